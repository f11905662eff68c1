"""apex's lists of which functions cast: read from the tables of this library, and open to edits.

A script that took a name out of a list, or put one in, before it called `initialize` is heeded: the
next `initialize` or `init` does as the lists then say.
"""

from __future__ import annotations

from types import ModuleType

from amp.casting.registry import (
    register_float_function,
    register_half_function,
    register_promote_function,
    register_uncast_function,
    unregister_function,
)
from amp.compat.lists import functional_overrides, tensor_overrides, torch_overrides

__all__ = ["functional_overrides", "tensor_overrides", "torch_overrides"]

_MODULES = (functional_overrides, torch_overrides, tensor_overrides)
_REGISTER = {
    "FP16_FUNCS": register_half_function,
    "FP32_FUNCS": register_float_function,
    "CASTS": register_promote_function,
}


def _listed(module: ModuleType) -> dict[str, str]:
    """Return the list that each function of a module is in."""
    lists = {name: getattr(module, name) for name in ("BANNED_FUNCS", *_REGISTER)}
    banned = {function for function, _ in lists.pop("BANNED_FUNCS")}
    return {function: name for name in lists for function in lists[name]} | dict.fromkeys(
        banned, "BANNED_FUNCS"
    )


_tables = {module: _listed(module) for module in _MODULES}
_known = dict(_tables)


def heed() -> None:
    """Register what has been edited since the last call, and unregister what has been put back.

    Raises:
        AmpValueError: a name in a list is no function.
    """
    for module, before in _known.items():
        now = _listed(module)
        for function in before | now:
            if now.get(function) == before.get(function):
                continue
            if now.get(function) == _tables[module].get(function):
                unregister_function(module.MODULE, function)
            else:
                register = _REGISTER.get(now.get(function, ""), register_uncast_function)
                register(module.MODULE, function)
        _known[module] = now
