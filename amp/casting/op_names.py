"""Finding functions by the full names in op tables and rules, and which functions may be cast.

Names may come from untrusted files. So only parts of torch are imported, and functions that casts
depend on cannot be cast: those of Python and of amp, and all functions of torch that are not ops.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.overrides import get_overridable_functions

from amp.errors import AmpValueError, brief, did_you_mean
from amp.patching import unpatched
from amp.profiles.rules import Rule


def resolve(place: str) -> Any:
    """Return the module or class of a dotted name. Errors are Python's own.

    Only parts of torch are imported: other modules are found if they are imported already.
    """
    if place in sys.modules:
        return sys.modules[place]
    parent, _, name = place.rpartition(".")
    if not parent:
        raise ModuleNotFoundError(f"No module named {place!r} has been imported")
    holder = resolve(parent)
    if isinstance(holder, ModuleType):
        if not _is_of_torch(_name_of(holder, parent)):
            return vars(holder)[name]  # a `__getattr__` of its own may import anything
        if _is_of_torch(place) and "._" not in place and not hasattr(holder, name):
            return importlib.import_module(place)
    return getattr(holder, name)


def _is_of_torch(place: str) -> bool:
    return place.partition(".")[0] == "torch"


def _name_of(holder: Any, written: str = "") -> str:
    """Return the name that a module or class gives itself, which may differ from where it was found."""
    if isinstance(holder, type):
        return f"{holder.__module__}.{holder.__qualname__}"
    name = getattr(holder, "__name__", None)
    return name if isinstance(name, str) else written


def find(op: str) -> tuple[Any, str, str]:
    """Return the module or class that holds a function, or None, and the two parts of the full name."""
    place, _, name = op.rpartition(".")
    try:
        holder = resolve(place)
        own = _name_of(holder, place)
        if own != place and _is_of_torch(own) and resolve(own) is holder:
            place = own
    except Exception:  # a part of torch may need a package that is not installed
        return None, place, name
    return holder, place, name


_PYTHONS = sys.stdlib_module_names - {"__main__", "math", "operator", "_operator"} | {"amp"}


def is_of_python(place: str) -> bool:
    """Whether a module is part of Python's standard library or of amp, which casts depend on."""
    return place.partition(".")[0] in _PYTHONS


def is_immutable(holder: Any) -> bool:
    """Whether `holder` is an immutable type, such as Python's own, whose attributes are read-only."""
    return isinstance(holder, type) and bool(holder.__flags__ & 1 << 8)  # Py_TPFLAGS_IMMUTABLETYPE


SPELLINGS = ("torch", "torch.Tensor", "torch.nn.functional")
"""The places in which functions of the same name are the same op."""

_OPERATORS = {
    **{name: (f"__{name}__", f"__r{name}__") for name in ("matmul", "pow", "add", "sub", "mul")},
    "div": ("__truediv__", "__rtruediv__"),
    "neg": ("__neg__",),
}
"""The operators that are other spellings of a function."""


