"""`amp.kernels.quantize` in Triton: a matrix is read in tiles, and each tile is written both ways.

A program reads one tile `[TM, TK]` and writes it quantized, by rows and transposed. The dimension
that is contiguous in memory is a multiple of 16, so that 128 bits move at a time. The amax of a tensor
or a row spans several tiles, so an earlier launch computes it.

FP8 is written as bytes: Triton rounds to E4M3 only on sm_89 and later, and wrongly in its interpreter,
so elsewhere this module rounds the bits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from amp.kernels.backend import uses_triton
from amp.kernels.fp8 import (
    E8M0_NAN,
    GROUP,
    LARGEST_FLOAT,
    LARGEST_POWER,
    MULTIPLE,
    SIDE,
    Granularity,
    Operand,
    Part,
    QuantizeArguments,
    Quantized,
    columns_of,
    shape_of_scales,
    swizzled_size,
)
from amp.kernels.language import INTERPRETED, constant, jit, launch, tl, widened

TILES: dict[Granularity, tuple[tuple[int, int], int]] = {
    "tensor": ((64, 128), 4),
    "row": ((32, 64), 4),
    "1x128": ((SIDE, SIDE), 8),
    "128x128": ((SIDE, SIDE), 8),
    "1x32": ((GROUP, 128), 4),
}
"""Rows and columns of a tile, and the warps of its program: the fastest of 77 on an H100, or close to
it.

