"""Functions that run without autograd, and restore it even after an interrupt.

`torch.no_grad` is entered and left in Python: an interrupt just before or after its block leaves
autograd disabled, and the next backward fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

_set_grad_enabled = torch._C._set_grad_enabled


def without_grad(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function run without autograd, as the decorator `torch.no_grad()` does."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():  # Dynamo can trace torch's own
            with torch.no_grad():
                return function(*args, **kwargs)
        before = torch.is_grad_enabled()
        try:
            try:
                _set_grad_enabled(False)
                return function(*args, **kwargs)
            finally:
                _set_grad_enabled(before)
        finally:
            _set_grad_enabled(before)  # again: an interrupt may have come before

    return wrapper


def outside_inference_mode() -> AbstractContextManager[object]:
    """Return a context that leaves inference mode for its block, and does nothing where that is off.

    After an interrupt torch's switch is left late, and restores the grad mode in which it was entered.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
