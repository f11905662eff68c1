"""Running an op again in FP64, to see whether its result is finite with a wider range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

_HALF_OR_SINGLE = (torch.float16, torch.bfloat16, torch.float32)


def floats_in(value: Any) -> list[Tensor]:
    """Return the dense floating tensors with values, in nested arguments or results."""
    leaves, _ = tree_flatten(value)
    tensors = [x for x in leaves if isinstance(x, Tensor) and x.layout is torch.strided]
    return [x for x in tensors if x.is_floating_point() and x.numel() and not x.is_meta]


def is_finite(x: Tensor) -> bool:
    """Whether a tensor has no inf or NaN. The host waits for the device."""
    if x.dtype.itemsize == 1:
        x = x.float()
    return math.isfinite(torch.linalg.vector_norm(x.detach(), math.inf).item())


def largest_in_float64(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> float | None:
    """Run an op of aten in FP64, and return the largest magnitude of its results.

    The host waits for the device.

    Returns:
        The magnitude, which is inf or NaN if the result is not finite in FP64 either. None for an op
        that cannot be run again: a random op, a collective, or one that does not support FP64.
    """
    if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
    args64, kwargs64 = tree_unflatten([_widened(leaf) for leaf in leaves], spec)
    try:
        result = func(*args64, **kwargs64)
        found = floats_in(args64[:1] if result is None else result)
    except (RuntimeError, TypeError, NotImplementedError):
        return None
    magnitudes = [torch.linalg.vector_norm(x, math.inf).item() for x in found]
    return max(magnitudes, key=lambda x: (math.isnan(x), x), default=None)


def _widened(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.detach().double()
    return torch.float64 if leaf in _HALF_OR_SINGLE and isinstance(leaf, torch.dtype) else leaf