Where groups of rows share a scale in the transpose, a tile has the rows of one group.
"""
AMAX_BLOCK, AMAX_WARPS = 8192, 4
AMAXES_TILE, AMAXES_WARPS = (64, 64), 8

_LARGEST_POWER = constant(LARGEST_POWER)
_LARGEST_FLOAT = constant(LARGEST_FLOAT)
_E8M0_NAN = constant(E8M0_NAN)


def rounds_by_bits(x: Tensor) -> bool:
    """Whether Triton's FP8 casts are missing or wrong for a matrix.

    On sm_90, triton 3.6 writes wrong bytes where one cast of a float32 tile is stored both by rows and
    transposed.
    """
    if INTERPRETED or torch.version.hip is not None:
        return INTERPRETED
    return x.dtype is torch.float32 or torch.cuda.get_device_capability(x.device) < (8, 9)


def casts_in_software(device: torch.device) -> bool:
    """Whether Triton casts to these formats in software: gfx942 has other ones in hardware."""
    if INTERPRETED or torch.version.hip is None:
        return False
    return "gfx94" in torch.cuda.get_device_properties(device).gcnArchName


def take(x: Tensor, backend: str | None) -> bool:
    """Whether these kernels, which move 128 bits at a time, take a contiguous matrix."""
    if torch.compiler.is_compiling() or not (x.numel() and uses_triton(x.device, backend)):
        return False
    return x.shape[1] % 16 == 0 and x.data_ptr() % 16 == 0


def run(x: Tensor, wanted: QuantizeArguments) -> Quantized:
    """Do `quantize` for a matrix that these kernels take."""
    rows, columns = x.shape
    granularity, dtype, part = wanted.granularity, wanted.dtype, wanted.part
    padded = columns_of(rows, granularity)
    by_row = _new_operand(x, wanted, rows, columns) if wanted.by_row else None
    by_column = _new_operand(x, wanted, columns, padded) if wanted.by_column else None
    what = {
        "x": x,
        "by_row": None if by_row is None else by_row.values.view(torch.uint8),
        "by_column": None if by_column is None else by_column.values.view(torch.uint8),
        "M": rows,
        "K": columns,
        "PADDED": padded,
        "E4M3": dtype is torch.float8_e4m3fn,
        "POW2": wanted.power_of_2,
        "BY_BITS": rounds_by_bits(x),
    }
    if granularity == "tensor":
        return _run_by_tensor(what, wanted, by_row, by_column)
    scales = {
        "inverse": None if by_row is None else by_row.inverse,
        "transposed": None if by_column is None else by_column.inverse,
    }
    if granularity == "row":
        amaxes = _amaxes(what, scales, part)
        _launch_tiles(rows_kernel, what, granularity, **amaxes, **scales)
    elif granularity == "128x128":
        _launch_tiles(squares_kernel, what, granularity, **scales)
    else:
        again = x.dtype is torch.float32 and casts_in_software(x.device)
        of_groups = {"AGAIN": again, "G": MULTIPLE[granularity], "E8M0": granularity == "1x32"}
        _launch_tiles(groups_kernel, what, granularity, **scales, **of_groups)
    return Quantized(by_row, by_column)


def _new_operand(x: Tensor, wanted: QuantizeArguments, rows: int, columns: int) -> Operand:
    """Return memory for a matrix `[rows, columns]`."""
    values = x.new_empty((rows, columns), dtype=wanted.dtype)
    shape = shape_of_scales(wanted.granularity, rows, columns)
    if wanted.granularity == "1x32":
        inverse = x.new_zeros(swizzled_size(*shape), dtype=torch.uint8)
    else:
        inverse = x.new_empty(shape, dtype=torch.float32)
    return Operand(values, inverse, wanted.granularity, wanted.power_of_2)


def _launch_tiles(kernel: Any, what: dict[str, Any], granularity: Granularity, **more: Any) -> None:
    """Launch a program for each tile of the result, which may be padded."""
    tile, warps = TILES[granularity]
    tiles = -(-what["PADDED"] // tile[0]) * -(-what["K"] // tile[1])
    sizes = {"TM": tile[0], "TK": tile[1]}
    launch(kernel, tiles, what["x"].device, of_warps(warps), **what, **more, **sizes)


def of_warps(warps: int) -> int:
    """Return this GPU's number of warps for as many threads: AMD's warps are twice as wide."""
    return warps if torch.version.hip is None else warps // 2


def _run_by_tensor(
    what: dict[str, Any],
    wanted: QuantizeArguments,
    by_row: Operand | None,
    by_column: Operand | None,
) -> Quantized:
    """Quantize with one scale, which both results share."""
    x, factor = what["x"], wanted.factor
    amax, used = x.new_zeros(2, dtype=torch.float32).unbind()
    inverse = x.new_empty((), dtype=torch.float32)  # cuBLAS takes no view into other scales
    as_bits = amax.view(torch.int32)
    programs = -(-x.numel() // AMAX_BLOCK)
    what_to_see = {"x": x, "amax": as_bits, "factor": factor, "n": x.numel()}
    launch(amax_kernel, programs, x.device, of_warps(AMAX_WARPS), **what_to_see, BLOCK=AMAX_BLOCK)
    if wanted.part is not None:
        wanted.part.agree(amax)
    scale = {"amax": amax, "used": used, "inverse": inverse}
    _launch_tiles(tensor_kernel, what, "tensor", **scale, as_bits=as_bits, factor=factor)
    if factor is not None:
        launch(inverse_kernel, 1, x.device, 1, **scale)
    with_scale = [
        None if each is None else each._replace(inverse=inverse) for each in (by_row, by_column)
    ]
    return Quantized(with_scale[0], with_scale[1], amax, used)


def _amaxes(what: dict[str, Any], scales: dict[str, Any], part: Part | None) -> dict[str, Any]:
    """Return the amaxes of rows and columns, of those that have scales."""
    amaxes = {
        name: None if inverse is None else torch.zeros_like(inverse)
        for name, inverse in (("of_rows", scales["inverse"]), ("of_columns", scales["transposed"]))
    }
    as_bits = {name: each if each is None else each.view(torch.int32) for name, each in amaxes.items()}
    x, (height, width) = what["x"], AMAXES_TILE
    tiles = -(-what["M"] // height) * -(-what["K"] // width)
    sizes = {"M": what["M"], "K": what["K"], "TM": height, "TK": width}
    launch(amaxes_kernel, tiles, x.device, of_warps(AMAXES_WARPS), x=x, **as_bits, **sizes)
    for name, each in amaxes.items():
        if part is not None and each is not None and part.cuts("row", by_column=name == "of_columns"):
            part.agree(each)
    return amaxes


tiled_jit = functools.partial(jit, multiples_of_16=("x", "by_row", "by_column", "K", "PADDED", "n"))
"""`jit`, for kernels whose arguments are aligned as `take` checks."""


# Numbers.


@jit
def magnitude(x):
    """Return |x| in float32, inf for NaN, so that the largest shows whether all are finite."""
    y = tl.abs(widened(x))
    return tl.where(y == y, y, float("inf"))


@jit
def power_of(amax, E4M3: tl.constexpr):
    """See `amp.kernels.fp8.power_below`."""
    bits = amax.to(tl.int32, bitcast=True)
    highest: tl.constexpr = 254 + (8 if E4M3 else 15)
    power = highest - (bits >> 23) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.minimum(power, _LARGEST_POWER)


@jit
def scale_of(amax, E4M3: tl.constexpr, POW2: tl.constexpr):
    """Return the factor for an amax, see `amp.kernels.fp8.factor_of`, and its inverse."""
    if POW2:
        power = power_of(amax, E4M3)
        power = tl.where(amax == 0.0, 127, power)
        factor = (power << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - power) << 23).to(tl.float32, bitcast=True)
    else:
        factor = tl.minimum(tl.div_rn(448.0 if E4M3 else 57344.0, amax), _LARGEST_FLOAT)
        factor = tl.where(amax == 0.0, 1.0, factor)
        inverse = tl.div_rn(1.0, factor)
    return tl.where(amax < float("inf"), factor, float("nan")), tl.where(
        amax < float("inf"), inverse, float("nan")
    )


@jit
def to_fp8(x, E4M3: tl.constexpr, BY_BITS: tl.constexpr):
    """Return float32 values as FP8 bytes, saturated and rounded to nearest even. NaN stays NaN."""
    largest: tl.constexpr = 448.0 if E4M3 else 57344.0
    # tl.minimum and tl.maximum that keep NaN go wrong beside a transposed FP8 store (triton 3.7).
    x = tl.where(x > largest, largest, tl.where(x < -largest, -largest, x))
    if not BY_BITS:
        fp8 = x.to(tl.float8e4nv) if E4M3 else x.to(tl.float8e5)
        return fp8.to(tl.uint8, bitcast=True)
    mantissa: tl.constexpr = 3 if E4M3 else 2
    bias: tl.constexpr = 7 if E4M3 else 15
    shift: tl.constexpr = 23 - mantissa
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Adding half of the last kept bit, less one if that bit is even, rounds to nearest even.
    below_half: tl.constexpr = 0x7FFFF if E4M3 else 0xFFFFF
    rounded = (size + below_half + ((size >> shift) & 1)) >> shift
    normal = rounded - ((127 - bias) << mantissa)
    # Adding a number whose last bit has the value of a subnormal's last bit rounds to that bit.
    step: tl.constexpr = 24 - bias - mantissa
    added = size.to(tl.float32, bitcast=True) + 2.0**step
    subnormal = added.to(tl.int32, bitcast=True) - ((127 + step) << 23)
    code = tl.where(size < ((128 - bias) << 23), subnormal, normal)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (((bits >> 24) & 0x80) | code).to(tl.uint8)


# Tiles.


@jit
def tile_of(K, TM: tl.constexpr, TK: tl.constexpr):
    """Return the first row and the first column of this program's tile."""
    program = tl.program_id(0)
    across = tl.cdiv(K, TK)
    return program // across * TM, program % across * TK


