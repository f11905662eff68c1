"""Which functions run in which precision: the tables of `configs/ops/*.yaml` as a frozen value."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import torch

from amp.dtypes import dtype_name
from amp.errors import AmpValueError, brief, did_you_mean
from amp.profiles.levels import CONFIGS
from amp.profiles.properties import Properties
from amp.profiles.rules import Rule
from amp.profiles.yamlfile import Entry, read_mapping

TableCategory = Literal[
    "native", "half", "recurrent", "float", "promote", "padding", "sequence", "banned", "calls"
]
Category = Literal[TableCategory, "cast", "in_place", "in_place_float"]
_KEYS = ("closed", *get_args(TableCategory))


@dataclass(frozen=True)
class OpRule:
    """What is done with the arguments of one function.

    Attributes:
        category: what is done with them; `configs/ops/float16.yaml` explains the categories. `cast` is
            a user's: floating arguments are cast to `dtype`. `in_place` casts to the dtype of what is
            written to, and `in_place_float` refuses to write to half tensors.
        place: the module or class that holds the function, as a dotted name.
        name: the function's name there.
        dtype: for `cast`, to what; None casts nothing.
        note: for `banned`, what to do instead; for `calls`, what it calls; for `in_place_float`, the
            function that gives FP32.
        closed: whether nothing that the function calls casts its arguments again.
        source: where the rule was written, `file:line`.
    """

    category: Category
    place: str
    name: str
    dtype: torch.dtype | None = None
    note: str = ""
    closed: bool = False
    source: str = ""

    @property
    def op(self) -> str:
        """The function's full name."""
        return f"{self.place}.{self.name}"

    @property
    def in_place(self) -> OpRule | None:
        """The rule for the in-place form of the function, should it have one."""
        if self.category not in ("native", "half", "promote", "float"):
            return None
        if self.place == "torch.nn.functional" or self.name.startswith("__"):
            return None
        category: Category = "in_place_float" if self.category == "float" else "in_place"
        return OpRule(category, self.place, f"{self.name}_", note=self.op, source=self.source)


@dataclass(frozen=True)
class OpPolicy:
    """The dtype of the ops that gain from half precision, and a rule for each function."""

    dtype: torch.dtype
    rules: tuple[OpRule, ...]

    def missing(self) -> list[str]:
        """Return the functions that the policy names and this torch does not have."""
        return [rule.op for rule in self.rules if not hasattr(resolve(rule.place), rule.name)]


def policy_of(properties: Properties) -> OpPolicy:
    """Return the table of a profile that casts functions, with its rules for ops on top.

    Raises:
        AmpValueError: a rule names no function of this torch or of what it imports.
    """
    policy = load_policy(properties.patch_torch_functions_type or torch.float16)
    table = {rule.op: rule for rule in policy.rules}
    for rule in properties.rules:
        for place, name in _functions(rule) if rule.kind == "op" else ():
            new = OpRule("cast", place, name, rule.dtype, closed=True, source=rule.source)
            table[new.op] = new
    return OpPolicy(policy.dtype, tuple(table.values()))


@functools.cache
def load_policy(dtype: torch.dtype) -> OpPolicy:
    """Return the table of `configs/ops` for `dtype`, float16 or bfloat16."""
    table = _load(CONFIGS / "ops" / f"{dtype_name(dtype)}.yaml")
    closed, _ = table.pop("closed")
    rules = tuple(
        OpRule(
            category,  # type: ignore[arg-type]
            place,
            name,
            note=names[name] if isinstance(names, dict) else "",
            closed=name in closed.value.get(place, ()),
            source=f"configs/ops/{file}:{entry.lines[place, name]}",
        )
        for category, (entry, file) in table.items()
        for place, names in entry.value.items()
        for name in names
    )
    return OpPolicy(dtype, rules)


def _load(path: Path) -> dict[str, tuple[Entry, str]]:
    """Return the entries of a table and of those that it extends, each with the name of its file."""
    table: dict[str, tuple[Entry, str]] = {}
    for entry in read_mapping(path):
        if entry.key == "extends":
            table = _load(path.with_name(f"{entry.value}.yaml"))
        elif entry.key in _KEYS:
            table[entry.key] = entry, path.name
        else:
            raise AmpValueError(
                f"{path}:{entry.line}: '{entry.key}' is not one of extends, "
                f"{', '.join(_KEYS)}{did_you_mean(entry.key, _KEYS)}"
            )
    return table


