"""Undoing what `initialize` has done, if it fails, or when the session closes."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp.distributed import set_values
from amp.shared_memory import CastMemory


class Contents(NamedTuple):
    """The memory and the gradient that a parameter or buffer has at one time."""

    data: Tensor
    grad: Tensor | None

    def put_into(self, tensor: Tensor) -> None:
        """Make these the contents of `tensor`, which may have another dtype."""
        set_values(tensor, self.data)
        tensor.grad = self.grad

    @classmethod
    def cast(cls, tensor: Tensor, dtype: torch.dtype, data: Tensor | None = None) -> Contents:
        """Return the contents of a tensor in another dtype, in `data` if that is given."""
        grad = None if tensor.grad is None else tensor.grad.to(dtype)
        return cls(tensor.data.to(dtype) if data is None else data, grad)


class Undo:
    """The functions that undo one `initialize`, called in reverse order.

    A function may be called again, because `close` may be repeated after an error or an interrupt.

    Args:
        memory: gives tensors memory in another dtype, and back.

    Attributes:
        before: the contents of tensors before they were cast.
        if_it_fails: functions to call only if `initialize` fails, and not when the session closes.
        is_for_close: whether `initialize` has succeeded, so that only `close` is still to undo it.
    """

    def __init__(self, memory: CastMemory | None = None) -> None:
        self.memory = memory or CastMemory()
        self.is_for_close = False
        self.before: dict[Tensor, Contents] = {}
        self.if_it_fails: list[Callable[[], object]] = []
        self._callbacks: list[Callable[[], object]] = []
        self._always: list[Callable[[], object]] = []

    def callback(self, function: Callable[..., object], *args: Any) -> None:
        """Let `close` call a function."""
        self._callbacks.append(functools.partial(function, *args))

    def always(self, function: Callable[[], object]) -> None:
        """Let `unpatch` call a function, or the garbage collector, if `close` is never called.

        The function must not refer to an object that refers to this one.
        """
        weakref.finalize(self, function).atexit = False
        self._always.append(function)

    def has_succeeded(self) -> None:
        """Forget the functions that are only for a failure."""
        self.is_for_close, self.before, self.if_it_fails = True, {}, []

    def unpatch(self) -> None:
        """Undo the changes to the whole process. Idempotent."""
        for function in reversed(self._always):
            function()

    def close(self) -> None:
        """Call the callbacks, newest first, and forget each one that succeeds.

        An error or an interrupt ends the call: older callbacks undo what newer ones rely on, such as a
        cast whose values masters have. The next call goes on with the callbacks that are left.
        """
        self.unpatch()
        while self._callbacks:
            self._callbacks[-1]()
            del self._callbacks[-1]

    def roll_back(self) -> None:
        """Undo everything, because `initialize` has failed."""
        for tensor, contents in self.before.items():
            contents.put_into(tensor)
        for take_back in reversed(self.if_it_fails):
            take_back()
        self.close()
        self.before, self.if_it_fails = {}, []
