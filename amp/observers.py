"""Events of sessions, for whoever watches them: logs, diagnosis, comparisons of levels, integrations.

A session calls its observers, and those that watch all sessions of the process. Nothing has to be
replaced for that, and an event that nobody takes costs an empty call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_everywhere: list[Observer] = []
"""Those that watch all sessions of the process."""


class Observer:
    """Is told what happens in a session. Each event does nothing here.

    What an event raises comes out of the call that it is about.

    Attributes:
        takes_half_models: whether `initialize` takes a model in 16 bits as it is, to be looked at.
    """

    takes_half_models = False

    def session_begins(self, opt_level: Any, options: dict[str, Any]) -> Any:
        """Return the level of a session that is about to be made; `options` may be changed."""
        return opt_level

    def session_ends(self, session: Any) -> None:
        """A session is about to be closed, and is as it was in use."""

    def initialize_begins(self, session: Any, models: Sequence[nn.Module]) -> None:
        """`initialize` was given models, and has changed nothing."""

    def initialize_ends(
        self, session: Any, models: Sequence[nn.Module], optimizers: Sequence[Any]
    ) -> None:
        """`initialize` has set models and optimizers up."""

    def forward_begins(self, session: Any, model: nn.Module, args: Any, kwargs: Any) -> None:
        """A model is called: see `watch_forwards`."""

    def forward_ends(self, session: Any, model: nn.Module, output: Any) -> None:
        """A model has returned: see `watch_forwards`."""

    def block_entered(self, session: Any, block: Any, loss: Tensor, attached: Sequence[Any]) -> None:
        """A `scale_loss` block begins for a loss, and for what is attached to its optimizers."""

    def block_left(self, session: Any, block: Any) -> None:
        """A block has been left without an error."""

    def must_know(self, scaler: Any) -> int:
        """Return up to which of a scaler's updates the host has to know, though it may have to wait."""
        return -1

    def verdicts(self, session: Any, scaler: Any, rows: Sequence[Any]) -> None:
        """The host was asked what it has learnt of a scaler: updates since the last time, if any."""

    def step_begins(self, attached: Any, closure: Callable[[], Any] | None) -> Any:
        """`optimizer.step` was called; return its closure, or what is to be called instead."""
        return closure

    def step_ends(self, attached: Any) -> None:
        """An optimizer has stepped, or skipped its step, and masters are in the model."""

    def unscaling(self, grads: Sequence[Tensor], inv_scale: Tensor) -> None:
        """An `amp.GradScaler` is about to unscale gradients, or to check them while they are scaled."""


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Let an observer watch all sessions of the process inside the block."""
    _everywhere.append(observer)
    try:
        yield
    finally:
        _everywhere.remove(observer)


def watching(own: Iterable[Observer] = ()) -> list[Observer]:
    """Return who is to be told of an event in a session whose own observers these are."""
    return [*_everywhere, *own]


def watch_forwards(observer: Observer, session: Any, models: Iterable[nn.Module]) -> Callable[[], None]:
    """Tell an observer of each forward of models, until what is returned is called."""
    of = weakref.ref(observer), weakref.ref(session)
    handles = [
        handle
        for model in models
        for handle in (
            model.register_forward_pre_hook(_Begins(*of), with_kwargs=True, prepend=True),
            model.register_forward_hook(_Ends(*of)),
        )
    ]

    def stop() -> None:
        while handles:
            handles.pop().remove()

    return stop


class _Hook:
    """A hook on a model. That of a copy does nothing."""

    def __init__(self, *of: Callable[[], Any]) -> None:
        self._of = of

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()

    def _told(self) -> tuple[Any, Any] | None:
        found = [reference() for reference in self._of]
        is_told = found and None not in found and not torch.compiler.is_compiling()
        return (found[0], found[1]) if is_told else None


class _Begins(_Hook):
    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if (told := self._told()) is not None:
            told[0].forward_begins(told[1], model, args, kwargs)


class _Ends(_Hook):
    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        if (told := self._told()) is not None:
            told[0].forward_ends(told[1], model, output)
