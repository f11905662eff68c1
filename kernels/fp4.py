"""FP4 matrices with their scales, and quantization to them in plain torch.

`amp.kernels.quantize_fp4` has the formulas.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from amp.kernels import cpu_passes
from amp.kernels.fp8 import (
    LARGEST_FLOAT,
    Fp4Granularity,
    Operand,
    Quantized,
    amax_of,
    columns_of,
    exponent_of,
    packed,
    power_below,
    shape_of_scales,
    times,
    transposed,
)
from amp.kernels.philox import Draw, random_bytes

LARGEST = 6.0
"""E2M1's largest number; the others are 0, 0.5, 1, 1.5, 2, 3 and 4."""
LARGEST_SCALE = 448.0
"""E4M3's largest number."""
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The signs that multiply 16 neighbours before their Hadamard transform, as in Transformer Engine."""


class QuantizeFp4Arguments(NamedTuple):
    """The arguments of `amp.kernels.quantize_fp4.quantize_fp4` beside the matrix; see there."""

    granularity: Fp4Granularity
    by_row: bool
    by_column: bool
    hadamard: bool
    draw: Draw | None
    backend: str | None


def quantize_reference(x: Tensor, wanted: QuantizeFp4Arguments) -> Quantized:
    """Do `quantize_fp4` in plain torch, or in the passes of `amp.kernels.cpu_passes`."""
    granularity, draw, backend = wanted.granularity, wanted.draw, wanted.backend
    rows = _operand(x, granularity, draw, backend) if wanted.by_row else None
    if not wanted.by_column:
        return Quantized(rows, None)
    transpose = turned(x, columns_of(x.shape[0], granularity), wanted.hadamard, backend)
    return Quantized(rows, _operand(transpose, granularity, draw and draw.of_columns(), backend))


def turned(x: Tensor, padded: int, hadamard: bool, backend: str | None = None) -> Tensor:
    """Return the transpose `[K, padded]`, padded with zeros, and perhaps transformed."""
    if hadamard:
        return transformed(x, padded, backend)
    return transposed(x, padded, backend)


def transformed(x: Tensor, padded: int, backend: str | None = None) -> Tensor:
    """Return the transpose, bfloat16 `[K, padded]`, with Hadamard transforms of 16 neighbours in rows.

    They are multiplied by `SIGNS` before. The transform is orthogonal and Sylvester's. Sums are made in
    a fixed order, so all devices round alike.
    """
    if cpu_passes.take(x, backend=backend):
        return cpu_passes.transformed(x, padded, SIGNS)
    transpose = turned(x.float(), padded, hadamard=False)
    y = transpose.view(-1, 16) * transpose.new_tensor(SIGNS)
    for half in (1, 2, 4, 8):
        a, b = y.view(-1, 8 // half, 2, half).unbind(2)
        y = torch.stack([a + b, a - b], 2)
    return (y * 0.25).bfloat16().view(transpose.shape)


def _operand(x: Tensor, granularity: Fp4Granularity, draw: Draw | None, backend: str | None) -> Operand:
    """Return `[R, C]` in FP4."""
    amax = amax_of(x, granularity, backend)
    outer = None
    if granularity == "1x32":
        factor, inverse = _powers(amax, backend)
    else:
        inverse, factor, outer = two_levels(amax, backend)
    inverse = inverse.reshape(shape_of_scales(granularity, *x.shape)).contiguous()
    return Operand(_times(x, factor, draw, backend), inverse, granularity, outer=outer)


def _times(x: Tensor, factors: Tensor, draw: Draw | None, backend: str | None) -> Tensor:
    """Return a matrix times the factors `[down, across]` of its blocks, in FP4, uint8 `[R, C / 2]`."""
    if cpu_passes.take(x, factors, backend=backend):
        return cpu_passes.to_fp4(x, factors, draw)
    y = times(x.float(), factors).clamp(-LARGEST, LARGEST)
    size = y.abs()
    kept = to_nearest(size) if draw is None else stochastically(size, random_bytes(x.shape, draw))
    sign = (y.view(torch.int32) >> 28) & 8
    codes = torch.where(size == size, code_of(kept) | sign, 7)
    return packed(codes.to(torch.uint8))


def _powers(amax: Tensor, backend: str | None) -> tuple[Tensor, Tensor]:
    """Return MXFP4's factors for the amaxes of blocks, float32, and their inverse, E8M0."""
    if cpu_passes.take(amax, backend=backend):
        return cpu_passes.scales(amax, LARGEST, True, True, None)
    factor = (power_below(LARGEST, amax) << 23).view(torch.float32)
    factor = torch.where(amax < torch.inf, factor, torch.nan)
    return factor, exponent_of(1 / factor)


def two_levels(amax: Tensor, backend: str | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return NVFP4's scales for the amaxes of blocks, float32 `[down, across]`.

    Returns:
        The scales of blocks, E4M3 `[down, across]`; the factors of their values, float32; and the
        tensor's scale, float32 `[]`.
    """
    if cpu_passes.take(amax, backend=backend):
        return cpu_passes.two_levels(amax)
    largest = amax.amax() if amax.numel() else amax.new_zeros(())
    encode = (torch.full_like(largest, LARGEST * LARGEST_SCALE) / largest).clamp(max=LARGEST_FLOAT)
    encode = torch.where((largest == 0) | (encode == 0), 1.0, encode)
    decode = 1 / encode
    sixth = torch.full_like(encode, LARGEST).reciprocal()
    scale = (amax * (encode * sixth)).clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn)
    factor = (1 / (scale.float() * decode)).clamp(max=LARGEST_FLOAT)
    return scale, factor, torch.where(largest < torch.inf, decode, torch.nan)


# E2M1.


def _step(size: Tensor) -> Tensor:
    """Return the distance of E2M1's numbers at magnitudes: 0.5 below 2, 1 below 4, else 2."""
    exponent = (size.view(torch.int32) >> 23).clamp(127, 129)
    return ((exponent - 1) << 23).view(torch.float32)


def to_nearest(size: Tensor) -> Tensor:
    """Return magnitudes of up to 6, float32, rounded to E2M1; ties go to the even code."""
    added = _step(size) * 2.0**23  # a float32 of this size has steps of E2M1's
    return (size + added) - added


def stochastically(size: Tensor, random: Tensor) -> Tensor:
    """Return magnitudes of up to 6 rounded to E2M1, up or down at random, so that they are right on
    average.

    Args:
        size: float32.
        random: uint8, of the same shape. Eight bits round down with 1/512 of a step too much.
    """
    raised = size + (random.float() * (1 / 256)) * _step(size)
    step = _step(raised)
    return ((raised / step).floor() * step).clamp(max=LARGEST)


def code_of(size: Tensor) -> Tensor:
    """Return the codes, int32, of magnitudes that E2M1 has."""
    return torch.where(size < 2, (size * 2).int(), (size.view(torch.int32) >> 22) - 252)
