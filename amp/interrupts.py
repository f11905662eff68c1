"""Clean-up after a call that may be interrupted: a KeyboardInterrupt can come between any two lines."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def followed_by(call: Callable[[], T], afterwards: Callable[[], object]) -> T:
    """Call a function, and then another one, even if the first one raises.

    Args:
        call: the first function, whose result is returned.
        afterwards: the other function. If an interrupt ends it, it is called a second time.
    """
    is_done = False
    try:
        try:
            return call()
        finally:
            afterwards()
            is_done = True
    finally:
        if not is_done:
            afterwards()