def spellings(place: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield the places and names under which the op `place.name` exists, itself included."""
    for operators_of, operators in _OPERATORS.items():
        if place == "torch.Tensor" and name in operators:
            name = operators_of
    for other in SPELLINGS if place in SPELLINGS else (place,):
        holder = resolve(other)
        # torch.half is a dtype, and not another spelling of torch.Tensor.half.
        if hasattr(holder, name) if other == place else may_be_cast(holder, name):
            yield other, name
    if place in SPELLINGS:
        yield from (("torch.Tensor", operator) for operator in _OPERATORS.get(name, ()))


def functions_of(rules: Iterable[Rule]) -> dict[tuple[str, str], Rule]:
    """Return the functions that rules for ops match, in all their spellings, each with its last rule.

    Raises:
        AmpValueError: a rule matches no function in torch or in the modules imported so far, or one
            that must not be cast.
    """
    public = functools.cache(public_functions)
    spelled = functools.cache(lambda *op: list(spellings(*op)))
    found: dict[tuple[str, str], Rule] = {}
    for rule in rules:
        for op in _matches(rule, public):
            found |= dict.fromkeys(spelled(*op), rule)
    return found


def _matches(rule: Rule, public: Callable[[str], list[str]]) -> list[tuple[str, str]]:
    """Return the functions that a rule matches; `public` is a cached `public_functions`."""
    holder, place, name = find(rule.pattern)
    if holder is None:
        why = (
            f"there is no {brief(place or rule.pattern)} in torch or in what the script has imported, "
            "and nothing else is imported for a rule. Write a full name, such as torch.fft.*"
        )
    elif not isinstance(holder, (type, ModuleType)):
        why = f"{brief(place)} is a {type(holder).__name__}, no module or class"
    elif is_immutable(holder):
        why = f"{_name_of(holder)} is a type of Python itself"
    elif is_of_python(own := _name_of(holder, place)):
        why = f"{own} is a module of Python or amp itself, which casts depend on"
    elif place in ("torch", "torch.Tensor") and not name.strip("*?"):
        why = f"it is too broad: casting needs some of {place}"
    else:
        matching = [each for each in public(place) if fnmatchcase(each, name)]
        if matching or may_be_cast(holder, name):
            return [(place, each) for each in matching or [name]]
        why = "it takes no tensors, or casts themselves depend on it"
        if member(holder, name) is None:
            why = f"{brief(place)} has no such function{did_you_mean(name, public(place))}"
    raise AmpValueError(f"{rule.source}: op {brief(rule.pattern)}: {why}")


def public_functions(place: str) -> list[str]:
    """Return the public functions of a module or class that may be cast, by name."""
    holder = resolve(place)
    names = list(vars(holder)) if _is_module_of_others(holder) else dir(holder)
    return [name for name in names if name and name[0] != "_" and may_be_cast(holder, name)]


def _is_module_of_others(holder: Any) -> bool:
    return isinstance(holder, ModuleType) and not _is_of_torch(_name_of(holder))


def member(holder: Any, name: str) -> Any:
    """Return an attribute of a module or class, or None. Only parts of torch are imported for it."""
    if _is_module_of_others(holder):
        return vars(holder).get(name)
    try:
        return getattr(holder, name, None)
    except Exception:  # raised by a `__getattr__`
        return None


# Which functions may be cast.

_USED_BY_CASTS = ("to", "is_floating_point", "promote_types", "_is_view")
_PLACES_OF_OPS = (
    *SPELLINGS,
    *(f"torch.{name}" for name in ("fft", "linalg", "special", "sparse", "nested", "nn.init", "_VF")),
)
_OPERATOR_METHODS = {name for name in dir(operator) if name.startswith("__")}


def may_be_cast(holder: Any, name: str) -> bool:
    """Whether `holder.name` is a function whose arguments a rule may cast.

    In torch only functions that take tensors may be cast; elsewhere all but those of Python and amp.
    """
    value = unpatched(member(holder, name))
    if not callable(value) or isinstance(value, (type, ModuleType)) or is_pythons_own(value):
        return False
    is_special = name.startswith("__") and name.endswith("__")
    if is_special and name.replace("__r", "__", 1) not in _OPERATOR_METHODS:
        return name in _OPERATOR_METHODS  # __rshift__ is not a reflected method
    if "autocast" in name or name in _USED_BY_CASTS:
        return False
    place = _name_of(holder)
    return not _is_of_torch(place) or _is_op(holder, place, name, value)


def is_pythons_own(function: Any) -> bool:
    """Whether a function is defined in Python's standard library or amp, wherever it was imported."""
    module = getattr(function, "__module__", None) if inspect.isroutine(function) else None
    return isinstance(module, str) and is_of_python(module)


def _is_op(holder: Any, place: str, name: str, value: Any) -> bool:
    """Whether a function of torch takes tensors, unlike `is_grad_enabled`, which casts depend on."""
    if isinstance(holder, type) and issubclass(holder, nn.Module):
        return name == "forward" and holder is not nn.Module
    module = str(getattr(value, "__module__", ""))
    return (
        id(value) in _overridable()
        or module.startswith("torch._C._")  # torch._C._nn, torch._C._fft, ...
        or place.startswith("torch.ops.")
        or (place.startswith("torch.nn.") and module == place)
        or (place in _PLACES_OF_OPS and _takes_tensors(name))
    )


@functools.cache
def _overridable() -> frozenset[int]:
    """Return the ids of the functions that torch lets classes of tensors override."""
    functions = (each for those in get_overridable_functions().values() for each in those)
    return frozenset(id(unpatched(function)) for function in functions)


@functools.cache
def _takes_tensors(name: str) -> bool:
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    return any("Tensor" in str(argument.type) for schema in schemas for argument in schema.arguments)
