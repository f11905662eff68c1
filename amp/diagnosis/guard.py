"""An error in a watch never reaches the run that is watched: it is counted, and reported at the end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def first_line(error: BaseException) -> str:
    """Return the class and the first line of an error."""
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}".removesuffix(": ")


class Unfollowed:
    """Counts what a watch could not follow, because its own code has raised an error.

    Attributes:
        count: how many times that was.
        first: the first error, in one line.
    """

    def __init__(self) -> None:
        self.count, self.first = 0, ""

    def note(self, error: Exception) -> None:
        """Count an error."""
        self.first = self.first or first_line(error)
        self.count += 1

    def __str__(self) -> str:
        if not self.count:
            return ""
        return f"{self.count} op{'s' * (self.count != 1)} could not be followed ({self.first})"


def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method of an object that has `unfollowed` count its errors there, and return None."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # of whatever kind: the run must go on
            self.unfollowed.note(error)
            return None

    return call
