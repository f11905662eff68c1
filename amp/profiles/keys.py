"""How a key of profiles is declared and parsed; each key is a field of a dataclass in another module.

The keys are the fields of `Properties`, `LossScaling` and `FP8Recipe`. A field has the name, type,
default and parser of its key, and the class's docstring explains it. The allowed keys of profiles and
overrides, the parsing of values and the error messages come from there.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, SupportsFloat

import torch

from amp.dtypes import DTYPES, dtype_name
from amp.errors import (
    AmpError,
    AmpTypeError,
    AmpValueError,
    beginning_with,
    brief,
    did_you_mean,
    name_of,
)

Parser = Callable[[str, Any], Any]
"""Returns the field's value, from the key's name and a value. Raises an AmpError that names the key."""


@dataclass(frozen=True)
class Key:
    """How a key is written and parsed.

    Attributes:
        parse: the parser of its values.
        name: the key's name, if it is not the field's.
        aliases: other names of the key.
        field: the field that holds the value; `keys_of` fills it in.
    """

    parse: Parser
    name: str = ""
    aliases: tuple[str, ...] = ()
    field: str = ""


def key(default: Any, parse: Parser, **more: Any) -> Any:
    """Return a dataclass field that is set by a key; see `Key`."""
    return field(default=default, metadata={"key": Key(parse, **more)})


def keys_of(cls: type) -> dict[str, Key]:
    """Return the keys of a dataclass by their names."""
    found = [(each.name, each.metadata["key"]) for each in fields(cls) if "key" in each.metadata]
    return {key.name or name: replace(key, name=key.name or name, field=name) for name, key in found}


def parse_fields(made: Any, keys: Mapping[str, Key]) -> None:
    """Replace the fields of a frozen dataclass by their parsed values."""
    for key in keys.values():
        object.__setattr__(made, key.field, key.parse(key.name, getattr(made, key.field)))


def find_key(
    name: Any,
    keys: Mapping[str, Key],
    what: str,
    others: Sequence[str] = (),
    hint_at: Callable[[str, Iterable[str]], str] = did_you_mean,
) -> Key:
    """Return the key whose name or alias is `name`, or raise an AmpTypeError that begins with `what`.

    The error lists the keys, and `others`, which the caller allows as well.
    """
    spelled = {spelling: key for key in keys.values() for spelling in (key.name, *key.aliases)}
    if name not in spelled:
        hint = hint_at(name_of(name), [*others, *spelled]) or beginning_with(name_of(name), keys)
        raise AmpTypeError(f"{what} {brief(name)}; allowed: {', '.join([*others, *keys])}{hint}")
    return spelled[name]


def fields_of(
    what: str, mapping: Mapping[Any, Any], read: Callable[[str, Any], Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields that a mapping sets, and the spelling of each in the mapping.

    Args:
        what: the key that the mapping is the value of.
        mapping: values by keys, in any spelling.
        read: returns the fields that one item sets, given its key and its value.

    Raises:
        AmpValueError: two items set the same field.
    """
    found: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, item in mapping.items():
        written = key if isinstance(key, str) else brief(key)
        for name, value in read(written, item).items():
            if name in found:
                raise AmpValueError(
                    f"{what} has both '{spelled[name]}' and '{written}', which are one thing; keep one"
                )
            found[name], spelled[name] = value, written
    return found, spelled


def wrong_type(name: str, value: object, remedy: str) -> AmpTypeError:
    """Return the error for a value whose type a key does not take."""
    return AmpTypeError(f"{name}={brief(value)} is a {type(value).__name__}; {remedy}")


def shown(value: object) -> str:
    """Return a value as errors and logs show it."""
    return dtype_name(value) if isinstance(value, torch.dtype) else str(value)


def shortened(value: object) -> str:
    """Return the text of `shown`, cut at 200 characters."""
    text = shown(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


# Parsers.

SMALLEST_SCALE = 2.0**-126
"""FP32's smallest normal number: no loss scale goes below it, so a scale is never 0 or subnormal."""

LARGEST_SCALE = 2.0**126
"""The reciprocal of `SMALLEST_SCALE`: growth stops here, so that no inverse scale is subnormal."""

_WORDS = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    **dict.fromkeys(("none", "null")),
    **DTYPES,
}


def word_of(value: object) -> str:
    """Return a text as a plain word, such as `fp16` for ` torch.FP16`; "" for anything else."""
    return value.strip().lower().removeprefix("torch.") if isinstance(value, str) else ""


