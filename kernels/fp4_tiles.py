"""`amp.kernels.quantize_fp4` in Triton: a matrix is read in tiles, and each tile is written both ways.

A program quantizes the rows of its tile first, some at a time, 128 bits for a thread. Then it reads
the tile again, from a cache, as 16 tensors `[GROUPS, TK]`: the i-th has row 16 g + i for each g. So a
thread has all 16 neighbours in a column, and their Hadamard transform, amax, random words and codes
need no other thread; only codes and scales are transposed, and the codes of 16 numbers are one word.

The amax of a tensor spans all tiles, so an earlier launch computes it, for NVFP4. Numbers are rounded
by arithmetic that is alike on all GPUs and in Triton's interpreter, and not by casts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amp.kernels.fp4 import LARGEST, LARGEST_SCALE, SIGNS, QuantizeFp4Arguments
from amp.kernels.fp8 import (
    BLOCKS,
    E8M0_NAN,
    LARGEST_FLOAT,
    LARGEST_POWER,
    Fp4Granularity,
    Operand,
    Quantized,
    columns_of,
    shape_of_scales,
)
from amp.kernels.language import INTERPRETED, bits, constant, jit, launch, narrow, number, tl, widened
from amp.kernels.philox import Draw
from amp.kernels.quantize_tiles import (
    amax_of_tensor,
    load_tile,
    of_warps,
    store_tile,
    tile_of,
    tiled_jit,
)

TILE, WARPS = (64, 128), 4
SIZES = {"TM": 32, "TK": TILE[1], "GROUPS": TILE[0] // 16}
REGISTERS = 160
"""The most registers of a thread, so that three programs fit on one of NVIDIA's SMs."""

_INTERPRETED = constant(INTERPRETED)
_LARGEST = constant(LARGEST)
_LARGEST_SCALE = constant(LARGEST_SCALE)
_PRODUCT = constant(LARGEST * LARGEST_SCALE)
_SIXTH = constant(1 / LARGEST)
_LARGEST_FLOAT = constant(LARGEST_FLOAT)
_LARGEST_POWER = constant(LARGEST_POWER)
_E8M0_NAN = constant(E8M0_NAN)
_NEGATIVE = constant(sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0))


def run(x: Tensor, wanted: QuantizeFp4Arguments) -> Quantized:
    """Do `quantize_fp4` for a matrix that `quantize_tiles.take` allows."""
    granularity, hadamard = wanted.granularity, wanted.hadamard and wanted.by_column
    padded = columns_of(x.shape[0], granularity)
    of_rows, of_columns = new_operands(x, wanted)
    row_amax = column_amax = None
    if granularity != "1x32":
        if hadamard:
            amaxes = x.new_zeros(2, dtype=torch.float32)
            row_amax, column_amax = amaxes.unbind()
            as_bits = amaxes.view(torch.int32).unbind()
            which = {"of_rows": as_bits[0] if wanted.by_row else None, "of_columns": as_bits[1]}
            _launch(amaxes_kernel, x, padded, **which)
        else:
            row_amax = column_amax = amax_of_tensor(x)
    height, width = BLOCKS[granularity]
    _launch(
        blocks_kernel,
        x,
        padded,
        **_memory_of(of_rows, "by_row", "inverse", "outer"),
        **_memory_of(of_columns, "by_column", "transposed", "outer_of_columns"),
        row_amax=row_amax,
        column_amax=column_amax,
        **_words_of(wanted.draw),
        PADDED=padded,
        HADAMARD=hadamard,
        H=height,
        G=width,
    )
    return Quantized(of_rows, of_columns)


