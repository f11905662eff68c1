"""Matrices in FP8 with their scales, and how numbers become that, in plain torch.

`amp.kernels.quantize` has the formulas.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

Granularity = Literal["tensor", "row", "1x128", "128x128", "1x32"]

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SOURCES = (torch.float16, torch.bfloat16, torch.float32)

MULTIPLE = {"tensor": 16, "row": 16, "1x128": 128, "128x128": 128, "1x32": 32}
"""What the dimension that a product sums over must be a multiple of."""

LARGEST_POWER = 253
"""The biased exponent of 2^126."""
LARGEST_FLOAT = torch.finfo(torch.float32).max
E8M0_NAN = 255
SWIZZLE_ROWS, SWIZZLE_COLUMNS = 128, 4


class Operand(NamedTuple):
    """A matrix in FP8, with scales along its rows.

    Attributes:
        values: E4M3 or E5M2 `[R, C]`, contiguous. Products sum over C.
        inverse: what to multiply them by, for each granularity:
            tensor    float32 `[]`
            row       float32 `[R, 1]`
            1x128     float32 `[C / 128, R]`
            128x128   float32 `[R / 128, C / 128]`
            1x32      float8_e8m0fnu, flat, `swizzle`d from `[R, C / 32]`
        granularity: what shares a scale.
        power_of_2: whether scales are powers of 2.
    """

    values: Tensor
    inverse: Tensor
    granularity: Granularity
    power_of_2: bool = True


class Quantized(NamedTuple):
    """What `quantize` returns.

    Attributes:
        by_row: for products over the columns of what was quantized, or None.
        by_column: its transpose, for products over the rows, or None.
        amax: `tensor`: float32 `[]`, the largest magnitude; inf where that is inf or NaN.
        factor: `tensor`: float32 `[]`, what values were multiplied by.
    """

    by_row: Operand | None
    by_column: Operand | None
    amax: Tensor | None = None
    factor: Tensor | None = None


def columns_of(rows: int, granularity: Granularity) -> int:
    """Return how long the rows of a transpose are: `rows`, padded as products need it."""
    return -(-rows // MULTIPLE[granularity]) * MULTIPLE[granularity]


def quantize_reference(
    x: Tensor,
    dtype: torch.dtype,
    granularity: Granularity,
    by_row: bool,
    by_column: bool,
    power_of_2: bool,
    factor: Tensor | None,
) -> Quantized:
    """Do `quantize` in plain torch."""
    x = x.float()
    amax = None
    if granularity == "tensor":
        amax = amax_of(x.reshape(-1), 0)
        own = factor_of(amax, dtype, power_of_2)
        factor = own if factor is None else torch.where(factor > 0, factor, own)
    padding = columns_of(x.shape[0], granularity) - x.shape[0]
    transpose = pad(x.t(), (0, padding)).contiguous() if by_column else None
    rows, columns = (
        None if matrix is None else _operand(matrix, dtype, granularity, power_of_2, amax, factor)
        for matrix in (x if by_row else None, transpose)
    )
    return Quantized(rows, columns, amax, factor)


def _operand(
    x: Tensor,
    dtype: torch.dtype,
    granularity: Granularity,
    power_of_2: bool,
    amax: Tensor | None,
    factor: Tensor | None,
) -> Operand:
    """Return float32 `[R, C]` in FP8, with scales along its rows."""
    rows, columns = x.shape
    if granularity == "tensor":
        assert amax is not None
        assert factor is not None
        inverse = torch.where(amax < torch.inf, 1 / factor, torch.nan)
        return Operand(_saturated(x * factor, dtype), inverse, granularity, power_of_2)
    if granularity == "row":
        factor = factor_of(amax_of(x, 1), dtype, power_of_2)[:, None]
        return Operand(_saturated(x * factor, dtype), 1 / factor, granularity, power_of_2)
    if granularity == "128x128":
        squares = x.view(rows // 128, 128, columns // 128, 128)
        factor = factor_of(amax_of(amax_of(squares, 3), 1), dtype, power_of_2)
        values = _saturated(squares * factor[:, None, :, None], dtype)
        return Operand(values.view(rows, columns), 1 / factor, granularity, power_of_2)
    group = MULTIPLE[granularity]
    groups = x.view(rows, columns // group, group)
    amax = amax_of(groups, 2)
    if granularity == "1x32":
        power = power_of(amax, dtype)
        exponent = torch.where(amax < torch.inf, 254 - power, E8M0_NAN)
        factor = torch.where(amax < torch.inf, (power << 23).view(torch.float32), torch.nan)
        inverse = swizzle(exponent.to(torch.uint8)).view(torch.float8_e8m0fnu)
    else:
        factor = factor_of(amax, dtype, power_of_2)
        inverse = (1 / factor).t().contiguous()
    values = _saturated(groups * factor[:, :, None], dtype)
    return Operand(values.view(rows, columns), inverse, granularity, power_of_2)


def amax_of(x: Tensor, dim: int) -> Tensor:
    """Return the largest magnitudes along a dimension; inf where there is an inf or NaN."""
    if not x.shape[dim]:
        return x.new_zeros([size for i, size in enumerate(x.shape) if i != dim])
    amax = x.abs().amax(dim)
    return torch.where(amax < torch.inf, amax, torch.inf)


def power_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the biased exponent, int32, of the largest power of 2 that is at most FMAX / amax.

    It is at most that of 2^126, whose inverse is FP32's smallest normal number.
    """
    bits = amax.view(torch.int32)
    # FMAX is 1.75 * 2^8 or 1.75 * 2^15: one less where the mantissa of amax is above 1.75.
    highest = 254 + (8 if dtype is torch.float8_e4m3fn else 15)
    power = highest - (bits >> 23) - ((bits & 0x7FFFFF) > 0x600000).int()
    return power.clamp(max=LARGEST_POWER)


