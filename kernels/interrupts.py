"""Code that an interrupt may cut anywhere: clean-up, autograd's switch, and changes of tensors.

Python can raise KeyboardInterrupt between any two instructions. A step that was interrupted after it
changed some tensors can be neither repeated nor abandoned. So a step is first planned as a list of
changes. Each change is one call, which no interrupt divides, and once the first change is made, the
others are made before the interrupt propagates.

`torch.no_grad` is entered and left in Python: an interrupt just before or after its block leaves
autograd disabled, and the next backward fails. `without_grad` restores it even then.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
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


_set_grad_enabled = torch._C._set_grad_enabled


def without_grad(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function run without autograd, as the decorator `torch.no_grad()` does."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():  # Dynamo can trace torch's own
            with torch.no_grad():
                return function(*args, **kwargs)
        before = torch.is_grad_enabled()
        try:
            try:
                _set_grad_enabled(False)
                return function(*args, **kwargs)
            finally:
                _set_grad_enabled(before)
        finally:
            _set_grad_enabled(before)  # again: an interrupt may have come before

    return wrapper


def outside_inference_mode() -> AbstractContextManager[object]:
    """Return a context that leaves inference mode for its block, and does nothing where that is off.

    After an interrupt torch's switch is left late, and restores the grad mode in which it was entered.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


Change = Callable[[], Any]
"""Makes one change. It is called again if an interrupt has ended it. So it ends with one call of a
function that is not written in Python, or repeating it does no harm."""


def at_once(*changes: Change) -> None:
    """Call functions that are not written in Python, without an interrupt between them."""
    deque(map(operator.call, changes), maxlen=0)


class Changes:
    """Planned changes, in order."""

    def __init__(self) -> None:
        self._planned: list[Callable[[], Change]] = []
        self._made: list[Any] = []
        self._ready: tuple[int, Change] | None = None

    def add(self, change: Change) -> None:
        """Plan a change that is ready to be made."""
        self._planned.append(lambda: change)

    def add_later(self, work_out: Callable[[], Change]) -> None:
        """Plan a change that is computed when its turn comes.

        Args:
            work_out: computes and returns the change, and itself changes nothing. It is called again if
                an interrupt has ended it, but not once its change may have been made.
        """
        self._planned.append(work_out)

    @property
    def are_made(self) -> bool:
        """Whether there are changes, and all of them are made."""
        return 0 < len(self._planned) == len(self._made)

    @without_grad
    def make(self) -> None:
        """Make all changes. After an interrupt, the rest is made before the interrupt propagates."""
        try:
            self._make_rest()
        finally:
            self._make_rest()

    def _make_rest(self) -> None:
        while len(self._made) < len(self._planned):
            i = len(self._made)
            if self._ready is None or self._ready[0] != i:
                self._ready = i, self._planned[i]()
            # Made and noted by one call: a signal that comes during the change is handled after both.
            self._made.extend(map(operator.call, [self._ready[1]]))
