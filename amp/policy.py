"""Which functions run in which precision: the tables of `configs/ops/*.yaml` as a frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from amp.dtypes import dtype_name, parse_dtype
from amp.errors import AmpValueError, did_you_mean
from amp.profiles import CONFIGS
from amp.yamlfile import read_mapping

Category = Literal["half", "float", "promote", "sequence", "banned"]
_CATEGORIES: tuple[Category, ...] = get_args(Category)


@dataclass(frozen=True)
class OpRule:
    """What is done with the arguments of one function.

    Attributes:
        category: what is done with them.
        place: the module or class that holds the function, as a dotted name.
        name: the function's name there.
        advice: for `banned`, what to do instead.
    """

    category: Category
    place: str
    name: str
    advice: str = ""


@dataclass(frozen=True)
class OpPolicy:
    """One table: the dtype of the `half` ops and a rule for each function."""

    dtype: torch.dtype
    rules: tuple[OpRule, ...]


def load_policy(dtype: torch.dtype) -> OpPolicy:
    """Return the table for `dtype`, float16 or bfloat16.

    Raises:
        AmpValueError: a table has a key that is no category.
    """
    tables = _load(dtype_name(dtype))
    rules = tuple(
        OpRule(category, place, name, names[name] if isinstance(names, dict) else "")
        for category in _CATEGORIES
        for place, names in tables.get(category, {}).items()
        for name in names
    )
    return OpPolicy(parse_dtype(tables["dtype"]), rules)


def _load(name: str) -> dict[str, Any]:
    path = CONFIGS / "ops" / f"{name}.yaml"
    tables: dict[str, Any] = {}
    for entry in read_mapping(path):
        if entry.key == "extends":
            tables = _load(entry.value)
        elif entry.key == "dtype" or entry.key in _CATEGORIES:
            tables[entry.key] = entry.value
        else:
            raise AmpValueError(
                f"{path}:{entry.line}: '{entry.key}' is not one of extends, dtype, "
                f"{', '.join(_CATEGORIES)}{did_you_mean(entry.key, _CATEGORIES)}"
            )
    return tables
