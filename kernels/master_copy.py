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

from amp.kernels.language import (
    ALIGNMENT,
    STEP,
    dtype_of,
    jit,
    launch,
    locate,
    narrow,
    tl,
    vector_length,
)
from amp.kernels.tables import plan
from amp.kernels.tensor_lists import dense, were_written

BLOCK = 8192
WARPS = 8


@torch.no_grad()
def master_copy(
    sources: Sequence[Tensor], targets: Sequence[Tensor], *, backend: str | None = None
) -> None:
    """Copy each source into its target. The host does not wait for the device.

    Raises:
        ValueError: sources and targets do not match.
        UnsupportedTensorError: a dtype that is not listed above.
    """
    inputs, outputs = dense(sources), dense(targets)
    todo = plan(inputs, outputs, block=BLOCK, backend=backend)
    were_written(targets)
    for each in todo.launches:
        launch(
            copy_kernel,
            len(each.chunks),
            each.device,
            each.rows,
            each.chunks,
            SOURCE=dtype_of(each.dtypes[0]),
            TARGET=dtype_of(each.dtypes[1]),
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    for same in todo.fallback:
        torch._foreach_copy_([outputs[i] for i in same], [inputs[i] for i in same])


@jit
def _copy_block(source, target, i, mask):
    x = tl.load(source + i, mask=mask, other=0.0)
    tl.store(target + i, narrow(x, target.dtype.element_ty), mask=mask)


@jit
def copy_kernel(rows, chunks, SOURCE: tl.constexpr, TARGET: tl.constexpr, BLOCK: tl.constexpr):
    row, start, length = locate(chunks, rows, 2, BLOCK)
    source, target = tl.load(row), tl.load(row + 1)
    vectors = vector_length(source | target, length)
    i = tl.arange(0, BLOCK)
    _copy_block(
        tl.multiple_of(source.to(tl.pointer_type(SOURCE)), ALIGNMENT) + start,
        tl.multiple_of(target.to(tl.pointer_type(TARGET)), ALIGNMENT) + start,
        i,
        i < vectors,
    )
    for first in range(vectors, length, STEP):
        j = first + tl.arange(0, STEP)
        _copy_block(
            source.to(tl.pointer_type(SOURCE)) + start,
            target.to(tl.pointer_type(TARGET)) + start,
            j,
            j < length,
        )
