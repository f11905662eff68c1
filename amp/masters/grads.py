"""Read and set the gradients of many tensors."""

import itertools
import operator
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
    return any(map(operator.is_not, map(_GRAD.__get__, tensors), itertools.repeat(None)))


def store_grads(tensors: Iterable[Tensor], grads: Iterable[Tensor | None] | None = None) -> None:
    """Set the `.grad` of each tensor; by default None."""
    if grads is None:
        host_lists.lists.clear_grads(list(tensors))
        return
    for tensor, grad in zip(tensors, grads, strict=True):
        tensor.grad = grad
