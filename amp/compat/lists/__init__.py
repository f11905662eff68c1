"""apex's lists of which functions cast: read from the tables of this library, and open to edits.

A script that took a name out of a list, or put one in, before it called `initialize` is heeded: the
next `initialize` or `init` does as the lists then say.
"""

from types import ModuleType

from amp.casting import registry
from amp.compat.lists import functional_overrides, tensor_overrides, torch_overrides

__all__ = ["functional_overrides", "tensor_overrides", "torch_overrides"]

_REGISTER = {
    "FP16_FUNCS": registry.register_half_function,
    "FP32_FUNCS": registry.register_float_function,
    "CASTS": registry.register_promote_function,
}


def _listed(module: ModuleType) -> dict[str, str]:
    """Return the list that each function of a module is in."""
    listed = {function: name for name in _REGISTER for function in getattr(module, name)}
    return listed | {function: "BANNED_FUNCS" for function, _ in module.BANNED_FUNCS}


_tables = {each: _listed(each) for each in (functional_overrides, torch_overrides, tensor_overrides)}
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
                registry.unregister_function(module.MODULE, function)
            else:
                register = _REGISTER.get(now.get(function, ""), registry.register_uncast_function)
                register(module.MODULE, function)
        _known[module] = now
