"""Hiding gradients of masters from Dynamo and from DDP: for a time only the masters have them.

Those of earlier blocks are hidden in a block too, and `model.zero_grad()` drops them there.

Dynamo compiles no code of a parameter whose gradient has another dtype: it would run the code eagerly,
or raise. DDP raises in a backward that finds such a gradient, because its buckets have the parameters'
dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves

from amp import active
from amp.patching import Patch, around

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
    """Hide the gradients that are shown, and return the `Gradients` of their optimizers."""
    return [gradients for gradients in _of(sessions) if gradients.hide()]


def _of(sessions: Iterable[Any]) -> list[Any]:
    return [attached.gradients for session in sessions for attached in session.attached]


def _show(hidden: Iterable[Any]) -> None:
    for gradients in hidden:
        gradients.show()


@_disable_dynamo
def _zero_grad(original: Callable[..., None], module: nn.Module, set_to_none: bool = True) -> None:
    """Clear the gradients of a module, hidden ones too. Dynamo does not trace it."""
    original(module, set_to_none)
    for gradients in _of(active.open_sessions()):
        gradients.clear_hidden(module, set_to_none)


PATCHES = (
    Patch(
        ("torch.nn.modules.module.Module",),
        "zero_grad",
        around(_zero_grad),
        "in a block, gradients of earlier blocks would come back when it is left",
    ),
)
"""The function that is patched in a session with a loss scale or with masters."""
