"""The errors and warnings of the library, and helpers for their messages.

Each error is an `AmpError`, and also of the builtin type that apex or torch raises in the same
situation, so that scripts written for them still catch it. Every message says what was passed, what is
allowed, and what to do.
"""

import contextlib
import difflib
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any


class AmpError(Exception):
    """The base class of all errors that this library raises on purpose.

    Each error is also the builtin type: `AmpRuntimeError` is a `RuntimeError`, `AmpTypeError` a
    `TypeError`, `AmpValueError` a `ValueError`, `AmpIndexError` an `IndexError`, `AmpAssertionError` an
    `AssertionError`, `AmpNotImplementedError` a `NotImplementedError`, and `ProfileNotFoundError` a
    `FileNotFoundError`. Catch `amp.AmpError` or the builtin type, such as `RuntimeError`.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class AmpRuntimeError(AmpError, RuntimeError):
    """A call out of order, or properties that do not fit together."""


class AmpValueError(AmpError, ValueError):
    """A value that is not one of the allowed ones."""


class AmpTypeError(AmpError, TypeError):
    """An argument of the wrong type, or an argument that does not exist."""


class AmpIndexError(AmpError, IndexError):
    """A `loss_id` for which there is no loss scaler."""


class AmpAttributeError(AmpError, AttributeError):
    """An attribute that an object of this library does not have."""


class AmpAssertionError(AmpError, AssertionError):
    """A situation in which apex or torch.amp has a failing assertion."""


class AmpNotImplementedError(AmpError, NotImplementedError):
    """An operation that is unsafe in half precision, or that this library does not have."""


class ProfileNotFoundError(AmpError, FileNotFoundError):
    """The path in `opt_level` or `extends` of a file that does not exist."""


class AmpWarning(UserWarning):
    """A warning: training goes on, but something is probably not what the user wants."""


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Escape characters that would steer a terminal: anybody may have written a checkpoint's keys."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


_AMP = f"{Path(__file__).parent}{os.sep}"


def warn(message: str) -> None:
    """Raise an AmpWarning that names the user's line: the innermost one outside of amp and torch."""
    torch = f"{Path(sys.modules['torch'].__file__ or '').parent}{os.sep}"
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith((_AMP, torch, contextlib.__file__)):
        frame, level = frame.f_back, level + 1
    warnings.warn(printable(message), AmpWarning, stacklevel=level if frame is not None else 2)


def did_you_mean(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `"; did you mean 'x'?"` for the nearest candidate, or an empty string."""
    matches = difflib.get_close_matches(word, list(candidates), n=1, cutoff=cutoff)
    return f"; did you mean '{matches[0]}'?" if matches else ""


def beginning_with(word: str, candidates: Iterable[str]) -> str:
    """Return `"; did you mean 'x' or 'y'?"` for those with a part that begins with a word, or ""."""
    stem = word.lower().removesuffix("s")
    found = [f"'{x}'" for x in candidates if any(part.startswith(stem) for part in x.split("_"))]
    return f"; did you mean {' or '.join(found)}?" if found and len(stem) > 3 else ""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out, which is torch's RuntimeError on some devices."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    texts = "out of memory", "allocate memory", "not enough memory"
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


_LONGEST = 200


def brief(value: Any) -> str:
    """Return a value as messages show it: its repr if that is short, else its type and size.

    For any value, this takes a bounded time and does not raise. No host sync.
    """
    try:
        return _brief(value)
    except Exception:  # from the value's own methods, or because it is nested too deeply
        return f"an object of type {type(value).__name__}"


def _brief(value: Any) -> str:
    kind = type(value).__name__
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        layout = "" if value.layout is torch.strided else f" ({value.layout})"
        return f"a {dtype} tensor of shape {shape_of(value)}{layout}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        digits = int(value.bit_length() * math.log10(2)) + 1
        return f"an integer of about {digits} digits"
    if isinstance(value, (str, bytes)) and len(value) > _LONGEST:
        return f"{value[:60]!r}... of length {len(value)}"
    if isinstance(value, (list, tuple, dict, set, frozenset, bytearray)):
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        if len(value) > 8 or any(isinstance(each, (list, tuple, dict, set)) for each in inner):
            return f"a {kind} of length {len(value)}"
        if isinstance(value, (list, tuple)):
            text = ", ".join(map(brief, value))
            return f"[{text}]" if isinstance(value, list) else f"({text}{',' * (len(value) == 1)})"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"an object of type {kind}: {text[:_LONGEST]}..."


def shape_of(tensor: Any) -> str:
    """Return a tensor's shape as messages show it: `(...)` for a nested tensor, which has none."""
    try:
        return str(tuple(tensor.shape))
    except Exception:
        return "(...)"


def check_function(name: str, value: Any, what: str) -> None:
    """Raise AmpTypeError if a value is no function. A model is refused too, though it can be called."""
    if not callable(value) or hasattr(type(value), "parameters"):
        raise AmpTypeError(f"{name} must be a function that {what}, and got {brief(value)}")


def name_of(key: Any) -> str:
    """Return a key as messages show it: without quotes, if it is a short string."""
    return key if isinstance(key, str) and len(key) <= _LONGEST else brief(key)


def first_few(values: Iterable[Any], show: Callable[[Any], str] = name_of, most: int = 8) -> str:
    """Return the first of some values, and how many more there are."""
    values = list(values)
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(map(show, values[:most])) + more


def truth_of(name: str, value: Any) -> bool:
    """Return a flag as a bool: None is False, and 0 and 1 are flags, also as a tensor or NumPy's.

    Raises:
        AmpTypeError: it is anything else, such as the text "False".
    """
    with contextlib.suppress(Exception):  # of a tensor of several elements, or on the device meta
        if value is None or value == 0 or value == 1:
            return bool(value)
    is_betas = name == "bias_correction" and isinstance(value, (list, tuple))
    hint = f"; did you mean betas={brief(value)}?" if is_betas else "; pass one of them"
    raise AmpTypeError(f"{name}={brief(value)} is neither True nor False{hint}")