def factor_of(amax: Tensor, dtype: torch.dtype, power_of_2: bool) -> Tensor:
    """Return what brings values of up to `amax`, float32, into the range of `dtype`.

    NaN where amax is inf or NaN, 1 where it is 0; at most 2^126, or FP32's largest number.
    """
    if power_of_2:
        factor = (power_of(amax, dtype) << 23).view(torch.float32)
    else:  # not a number by a tensor, which torch rounds twice
        factor = torch.full_like(amax, torch.finfo(dtype).max) / amax
        factor = factor.clamp(max=LARGEST_FLOAT)
    factor = torch.where(amax == 0, 1.0, factor)
    return torch.where(amax < torch.inf, factor, torch.nan)


def _saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def swizzle(scales: Tensor) -> Tensor:
    """Return scales `[R, C]` flat, in the order in which tensor cores read them, padded by zeros.

    Tiles of 128 rows and 4 columns follow each other; in a tile, row 32 i + j lies at 16 j + 4 i.
    torch calls it SWIZZLE_32_4_4.
    """
    rows, columns = scales.shape
    scales = pad(scales, (0, -columns % SWIZZLE_COLUMNS, 0, -rows % SWIZZLE_ROWS))
    rows, columns = scales.shape
    tiles = scales.view(rows // SWIZZLE_ROWS, 4, 32, columns // SWIZZLE_COLUMNS, SWIZZLE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Return the scales `[rows, columns]` that `swizzle` was given."""
    down, across = -(-rows // SWIZZLE_ROWS), -(-columns // SWIZZLE_COLUMNS)
    tiles = scales.view(down, across, 32, 4, SWIZZLE_COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(down * SWIZZLE_ROWS, across * SWIZZLE_COLUMNS)[:rows, :columns]


def dequantize(operand: Operand) -> Tensor:
    """Return float32 `[R, C]`, the values times their inverse scales."""
    values, inverse, granularity, _ = operand
    rows, columns = values.shape
    if granularity == "1x128":
        inverse = inverse.t().repeat_interleave(128, 1)
    elif granularity == "128x128":
        inverse = inverse.repeat_interleave(128, 0).repeat_interleave(128, 1)
    elif granularity == "1x32":
        inverse = unswizzle(inverse.view(torch.uint8), rows, columns // 32)
        inverse = inverse.view(torch.float8_e8m0fnu).float().repeat_interleave(32, 1)
    return values.float() * inverse
