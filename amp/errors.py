"""What the library raises and warns with.

Each error is an `AmpError` and also the builtin type that apex raised in the same
situation, so that a script written for apex still catches it. Every message says what
was passed, what is allowed, and what to do.
"""

import difflib
from collections.abc import Iterable


class AmpError(Exception):
    """Base of everything this library raises on purpose."""


class AmpRuntimeError(AmpError, RuntimeError):
    """A call out of order, or properties that do not fit together."""


class AmpValueError(AmpError, ValueError):
    """A value that is not one of the allowed ones."""


class AmpTypeError(AmpError, TypeError):
    """An argument of the wrong type, or an argument that does not exist."""


class AmpIndexError(AmpError, IndexError):
    """A `loss_id` that no loss scaler answers to."""


class AmpAssertionError(AmpError, AssertionError):
    """An illegal `keep_batchnorm_fp32` (apex asserted it)."""


class AmpNotImplementedError(AmpError, NotImplementedError):
    """An op that half precision cannot do safely."""


class ProfileNotFoundError(AmpError, FileNotFoundError):
    """A path given as `opt_level` or `extends` where there is no file."""


class AmpWarning(UserWarning):
    """Training goes on, but something deserves a look."""


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the nearest candidate, or an empty string."""
    matches = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return f"; did you mean '{matches[0]}'?" if matches else ""