@jit
def place(values, m, k, M, K, TM: tl.constexpr, TK: tl.constexpr):
    """Return pointers to the tile of `values` `[M, K]` that begins at m and k, and its mask."""
    i, j = tl.arange(0, TM), tl.arange(0, TK)
    first = values + m.to(tl.int64) * K + k
    return first + (i[:, None] * K + j[None, :]), (i < M - m)[:, None] & (j < K - k)[None, :]


@jit
def load_tile(x, m, k, M, K, TM: tl.constexpr, TK: tl.constexpr):
    """Return a tile of `x` `[M, K]` in float32, 0 outside of it."""
    pointers, mask = place(x, m, k, M, K, TM, TK)
    return widened(tl.load(pointers, mask=mask, other=0.0))


@jit
def store_tile(values, fp8, m, k, M, K):
    """Write a tile of bytes into `values` `[M, K]`."""
    pointers, mask = place(values, m, k, M, K, fp8.shape[0], fp8.shape[1])
    tl.store(pointers, fp8, mask=mask)


@jit
def store_both(
    tile, row_factor, column_factor, by_row, by_column, m, k, M, K, PADDED,
    E4M3: tl.constexpr, BY_BITS: tl.constexpr,
):  # fmt: skip
    """Write a tile times its factors, by rows and transposed."""
    if by_row is not None:
        store_tile(by_row, to_fp8(tile * row_factor, E4M3, BY_BITS), m, k, M, K)
    if by_column is not None:
        fp8 = to_fp8(tile * column_factor, E4M3, BY_BITS)
        store_tile(by_column, tl.trans(fp8), k, m, K, PADDED)


