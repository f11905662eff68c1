"""Copies between FP32 masters and 16-bit weights.

    target_i = round_to_nearest_even(source_i)        for every i

Shapes: `sources[i]` and `targets[i]` have the same shape, any strides. Dtypes: float16, bfloat16,
float32 or float64 on either side. Reference: `torch.Tensor.copy_`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each source into its target. The host does not wait for the device."""
    if sources:
        torch._foreach_copy_(list(targets), list(sources))
