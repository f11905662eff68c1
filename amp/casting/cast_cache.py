"""Who keeps the casts of weights in a forward: torch's cache, or one of the thread's own.

torch has one cache for all threads, and empties it when any thread leaves an outermost region. Another
thread that uses a weight twice would then cast it twice, and sum its gradients in another dtype. So
only one thread at a time uses torch's cache, and a forward that finds it taken keeps its own casts.
"""

from __future__ import annotations

import operator
import threading
import weakref

import torch
from torch import Tensor


class _Token:
    """An object that lives as long as its thread."""


def _free(thread: weakref.ref[_Token]) -> None:
    """Release torch's cache of a thread that ended without releasing it, because of an interrupt."""
    if _holder.get("thread") is thread:
        torch.clear_autocast_cache()
        _holder.clear()


class _Forwards(threading.local):
    """Whether this thread is in the forward of a session's model, and where casts are cached there.

    Attributes:
        are_running: whether the thread is in a forward in which torch casts and caches.
        casts: weights and their casts, by id, in a forward in which patched functions cast; else None.
        thread: a reference that identifies this thread, and dies with it.
    """

    are_running = False
    casts: dict[int, tuple[Tensor, Tensor]] | None = None

    def __init__(self) -> None:
        token = _Token()
        self.thread = weakref.ref(token, _free)
        self._token = token  # last: `_free` is not called if this object and the reference die together

    @property
    def have_torchs_cache(self) -> bool:
        """Whether this thread holds torch's cache."""
        return _holder.get("thread") is self.thread

    def is_in_one(self) -> bool:
        """Whether the thread is in the forward of a session's model."""
        return self.are_running or self.casts is not None


forwards = _Forwards()

_holder: dict[str, weakref.ref[_Token]] = {}
"""The thread that holds torch's cache, if one does.

One call of `setdefault` both takes the cache and tells who holds it: no interrupt can come between.
"""


def take_torchs_cache() -> bool:
    """Take torch's cache for this thread if it is free; return whether this thread holds it."""
    return _holder.setdefault("thread", forwards.thread) is forwards.thread


def give_torchs_cache() -> None:
    """Release torch's cache, if this thread holds it."""
    if forwards.have_torchs_cache:
        _holder.clear()


def forget_casts() -> None:
    """Forget the cached casts of this thread."""
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
    """Return how many regions this thread is in. torch tells only when one is entered or left."""
    counts = map(operator.call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting))
    return tuple(counts)[1]  # one call for both, so that no interrupt comes between
