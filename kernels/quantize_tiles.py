"""`amp.kernels.quantize` in Triton: a matrix is read in tiles, and each tile is written both ways.

A program reads one tile `[TM, TK]` and writes it quantized, by rows and transposed. The dimension
that is contiguous in memory is a multiple of 16, so that 128 bits move at a time. The amax of a tensor
or a row spans several tiles, so an earlier launch computes it.

Where the factor of a tensor is given or guessed, there is no earlier launch: the programs write their
tiles by that factor, and measure the amax as they do. The one that finishes last then knows whether the
factor is right. If not, which is rare, it writes all tiles again, alone.

Programs raise the amax of a tensor in a scratch that the last one clears, for the next launch on that
stream.

FP8 is written as bytes: Triton rounds to E4M3 only on sm_89 and later, and wrongly in its interpreter,
so elsewhere this module rounds the bits.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

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
from amp.kernels.interrupts import outside_inference_mode
from amp.kernels.language import INTERPRETED, Bound, constant, jit, launch, tl, widened
from amp.kernels.launch_plans import cached

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

FEW = constant(16)
"""Rows of a tile that the last program writes again: few, so that the others need no more registers."""
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
    return x.dtype is torch.float32 or _is_older_than_fp8(x.device)


@functools.cache
def _is_older_than_fp8(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) < (8, 9)


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
    if wanted.granularity == "tensor":
        return _run_by_tensor(x, wanted)
    rows, columns = x.shape
    granularity, dtype, part = wanted.granularity, wanted.dtype, wanted.part
    by_row, by_column = new_operands(x, wanted)
    what = {
        "x": x,
        "by_row": None if by_row is None else by_row.values.view(torch.uint8),
        "by_column": None if by_column is None else by_column.values.view(torch.uint8),
        "M": rows,
        "K": columns,
        "PADDED": columns_of(rows, granularity),
        "E4M3": dtype is torch.float8_e4m3fn,
        "POW2": wanted.power_of_2,
        "BY_BITS": rounds_by_bits(x),
    }
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


def new_operands(x: Tensor, wanted: QuantizeArguments) -> tuple[Operand | None, Operand | None]:
    """Return memory for a matrix and its transpose, as far as they are wanted."""
    rows, columns = x.shape
    padded = columns_of(rows, wanted.granularity)
    return (
        _new_operand(x, wanted, rows, columns) if wanted.by_row else None,
        _new_operand(x, wanted, columns, padded) if wanted.by_column else None,
    )


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


class _TensorPlan(NamedTuple):
    """How matrices of one kind are quantized with one scale.

    Attributes:
        by_row: a tensor of one number, expanded, that has the shape of the result by row, or None:
            `empty_like` takes half of the time of `empty` on the host.
        by_column: the same for the result by column, or None.
        number: float32 `[]`.
        measure: launches `amax_kernel`.
        scale: launches `scale_kernel`.
        write: launches `tensor_kernel` with the right factor.
        write_and_check: launches it with a factor that is given or guessed.
    """

    by_row: Tensor | None
    by_column: Tensor | None
    number: Tensor
    measure: Bound
    scale: Bound
    write: Bound
    write_and_check: Bound


@functools.lru_cache(maxsize=4096)
def _tensor_plan(
    device: torch.device,
    source: torch.dtype,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    power_of_2: bool,
    by_bits: bool,
    *which: bool,
) -> _TensorPlan:
    """Return the plan for a kind of matrices, of factors and results.

    which: whether the factor is a guess, and what may be None or not: a launch is bound to that.
    """
    padded = columns_of(rows, "tensor")
    (height, width), warps = TILES["tensor"]
    tiles = -(-padded // height) * -(-columns // width)
    warps, of_amax = of_warps(warps), of_warps(AMAX_WARPS)
    numbers = which[0], dtype is torch.float8_e4m3fn, power_of_2
    size = rows * columns
    sizes = rows, columns, padded, *numbers, by_bits, height, width
    with outside_inference_mode():
        one = torch.empty(1, dtype=dtype, device=device)
        number = torch.empty((), dtype=torch.float32, device=device)
    return _TensorPlan(
        one.expand(rows, columns) if which[-2] else None,
        one.expand(columns, padded) if which[-1] else None,
        number,
        Bound(amax_kernel, -(-size // AMAX_BLOCK), device, of_amax, (size, *numbers, AMAX_BLOCK)),
        Bound(scale_kernel, 1, device, 1, numbers),
        *(Bound(tensor_kernel, tiles, device, warps, sizes) for _ in range(2)),
    )


def _run_by_tensor(x: Tensor, wanted: QuantizeArguments) -> Quantized:
    """Quantize with one scale, which both results share."""
    (rows, columns), device, part = x.shape, x.device, wanted.part
    is_guess = wanted.guess is not None and part is None
    factor = wanted.guess if is_guess else wanted.factor
    seen, divisor = wanted.seen or (None, None)
    plan = _tensor_plan(
        *(device, x.dtype, rows, columns, wanted.dtype, wanted.power_of_2, rounds_by_bits(x)),
        *(is_guess, factor is not None, seen is not None, divisor is not None),
        *(part is not None, wanted.by_row, wanted.by_column),
    )
    by_row = None if plan.by_row is None else _new(plan.by_row)
    by_column = None if plan.by_column is None else _new(plan.by_column)
    # Each number in memory of its own: cuBLAS takes no view of a vector.
    used, inverse = _new(plan.number), _new(plan.number)
    results = used, inverse, seen, divisor
    scratch = _scratch(device)
    if is_guess or (factor is not None and wanted.is_known and part is None):
        plan.write_and_check(x, scratch, factor, *results, by_row, by_column)
    else:
        if part is None:
            plan.measure(x, scratch, factor, None, *results)
        else:
            amax = _new(plan.number)
            plan.measure(x, scratch, None, amax, None, None, None, None)
            part.agree(amax)
            plan.scale(factor, amax, *results)
        plan.write(x, None, used, None, None, None, None, by_row, by_column)
    return Quantized(
        None if by_row is None else Operand(by_row, inverse, "tensor", wanted.power_of_2),
        None if by_column is None else Operand(by_column, inverse, "tensor", wanted.power_of_2),
        used,
    )


_new = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)


@cached
def _scratch(device: torch.device) -> Tensor:
    """Return an amax and how many programs have raised it, int32 `[2]`; between launches both are 0."""
    with outside_inference_mode():
        return torch.zeros(2, dtype=torch.int32, device=device)


def amax_of_tensor(x: Tensor) -> Tensor:
    """Return the amax of a matrix that `take` allows, float32 `[]`; inf for inf and NaN."""
    amax = x.new_empty((), dtype=torch.float32)
    measure = _measure(x.device, x.dtype, x.numel())
    measure(x, _scratch(x.device), None, amax, *[None] * 4)
    return amax


@functools.lru_cache(maxsize=1024)
def _measure(device: torch.device, source: torch.dtype, size: int) -> Bound:
    """Return what measures the amax of matrices of a size."""
    rest = size, False, False, False, AMAX_BLOCK
    return Bound(amax_kernel, -(-size // AMAX_BLOCK), device, of_warps(AMAX_WARPS), rest)


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
    return tile_at(tl.program_id(0), K, TM, TK)


@jit
def tile_at(i, K, TM: tl.constexpr, TK: tl.constexpr):
    """Return the first row and the first column of the i-th tile."""
    across = tl.cdiv(K, TK)
    return i // across * TM, i % across * TK


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
def raise_amax(scratch, sizes):
    """Raise the amax in a scratch to the largest of a program's magnitudes."""
    tl.atomic_max(scratch, tl.max(sizes).to(tl.int32, bitcast=True))


