"""Unscaling gradients, and finding out whether they are finite.

    target_i = source_i * inv_scale                   for every i
    found_inf = 1 if any source or target element is inf or NaN

The check covers the products too: a scale below 1 can make an inf out of a finite gradient.

Shapes: `sources[i]` and `targets[i]` have the same shape and layout; a target may be its source.
Dtypes: float16, bfloat16, float32, float64, complex; a target may be wider than its source. The
product is computed in the target's dtype, in FP32 for 16-bit targets. Sparse gradients go through
their values.
Reference: `torch._amp_foreach_non_finite_check_and_unscale_`, which checks before multiplying only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor


@torch.no_grad()
def unscale(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    inv_scale: Tensor,
    found_inf: Tensor | None,
) -> None:
    """Write `sources * inv_scale` to `targets`. The host does not wait for the device.

    Args:
        sources: scaled gradients.
        targets: where the unscaled ones go; may be the sources themselves.
        inv_scale: float32 `[1]`.
        found_inf: float32 `[1]`, set to 1 on overflow and never cleared; None checks nothing.
    """
    outputs = []
    for source, target in zip(sources, targets, strict=True):
        values = _real_values(target)
        if target is not source:
            values.copy_(_real_values(source))
        outputs.append(values)
    outputs.sort(key=_group)
    for (device, _), tensors in groupby(outputs, key=_group):
        group, scale = list(tensors), inv_scale.to(device)
        found_here = torch.zeros_like(scale)
        torch._amp_foreach_non_finite_check_and_unscale_(group, found_here, scale)
        if found_inf is not None:
            one = torch.ones_like(scale)
            torch._amp_foreach_non_finite_check_and_unscale_(group, found_here, one)
            torch.maximum(found_inf, found_here.to(found_inf.device), out=found_inf)


def _real_values(tensor: Tensor) -> Tensor:
    """Return the numbers of a gradient as a real tensor that shares its memory."""
    if tensor.is_sparse:
        tensor = tensor._values()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _group(tensor: Tensor) -> tuple[str, str]:
    return str(tensor.device), str(tensor.dtype)
