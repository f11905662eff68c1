"""Sets that hold no references, read while other threads add to them."""

import weakref
from typing import TypeVar

T = TypeVar("T")


def members(of: "weakref.WeakSet[T]") -> list[T]:
    """Return what is in the set. A thread that opens a session meanwhile may change it."""
    while True:
        try:
            return list(of)
        except RuntimeError:  # it changed size
            continue
