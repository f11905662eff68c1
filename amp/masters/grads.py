"""Read and set the gradients of many tensors."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from amp.kernels import host_lists

_GRAD: Any = torch.Tensor.grad


def grads_of(tensors: Iterable[Tensor]) -> list[Tensor | None]:
    """Return the `.grad` of each tensor."""
    return list(map(_GRAD.__get__, tensors))


def have_grads(tensors: Iterable[Tensor]) -> bool:
    """Whether any tensor has a gradient."""
    every = list(tensors)
    return not host_lists.lists.have_grads(every, [None] * len(every))


def store_grads(tensors: Iterable[Tensor], grads: Iterable[Tensor | None] | None = None) -> None:
    """Set the `.grad` of each tensor; by default None."""
    if grads is None:
        host_lists.lists.clear_grads(list(tensors))
        return
    both = list(tensors), list(grads)
    if not host_lists.lists.set_grads(*both):
        host_lists.InPython.set_grads(*both)
