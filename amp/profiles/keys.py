"""The keys of profiles and overrides, each described in one place: the metadata of a dataclass's field.

From it follow what profiles and overrides may set, how a value is read, what an error says, and the
tables of docs/profiles.md.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, SupportsFloat

import torch

from amp.dtypes import DTYPES, dtype_name
from amp.errors import AmpError, AmpTypeError, AmpValueError, brief, did_you_mean

Parser = Callable[[str, Any], Any]
"""From a key's name and a value to what the field holds. Raises an AmpError that names the key."""


@dataclass(frozen=True)
class Key:
    """What there is to know of a key.

    Attributes:
        parse: reads a value.
        doc: what the key means, for the table in docs/profiles.md.
        values: what it takes, for that table; by default what `parse` prints as.
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
    """Return the key that is written as `name`, or raise an AmpTypeError that begins with `what`.

    The error lists the keys, and `others`, which are allowed besides.
    """
    for each in keys.values():
        if name == each.name or name in each.aliases:
            return each
    spellings = [*others, *keys, *(alias for each in keys.values() for alias in each.aliases)]
    allowed = ", ".join((*others, *keys))
    called = f"'{name}'" if len(name) < 80 else brief(name)
    raise AmpTypeError(f"{what} {called}; allowed: {allowed}{did_you_mean(name, spellings)}")


def written(key: object) -> str:
    """Return the key of a mapping as text, whatever it is."""
    return key if isinstance(key, str) else brief(key)


def shown(value: object) -> str:
    """Return a value as errors and logs show it."""
    return dtype_name(value) if isinstance(value, torch.dtype) else str(value)


# Parsers.

SMALLEST_SCALE = 2.0**-126
"""FP32's smallest normal number: no loss scale goes below it, so none is ever 0 or a denormal."""

LARGEST_SCALE = 2.0**126
"""The reciprocal of `SMALLEST_SCALE`: growth stops here, so that no inverse is a denormal."""

_WORDS = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    **dict.fromkeys(("none", "null")),
    **DTYPES,
}


class OneOf:
    """A parser of values that can be listed. Names of dtypes, and words such as `yes`, are understood.

    Args:
        allowed: True, False, None, dtypes and words.
        means: what some of these are read as, where not as themselves.
        error: what is raised for anything else. The default is AmpValueError, and AmpTypeError for a
            value of another type where dtypes are allowed.
    """

    def __init__(
        self,
        *allowed: Any,
        means: Mapping[Any, Any] | None = None,
        error: type[AmpError] | None = None,
    ) -> None:
        self._allowed = allowed
        self._means = means or {}
        self._error = error

    def __call__(self, name: str, value: object) -> Any:
        """Return the allowed value that `value` is or names."""
        word = value.strip().lower().removeprefix("torch.") if isinstance(value, str) else ""
        found = _WORDS.get(word, word) if word else value
        for each in self._allowed:
            if found is each or (word and found == each):
                return self._means.get(each, each)
        takes_dtypes = any(isinstance(each, torch.dtype) for each in self._allowed)
        is_typed = isinstance(value, (str, torch.dtype)) or not takes_dtypes
        error = self._error or (AmpValueError if is_typed else AmpTypeError)
        names = [shown(each) for each in self._allowed]
        raise error(
            f"{name}={brief(value)} is not one of {', '.join(names)}{did_you_mean(word, names)}"
        )

    def __str__(self) -> str:
        return ", ".join(shown(each).lower() for each in self._allowed)


def is_none(value: object) -> bool:
    """Whether `value` is None or the word for it."""
    return value is None or (isinstance(value, str) and value.strip().lower() in ("none", "null"))


def parse_number(name: str, value: object) -> float:
    """Return a float; strings such as `"128.0"` are read."""
    is_tensor = isinstance(value, torch.Tensor)
    if is_tensor and (value.numel() != 1 or value.is_meta or value.is_complex()):  # type: ignore[attr-defined]
        raise AmpValueError(f"{name} is {brief(value)}; give a number, or a tensor of one element")
    if isinstance(value, (str, SupportsFloat)):  # NumPy's numbers and tensors of one element too
        try:
            return float(value)
        except (ValueError, RuntimeError, TypeError):
            pass
        except OverflowError:  # of an integer that no float can hold
            return math.inf
    raise AmpValueError(f"{name}={brief(value)} is not a number")


def parse_positive(name: str, value: object) -> float:
    """Return a float that a loss scale can be."""
    number = parse_number(name, value)
    if not SMALLEST_SCALE <= number <= torch.finfo(torch.float32).max:
        hint = "; DeepSpeed's 0 is 'dynamic' here" if name == "loss_scale" and number == 0 else ""
        raise AmpValueError(f"{name}={brief(value)} must be a finite number above 0{hint}")
    return number


def parse_count(name: str, value: object) -> int:
    """Return an integer of at least 1."""
    number = parse_number(name, value)
    if isinstance(value, bool) or not 1 <= number <= 2.0**63 or not number.is_integer():
        raise AmpValueError(f"{name}={brief(value)} must be an integer of at least 1")
    count = value if isinstance(value, int) else int(number)
    if count >= 2**63:
        raise AmpValueError(f"{name}={brief(value)} must be an integer of less than 2**63")
    return count


LONGEST_GLOB = 1000
"""In characters. The time that it takes to read a glob grows with the square of its length."""
MOST_GLOBS = 1000


def parse_glob(name: str, value: object) -> str:
    """Return a name or a glob without the spaces around it."""
    if not isinstance(value, str) or not value.strip():
        raise AmpTypeError(f"{name}={brief(value)} is not a name")
    if len(value) > LONGEST_GLOB:
        raise AmpValueError(
            f"{name}={brief(value)} is too long; a name or glob has at most {LONGEST_GLOB} characters"
        )
    return value.strip()


def parse_globs(name: str, values: Sequence[object]) -> tuple[str, ...]:
    """Return names and globs without the spaces around them."""
    if len(values) > MOST_GLOBS:
        raise AmpValueError(f"{name} has {len(values)} names; at most {MOST_GLOBS} are allowed")
    return tuple(parse_glob(name, value) for value in values)
