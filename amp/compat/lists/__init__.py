"""apex's lists of functions that cast, made from this library's op tables, and open to edits.

If a script adds or removes names in these lists, the next `initialize` or `init` follows the edits.
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
    """Return the functions in a module's lists, each with the name of its list."""
    listed = {function: name for name in _REGISTER for function in getattr(module, name)}
    return listed | {function: "BANNED_FUNCS" for function, _ in module.BANNED_FUNCS}


_tables = {each: _listed(each) for each in (functional_overrides, torch_overrides, tensor_overrides)}
_known = dict(_tables)


def heed() -> None:
    """Register functions whose list was edited since the last call, and unregister restored ones.

    Raises:
        AmpValueError: a name in a list is not a function.
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
