"""What has to be done after a call, whatever ends it: an interrupt may come between any two lines."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def followed_by(call: Callable[[], T], afterwards: Callable[[], object]) -> T:
    """Call a function and, whatever it raises, another one after it.

    Args:
        call: the function, whose result is returned.
        afterwards: is called again if an interrupt has ended it, so it has to bear that.
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
