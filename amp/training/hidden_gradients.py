"""Gradients of masters are hidden from Dynamo and from DDP: the masters alone have them meanwhile.

Dynamo compiles no code of a parameter whose gradient has another dtype: it would run the code eagerly,
or raise. DDP raises in a backward that finds such a gradient, because its buckets have the parameters'
dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from amp import active

_hidden: list[list[Any]] = []
"""The `Gradients` that each compilation under way has hidden; compilations may nest."""


def register_with_dynamo(dynamo: Any) -> None:
    """Let `torch._dynamo.callback` hide gradients while it compiles."""
    dynamo.on_compile_start(begin_compiling)
    dynamo.on_compile_end(_end_compiling)


def begin_compiling(*_: object) -> None:
    """Hide the gradients of all sessions."""
    _hidden.append(_hide(active.open_sessions()))


def _end_compiling(*_: object) -> None:
    if _hidden:
        _show(_hidden.pop())


def hide_in_backward(sessions: Sequence[Any], output: Any) -> None:
    """Hide the gradients of some sessions in the backward of an output.

    They are shown again in the last callback of the backward, after DDP has written what it reduced.
    """

    def begin(_: Tensor) -> None:
        if hidden := _hide(sessions):
            _after_backward(lambda: _after_backward(lambda: _show(hidden)))

    for tensor in tree_leaves(output) if sessions else ():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(begin)  # type: ignore[no-untyped-call]


def _after_backward(function: Any) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(function)


def _hide(sessions: Iterable[Any]) -> list[Any]:
    """Hide the gradients that are shown, and return those of which optimizers."""
    every = [attached.gradients for session in sessions for attached in session.attached]
    return [gradients for gradients in every if gradients.hide()]


def _show(hidden: Iterable[Any]) -> None:
    for gradients in hidden:
        gradients.show()
