"""FP8 and FP4 matrices with their scales, and quantization to FP8 in plain torch.

`amp.kernels.quantize` has the formulas, and `amp.kernels.quantize_fp4` those of FP4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from amp.kernels import cpu_passes

Granularity = Literal["tensor", "row", "1x128", "128x128", "1x32"]
Fp4Granularity = Literal["1x16", "16x16", "1x32"]
AnyGranularity = Granularity | Fp4Granularity

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SOURCES = (torch.float16, torch.bfloat16, torch.float32)

SIDE, GROUP = 128, 32
"""How many numbers share a scale: SIDE x SIDE or SIDE in a row, and GROUP in a row of MX formats."""
BLOCKS: dict[str, tuple[int | None, int | None]] = {
    "tensor": (None, None),
    "row": (1, None),
    "1x128": (1, SIDE),
    "128x128": (SIDE, SIDE),
    "1x32": (1, GROUP),
    "1x16": (1, 16),
    "16x16": (16, 16),
}
"""How many rows and columns share a scale; None is all of them."""
MULTIPLE = {granularity: columns or 16 for granularity, (_, columns) in BLOCKS.items()}
MULTIPLE |= {"1x16": 32, "16x16": 32}
"""The dimension that a product sums over is a multiple of this."""

LARGEST_POWER = 253
"""The biased exponent of 2^126."""
LARGEST_FLOAT = torch.finfo(torch.float32).max
E8M0_NAN = 255
SWIZZLE_ROWS, SWIZZLE_COLUMNS = 128, 4


class Operand(NamedTuple):
    """A matrix in FP8 or FP4, with scales along its rows.

    Attributes:
        values: E4M3 or E5M2 `[R, C]`, contiguous; for FP4 uint8 `[R, C / 2]`, the codes of E2M1, an
            even column in the lower half of a byte. Products sum over C.
        inverse: what to multiply the values by, for each granularity:
            tensor    float32 `[]`
            row       float32 `[R, 1]`
            1x128     float32 `[C / 128, R]`
            128x128   float32 `[R / 128, C / 128]`
            1x32      uint8 `[R, C / 32]`, the bits of E8M0; or these flat, as `swizzle` returns them
            1x16      E4M3 `[R, C / 16]`
            16x16     E4M3 `[R / 16, C / 16]`
        granularity: which numbers share a scale.
        power_of_2: whether scales are powers of 2.
        outer: for `1x16` and `16x16`: float32 `[]`, what to multiply all values by besides.
    """

    values: Tensor
    inverse: Tensor
    granularity: AnyGranularity
    power_of_2: bool = True
    outer: Tensor | None = None

    @property
    def is_fp4(self) -> bool:
        """Whether a byte has two values."""
        return self.values.dtype is torch.uint8

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and of columns."""
        rows, columns = self.values.shape
        return rows, columns * 2 if self.is_fp4 else columns


class Quantized(NamedTuple):
    """The result of `quantize`.

    Attributes:
        by_row: for products over the columns of what was quantized, or None.
        by_column: its transpose, for products over the rows, or None.
        factor: for `tensor`: float32 `[]`, what the values were multiplied by.
    """

    by_row: Operand | None
    by_column: Operand | None
    factor: Tensor | None = None


class Part(NamedTuple):
    """Says that a matrix is one rank's part of a larger one, and gets the scales of the larger one.

    Attributes:
        dim: the dimension that is cut. Scales for whole matrices are those of the larger one, and so
            are scales for rows that are cut. Blocks are not cut.
        agree: raises amaxes, float32, in place to the largest of all parts.
    """

    dim: int
    agree: Callable[[Tensor], None]

    def cuts(self, granularity: AnyGranularity, *, by_column: bool) -> bool:
        """Whether other ranks have numbers that share a scale, in a matrix or its transpose."""
        return granularity == "tensor" or (granularity == "row" and self.dim == int(not by_column))


class Seen(NamedTuple):
    """Where a quantization records the amax of a tensor.

    Attributes:
        amax: float32 `[]`, raised to the tensor's: its largest magnitude; inf if one is inf or NaN.
        divisor: float32 `[]`, what the tensor's is divided by before, or None.
    """

    amax: Tensor
    divisor: Tensor | None = None

    def see(self, amax: Tensor) -> None:
        """Record an amax, float32 `[]`. The host does not wait for the device."""
        amax = amax if self.divisor is None else amax / self.divisor
        self.amax.copy_(torch.maximum(self.amax, amax))


class QuantizeArguments(NamedTuple):
    """The arguments of `amp.kernels.quantize.quantize` beside the matrix; see there."""

    dtype: torch.dtype
    granularity: Granularity
    by_row: bool
    by_column: bool
    power_of_2: bool
    factor: Tensor | None
    is_known: bool = False
    guess: Tensor | None = None
    seen: Seen | None = None
    part: Part | None = None
    backend: str | None = None


