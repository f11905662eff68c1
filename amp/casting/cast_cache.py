"""Where casts of weights are kept during a forward: in torch's cache, or for one thread alone.

torch has one cache for all threads, and whoever leaves an outermost region empties it. Another thread
whose weight is used twice would cast it twice then, and sum up the gradients in another dtype. So one
thread has torch's cache at a time, and a forward that finds it taken keeps its own casts.
"""

from __future__ import annotations

import operator
import threading
import weakref

import torch
from torch import Tensor


class _Token:
    """Ends with its thread."""


def _free(thread: weakref.ref[_Token]) -> None:
    """Let other threads have torch's cache: a thread has ended that an interrupt kept from that."""
    if _holder.get("thread") is thread:
        torch.clear_autocast_cache()
        _holder.clear()


class _Forwards(threading.local):
    """Whether this thread is in the forward of a session's model, and who keeps casts of weights there.

    Attributes:
        are_running: whether it is in one in which torch casts.
        casts: in a forward in which patched functions cast: the weights and their casts, by id.
        thread: stands for this thread. It is dead when the thread is.
    """

    are_running = False
    casts: dict[int, tuple[Tensor, Tensor]] | None = None

    def __init__(self) -> None:
        token = _Token()
        self.thread = weakref.ref(token, _free)
        self._token = token  # goes last: nobody is told, if only this object knows of the thread

    @property
    def have_torchs_cache(self) -> bool:
        """Whether this thread is the one that torch keeps casts of weights for."""
        return _holder.get("thread") is self.thread

    def is_in_one(self) -> bool:
        """Whether it is in any."""
        return self.are_running or self.casts is not None


forwards = _Forwards()

_holder: dict[str, weakref.ref[_Token]] = {}
"""The thread in whose outermost region torch keeps casts of weights, if there is one.

One call takes the place, and says who has it: no interrupt comes between.
"""


def take_torchs_cache() -> bool:
    """Take torch's cache for this thread if no other has it, and return whether this one has it."""
    return _holder.setdefault("thread", forwards.thread) is forwards.thread


def give_torchs_cache() -> None:
    """Let other threads have torch's cache."""
    if forwards.have_torchs_cache:
        _holder.clear()


def forget_casts() -> None:
    """Forget the casts of weights that are kept for this thread."""
    if forwards.casts is not None:
        forwards.casts.clear()
    if forwards.have_torchs_cache:
        torch.clear_autocast_cache()
    elif take_torchs_cache():
        try:
            torch.clear_autocast_cache()
        finally:
            give_torchs_cache()
    elif nesting() and torch.is_autocast_cache_enabled():  # in a region older than any session
        torch.clear_autocast_cache()


def nesting() -> int:
    """Return how many regions this thread is in. torch tells it only to who enters or leaves one."""
    counts = map(operator.call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting))
    return tuple(counts)[1]  # both calls in one, which no interrupt divides
