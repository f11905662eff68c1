"""The keys of profiles and overrides, each described in one place: the metadata of a dataclass's field.

From it follow what a profile and an override may set, how a value is read, what an error says, and the
tables of docs/profiles.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, SupportsFloat

import torch

from amp.dtypes import is_none, parse_dtype
from amp.errors import AmpTypeError, AmpValueError, did_you_mean

Parser = Callable[[str, Any], Any]
"""From a key's name and a value to what the field holds. Raises an AmpError that names the key."""


@dataclass(frozen=True)
class Key:
    """What there is to know of a key.

    Attributes:
        parse: reads a value.
        doc: what the key means, for people.
        values: what it takes, for people.
        name: how it is written, if not as the field.
        aliases: other ways to write it.
        field: the field that holds the value; `keys_of` fills it in.
    """

    parse: Parser
    doc: str
    values: str = ""
    name: str = ""
    aliases: tuple[str, ...] = ()
    field: str = ""


def key(default: Any, parse: Parser, doc: str, **more: Any) -> Any:
    """Return a dataclass's field that a key sets; see `Key`."""
    return field(default=default, metadata={"key": Key(parse, doc, **more)})


def keys_of(cls: type) -> dict[str, Key]:
    """Return the keys of a dataclass by their names."""
    found = [(each.name, each.metadata["key"]) for each in fields(cls) if "key" in each.metadata]
    return {key.name or name: replace(key, name=key.name or name, field=name) for name, key in found}


def find_key(name: str, keys: Mapping[str, Key], what: str, others: tuple[str, ...] = ()) -> Key:
    """Return the key that is written as `name`.

    Raises:
        AmpTypeError: there is none. `what` begins the message, and `others` are allowed besides.
    """
    for each in keys.values():
        if name == each.name or name in each.aliases:
            return each
    spellings = [*others, *keys, *(alias for each in keys.values() for alias in each.aliases)]
    allowed = ", ".join((*others, *keys))
    raise AmpTypeError(f"{what} '{name}'; allowed: {allowed}{did_you_mean(name, spellings)}")


# Parsers.

SMALLEST_SCALE = 2.0**-126
"""FP32's smallest normal number: no loss scale goes below it, so none is ever 0 or a denormal."""

LARGEST_SCALE = 2.0**126
"""The reciprocal of `SMALLEST_SCALE`: growth stops here, so that no inverse is a denormal."""

_LARGEST_FLOAT32 = (2 - 2.0**-23) * 2.0**127


def optional(parse: Parser) -> Parser:
    """Return a parser that takes None, and words for it, too."""
    return lambda name, value: None if is_none(value) else parse(name, value)


def is_false(value: object) -> bool:
    """Whether a value is False or a word for it."""
    return value is False or (
        isinstance(value, str) and value.strip().lower() in ("false", "no", "off")
    )


def parse_bool(name: str, value: object) -> bool:
    """Return a bool; `"True"`, `"no"`, `"off"` and their like are read."""
    if is_false(value):
        return False
    if value is True or (isinstance(value, str) and value.strip().lower() in ("true", "yes", "on")):
        return True
    raise AmpValueError(f"{name}={value!r} is not one of True, False")


def parse_castable(name: str, value: object) -> torch.dtype:
    """Return float16, bfloat16 or float32."""
    try:
        return parse_dtype(value)
    except (AmpValueError, AmpTypeError) as error:
        raise type(error)(f"{name}: {error}") from None


def parse_number(name: str, value: object) -> float:
    """Return a float; strings such as `"128.0"` are read."""
    if isinstance(value, (str, SupportsFloat)):  # NumPy's numbers and 0-dim tensors too
        try:
            return float(value)
        except (ValueError, RuntimeError):
            pass
    raise AmpValueError(f"{name}={value!r} is not a number")


def parse_positive(name: str, value: object) -> float:
    """Return a float that a loss scale can be."""
    number = parse_number(name, value)
    if not SMALLEST_SCALE <= number <= _LARGEST_FLOAT32:
        hint = "; DeepSpeed's 0 is 'dynamic' here" if name == "loss_scale" and number == 0 else ""
        raise AmpValueError(f"{name}={value!r} must be a finite number above 0{hint}")
    return number


def parse_count(name: str, value: object) -> int:
    """Return an integer of at least 1."""
    number = parse_number(name, value)
    if isinstance(value, bool) or not number >= 1 or number != math.floor(number):
        raise AmpValueError(f"{name}={value!r} must be an integer of at least 1")
    return int(number)
