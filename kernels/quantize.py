"""Quantization of matrices to FP8, with the scales that bring their values into its range.

    factor = FMAX / amax                          rounded down to a power of 2 if `power_of_2`
    values = saturate(x * factor)                 to nearest even; FMAX is 448 (E4M3) or 57344 (E5M2)
    x     ~= values * inverse,  inverse = 1 / factor

amax is the largest magnitude of the numbers that share a scale:

    tensor    a whole matrix, this one or earlier ones (`factor`)
    row       a row
    1x128     128 neighbours in a row
    128x128   a square, for weights
    1x32      32 neighbours in a row; inverse is E8M0: 2^n, rounded up so that nothing saturates

A matrix `x` `[M, K]` is quantized for two products: `by_row` `[M, K]`, whose products sum over K, and
`by_column` `[K, M']`, the transpose, whose products sum over M; M' is M padded with zeros to a multiple
that products take. Each has scales along its own rows. `x` is float16, bfloat16 or float32; factors are
FP32. An amax of 0 gives a factor of 1 (2^126 for `1x32`). Where amax is inf or NaN, the inverse scale
is NaN, and so is every product: this shows an overflow to the loss scaler although values saturate.

Memory traffic, for an element of b bytes: b bytes read, 1 written for each result that is asked for,
and b read once more for the amax of a row, or of a tensor whose factor is neither known nor guessed.
Launches: one; two for `row`, and for such a tensor.
Sources: Transformer Engine's and torchao's recipes; DeepSeek-V3 (1x128); OCP MX 1.0, and
arXiv:2506.08027 for rounding scales up.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from amp.kernels import quantize_operators, quantize_tiles
from amp.kernels.fp8 import (
    DTYPES,
    MULTIPLE,
    SOURCES,
    Granularity,
    Part,
    QuantizeArguments,
    Quantized,
    Seen,
    quantize_reference,
)
from amp.kernels.interrupts import without_grad

_GRANULARITIES = get_args(Granularity)
_reference = without_grad(quantize_reference)


def quantize(
    x: Tensor,
    dtype: torch.dtype,
    granularity: Granularity = "tensor",
    *,
    by_row: bool = True,
    by_column: bool = True,
    power_of_2: bool = True,
    factor: Tensor | None = None,
    is_known: bool = False,
    guess: Tensor | None = None,
    seen: Seen | None = None,
    part: Part | None = None,
    backend: str | None = None,
) -> Quantized:
    """Return a matrix in FP8. The host does not wait for the device.

    Args:
        x: float16, bfloat16 or float32 `[M, K]`.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        granularity: what shares a scale; for `128x128`, M and K are multiples of 128.
        by_row: whether to return the matrix; K is a multiple of `MULTIPLE[granularity]` then.
        by_column: whether to return its transpose.
        power_of_2: whether factors are powers of 2. Those of `1x32` always are.
        factor: for `tensor`: float32 `[]`, the factor to use; 0 means the tensor's own.
        is_known: whether `factor` is hardly ever 0. Then a kernel reads the matrix once, and takes long
            where it is 0. The result is the same.
        guess: for `tensor`: float32 `[]`, what the tensor's own factor probably is. Then a kernel reads
            the matrix once, and takes long where it is another. The result is the same.
        seen: for `tensor`: where to record the amax, or None.
        part: of which larger matrix this is a part, or None if it is whole.
        backend: see `amp.kernels.backend`.

    Raises:
        ValueError: a dtype, granularity or shape that is not listed here.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype} is not one of {', '.join(map(str, DTYPES))}")
    check_matrix(x, granularity, _GRANULARITIES, by_row)
    if granularity != "tensor":
        for name, given in (("a factor", factor), ("a guess", guess), ("seen", seen)):
            if given is not None:
                raise ValueError(f"{name} is for granularity='tensor', and not for '{granularity}'")
    if factor is not None and guess is not None:
        raise ValueError("factor and guess are given; a guess is for a tensor without a factor")
    x = x.detach().contiguous()
    options = by_row, by_column, power_of_2, factor, is_known, guess, seen, part, backend
    wanted = QuantizeArguments(dtype, granularity, *options)
    if quantize_tiles.take(x, backend):
        return quantize_tiles.run(x, wanted)
    if part is None and quantize_operators.take(x, granularity, backend):
        return quantize_operators.quantize(x, wanted)
    return _reference(x, wanted)


def check_matrix(x: Tensor, granularity: str, allowed: tuple[str, ...], by_row: bool) -> None:
    """Raise ValueError unless `x` is a matrix that can have scales of a granularity."""
    if granularity not in allowed:
        raise ValueError(f"granularity={granularity!r} is not one of {', '.join(allowed)}")
    if x.dim() != 2 or x.dtype not in SOURCES:
        raise ValueError(
            f"x is {x.dtype} of shape {tuple(x.shape)}; give a matrix in float16, bfloat16 or float32"
        )
    multiple, of_squares = MULTIPLE[granularity], granularity in ("128x128", "16x16")
    rows, columns = x.shape
    if (columns % multiple and (by_row or of_squares)) or (rows % multiple and of_squares):
        raise ValueError(
            f"x has shape {tuple(x.shape)}, and scales for '{granularity}' need "
            f"{'both dimensions' if of_squares else 'rows'} of a multiple of {multiple}"
        )
