"""Arithmetic on many tensors at once, by torch's foreach operations.

On a GPU one of them is a few launches for any number of tensors of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class TensorGroup:
    """Tensors of one dtype and device, on which an operator is one foreach operation.

    A formula that is written for a tensor takes it: the other operand is a number, or a group of
    tensors of the same shapes.

    Args:
        tensors: the tensors, which no operator changes.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all tensors."""
        return self.tensors[0].dtype

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    def to(self, dtype: torch.dtype) -> TensorGroup:
        """Return the tensors in a dtype; this group if they have it."""
        if self.dtype is dtype:
            return self
        cast = [torch.empty_like(tensor, dtype=dtype) for tensor in self.tensors]
        torch._foreach_copy_(cast, self.tensors)
        return TensorGroup(cast)

    def sqrt(self) -> TensorGroup:
        """Return the square roots."""
        return TensorGroup(torch._foreach_sqrt(self.tensors))

    def sign(self) -> TensorGroup:
        """Return the signs: -1, 0 or 1."""
        return TensorGroup(torch._foreach_sign(self.tensors))

    def __add__(self, other: Any) -> TensorGroup:
        return TensorGroup(torch._foreach_add(self.tensors, _operand(other)))

    def __sub__(self, other: Any) -> TensorGroup:
        return TensorGroup(torch._foreach_sub(self.tensors, _operand(other)))

    def __mul__(self, other: Any) -> TensorGroup:
        return TensorGroup(torch._foreach_mul(self.tensors, _operand(other)))

    def __truediv__(self, other: Any) -> TensorGroup:
        return TensorGroup(torch._foreach_div(self.tensors, _operand(other)))

    __radd__, __rmul__ = __add__, __mul__


def _operand(other: Any) -> Any:
    return other.tensors if isinstance(other, TensorGroup) else other


def on_each(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Call a function of tensors, which may return several, with each of the tensors of groups."""
    if not isinstance(first, TensorGroup):
        return function(first, *others)
    every = [
        other.tensors if isinstance(other, TensorGroup) else [other] * len(first.tensors)
        for other in others
    ]
    results = [function(*each) for each in zip(first.tensors, *every, strict=True)]
    if isinstance(results[0], Tensor):
        return TensorGroup(results)
    return tuple([TensorGroup(several) for several in zip(*results, strict=True)])
