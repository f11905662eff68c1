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
            1x32      uint8 `[R, C / 32]`, the bits of E8M0; or these flat, as `swizzle` returns them
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
    if granularity == "tensor":
        return _by_tensor(x, dtype, by_row, by_column, power_of_2, factor)
    rows, columns = (
        _operand(x, dim, dtype, granularity, power_of_2) if is_asked_for else None
        for dim, is_asked_for in ((1, by_row), (0, by_column))
    )
    return Quantized(rows, columns)


def _by_tensor(
    x: Tensor,
    dtype: torch.dtype,
    by_row: bool,
    by_column: bool,
    power_of_2: bool,
    factor: Tensor | None,
) -> Quantized:
    """Return float32 `[M, K]` in FP8, with one scale for all."""
    amax = amax_of(x.reshape(-1), 0)
    own = factor_of(amax, dtype, power_of_2)
    factor = own if factor is None else torch.where(factor > 0, factor, own)
    inverse = torch.where(amax < torch.inf, 1 / factor, torch.nan)
    rows = x.shape[0]
    if by_column:
        x = _padded(x, "tensor")
    values = _saturated(x * factor, dtype)
    transpose = values.t().contiguous() if by_column else None
    return Quantized(
        Operand(values[:rows], inverse, "tensor", power_of_2) if by_row else None,
        # Not the same tensor: Dynamo takes none twice as the input of one autograd.Function.
        None if transpose is None else Operand(transpose, inverse.clone(), "tensor", power_of_2),
        amax,
        factor,
    )


def _padded(x: Tensor, granularity: Granularity) -> Tensor:
    return pad(x, (0, 0, 0, columns_of(x.shape[0], granularity) - x.shape[0]))


def _operand(
    x: Tensor,
    dim: int,
    dtype: torch.dtype,
    granularity: Granularity,
    power_of_2: bool,
) -> Operand:
    """Return float32 `[M, K]`, or its transpose, in FP8, for products that sum over `dim` of it."""
    if dim == 0:
        x = _padded(x, granularity)
    if granularity == "row":
        factor = factor_of(amax_of(x, dim), dtype, power_of_2).unsqueeze(dim)
        inverse = 1 / factor.reshape(-1, 1)
        values = _saturated(x * factor, dtype)
    elif granularity == "128x128":
        squares = x.view(x.shape[0] // 128, 128, x.shape[1] // 128, 128)
        factor = factor_of(amax_of(amax_of(squares, 3), 1), dtype, power_of_2)
        inverse = 1 / (factor if dim == 1 else factor.t().contiguous())
        values = _saturated(squares * factor[:, None, :, None], dtype)
    else:
        group = MULTIPLE[granularity]
        down, across = x.shape[0] // group, x.shape[1] // group
        shape = (x.shape[0], across, group) if dim == 1 else (down, group, x.shape[1])
        groups = x.view(shape)
        amax = amax_of(groups, dim + 1)
        by_row = amax if dim == 1 else amax.t()
        factor, inverse = _of_groups(by_row, dtype, granularity, power_of_2)
        factor = factor.unsqueeze(2) if dim == 1 else factor.t().unsqueeze(1)
        values = _saturated(groups * factor, dtype)
    values = values.view(x.shape)
    values = values if dim == 1 else values.t().contiguous()
    return Operand(values, inverse, granularity, power_of_2)


def _of_groups(
    amax: Tensor, dtype: torch.dtype, granularity: Granularity, power_of_2: bool
) -> tuple[Tensor, Tensor]:
    """Return the factors `[R, groups]` for amaxes of that shape, and an operand's inverse scales."""
    if granularity == "1x128":
        factor = factor_of(amax, dtype, power_of_2)
        return factor, (1 / factor).t().contiguous()
    power = power_of(amax, dtype)
    is_finite = amax < torch.inf
    exponent = torch.where(is_finite, 254 - power, E8M0_NAN)
    factor = torch.where(is_finite, (power << 23).view(torch.float32), torch.nan)
    return factor, exponent.to(torch.uint8).contiguous()


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
    wide = values.float()
    if granularity in ("tensor", "row"):
        return wide * inverse
    if granularity == "128x128":
        squares = wide.view(rows // 128, 128, columns // 128, 128)
        return (squares * inverse[:, None, :, None]).view(rows, columns)
    if granularity == "1x128":
        inverse = inverse.t()
    else:
        exponent = unswizzle(inverse, rows, columns // 32) if inverse.dim() == 1 else inverse
        exponent = exponent.int()
        inverse = (exponent << 23).view(torch.float32)
        inverse = torch.where(exponent == E8M0_NAN, torch.nan, inverse)
    groups = wide.view(rows, inverse.shape[1], MULTIPLE[granularity])
    return (groups * inverse[:, :, None]).view(rows, columns)