# Kernels.


@tiled_jit
def amax_kernel(x, amax, factor, n, BLOCK: tl.constexpr):
    """Raise `amax`, int32 bits of a float32, to the tensor's, unless a factor is given."""
    given = 0.0
    if factor is not None:
        given = tl.load(factor)
    if given == 0.0:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + i, mask=i < n, other=0.0)
        tl.atomic_max(amax, tl.max(magnitude(values), axis=0).to(tl.int32, bitcast=True))


@tiled_jit
def tensor_kernel(
    x, amax, as_bits, factor, used, inverse, by_row, by_column, M, K, PADDED,
    E4M3: tl.constexpr, POW2: tl.constexpr, BY_BITS: tl.constexpr, TM: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    m, k = tile_of(K, TM, TK)
    tile = load_tile(x, m, k, M, K, TM, TK)
    scale, of_scale = scale_of(tl.load(amax), E4M3, POW2)
    if factor is not None:
        given = tl.load(factor)
        scale = tl.where(given > 0.0, given, scale)
        tl.atomic_max(
            as_bits, tl.max(tl.max(magnitude(tile), axis=1), axis=0).to(tl.int32, bitcast=True)
        )
    if tl.program_id(0) == 0:
        tl.store(used, scale)
        tl.store(inverse, of_scale)
    # The padding is zero where the scale is NaN, too.
    of_rows = tl.where((m + tl.arange(0, TM))[:, None] < M, scale, 0.0)
    store_both(tile, of_rows, of_rows, by_row, by_column, m, k, M, K, PADDED, E4M3, BY_BITS)


@jit
def inverse_kernel(amax, used, inverse):
    """Write the inverse of a given factor, now that the amax is known."""
    tl.store(
        inverse, tl.where(tl.load(amax) < float("inf"), tl.div_rn(1.0, tl.load(used)), float("nan"))
    )


@tiled_jit
def amaxes_kernel(x, of_rows, of_columns, M, K, TM: tl.constexpr, TK: tl.constexpr):
    """Raise the amaxes of rows and columns."""
    m, k = tile_of(K, TM, TK)
    size = magnitude(load_tile(x, m, k, M, K, TM, TK))
    if of_rows is not None:
        rows = m + tl.arange(0, TM)
        tl.atomic_max(of_rows + rows, tl.max(size, axis=1).to(tl.int32, bitcast=True), mask=rows < M)
    if of_columns is not None:
        columns = k + tl.arange(0, TK)
        amax = tl.max(size, axis=0).to(tl.int32, bitcast=True)
        tl.atomic_max(of_columns + columns, amax, mask=columns < K)


@jit
def factors_at(amaxes, inverse, i, n, is_first, E4M3: tl.constexpr, POW2: tl.constexpr):
    """Return the factors of some rows, and write their inverses if this program is their first."""
    factor, of_factor = scale_of(tl.load(amaxes + i, mask=i < n, other=0.0), E4M3, POW2)
    tl.store(inverse + i, of_factor, mask=(i < n) & is_first)
    return factor


@tiled_jit
def rows_kernel(
    x, of_rows, of_columns, inverse, transposed, by_row, by_column, M, K, PADDED,
    E4M3: tl.constexpr, POW2: tl.constexpr, BY_BITS: tl.constexpr, TM: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    m, k = tile_of(K, TM, TK)
    tile = load_tile(x, m, k, M, K, TM, TK)
    if by_row is not None:
        i = m + tl.arange(0, TM)
        rows = factors_at(of_rows, inverse, i, M, k == 0, E4M3, POW2)[:, None]
        store_tile(by_row, to_fp8(tile * rows, E4M3, BY_BITS), m, k, M, K)
    if by_column is not None:
        j = k + tl.arange(0, TK)
        columns = factors_at(of_columns, transposed, j, K, m == 0, E4M3, POW2)[None, :]
        fp8 = to_fp8(tile * columns, E4M3, BY_BITS)
        store_tile(by_column, tl.trans(fp8), k, m, K, PADDED)


@tiled_jit
def squares_kernel(
    x, inverse, transposed, by_row, by_column, M, K, PADDED,
    E4M3: tl.constexpr, POW2: tl.constexpr, BY_BITS: tl.constexpr, TM: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    m, k = tile_of(K, TM, TK)
    tile = load_tile(x, m, k, M, K, TM, TK)
    factor, of_factor = scale_of(tl.max(tl.max(magnitude(tile), axis=1), axis=0), E4M3, POW2)
    down, across = M // TM, K // TK
    if inverse is not None:
        tl.store(inverse + m // TM * across + k // TK, of_factor)
    if transposed is not None:
        tl.store(transposed + k // TK * down + m // TM, of_factor)
    store_both(tile, factor, factor, by_row, by_column, m, k, M, K, PADDED, E4M3, BY_BITS)


@jit
def scales_of_groups(
    amax, inverse, rows, groups, R, C, E4M3: tl.constexpr, E8M0: tl.constexpr, POW2: tl.constexpr
):
    """Return the factors of groups `[rows, groups]`, and write their inverses.

    R, C: how many rows and groups the matrix has.
    """
    mask = (rows < R)[:, None] & (groups < C)[None, :]
    if E8M0:
        power = power_of(amax, E4M3)
        r, c = rows[:, None], groups[None, :]
        tile = r // 128 * tl.cdiv(C, 4) + c // 4
        at = tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
        exponent = tl.where(amax < float("inf"), 254 - power, _E8M0_NAN)
        tl.store(inverse + at, exponent.to(tl.uint8), mask=mask)
        return tl.where(amax < float("inf"), (power << 23).to(tl.float32, bitcast=True), float("nan"))
    factor, of_factor = scale_of(amax, E4M3, POW2)
    tl.store(inverse + groups[None, :] * R + rows[:, None], of_factor, mask=mask)
    return factor


@tiled_jit
def groups_kernel(
    x, inverse, transposed, by_row, by_column, M, K, PADDED, AGAIN: tl.constexpr,
    G: tl.constexpr, E8M0: tl.constexpr,
    E4M3: tl.constexpr, POW2: tl.constexpr, BY_BITS: tl.constexpr, TM: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    """Quantize groups of G numbers of a row, and of a column; a tile has one group of each column.

    AGAIN: read the tile once more for its columns. With casts in software, keeping it for both uses
    would take more registers than full occupancy allows.
    """
    m, k = tile_of(K, TM, TK)
    tile = load_tile(x, m, k, M, K, TM, TK)
    if by_row is not None:
        rows, groups = m + tl.arange(0, TM), k // G + tl.arange(0, TK // G)
        cut = tl.reshape(tile, [TM, TK // G, G])
        amax = tl.max(magnitude(cut), axis=2)
        factor = scales_of_groups(amax, inverse, rows, groups, M, K // G, E4M3, E8M0, POW2)
        fp8 = to_fp8(tl.reshape(cut * factor[:, :, None], [TM, TK]), E4M3, BY_BITS)
        store_tile(by_row, fp8, m, k, M, K)
    if by_column is not None:
        if AGAIN:
            tile = load_tile(x, m, k, M, K, TM, TK)
        rows, groups = k + tl.arange(0, TK), m // G + tl.arange(0, 1)
        amax = tl.max(magnitude(tile), axis=0)[:, None]
        factor = scales_of_groups(amax, transposed, rows, groups, K, PADDED // G, E4M3, E8M0, POW2)
        fp8 = to_fp8(tile * tl.trans(factor), E4M3, BY_BITS)
        store_tile(by_column, tl.trans(fp8), k, m, K, PADDED)
