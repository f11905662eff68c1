"""Copies between FP32 masters and 16-bit weights.

    target_i = round_to_nearest_even(source_i)        for every i

Shapes: `sources[i]` and `targets[i]` have one shape, of any size. Dtypes: float16, bfloat16, float32 or
float64 on either side; what is too large for the target becomes inf. Launches: one for each device and
pair of dtypes. Memory traffic: each source is read and each target written once.
Reference: `torch.Tensor.copy_`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp.kernels.language import each_part, jit, narrow, tl
from amp.kernels.launch_plans import Elementwise

BLOCK = 8192


def master_copy(
    sources: Sequence[Tensor], targets: Sequence[Tensor], *, backend: str | None = None
) -> None:
    """Copy each source into its target. The host does not wait for the device.

    Raises:
        ValueError: sources and targets do not match.
        UnsupportedTensorError: a dtype that is not listed above.
    """
    _COPY.run((sources, targets), backend)


@jit
def _copy(pointers, i, mask, arguments):
    source, target = pointers
    x = tl.load(source + i, mask=mask, other=0.0)
    tl.store(target + i, narrow(x, target.dtype.element_ty), mask=mask)
    return 0


@jit
def copy_kernel(rows, chunks, DTYPES: tl.constexpr, BLOCK: tl.constexpr):
    each_part(_copy, rows, chunks, (), DTYPES, BLOCK)


def copy_reference(sources: list[Tensor], targets: list[Tensor]) -> None:
    """Do `master_copy` in plain torch."""
    torch._foreach_copy_(targets, sources)


_COPY = Elementwise(copy_kernel, copy_reference, writes=1, block=BLOCK)