def resolve(place: str) -> Any:
    """Return the module or class of a dotted name. Errors are Python's own.

    Names come from files, so nothing is imported but parts of torch: another module is found if
    somebody else has imported it.
    """
    if place in sys.modules:
        return sys.modules[place]
    parent, _, name = place.rpartition(".")
    if not parent:
        raise ModuleNotFoundError(f"No module named {place!r} has been imported")
    holder = resolve(parent)
    if not hasattr(holder, name) and isinstance(holder, ModuleType) and _is_of_torch(place):
        return importlib.import_module(place)
    return getattr(holder, name)


def _is_of_torch(place: str) -> bool:
    """Whether a module is a part of torch that may be imported: one that no name marks as private."""
    first, *others = place.split(".")
    return first == "torch" and not any(part.startswith("_") for part in others)


def find(op: str) -> tuple[Any, str, str]:
    """Return what holds the function of a full name, or None, with the two parts of the name."""
    place, _, name = op.rpartition(".")
    try:
        return resolve(place), place, name
    except Exception:  # a part of torch may need what is not installed
        return None, place, name


_MAY_BE_OPS = ("math", "operator")


def is_of_python(place: str) -> bool:
    """Whether a module is one of Python's own, or of this library, by which casts themselves work."""
    first = place.partition(".")[0]
    return first == "amp" or (first in sys.stdlib_module_names and first not in _MAY_BE_OPS)


_SPELLINGS = ("torch", "torch.Tensor", "torch.nn.functional")
"""Where a function of one name is one op."""

_OPERATORS = {
    **{name: (f"__{name}__", f"__r{name}__") for name in ("matmul", "pow", "add", "sub", "mul")},
    "div": ("__truediv__", "__rtruediv__"),
    "neg": ("__neg__",),
}
"""The operators that are other spellings of a function."""


def is_immutable(holder: Any) -> bool:
    """Whether `holder` is a class of Python itself, whose attributes cannot be replaced."""
    return isinstance(holder, type) and bool(holder.__flags__ & 1 << 8)  # Py_TPFLAGS_IMMUTABLETYPE


def spellings(place: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield the other places and names of the op `place.name` that exist, and itself."""
    for operators_of, operators in _OPERATORS.items():
        if place == "torch.Tensor" and name in operators:
            name = operators_of
    for other in _SPELLINGS if place in _SPELLINGS else (place,):
        if hasattr(resolve(other), name):
            yield other, name
    if place in _SPELLINGS:
        yield from (("torch.Tensor", operator) for operator in _OPERATORS.get(name, ()))


def _functions(rule: Rule) -> Iterator[tuple[str, str]]:
    """Yield the functions that a user's rule is for, in all their spellings."""
    holder, place, name = find(rule.pattern)
    public = [n for n in dir(holder) if _is_function(holder, n)]
    found = [n for n in public if fnmatchcase(n, name)]
    if not found and _is_function(holder, name, public=False):
        found = [name]
    if holder is None:
        why = (
            f"there is no {brief(place or rule.pattern)} in torch or in what the script has imported, "
            "and nothing else is imported for a rule. Write a full name, such as torch.fft.*"
        )
    elif is_immutable(holder):
        why = f"{place} is a type of Python itself"
    elif place != "__main__" and is_of_python(place):
        why = f"{place} is a module of Python or amp itself, by which casts work"
    elif place in ("torch", "torch.Tensor") and not name.strip("*?"):
        why = f"it is too broad: casting needs some of {place}"
    elif not found:
        why = f"{place} has no such function{did_you_mean(name, public)}"
    else:
        why = ""
    if why:
        raise AmpValueError(f"{rule.source}: op '{rule.pattern}': {why}")
    for match in found:
        yield from spellings(place, match)


def _is_function(holder: Any, name: str, public: bool = True) -> bool:
    """Whether `holder.name` is a function that a rule may be for; private ones only by full name."""
    value = getattr(holder, name, None)
    used_by_casts = "autocast" in name or name in ("to", "is_floating_point", "promote_types")
    return (
        callable(value)
        and not used_by_casts
        and not isinstance(value, (type, ModuleType))
        and not (public and name.startswith("_"))
    )
