"""What takes back what `initialize` has done: once it has failed, or when the session closes."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp.distributed import set_values


class Contents(NamedTuple):
    """What a parameter or buffer held at one time."""

    data: Tensor
    grad: Tensor | None

    def put_into(self, tensor: Tensor) -> None:
        """Make these the contents of `tensor`, whatever its dtype was."""
        set_values(tensor, self.data)
        tensor.grad = self.grad

    @classmethod
    def cast(cls, tensor: Tensor, dtype: torch.dtype) -> Contents:
        """Return what a tensor holds, in another dtype."""
        return cls(tensor.data.to(dtype), None if tensor.grad is None else tensor.grad.to(dtype))


class Undo:
    """What takes back what one `initialize` has done, newest first.

    Each callback must bear to be called again: `close` may be repeated after an error or an interrupt.

    Attributes:
        before: what tensors held that it has cast.
        if_it_fails: what takes back what stays when the session closes.
        is_for_close: whether `initialize` has succeeded, and `close` alone takes it back.
    """

    def __init__(self) -> None:
        self.is_for_close = False
        self.before: dict[Tensor, Contents] = {}
        self.if_it_fails: list[Callable[[], object]] = []
        self._callbacks: list[Callable[[], object]] = []

    def callback(self, function: Callable[..., object], *args: Any) -> None:
        """Let `close` call a function."""
        self._callbacks.append(functools.partial(function, *args))

    def always(self, function: Callable[[], object]) -> None:
        """Let `close` call a function, or the garbage collector if nobody closes.

        The function must not hold what holds this object.
        """
        finalizer = weakref.finalize(self, function)
        finalizer.atexit = False
        self.callback(finalizer.detach)
        self.callback(function)

    def has_succeeded(self) -> None:
        """Forget what is for a failure alone."""
        self.is_for_close, self.before, self.if_it_fails = True, {}, []

    def close(self) -> None:
        """Call what is to be called, newest first, and forget what has returned.

        An error does not keep the others from being called; the first one is raised at the end. An
        interrupt ends it at once. The next call goes on where this one has ended.
        """
        errors: list[Exception] = []
        for i in reversed(range(len(self._callbacks))):
            try:
                self._callbacks[i]()
            except Exception as error:
                errors.append(error)
            else:
                del self._callbacks[i]
        if errors:
            raise errors[0]

    def roll_back(self) -> None:
        """Make everything what it was: `initialize` has failed."""
        for tensor, contents in self.before.items():
            contents.put_into(tensor)
        for take_back in reversed(self.if_it_fails):
            take_back()
        self.close()
        self.before, self.if_it_fails = {}, []
