"""Events of sessions, for their observers: logs, diagnosis, comparisons of levels, integrations.

A session calls its own observers, and those that watch all sessions of the process. So an observer does
not have to replace any function. An event that an observer does not use costs an empty call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

everywhere: list[Observer] = []
"""The observers of all sessions of the process; `observing` adds one."""


class Observer:
    """The base class of observers: one method for each event of a session, which does nothing.

    If a method raises an error, the call of the session that caused the event raises it.
    """

    def session_begins(self, opt_level: Any, options: dict[str, Any]) -> Any:
        """A session is about to be made. Return its level; `options` may be changed."""
        return opt_level

    def session_ends(self, session: Any) -> None:
        """A session is about to be closed, and nothing of it is undone yet."""

    def initialize_begins(self, session: Any, models: Sequence[nn.Module]) -> None:
        """`initialize` was called with models, and has changed nothing yet."""

    def initialize_ends(
        self, session: Any, models: Sequence[nn.Module], optimizers: Sequence[Any]
    ) -> None:
        """`initialize` has prepared models and optimizers."""

    def forward_begins(self, session: Any, model: nn.Module, args: Any, kwargs: Any) -> None:
        """A model is called: see `watch_forwards`."""

    def block_entered(self, session: Any, block: Any, loss: Tensor, attached: Sequence[Any]) -> None:
        """A `scale_loss` block begins for a loss. `attached` are its `AttachedOptimizer`s."""

    def block_left(self, session: Any, block: Any) -> None:
        """A `scale_loss` block has ended without an error."""

    def must_know(self, scaler: Any) -> int:
        """Return the number of the last update of a scaler that the host must wait for; -1 for none."""
        return -1

    def verdicts(self, session: Any, scaler: Any, rows: Sequence[Any]) -> None:
        """`rows` are the updates of a scaler that the host has learnt of since the last such event."""

    def step_begins(self, attached: Any, closure: Callable[[], Any] | None) -> Any:
        """`optimizer.step` was called. Return its closure, or another one to use instead."""
        return closure

    def step_ends(self, attached: Any) -> None:
        """An optimizer has stepped, or skipped its step, and the model has the new weights."""

    def unscaling(self, grads: Sequence[Tensor], inv_scale: Tensor) -> None:
        """An `amp.GradScaler` is about to unscale gradients, or to check them in their scaled form."""


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Let an observer watch all sessions of the process inside the block."""
    everywhere.append(observer)
    try:
        yield
    finally:
        everywhere.remove(observer)


def watch_forwards(observer: Observer, session: Any, models: Iterable[nn.Module]) -> Callable[[], None]:
    """Tell an observer of each forward of models, until the function that this returns is called."""
    hook = _ForwardHook(weakref.ref(observer), weakref.ref(session))
    handles = [
        model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True) for model in models
    ]

    def stop() -> None:
        while handles:
            handles.pop().remove()

    return stop


class _ForwardHook:
    """A forward pre-hook that tells an observer. In a copy of the model it does nothing."""

    def __init__(self, *told: Callable[[], Any]) -> None:
        self._told = told

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        told = [reference() for reference in self._told]
        if told and None not in told and not torch.compiler.is_compiling():
            observer, session = told
            observer.forward_begins(session, model, args, kwargs)
