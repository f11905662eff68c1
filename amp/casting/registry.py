"""Casts for a script's own functions at O1 and O4: apex's decorators and `register_*_function`.

Registrations belong to the process, not to a session: they may come before or after `initialize`, and
apply to every later session too. They do nothing where no session casts functions.
"""

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import torch

from amp import active
from amp.casting.op_names import is_immutable, is_of_python, is_pythons_own
from amp.casting.policy import Category, OpRule
from amp.casting.wrappers import call_with_casts
from amp.dtypes import dtype_name
from amp.errors import AmpTypeError, AmpValueError, brief, did_you_mean
from amp.patching import Patches

F = TypeVar("F", bound=Callable[..., Any])

_registered: dict[tuple[int, str], tuple[OpRule, Any]] = {}


def register_half_function(module: Any, name: str) -> None:
    """Run `module.name` in half precision at O1 (float16) and O4 (bfloat16).

    Its floating-point arguments, except float64, are cast down, also inside lists and tuples. The torch
    functions that it calls cast as they do elsewhere.

    Args:
        module: a module or class. It may be a C extension, or an `autograd.Function` whose `name` is
            `"apply"`.
        name: the function's name in `module`.

    Raises:
        AmpValueError: there is no such function, or casts themselves depend on it.
        AmpTypeError: the function cannot be replaced, for example in an object with slots.
    """
    _register(module, name, "half", None)


def register_bfloat16_function(module: Any, name: str) -> None:
    """Run `module.name` in bfloat16 at both O1 and O4; see `register_half_function`."""
    _register(module, name, "cast", torch.bfloat16)


def register_float_function(module: Any, name: str) -> None:
    """Run `module.name` in FP32: arguments are cast up, and no function that it calls casts them down.

    See `register_half_function` for the arguments. Generators and asynchronous functions are refused,
    because their code runs after the call has returned.
    """
    _register(module, name, "cast", torch.float32)


def register_promote_function(module: Any, name: str) -> None:
    """Cast floating arguments of `module.name` to their widest dtype; see `register_half_function`."""
    _register(module, name, "promote", None)


def register_uncast_function(module: Any, name: str) -> None:
    """Cast no arguments of `module.name` or of what it calls; see `register_half_function`."""
    _register(module, name, "cast", None)


def unregister_function(module: Any, name: str) -> None:
    """Remove the registration of `module.name`, from the next session on."""
    _registered.pop((id(module), name), None)


def half_function(function: F) -> F:
    """Decorate a function that runs in half precision at O1 and O4; see `register_half_function`."""
    return _decorate(function, "half", None)


def bfloat16_function(function: F) -> F:
    """Decorate a function that runs in bfloat16; see `register_bfloat16_function`."""
    return _decorate(function, "cast", torch.bfloat16)


def float_function(function: F) -> F:
    """Decorate a function that runs in FP32 at O1 and O4; see `register_float_function`."""
    return _decorate(function, "cast", torch.float32)


def promote_function(function: F) -> F:
    """Decorate a function whose arguments are promoted; see `register_promote_function`."""
    return _decorate(function, "promote", None)


def registered() -> list[tuple[OpRule, Any]]:
    """Return the rule of every registered function, and the module or class that holds it."""
    return list(_registered.values())


def _register(module: Any, name: Any, category: Category, dtype: torch.dtype | None) -> None:
    if not isinstance(name, str):
        kind = type(name).__name__
        raise AmpTypeError(f"the function's name is {brief(name)}, a {kind}; give a string")
    try:
        place = getattr(module, "__name__", type(module).__name__)
        function = getattr(module, name, None)
    except Exception as error:  # of a property, or a `__getattr__`
        raise AmpValueError(
            f"{brief(name)} of an object of type {type(module).__name__} cannot be read: {error!r}"
        ) from error
    if function is None:
        raise AmpValueError(f"{place} has no function {brief(name)}{did_you_mean(name, dir(module))}")
    if not callable(function) or isinstance(function, type):
        raise AmpValueError(f"{place}.{name} is no function but a {type(function).__name__}")
    if isinstance(module, ModuleType) and is_of_python(place):
        raise AmpValueError(f"{place} is a module of Python or amp itself, which casts depend on")
    if is_pythons_own(function):
        raise AmpValueError(
            f"{place}.{name} is a function of Python or amp itself, which casts depend on"
        )
    if is_immutable(module):
        raise AmpValueError(f"{place} is a type of Python itself, whose functions cannot be replaced")
    _check_ends_with_its_call(function, f"{place}.{name}", dtype)
    try:
        with Patches() as trial:
            trial.wrap(module, name, functools.partial)
    except (AttributeError, TypeError) as error:
        raise AmpTypeError(
            f"{place}.{name} cannot be replaced: {error}. Decorate it instead"
        ) from error
    if isinstance(module, type):
        place = f"{module.__module__}.{module.__qualname__}"
    rule = OpRule(category, place, name, dtype, closed=category == "cast", source="registered")
    _registered[id(module), name] = (rule, module)
    with active.opening:
        for caster in active.casters():
            caster.patch(rule, module)
            caster.replace_names()


def _check_ends_with_its_call(function: Any, name: str, dtype: torch.dtype | None) -> None:
    """Refuse generators and coroutines for a fixed dtype: their code runs after the call."""
    later = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if dtype is not None and any(is_kind(inspect.unwrap(function)) for is_kind in later):
        raise AmpTypeError(
            f"{name} is a generator or asynchronous: it runs after the call, where casts are on again. "
            f"Write its own `with amp.disable_casts():` around what must run in {dtype_name(dtype)}"
        )


def _decorate(function: F, category: Category, dtype: torch.dtype | None) -> F:
    if isinstance(function, (staticmethod, classmethod)):
        inner: Any = _decorate(function.__func__, category, dtype)
        return type(function)(inner)  # pyright: ignore[reportReturnType]
    if not callable(function) or isinstance(function, type):
        kind = type(function).__name__
        raise AmpTypeError(f"{brief(function)} of type {kind} is no function to decorate")
    name = getattr(function, "__name__", type(function).__name__)
    _check_ends_with_its_call(function, name, dtype)
    rule = OpRule(category, "", name, dtype, closed=category == "cast", source="decorated")

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        caster = active.caster_here()
        if caster is None:
            return function(*args, **kwargs)
        return call_with_casts(caster, rule, function, args, kwargs)

    return wrapper  # type: ignore[return-value]