def _launch(kernel: Any, x: Tensor, padded: int, **more: Any) -> None:
    """Launch a program for each tile of a matrix whose rows are padded."""
    tiles = -(-padded // TILE[0]) * -(-x.shape[1] // TILE[1])
    what = {"x": x, "M": x.shape[0], "K": x.shape[1], **SIZES, **more}
    arguments = {name: what[name] for name in kernel.arg_names}
    launch(kernel, tiles, x.device, of_warps(WARPS), REGISTERS, **arguments)


def new_operands(x: Tensor, wanted: QuantizeFp4Arguments) -> tuple[Operand | None, Operand | None]:
    """Return memory for a matrix and its transpose, as far as they are wanted."""
    (rows, columns), granularity = x.shape, wanted.granularity
    padded = columns_of(rows, granularity)
    return (
        _new_operand(x, granularity, rows, columns) if wanted.by_row else None,
        _new_operand(x, granularity, columns, padded) if wanted.by_column else None,
    )


def _new_operand(x: Tensor, granularity: Fp4Granularity, rows: int, columns: int) -> Operand:
    """Return memory for a matrix `[rows, columns]`."""
    values = x.new_empty((rows, columns // 2), dtype=torch.uint8)
    shape = shape_of_scales(granularity, rows, columns)
    if granularity == "1x32":
        return Operand(values, x.new_empty(shape, dtype=torch.uint8), granularity)
    outer = x.new_empty((), dtype=torch.float32)
    return Operand(values, x.new_empty(shape, dtype=torch.float8_e4m3fn), granularity, outer=outer)


def _memory_of(operand: Operand | None, *names: str) -> dict[str, Tensor | None]:
    """Return the arguments for an operand's values, its scales and the tensor's scale."""
    if operand is None:
        return dict.fromkeys(names)
    values = operand.values if names[0] == "by_row" else operand.values.view(torch.int64)
    return dict(zip(names, (values, operand.inverse.view(torch.uint8), operand.outer), strict=True))


def _words_of(draw: Draw | None) -> dict[str, Any]:
    """Return the arguments for random bits."""
    names = "seed", "layer", "row_word", "column_word"
    if draw is None:
        return {"calls": None, **dict.fromkeys(names, 0)}
    words = [draw.name, draw.last_word, draw.of_columns().last_word]
    signed = [_signed(draw.seed, 64), *(_signed(word, 32) for word in words)]
    return {"calls": draw.calls, **dict(zip(names, signed, strict=True))}


def _signed(word: int, size: int) -> int:
    """Return the signed integer with the bits of a word."""
    return (word + (1 << size - 1)) % (1 << size) - (1 << size - 1)


# Numbers.


@jit
def magnitude(x):
    """Return the bits of |x|, float32, which are in the order of magnitudes, with NaN above inf."""
    return bits(x) & 0x7FFFFFFF


@jit
def amax_of(largest):
    """Return the largest magnitude in float32, inf for NaN, given its bits."""
    return number(tl.minimum(largest, 0x7F800000))


@jit
def saturated(y):
    """Return float32 values from -6 to 6; NaN becomes 6."""
    if _INTERPRETED:  # where tl.minimum keeps NaN
        result = tl.where(y < _LARGEST, tl.maximum(y, -_LARGEST), _LARGEST)
    else:
        result = tl.maximum(tl.minimum(y, _LARGEST), -_LARGEST)
    return result


@jit
def code_of(y, random):
    """Return the E2M1 codes, int32, of float32 values, saturated; NaN becomes 6, as `fp4` has it.

    Args:
        y: float32.
        random: 8 random bits each, or None to round to the nearest code.
    """
    y = saturated(y)
    size = tl.abs(y)
    power = bits(tl.maximum(size, 1.0)) & 0x7F800000  # of 1, 2 or 4: twice the step of E2M1 here
    if random is None:
        added = number(power) * 2.0**22  # a float32 of this size has steps of E2M1's
        kept = (size + added) - added
    else:
        # The byte / 256 of a step: a number with these bits behind the point, less the number without.
        share = number((random << 14).to(tl.int32) | power) - number(power)
        kept = number(bits(size + share) & 0x7FC00000)
    # The exponent now begins where float32's does, with numbers below 1 as subnormal ones.
    return bits(kept * 2.0**-126) >> 22 | (bits(y) >> 28 & 8)


@jit
def to_e4m3(x):
    """Return float32 numbers from 0 to 448 rounded to E4M3, and their codes, int32."""
    power = bits(tl.maximum(x, 0.015625)) & 0x7F800000  # from 2^-6, the smallest normal number, on
    added = number(power) * 2.0**20  # a float32 of this size has steps of E4M3's
    kept = (x + added) - added
    return kept, bits(kept * 2.0**-120) >> 20


@jit
def encoding_of(amax):
    """Return the factor for amaxes of blocks, and the tensor's scale; see `fp4.two_levels`."""
    encode = tl.minimum(tl.div_rn(_PRODUCT, amax), _LARGEST_FLOAT)
    encode = tl.where((amax == 0.0) | (encode == 0.0), 1.0, encode)
    return encode * _SIXTH, tl.div_rn(1.0, encode)


@jit
def scales_of(amax, of_tensor):
    """Return the codes of the scales for amaxes, int32, and the factors of values.

    of_tensor: what `encoding_of` returns, or None for E8M0.
    """
    if of_tensor is None:
        power = 256 - (bits(amax) >> 23) - ((bits(amax) & 0x7FFFFF) > 0x400000).to(tl.int32)
        power = tl.minimum(power, _LARGEST_POWER)
        code = tl.where(amax < float("inf"), 254 - power, _E8M0_NAN)
        factor = tl.where(amax < float("inf"), number(power << 23), float("nan"))
    else:
        scale, code = to_e4m3(tl.minimum(amax * of_tensor[0], _LARGEST_SCALE))
        factor = tl.minimum(tl.div_rn(1.0, scale * of_tensor[1]), _LARGEST_FLOAT)
    return code, factor


@jit
def random_words(index, draw):
    """Return the four random words for each 16 numbers; see `amp.kernels.philox`."""
    calls, seed, layer, last = draw
    return tl.philox(seed, index, tl.load(calls).to(tl.int32), layer, last)


@jit
def random_bytes_of_rows(index, draw):
    """Return random bytes `[R, 16 C]` for groups of 16 numbers in rows, given their index `[R, C]`."""
    words = random_words(index, draw)
    # A join's last dimension has its first argument first.
    each = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))
    each = tl.reshape(each, [index.shape[0], index.shape[1], 4, 1])
    every = each >> (8 * tl.arange(0, 4))[None, None, None, :].to(tl.uint32) & 0xFF
    return tl.reshape(every, [index.shape[0], 16 * index.shape[1]])


# Tiles.


@jit
def load_columns(x, m, k, M, K, GROUPS: tl.constexpr, TK: tl.constexpr):
    """Return numbers from m and k on as 16 tensors, as the module says, 0 outside of `x` `[M, K]`."""
    first = x + m.to(tl.int64) * K + k
    j = tl.arange(0, TK)
    columns = ()
    for r in tl.static_range(16):
        i = 16 * tl.arange(0, GROUPS) + r
        mask = (i < M - m)[:, None] & (j < K - k)[None, :]
        row = tl.load(first + (i[:, None] * K + j[None, :]), mask=mask, other=0.0)
        columns = columns + (widened(row),)  # type: ignore[assignment]  # noqa: RUF005
    return columns


@jit
def transformed(columns):
    """Return columns with a Hadamard transform of each 16 numbers; see `fp4.transformed`."""
    y = ()
    for r in tl.static_range(16):
        sign = -1.0 if _NEGATIVE >> r & 1 else 1.0  # Triton negates as 0 - x, which has no -0
        y = y + (columns[r] * sign,)  # type: ignore[assignment]  # noqa: RUF005
    for stage in tl.static_range(4):
        sums = ()
        for r in tl.static_range(16):
            if r >> stage & 1:
                sums = sums + (y[r - (1 << stage)] - y[r],)  # type: ignore[assignment]  # noqa: RUF005
            else:
                sums = sums + (y[r] + y[r + (1 << stage)],)  # type: ignore[assignment]  # noqa: RUF005
        y = sums
    rounded = ()
    for r in tl.static_range(16):
        row = widened(narrow(y[r] * 0.25, tl.bfloat16))  # pyright: ignore[reportOperatorIssue]
        rounded = rounded + (row,)  # type: ignore[assignment]  # noqa: RUF005
    return rounded


@jit
def largest_of(columns):
    """Return the largest bits of magnitudes of each 16 numbers in a column, `[GROUPS, TK]`."""
    largest = magnitude(columns[0])
    for r in tl.static_range(1, 16):
        largest = tl.maximum(largest, magnitude(columns[r]))
    return largest


@jit
def store_scales(scales, code, rows, groups, R, C):
    """Write the codes of scales into `scales` `[R, C]`, at rows and groups of a shape like theirs."""
    mask = (rows < R) & (groups < C)
    tl.store(scales + rows.to(tl.int64) * C + groups, code.to(tl.uint8), mask=mask)


@jit
def store_rows(
    by_row, inverse, x, of_tensor, draw, m, k, M, K,
    H: tl.constexpr, G: tl.constexpr, TM: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    """Quantize the tile that begins at m and k."""
    cut = tl.reshape(load_tile(x, m, k, M, K, TM, TK), [TM // H, H, TK // G, G])
    largest = tl.max(tl.max(magnitude(cut), axis=3), axis=1)
    code, factor = scales_of(amax_of(largest), of_tensor)
    i, j = m // H + tl.arange(0, TM // H)[:, None], k // G + tl.arange(0, TK // G)[None, :]
    store_scales(inverse, code, i, j, M // H, K // G)
    y = tl.reshape(cut * factor[:, None, :, None], [TM, TK])
    if draw is None:
        codes = code_of(y, None)
    else:
        rows = m + tl.arange(0, TM)[:, None]
        index = rows * (K // 16) + k // 16 + tl.arange(0, TK // 16)[None, :]
        codes = code_of(y, random_bytes_of_rows(index, draw))
    even, odd = tl.split(tl.reshape(codes, [TM, TK // 2, 2]))
    across = K // 32 * 16  # so that Triton knows that rows begin at a multiple of 16
    store_tile(by_row, (even | odd << 4).to(tl.uint8), m, k // 2, M, across)


@jit
def eight_codes(columns, factor, words, FIRST: tl.constexpr):
    """Return the codes of eight numbers in columns, from FIRST on, times a factor, in one int64."""
    packed = tl.zeros_like(factor).to(tl.int32)
    for i in tl.static_range(8):
        y = columns[FIRST + i] * factor
        if words is None:
            code = code_of(y, None)
        else:
            code = code_of(y, words[(FIRST + i) // 4] >> (8 * (i % 4)) & 0xFF)
        packed |= code << (4 * i)
    return packed.to(tl.uint32, bitcast=True).to(tl.int64)


@jit
def store_columns(
    by_column, transposed, columns, of_tensor, draw, m, k, K, PADDED, H: tl.constexpr, G: tl.constexpr
):
    """Quantize columns that begin at m and k."""
    groups: tl.constexpr = columns[0].shape[0]
    width: tl.constexpr = columns[0].shape[1]
    of_block: tl.constexpr = [groups * 16 // G, G // 16, width // H, H]
    largest = tl.max(tl.max(tl.reshape(largest_of(columns), of_block), axis=3), axis=1)
    code, factor = scales_of(amax_of(largest), of_tensor)
    i, j = m // G + tl.arange(0, of_block[0])[:, None], k // H + tl.arange(0, of_block[2])[None, :]
    store_scales(transposed, code, j, i, K // H, PADDED // G)
    factor = tl.reshape(tl.broadcast_to(factor[:, None, :, None], of_block), [groups, width])
    g, c = m // 16 + tl.arange(0, groups)[:, None], k + tl.arange(0, width)[None, :]
    if draw is None:
        words = None
    else:
        # No factor is below 0, but this has Triton make the words in the threads that need them.
        words = random_words(c * (PADDED // 16) + g + (factor < 0.0).to(tl.int32), draw)
    low, high = eight_codes(columns, factor, words, 0), eight_codes(columns, factor, words, 8)
    across = PADDED // 32 * 2  # so that Triton knows that two of these words lie at a multiple of 16
    pointers = by_column + c.to(tl.int64) * across + g
    tl.store(pointers, low | high << 32, mask=(c < K) & (g < across))


@jit
def encoding_at(amax, outer):
    """Return what `encoding_of` does for an amax in memory, and write the tensor's scale."""
    if amax is None:
        result = None
    else:
        largest = tl.load(amax)
        result = encoding_of(largest)
        if tl.program_id(0) == 0:
            tl.store(outer, tl.where(largest < float("inf"), result[1], float("nan")))
    return result


# Kernels.


@jit
def raise_amax(amax, columns):
    largest = tl.max(tl.max(largest_of(columns), axis=1), axis=0)
    tl.atomic_max(amax, tl.minimum(largest, 0x7F800000))


@tiled_jit
def amaxes_kernel(x, of_rows, of_columns, M, K, GROUPS: tl.constexpr, TK: tl.constexpr):
    """Raise the amaxes of a tensor and of its transformed transpose, int32 bits of float32."""
    m, k = tile_of(K, 16 * GROUPS, TK)
    columns = load_columns(x, m, k, M, K, GROUPS, TK)
    if of_rows is not None:
        raise_amax(of_rows, columns)
    raise_amax(of_columns, transformed(columns))


@tiled_jit
def blocks_kernel(
    x, row_amax, column_amax, outer, outer_of_columns, inverse, transposed, by_row, by_column,
    calls, seed, layer, row_word, column_word, M, K, PADDED,
    HADAMARD: tl.constexpr, H: tl.constexpr, G: tl.constexpr,
    TM: tl.constexpr, TK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Quantize a tile `[16 GROUPS, TK]` both ways, with scales for blocks `[H, G]` of each result."""
    m, k = tile_of(K, 16 * GROUPS, TK)
    if by_row is not None:
        of_tensor = encoding_at(row_amax, outer)
        draw = None if calls is None else (calls, seed, layer, row_word)
        for i in range(0, 16 * GROUPS, TM):
            store_rows(by_row, inverse, x, of_tensor, draw, m + i, k, M, K, H, G, TM, TK)
    if by_column is not None:
        of_tensor = encoding_at(column_amax, outer_of_columns)
        draw = None if calls is None else (calls, seed, layer, column_word)
        columns = load_columns(x, m, k, M, K, GROUPS, TK)
        if HADAMARD:
            columns = transformed(columns)
        store_columns(by_column, transposed, columns, of_tensor, draw, m, k, K, PADDED, H, G)