@jit
def is_last(scratch):
    """Whether this program is the last one that has come here: then all have raised the amax."""
    tl.debug_barrier()  # every thread has read what the last program overwrites
    return tl.atomic_add(scratch + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1


@jit
def amax_found(scratch):
    """Return the amax of all programs, and clear the scratch."""
    tl.store(scratch + 1, 0)
    return tl.atomic_xchg(scratch, 0).to(tl.float32, bitcast=True)


@jit
def settle(
    found, factor, used, inverse, seen, divisor,
    IS_GUESS: tl.constexpr, E4M3: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    """Return the factor of a tensor whose amax was found; write it, its inverse, and what is seen."""
    scale, of_scale = scale_of(found, E4M3, POW2)
    if factor is not None:
        if not IS_GUESS:
            given = tl.load(factor)
            scale = tl.where(given > 0.0, given, scale)
            of_scale = tl.where(found < float("inf"), tl.div_rn(1.0, scale), float("nan"))
    tl.store(used, scale)
    tl.store(inverse, of_scale)
    if seen is not None:
        if divisor is not None:
            found = tl.div_rn(found, tl.load(divisor))
        tl.store(seen, tl.maximum(tl.load(seen), found))
    return scale


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
def amax_kernel(
    x, scratch, factor, amax, used, inverse, seen, divisor, n,
    IS_GUESS: tl.constexpr, E4M3: tl.constexpr, POW2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a tensor's amax, or what follows from it and from a factor, if one is given."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    raise_amax(scratch, magnitude(tl.load(x + i, mask=i < n, other=0.0)))
    if is_last(scratch):
        found = amax_found(scratch)
        if amax is not None:
            tl.store(amax, found)
        else:
            settle(found, factor, used, inverse, seen, divisor, IS_GUESS, E4M3, POW2)


@jit
def scale_kernel(
    factor, amax, used, inverse, seen, divisor,
    IS_GUESS: tl.constexpr, E4M3: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    """Write what follows from the amax on which ranks have agreed."""
    settle(tl.load(amax), factor, used, inverse, seen, divisor, IS_GUESS, E4M3, POW2)


@jit
def store_scaled(
    tile, scale, by_row, by_column, m, k, M, K, PADDED, E4M3: tl.constexpr, BY_BITS: tl.constexpr
):  # fmt: skip
    """Write a tile times its tensor's factor. The padding is zero where that is NaN, too."""
    of_rows = tl.where((m + tl.arange(0, tile.shape[0]))[:, None] < M, scale, 0.0)
    store_both(tile, of_rows, of_rows, by_row, by_column, m, k, M, K, PADDED, E4M3, BY_BITS)


@jit
def store_again(
    x, scale, by_row, by_column, M, K, PADDED,
    E4M3: tl.constexpr, BY_BITS: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    """Write all tiles in one program."""
    for i in tl.range(tl.cdiv(PADDED, FEW) * tl.cdiv(K, TK), num_stages=1):
        m, k = tile_at(i, K, FEW, TK)
        tile = load_tile(x, m, k, M, K, FEW, TK)
        store_scaled(tile, scale, by_row, by_column, m, k, M, K, PADDED, E4M3, BY_BITS)


@tiled_jit
def tensor_kernel(
    x, scratch, factor, used, inverse, seen, divisor, by_row, by_column, M, K, PADDED,
    IS_GUESS: tl.constexpr, E4M3: tl.constexpr, POW2: tl.constexpr, BY_BITS: tl.constexpr,
    TM: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    """Write a tensor times a factor: the right one, or with a scratch one to be checked."""
    m, k = tile_of(K, TM, TK)
    tile = load_tile(x, m, k, M, K, TM, TK)
    scale = tl.load(factor)
    if scratch is not None:
        scale = tl.where(scale <= 0.0, 1.0, scale)  # NaN stays, as for a tensor that is not finite
        raise_amax(scratch, magnitude(tile))
    store_scaled(tile, scale, by_row, by_column, m, k, M, K, PADDED, E4M3, BY_BITS)
    if scratch is not None:
        if is_last(scratch):
            found = amax_found(scratch)
            right = settle(found, factor, used, inverse, seen, divisor, IS_GUESS, E4M3, POW2)
            if (right != scale) & ((right == right) | (scale == scale)):  # and not both NaN
                store_again(x, right, by_row, by_column, M, K, PADDED, E4M3, BY_BITS, TK)


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
