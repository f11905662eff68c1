"""Arithmetic on many tensors at once, by torch's foreach operations.

On a GPU one of them is a few launches for many tensors, and one more for each few million elements.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from amp.kernels.interrupts import Change


def copies(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return copies of tensors in a dtype."""
    found = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(found, list(tensors))
    return found


def by_dtypes(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> list[Change]:
    """Return changes that copy sources into targets, one for each pair of dtypes.

    On CUDA, torch before 2.11 writes a list of several dtypes as if all had the first one's.
    """
    pairs: defaultdict[Any, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for target, source in zip(targets, sources, strict=True):
        both = pairs[target.dtype, source.dtype]
        both[0].append(target)
        both[1].append(source)
    return [functools.partial(torch._foreach_copy_, *both) for both in pairs.values()]


def _foreach(function: Callable[..., Any]) -> Any:
    """Return a method that calls a foreach operation on the tensors of a group."""

    def on_group(group: TensorGroup, *operands: Any) -> TensorGroup:
        others = [x.tensors if isinstance(x, TensorGroup) else x for x in operands]
        return TensorGroup(function(group.tensors, *others))

    return on_group


class TensorGroup:
    """Tensors of one dtype and device, on which an operator is one foreach operation.

    A formula that is written for a tensor takes it: the other operand is a number, a list with one for
    each tensor, or a group of tensors of the same shapes.

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
        return TensorGroup(copies(self.tensors, dtype))

    sqrt, sign = _foreach(torch._foreach_sqrt), _foreach(torch._foreach_sign)
    __add__ = __radd__ = _foreach(torch._foreach_add)
    __mul__ = __rmul__ = _foreach(torch._foreach_mul)
    __sub__, __truediv__ = _foreach(torch._foreach_sub), _foreach(torch._foreach_div)


def on_each(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Call a function of tensors that works on each element, and may return several tensors.

    The tensors of groups are joined for it.
    """
    if not isinstance(first, TensorGroup):
        return function(first, *others)
    result = function(_joined(first), *map(_joined, others))
    if isinstance(result, Tensor):
        return TensorGroup(_unflatten_dense_tensors(result, first.tensors))
    return tuple([TensorGroup(_unflatten_dense_tensors(each, first.tensors)) for each in result])


def _joined(value: Any) -> Any:
    return _flatten_dense_tensors(value.tensors) if isinstance(value, TensorGroup) else value


def norms_of(value: Tensor | TensorGroup) -> Tensor:
    """Return the norm of a tensor, or those of a group, `[n]`."""
    if isinstance(value, TensorGroup):
        return torch.stack(torch._foreach_norm(value.tensors))
    norm: Tensor = torch.linalg.vector_norm(value)
    return norm