class OneOf:
    """A parser for a list of allowed values. It understands names of dtypes, and words such as `yes`.

    Args:
        allowed: True, False, None, dtypes and words.
        means: the values that stand for another value. Those that are not in `allowed` are accepted
            too, but error messages do not list them.
        error: the class of the error for other values. The default is AmpValueError, and AmpTypeError
            for a value that is neither text nor a dtype where dtypes are allowed.
    """

    def __init__(
        self,
        *allowed: Any,
        means: Mapping[Any, Any] | None = None,
        error: type[AmpError] | None = None,
    ) -> None:
        self._allowed = allowed
        self._means = {**dict(zip(allowed, allowed, strict=True)), **(means or {})}
        self._error = error

    def __call__(self, name: str, value: object) -> Any:
        """Return the allowed value that `value` is or stands for."""
        word = word_of(value)
        found = _WORDS.get(word, word) if word else value
        for each, meant in self._means.items():
            if found is each or (word and found == each):
                return meant
        takes_dtypes = any(isinstance(each, torch.dtype) for each in self._allowed)
        is_typed = isinstance(value, (str, torch.dtype)) or not takes_dtypes
        error = self._error or (AmpValueError if is_typed else AmpTypeError)
        names = [shown(each) for each in self._allowed]
        hint = did_you_mean(word, names)
        if takes_dtypes and any(x in brief(value) for x in ("float8", "fp8", "e4m3", "e5m2")):
            hint = "; FP8 is a property of linear layers: take opt_level='O6' or 'O7', or fp8='current'"
        if takes_dtypes and any(x in brief(value) for x in ("float4", "fp4", "e2m1")):
            hint = "; FP4 is a property of linear layers: take opt_level='O8' or 'O9', or fp4=True"
        raise error(f"{name}={brief(value)} is not one of {', '.join(names)}{hint}")


def is_none(value: object) -> bool:
    """Whether `value` is None or the word for it."""
    return value is None or word_of(value) in ("none", "null")


def or_none(parse: Parser) -> Parser:
    """Return a parser that takes None, and the words for it, besides what `parse` takes."""
    return lambda name, value: None if is_none(value) else parse(name, value)


def parse_number(name: str, value: object) -> float:
    """Return a float; strings such as `"128.0"` are read."""
    if isinstance(value, bool):
        raise AmpValueError(f"{name}={value} is not a number")
    is_tensor = isinstance(value, torch.Tensor)
    if is_tensor and (value.numel() != 1 or value.is_meta or value.is_complex()):  # type: ignore[attr-defined]
        raise AmpValueError(f"{name} is {brief(value)}; give a number, or a tensor of one element")
    if isinstance(value, (str, SupportsFloat)):  # NumPy's numbers and tensors of one element too
        try:
            return float(value)
        except (ValueError, RuntimeError, TypeError):
            pass
        except OverflowError:  # an integer beyond the range of float
            return math.inf
    power = re.fullmatch(r"(2|10) *(?:\*\*|\^) *(-?\d\d?)", value if isinstance(value, str) else "")
    hint = f"; write {float(power[1]) ** int(power[2]):.15g}" if power else ""
    raise AmpValueError(f"{name}={brief(value)} is not a number{hint}")


def parse_positive(name: str, value: object) -> float:
    """Return a float that a loss scale can be."""
    number = parse_number(name, value)
    if number > torch.finfo(torch.float32).max:
        raise AmpValueError(f"{name}={brief(value)} must be a finite number above 0, such as 65536")
    if not number >= SMALLEST_SCALE:
        hint = "; DeepSpeed's 0 is 'dynamic' here" if name == "loss_scale" and number == 0 else ""
        raise AmpValueError(f"{name}={brief(value)} must be a finite number above 0{hint}")
    return number


def parse_count(name: str, value: object, least: int = 1, most: int = 2**63 - 1) -> int:
    """Return an integer from `least` to `most`."""
    number = math.nan if isinstance(value, bool) else parse_number(name, value)
    if not number.is_integer() or number < least:
        raise AmpValueError(f"{name}={brief(value)} must be an integer of at least {least}")
    count = value if isinstance(value, int) else int(number)
    if count > most:
        raise AmpValueError(f"{name}={brief(value)} must be at most {most}")
    return count


def parse_glob(name: str, value: object) -> str:
    """Return a name or a glob without the spaces around it."""
    if not isinstance(value, str) or not value.strip():
        hint = "; write it in quotes" if isinstance(value, (int, float)) else ""
        raise AmpTypeError(f"{name}={brief(value)} is not a name or a glob{hint}")
    return value.strip()


def parse_globs(name: str, values: Sequence[object]) -> tuple[str, ...]:
    """Return names and globs without the spaces around them."""
    return tuple(parse_glob(name, value) for value in values)
