"""Functions that run without autograd, and leave it as it was whenever an interrupt comes.

`torch.no_grad` is entered and left in Python: an interrupt between that and the block that is to put
autograd back leaves it disabled, and the next backward fails.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

_set_grad_enabled = torch._C._set_grad_enabled


def without_grad(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function run without autograd, as the decorator `torch.no_grad()` does."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():  # Dynamo follows torch's own
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
            _set_grad_enabled(before)  # if an interrupt came before it was done

    return wrapper
