"""Whose casts apply: those of the session whose model a thread has called last.

Where it has called none, the newest session's do. So threads may train models of several sessions at
once, each with the casts of its own.
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


class Caster(Protocol):
    """What casts functions: see `amp.casting.by_op.CastOps`."""

    dtype: torch.dtype
    live: bool
    is_inherited: bool
    device_types: set[str]


live_casters: list[Any] = []
"""The casters of open sessions, newest last."""


def newest_caster() -> Any:
    """Return the caster of the newest session that casts functions, or None."""
    return live_casters[-1] if live_casters else None


class Bystander:
    """Stands for a session that casts no functions: in a thread that calls its model, none cast.

    Attributes:
        live: whether the session is open, and casts are not what a later `amp.initialize` says.
    """

    def __init__(self) -> None:
        self.live = True


def _inherit() -> None:
    """Note in a forked process which sessions are of its parent; see `amp.casting.regions.casts`."""
    for caster in live_casters:
        caster.is_inherited = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_inherit)


opening = threading.RLock()
"""Held by a thread that patches functions for a session, or gives them back."""

_bystanders: weakref.WeakSet[Bystander] = weakref.WeakSet()


class _Sessions:
    """The newest caster, and whether there are several sessions, which threads have to be asked about.

    Both change at once: in a thread that read one before and the other after another thread has opened
    a session, functions would cast as that says, or not at all.
    """

    now: tuple[Any, bool] = (None, False)

    @classmethod
    def count(cls) -> None:
        """Count them anew."""
        cls.now = newest_caster(), len(live_casters) + len(_bystanders) > 1


def call_model_of(session: Caster | Bystander) -> None:
    """Let functions cast in this thread as a session says, until it calls another one's model.

    torch keeps this for the thread, and autograd's threads inherit it with a backward.
    """
    keep_in_thread(_CALLED_LAST, session)


def _called_last() -> Any:
    """Return what stands for the session whose model this thread called last, or None."""
    if not _internals._is_key_in_tls(_CALLED_LAST):
        return None
    session = _internals._get_obj_in_tls(_CALLED_LAST)
    return session if session is not None and session.live else None


def caster_here() -> Any:
    """Return the caster that applies in this thread, or None.

    It is that of the session whose model the thread has called last, or the newest one where it has
    called none. Compiled code has the newest one's casts: Dynamo guards no variable of a thread.
    """
    newest, are_several = _Sessions.now
    if torch.compiler.is_dynamo_compiling() or not are_several:
        return newest
    session = _called_last()
    if session is None:
        return newest
    return None if isinstance(session, Bystander) else session


def applies(caster: Caster) -> bool:
    """Whether this thread has not called a model of another session than the caster's."""
    _, are_several = _Sessions.now
    if not are_several:
        return True
    session = _called_last()
    return session is None or session is caster


def stand_by() -> Bystander:
    """Return what stands for a session that casts no functions."""
    bystander = Bystander()
    _bystanders.add(bystander)
    _Sessions.count()
    return bystander


def stand_aside(bystander: Bystander) -> None:
    """Forget what `stand_by` returned. Idempotent."""
    bystander.live = False
    _bystanders.discard(bystander)
    _Sessions.count()


def begin(caster: Caster) -> None:
    """Let the casts of a session apply that is opened now, until a thread calls a model."""
    live_casters.append(caster)
    _Sessions.count()
    keep_in_thread(_CALLED_LAST, None)


def end(caster: Caster) -> None:
    """Forget a session's casts. Idempotent."""
    if caster in live_casters:
        live_casters.remove(caster)
        _Sessions.count()
