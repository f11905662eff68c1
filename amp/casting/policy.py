"""Which functions run in which precision: the tables of `configs/ops/*.yaml` as a frozen value."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from amp.casting.op_names import functions_of, resolve
from amp.dtypes import dtype_name
from amp.errors import AmpValueError, did_you_mean
from amp.profiles.levels import CONFIGS
from amp.profiles.properties import Properties
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
    for (place, name), rule in functions_of(r for r in properties.rules if r.kind == "op").items():
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