def columns_of(rows: int, granularity: AnyGranularity) -> int:
    """Return the length of a transpose's rows: `rows`, padded to a multiple that products take."""
    return -(-rows // MULTIPLE[granularity]) * MULTIPLE[granularity]


def counts_of(granularity: AnyGranularity, rows: int, columns: int) -> tuple[int, int]:
    """Return how many blocks a matrix has down and across."""
    height, width = BLOCKS[granularity]
    return rows // height if height else 1, columns // width if width else 1


def shape_of_scales(granularity: AnyGranularity, rows: int, columns: int) -> tuple[int, ...]:
    """Return the shape of the scales of an `Operand` `[rows, columns]`."""
    down, across = counts_of(granularity, rows, columns)
    return {"tensor": (), "1x128": (across, down)}.get(granularity, (down, across))


def quantize_reference(x: Tensor, wanted: QuantizeArguments) -> Quantized:
    """Do `quantize` in plain torch, or in the passes of `amp.kernels.cpu_passes`."""
    granularity, backend = wanted.granularity, wanted.backend
    padded = columns_of(x.shape[0], granularity)
    if granularity not in ("tensor", "128x128"):
        rows = _operand(x, wanted, by_column=False)[0] if wanted.by_row else None
        turned = transposed(x, padded, backend) if wanted.by_column else None
        columns = None if turned is None else _operand(turned, wanted, by_column=True)[0]
        return Quantized(rows, columns)
    # The cast to FP8 takes most of the time: once for both.
    both, amax, used = _operand(x, wanted, by_column=False)
    columns = None
    if wanted.by_column:
        # Scales in new memory: Dynamo does not take a tensor twice as input of a Function.
        scales = both.inverse.t().clone(memory_format=torch.contiguous_format)
        turned = transposed(both.values.view(torch.uint8), padded, backend).view(wanted.dtype)
        columns = both._replace(values=turned, inverse=scales)
    if wanted.seen is not None:
        wanted.seen.see(amax.reshape(()))
    factor = used.reshape(()) if granularity == "tensor" else None
    return Quantized(both if wanted.by_row else None, columns, factor)


def _operand(x: Tensor, wanted: QuantizeArguments, by_column: bool) -> tuple[Operand, Tensor, Tensor]:
    """Return `[R, C]` in FP8, and for each block its amax and its factor, float32 `[down, across]`.

    `by_column` says that it is the transpose of what was given.
    """
    granularity, part = wanted.granularity, wanted.part
    amax = amax_of(x, granularity, wanted.backend)
    if part is not None and part.cuts(granularity, by_column=by_column):
        part.agree(amax)
    used, inverse = _scales(amax, wanted)
    if granularity == "1x128":
        inverse = inverse.t()
    inverse = inverse.reshape(shape_of_scales(granularity, *x.shape)).contiguous()
    values = _times(x, used, wanted.dtype, wanted.backend)
    return Operand(values, inverse, granularity, wanted.power_of_2), amax, used


def _scales(amax: Tensor, wanted: QuantizeArguments) -> tuple[Tensor, Tensor]:
    """Return the factors of blocks, and their inverse as an operand has it, both `[down, across]`."""
    dtype, factor, is_mx = wanted.dtype, wanted.factor, wanted.granularity == "1x32"
    power_of_2 = wanted.power_of_2 or is_mx
    if cpu_passes.take(amax, factor, backend=wanted.backend):
        return cpu_passes.scales(amax, torch.finfo(dtype).max, power_of_2, is_mx, factor)
    used = factor_of(amax, dtype, power_of_2, keeps_zero=not is_mx)
    if factor is not None:
        used = torch.where(factor > 0, factor, used)
    inverse = torch.where(amax < torch.inf, 1 / used, torch.nan)
    return used, exponent_of(inverse) if is_mx else inverse


def _times(x: Tensor, factors: Tensor, dtype: torch.dtype, backend: str | None) -> Tensor:
    """Return a matrix times the factors `[down, across]` of its blocks, in FP8, saturated."""
    if cpu_passes.take(x, factors, backend=backend):
        return cpu_passes.to_fp8(x, factors, dtype)
    largest = torch.finfo(dtype).max
    return times(x.float(), factors).clamp(-largest, largest).to(dtype)


def times(x: Tensor, factors: Tensor) -> Tensor:
    """Return a float32 matrix times the factors `[down, across]` of its blocks."""
    (rows, columns), (down, across) = x.shape, factors.shape
    if not x.numel():
        return x
    blocks = x.view(down, rows // down, across, columns // across)
    return (blocks * factors[:, None, :, None]).view(x.shape)


def transposed(x: Tensor, padded: int, backend: str | None = None) -> Tensor:
    """Return the transpose of a matrix, contiguous, its rows padded with zeros to a length."""
    if cpu_passes.take(x, backend=backend):
        return cpu_passes.transposed(x, padded)
    return pad(x, (0, 0, 0, padded - x.shape[0])).t().contiguous()


def exponent_of(scale: Tensor) -> Tensor:
    """Return float32 powers of 2 as E8M0, in uint8. NaN stays NaN."""
    return ((scale.view(torch.int32) >> 23) & 0xFF).to(torch.uint8)


def amax_of(x: Tensor, granularity: AnyGranularity, backend: str | None = None) -> Tensor:
    """Return the largest magnitude of each block, float32 `[down, across]`; inf for inf and NaN."""
    counts = counts_of(granularity, *x.shape)
    if not x.numel():
        return x.new_zeros(counts, dtype=torch.float32)
    if cpu_passes.take(x, backend=backend):
        return cpu_passes.amax_of(x, counts)
    (rows, columns), (down, across) = x.shape, counts
    blocks = x.float().view(down, rows // down, across, columns // across)
    amax = blocks.abs().amax((1, 3))
    return torch.where(amax < torch.inf, amax, torch.inf)


def power_below(largest: float, amax: Tensor) -> Tensor:
    """Return the biased exponent, int32, of the largest power of 2 that is at most largest / amax.

    It is at most that of 2^126, whose inverse is FP32's smallest normal number.

    Args:
        largest: a format's largest number, of at most 23 bits behind the first one.
        amax: float32.
    """
    mantissa, exponent = math.frexp(largest)
    behind = int((2 * mantissa - 1) * 2**23)
    # Carried into the exponent, by more bits than these.
    carried = amax.view(torch.int32) + (2**23 - 1 - behind)
    return (253 + exponent - (carried >> 23)).clamp(max=LARGEST_POWER)


def factor_of(amax: Tensor, dtype: torch.dtype, power_of_2: bool, keeps_zero: bool = True) -> Tensor:
    """Return the factor that brings values of up to `amax`, float32, into the range of `dtype`.

    It is NaN where amax is inf or NaN, and at most 2^126 for a power of 2, else FP32's largest number;
    1 where amax is 0, if `keeps_zero`.
    """
    if power_of_2:
        factor = (power_below(torch.finfo(dtype).max, amax) << 23).view(torch.float32)
    else:  # a number divided by a tensor, torch would round twice
        factor = torch.full_like(amax, torch.finfo(dtype).max) / amax
        factor = factor.clamp(max=LARGEST_FLOAT)
    if keeps_zero:
        factor = torch.where(amax == 0, 1.0, factor)
    return torch.where(amax < torch.inf, factor, torch.nan)


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


def swizzled_size(rows: int, columns: int) -> int:
    """Return how many scales `swizzle` makes of `[rows, columns]`."""
    down, across = -(-rows // SWIZZLE_ROWS), -(-columns // SWIZZLE_COLUMNS)
    return down * SWIZZLE_ROWS * across * SWIZZLE_COLUMNS


def unswizzle(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Return the scales `[rows, columns]` that `swizzle` was given."""
    down, across = -(-rows // SWIZZLE_ROWS), -(-columns // SWIZZLE_COLUMNS)
    tiles = scales.view(down, across, 32, 4, SWIZZLE_COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(down * SWIZZLE_ROWS, across * SWIZZLE_COLUMNS)[:rows, :columns]


def dequantize(operand: Operand) -> Tensor:
    """Return float32 `[R, C]`, the values times all of their inverse scales."""
    scaled = values_of(operand)
    return scaled if operand.outer is None else scaled * operand.outer


def values_of(operand: Operand) -> Tensor:
    """Return float32 `[R, C]`, the values times their inverse scales, without `outer`."""
    inverse, granularity = operand.inverse, operand.granularity
    counts = counts_of(granularity, *operand.shape)
    if granularity == "1x32":
        exponent = unswizzle(inverse, *counts) if inverse.dim() == 1 else inverse
        inverse = (exponent.int() << 23).view(torch.float32)
        inverse = torch.where(exponent == E8M0_NAN, torch.nan, inverse)
    elif granularity == "1x128":
        inverse = inverse.t()
    elif granularity in ("1x16", "16x16"):
        inverse = decoded(inverse)
    return decoded(operand.values, inverse.reshape(counts).contiguous())


def decoded(values: Tensor, scales: Tensor | None = None) -> Tensor:
    """Return FP8 or FP4 values as float32, times the scales, float32 `[down, across]`, of their blocks.

    torch's own cast is a loop over single numbers on the CPU.
    """
    is_fp4 = values.dtype is torch.uint8
    if values.element_size() == 1 and cpu_passes.take(values, scales):
        return cpu_passes.decoded(values, scales, values.shape[1] * (2 if is_fp4 else 1))
    numbers = unpacked(values) if is_fp4 else values.float()  # nothing is done to float32
    return numbers if scales is None else times(numbers, scales)


def packed(codes: Tensor) -> Tensor:
    """Return FP4 codes `[R, C]` as bytes `[R, C / 2]`, an even column in the lower half of each."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpacked(values: Tensor) -> Tensor:
    """Return the numbers, float32 `[R, C]`, of FP4 codes in bytes `[R, C / 2]`."""
    codes = torch.stack([values & 15, values >> 4], -1).flatten(1)
    size = (codes & 7).float()
    size = torch.where(size < 4, size * 0.5, torch.where(size < 7, size - 2, 6.0))
    return torch.where(codes < 8, size, -size)
