"""The open sessions, and for each thread the session whose casts apply in it.

That is the session whose model the thread called last, or the newest session if it has called no model.
So several threads can train models of several sessions at once, each with the casts of its own session.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from amp.torch_versions import keep_in_thread, remove_from_thread

_CALLED_LAST = "amp: whose model this thread called last"

_internals: Any = torch._C  # whose private functions have no types

opening = threading.RLock()
"""Held by a thread that opens or closes a session, which patches functions or restores them."""


class Caster(Protocol):
    """An object that makes functions cast: see `amp.casting.by_op.CastOps`."""

    dtype: torch.dtype
    live: bool
    is_inherited: bool
    device_types: set[str]

    def check_region(self) -> None:
        """See `amp.casting.strategy.Strategy.check_region`."""


class NoCasts:
    """Takes the place of a caster in a session whose functions do not cast.

    No function casts in a thread that has called a model of the session last.

    Attributes:
        live: whether the session is open, and no later `amp.initialize` has replaced it.
    """

    def __init__(self) -> None:
        self.live, self.is_inherited = True, False

    def stop(self) -> None:
        """Let the casts of other sessions apply in all threads. Idempotent."""
        self.live = False
        look_at_casts()

    drop = stop


_sessions: tuple[weakref.ref[Any], ...] = ()


class _Casts:
    """The newest caster, and whether there are several sessions, so that threads may differ.

    Both are in one tuple, so that they change at once. Otherwise another thread, while a session opens,
    could read one value from before and one from after, and use the wrong casts.
    """

    now: tuple[Any, bool] = (None, False)


def open_sessions() -> list[Any]:
    """Return the sessions that have prepared something and are not closed, oldest first."""
    return [session for reference in _sessions if (session := reference()) is not None]


def session_of(model: Any) -> Any:
    """Return the open session that has prepared a model, or None."""
    found = (x for x in open_sessions() if any(each is model for each in x.live_models()))
    return next(found, None)


def add(session: Any) -> None:
    """Note that a session is open, until `remove`, or until it is garbage-collected."""
    global _sessions
    with opening:
        if session not in open_sessions():
            _sessions = (*_sessions, weakref.ref(session))
            look_at_casts()


def remove(session: Any) -> None:
    """Forget a session. Idempotent."""
    global _sessions
    with opening:
        _sessions = tuple([weakref.ref(each) for each in open_sessions() if each is not session])
        look_at_casts()


def casters() -> list[Any]:
    """Return the casters of the open sessions, newest last."""
    casts = [session.casts for session in open_sessions()]
    return [each for each in casts if each.live and not isinstance(each, NoCasts)]


def look_at_casts() -> None:
    """Find out again which casts apply, after those of a session have begun or ended."""
    found = casters()
    several = sum(session.casts.live for session in open_sessions()) > 1
    _Casts.now = found[-1] if found else None, several


def _after_fork() -> None:
    """Prepare the sessions for use in a forked process, which has no other threads."""
    for session in open_sessions():
        session.masters.renew_lock()
        session.casts.is_inherited = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# Whose casts apply.


def are_several() -> bool:
    """Whether there are several sessions, so that casts may differ between threads."""
    return _Casts.now[1]


def newest_caster() -> Any:
    """Return the caster of the newest session that casts functions, or None."""
    return _Casts.now[0]


activate: Callable[[Caster | NoCasts], None] = functools.partial(keep_in_thread, _CALLED_LAST)
"""Lets the casts of a session apply in this thread, until it calls a model of another session.

torch stores this for each thread, and the threads of autograd inherit it in a backward.
"""
deactivate: Callable[[], None] = functools.partial(remove_from_thread, _CALLED_LAST)
"""Lets the casts of the newest session apply in this thread. A thread that has called `activate` calls
this when it ends."""


def _called_last() -> Any:
    """Return the casts of the session whose model this thread called last, or None."""
    if not _internals._is_key_in_tls(_CALLED_LAST):
        return None
    casts = _internals._get_obj_in_tls(_CALLED_LAST)
    return casts if casts is not None and casts.live else None


def caster_here() -> Any:
    """Return the caster that applies in this thread, or None.

    It is the caster of the session whose model the thread has called last, or the newest caster if it
    has called none. In compiled code it is always the newest one, because Dynamo has no guards on
    variables of a thread.
    """
    newest, several = _Casts.now
    if torch.compiler.is_dynamo_compiling() or not several:
        return newest
    casts = _called_last()
    if casts is None:
        return newest
    return None if isinstance(casts, NoCasts) else casts


def applies(caster: Caster) -> bool:
    """Whether a caster applies in this thread: it has called no other session's model last."""
    if not _Casts.now[1]:
        return True
    casts = _called_last()
    return casts is None or casts is caster
