"""Quantization of matrices to FP4, with scales for blocks of 16 or 32 numbers.

E2M1 has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6. NVFP4 has two levels of scales:

    encode = 2688 / amax                                      of the tensor; 2688 = 6 * 448
    scale  = e4m3(amax of the block * (encode / 6))           at most 448
    factor = 1 / (scale * (1 / encode))
    code   = e2m1(x * factor)                                 saturated
    x     ~= code * scale * (1 / encode)

    1x16     16 neighbours in a row share a scale
    16x16    a square does: a weight and its transpose are quantized alike

All is FP32, and divisions are rounded correctly. An amax of 0 gives `encode` 1; where a value is inf
or NaN, the tensor's scale is NaN, and so is every product: this shows an overflow to the loss scaler.
MXFP4 (`1x32`) has one level, powers of 2 as in MXFP8, rounded up so that nothing saturates.

Values are rounded to the nearest code, ties to the even one; or stochastically, by 8 random bits each
(`amp.kernels.philox`): floor((|x| + byte / 256 * step) / step') * step', where step' is the step at the
sum. Rounded so, a gradient is right on average, but for 1/512 of a step, and for the values that a
scale rounded to nearest makes saturate.

The transpose can get a random Hadamard transform of each 16 neighbours in its rows, rounded to
bfloat16, before its amax is taken: it spreads large numbers over their neighbours. It is orthogonal, so
it cancels in the product of two operands that both have it.

Two numbers share a byte: the even column is in the lower half.

Memory traffic, for an element of b bytes: b bytes read, and b once more for the amax of a tensor with
NVFP4; for each result 9/16 of a byte written, 17/32 for `1x32`, 129/256 for `16x16`. Launches: two; one
for `1x32`.
Sources: Transformer Engine's `NVFP4BlockScaling` and torchao's `NVFP4TrainingConfig`, whose training
reference gives the same bytes; arXiv:2509.25149; OCP MX 1.0.
"""

from __future__ import annotations

from typing import get_args

from torch import Tensor

from amp.kernels import fp4_tiles, quantize_operators, quantize_tiles
from amp.kernels.fp4 import QuantizeFp4Arguments, quantize_reference
from amp.kernels.fp8 import Fp4Granularity, Quantized
from amp.kernels.interrupts import without_grad
from amp.kernels.philox import Draw
from amp.kernels.quantize import check_matrix


@without_grad
def quantize_fp4(
    x: Tensor,
    granularity: Fp4Granularity = "1x16",
    *,
    by_row: bool = True,
    by_column: bool = True,
    hadamard: bool = False,
    draw: Draw | None = None,
    backend: str | None = None,
) -> Quantized:
    """Return a matrix in FP4. The host does not wait for the device.

    Args:
        x: float16, bfloat16 or float32 `[M, K]`.
        granularity: what shares a scale; for `16x16`, M and K are multiples of 32.
        by_row: whether to return the matrix; K is a multiple of 32 then.
        by_column: whether to return its transpose, `[K, M']`: M' is M padded with zeros to a multiple
            of 32.
        hadamard: whether the transpose gets a Hadamard transform.
        draw: random bits, to round stochastically; None rounds to nearest.
        backend: see `amp.kernels.backend`.

    Raises:
        ValueError: a dtype, granularity or shape that is not listed here.
    """
    check_matrix(x, granularity, get_args(Fp4Granularity), by_row)
    if hadamard and granularity == "16x16":
        raise ValueError(
            "hadamard is for '1x16' and '1x32': squares are the weights' in forward and back"
        )
    x = x.detach().contiguous()
    wanted = QuantizeFp4Arguments(granularity, by_row, by_column, hadamard, draw, backend)
    if quantize_tiles.take(x, backend):
        return fp4_tiles.run(x, wanted)
    if quantize_operators.take(x, granularity, backend):
        return quantize_operators.quantize_fp4(x, wanted)
    return quantize_reference(x, wanted)
