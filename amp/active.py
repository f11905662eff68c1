"""The sessions that are open, and which of them a thread is active in: that whose model it called last.

Where a thread has called no model, the newest session's casts apply. So threads may train models of
several sessions at once, each with the casts of its own.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, Protocol

import torch

from amp.torch_versions import keep_in_thread

_CALLED_LAST = "amp: whose model this thread called last"

_internals: Any = torch._C  # which has no types for what is asked of it here

opening = threading.RLock()
"""Held by a thread that opens or closes a session, and so patches functions or gives them back."""


class Caster(Protocol):
    """What casts functions: see `amp.casting.by_op.CastOps`."""

    dtype: torch.dtype
    live: bool
    is_inherited: bool
    device_types: set[str]


class NoCasts:
    """What stands for a session that casts no functions: in a thread that calls its model, none cast.

    Attributes:
        live: whether the session is open, and casts are not what a later `amp.initialize` says.
    """

    def __init__(self) -> None:
        self.live, self.is_inherited = True, False

    def stop(self) -> None:
        """Let threads cast as other sessions say. Idempotent."""
        self.live = False
        look_at_casts()

    drop = stop


_sessions: tuple[weakref.ref[Any], ...] = ()


class _Casts:
    """The newest caster, and whether there are several sessions, which threads have to be asked about.

    Both change at once: in a thread that read one before and the other after another thread has opened
    a session, functions would cast as that says, or not at all.
    """

    now: tuple[Any, bool] = (None, False)


def open_sessions() -> list[Any]:
    """Return the sessions that have set something up and are not closed, oldest first."""
    return [session for reference in _sessions if (session := reference()) is not None]


def session_of(model: Any) -> Any:
    """Return the open session that a model went through, or None."""
    found = (x for x in open_sessions() if any(each is model for each in x.live_models()))
    return next(found, None)


def add(session: Any) -> None:
    """Note that a session is open, until `remove`, or until nothing holds it."""
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
    """Return what casts functions, of the open sessions, newest last."""
    casts = [session.casts for session in open_sessions()]
    return [each for each in casts if each.live and not isinstance(each, NoCasts)]


def look_at_casts() -> None:
    """Look which casts apply, after those of a session have begun or ended."""
    found = casters()
    several = sum(session.casts.live for session in open_sessions()) > 1
    _Casts.now = found[-1] if found else None, several


def _after_fork() -> None:
    for session in open_sessions():
        session.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# Whose casts apply.


def are_several() -> bool:
    """Whether there are several sessions, so that threads have to be asked about."""
    return _Casts.now[1]


def newest_caster() -> Any:
    """Return the caster of the newest session that casts functions, or None."""
    return _Casts.now[0]


def activate(casts: Caster | NoCasts | None) -> None:
    """Let functions cast in this thread as a session says, until it calls another one's model.

    torch keeps this for the thread, and autograd's threads inherit it with a backward. None is the
    newest session.
    """
    keep_in_thread(_CALLED_LAST, casts)


def _called_last() -> Any:
    """Return what stands for the session whose model this thread called last, or None."""
    if not _internals._is_key_in_tls(_CALLED_LAST):
        return None
    casts = _internals._get_obj_in_tls(_CALLED_LAST)
    return casts if casts is not None and casts.live else None


def caster_here() -> Any:
    """Return the caster that applies in this thread, or None.

    It is that of the session whose model the thread has called last, or the newest one where it has
    called none. Compiled code has the newest one's casts: Dynamo guards no variable of a thread.
    """
    newest, several = _Casts.now
    if torch.compiler.is_dynamo_compiling() or not several:
        return newest
    casts = _called_last()
    if casts is None:
        return newest
    return None if isinstance(casts, NoCasts) else casts


def applies(caster: Caster) -> bool:
    """Whether this thread has not called a model of another session than the caster's."""
    if not _Casts.now[1]:
        return True
    casts = _called_last()
    return casts is None or casts is caster
