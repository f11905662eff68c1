"""`amp.kernels.quantize_fp4` in Triton: a matrix is read in tiles, and each tile is written both ways.

A tile is 16 tensors `[GROUPS, TK]`: the i-th has row 16 g + i of the tile for each g. So a thread has all 16
neighbours in a column, and a column's Hadamard transform, amax, random words and codes need no other
thread. Of a row it has as many neighbours as 128 bits hold. Only codes and scales are transposed, and
those of 16 numbers in a column are one word of 64 bits.

The amax of a tensor spans all tiles, so an earlier launch computes it, for NVFP4. Numbers are rounded
by arithmetic that is alike on all GPUs and in Triton's interpreter, and not by casts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amp.kernels import quantize_tiles
from amp.kernels.fp4 import LARGEST, LARGEST_SCALE, SIGNS
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
from amp.kernels.language import bits, constant, jit, launch, narrow, number, tl
from amp.kernels.philox import Draw
from amp.kernels.quantize_tiles import (
    AMAX_BLOCK,
    AMAX_WARPS,
    amax_kernel,
    magnitude,
    of_warps,
    tile_of,
    tiled_jit,
)

TILES = {2: (8, 128), 4: (4, 128)}
"""GROUPS and TK for the bytes of a number: 128 bits of each row in each of 128 threads."""
WARPS = 4

_LARGEST = constant(LARGEST)
_LARGEST_SCALE = constant(LARGEST_SCALE)
_PRODUCT = constant(LARGEST * LARGEST_SCALE)
_SIXTH = constant(1 / LARGEST)
_LARGEST_FLOAT = constant(LARGEST_FLOAT)
_LARGEST_POWER = constant(LARGEST_POWER)
_E8M0_NAN = constant(E8M0_NAN)
_NEGATIVE = constant(sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0))


def run(
    x: Tensor,
    granularity: Fp4Granularity,
    by_row: bool,
    by_column: bool,
    hadamard: bool,
    draw: Draw | None,
) -> Quantized:
    """Do `quantize_fp4` for a matrix that `quantize_tiles.takes`."""
    rows, columns = x.shape
    padded = columns_of(rows, granularity)
    of_rows = _new_operand(x, granularity, rows, columns) if by_row else None
    of_columns = _new_operand(x, granularity, columns, padded) if by_column else None
    groups, width = TILES[x.element_size()]
    tiles = -(-padded // (16 * groups)) * -(-columns // width)
    sizes = {"M": rows, "K": columns, "GROUPS": groups, "TK": width}
    hadamard = hadamard and by_column
    row_amax = column_amax = None
    if granularity != "1x32":
        amaxes = x.new_zeros(2, dtype=torch.float32)
        row_amax, column_amax = amaxes.unbind()
        as_bits = amaxes.view(torch.int32).unbind()
        if hadamard:
            which = {"of_rows": as_bits[0] if by_row else None, "of_columns": as_bits[1]}
            launch(amaxes_kernel, tiles, x.device, of_warps(WARPS), x=x, **which, **sizes)
        else:
            column_amax = row_amax
            what = {"x": x, "amax": as_bits[0], "factor": None, "n": x.numel(), "BLOCK": AMAX_BLOCK}
            launch(amax_kernel, -(-x.numel() // AMAX_BLOCK), x.device, of_warps(AMAX_WARPS), **what)
    launch(
        blocks_kernel,
        tiles,
        x.device,
        of_warps(WARPS),
        x=x,
        **_memory_of(of_rows, "by_row", "inverse", "outer"),
        **_memory_of(of_columns, "by_column", "transposed", "outer_of_columns"),
        row_amax=row_amax,
        column_amax=column_amax,
        **_words_of(draw),
        PADDED=padded,
        HADAMARD=hadamard,
        SQUARES=granularity == "16x16",
        G=BLOCKS[granularity][1],
        **sizes,
    )
    return Quantized(of_rows, of_columns)


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
def code_of(y, random):
    """Return the E2M1 codes, int32, of float32 values, saturated; NaN becomes 6, as `fp4` has it.

    Args:
        y: float32.
        random: 8 random bits each, or None to round to the nearest code.
    """
    size = tl.abs(y)
    size = tl.where(size < _LARGEST, size, _LARGEST)
    power = bits(tl.maximum(size, 1.0)) & 0x7F800000  # of 1, 2 or 4: twice the step of E2M1 here
    if random is None:
        # The last bit of this sum has the value of a step, so its last bits count steps.
        code = (bits(size + number(power + (22 << 23))) & 7) + (power >> 22) - 254
    else:
        share = number((random << 15).to(tl.int32) | 0x3F800000) - 1.0  # the byte / 256
        raised = size + share * number(power - (1 << 23))  # below 8
        code = tl.where(raised < 1.0, (raised >= 0.5).to(tl.int32), (bits(raised) >> 22) - 252)
    return code | tl.where(y == y, bits(y) >> 28 & 8, 0)


@jit
def to_e4m3(x):
    """Return float32 numbers from 0 to 448 rounded to E4M3, and their codes, int32."""
    power = bits(tl.maximum(x, 0.015625)) & 0x7F800000  # from 2^-6, the smallest normal number, on
    added = number(power + (20 << 23))  # a float32 of this size has steps of E4M3's
    kept = (x + added) - added
    code = tl.where(kept < 0.015625, (kept * 512).to(tl.int32), (bits(kept) >> 20) - (120 << 3))
    return kept, code


@jit
def encoding_of(amax):
    """Return what amaxes of blocks are multiplied by, and the tensor's scale; see `fp4.two_levels`."""
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
    """Return random bytes for parts of rows, 4 numbers each, as `[R, 4 C]`.

    index: of these parts, `[R, C]`. Each thread has parts of few words, and computes all four.
    """
    words = random_words(index >> 2, draw)
    which = index & 3
    first = tl.where(which == 0, words[0], words[1])
    word = tl.where(which < 2, first, tl.where(which == 2, words[2], words[3]))
    shifted = word[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :].to(tl.uint32)
    return tl.reshape(shifted & 0xFF, [index.shape[0], 4 * index.shape[1]])


# Tiles.


@jit
def load_tile(x, m, k, M, K, GROUPS: tl.constexpr, TK: tl.constexpr):
    """Return the tile that begins at m and k, as the module says, 0 outside of `x` `[M, K]`."""
    first = x + m.to(tl.int64) * K + k
    j = tl.arange(0, TK)
    tile = ()
    for r in tl.static_range(16):
        i = 16 * tl.arange(0, GROUPS) + r
        mask = (i < M - m)[:, None] & (j < K - k)[None, :]
        row = tl.load(first + (i[:, None] * K + j[None, :]), mask=mask, other=0.0)
        tile = tile + (row,)  # type: ignore[assignment]  # noqa: RUF005
    return tile


@jit
def in_float32(tile):
    """Return a tile in float32."""
    wide = ()
    for r in tl.static_range(16):
        wide = wide + (tile[r].to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    return wide


@jit
def transformed(tile):
    """Return a tile, float32, whose columns are transformed and rounded; see `fp4.transformed`."""
    y = ()
    for r in tl.static_range(16):
        if _NEGATIVE >> r & 1:
            y = y + (-tile[r],)  # type: ignore[assignment]  # noqa: RUF005
        else:
            y = y + (tile[r],)  # type: ignore[assignment]  # noqa: RUF005
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
        row = narrow(y[r] * 0.25, tl.bfloat16).to(tl.float32)
        rounded = rounded + (row,)  # type: ignore[assignment]  # noqa: RUF005
    return rounded


@jit
def amaxes_of_columns(tile):
    """Return the largest magnitudes of each 16 numbers in a column, `[GROUPS, TK]`."""
    largest = magnitude(tile[0])
    for r in tl.static_range(1, 16):
        largest = tl.maximum(largest, magnitude(tile[r]))
    return largest


@jit
def store_scales(scales, code, rows, groups, R, C):
    """Write the codes of scales into `scales` `[R, C]`, at rows and groups of a shape like theirs."""
    mask = (rows < R) & (groups < C)
    tl.store(scales + rows.to(tl.int64) * C + groups, code.to(tl.uint8), mask=mask)


@jit
def store_rows(by_row, inverse, tile, of_square, of_tensor, draw, m, k, M, K, G: tl.constexpr):
    """Quantize the rows of a tile.

    of_square: the factors of squares, or None.
    """
    groups: tl.constexpr = tile[0].shape[0]
    width: tl.constexpr = tile[0].shape[1]
    j = tl.arange(0, width // 2)
    for r in tl.static_range(16):
        i = m + 16 * tl.arange(0, groups)[:, None] + r
        cut = tl.reshape(tile[r], [groups, width // G, G])
        if of_square is None:
            code, factor = scales_of(tl.max(magnitude(cut), axis=2), of_tensor)
            store_scales(inverse, code, i, k // G + tl.arange(0, width // G)[None, :], M, K // G)
        else:
            factor = of_square
        y = tl.reshape(cut * factor[:, :, None], [groups, width])
        if draw is None:
            codes = code_of(y, None)
        else:
            index = i * (K // 4) + k // 4 + tl.arange(0, width // 4)[None, :]
            codes = code_of(y, random_bytes_of_rows(index, draw))
        even, odd = tl.split(tl.reshape(codes, [groups, width // 2, 2]))
        pointers = by_row + i.to(tl.int64) * (K // 2) + (k // 2 + j[None, :])
        tl.store(pointers, (even | odd << 4).to(tl.uint8), mask=(i < M) & (k // 2 + j < K // 2)[None, :])


@jit
def store_columns(by_column, tile, factor, draw, m, k, K, PADDED):
    """Quantize the columns of a tile."""
    groups: tl.constexpr = tile[0].shape[0]
    width: tl.constexpr = tile[0].shape[1]
    g = m // 16 + tl.arange(0, groups)[:, None]
    j = k + tl.arange(0, width)[None, :]
    if draw is not None:
        words = random_words(j * (PADDED // 16) + g, draw)
    halves = ()
    for half in tl.static_range(2):
        packed = tl.zeros_like(j + g)
        for i in tl.static_range(8):
            r: tl.constexpr = 8 * half + i
            if draw is None:
                code = code_of(tile[r] * factor, None)
            else:
                code = code_of(tile[r] * factor, words[r // 4] >> (8 * (r % 4)) & 0xFF)
            packed |= code << (4 * i)
        halves = halves + (packed.to(tl.uint32, bitcast=True).to(tl.int64),)  # type: ignore[assignment]  # noqa: RUF005
    across = PADDED // 32 * 2  # so that Triton knows that two of these words lie at a multiple of 16
    pointers = by_column + j.to(tl.int64) * across + g
    tl.store(pointers, halves[0] | halves[1] << 32, mask=(j < K) & (g < across))


@jit
def spread_over_squares(factor, TK: tl.constexpr):
    """Return the factors `[GROUPS, TK]` of columns from those of squares."""
    groups: tl.constexpr = factor.shape[0]
    return tl.reshape(tl.broadcast_to(factor[:, :, None], [groups, TK // 16, 16]), [groups, TK])


@jit
def column_factors(transposed, tile, of_tensor, m, k, K, PADDED, G: tl.constexpr):
    """Return the factors `[GROUPS, TK]` for each 16 numbers in a column, and write their scales."""
    groups: tl.constexpr = tile[0].shape[0]
    width: tl.constexpr = tile[0].shape[1]
    together: tl.constexpr = G // 16
    amax = tl.reshape(amaxes_of_columns(tile), [groups // together, together, width])
    code, factor = scales_of(tl.max(amax, axis=1), of_tensor)
    g, j = tl.arange(0, groups // together)[:, None], tl.arange(0, width)[None, :]
    store_scales(transposed, code, k + j, m // G + g, K, PADDED // G)
    each = tl.broadcast_to(factor[:, None, :], [groups // together, together, width])
    return tl.reshape(each, [groups, width])


# Kernels.


@tiled_jit
def amaxes_kernel(x, of_rows, of_columns, M, K, GROUPS: tl.constexpr, TK: tl.constexpr):
    """Raise the amaxes of a tensor and of its transformed transpose, int32 bits of float32."""
    m, k = tile_of(K, 16 * GROUPS, TK)
    tile = in_float32(load_tile(x, m, k, M, K, GROUPS, TK))
    if of_rows is not None:
        raise_amax(of_rows, tile)
    raise_amax(of_columns, transformed(tile))


@jit
def raise_amax(amax, tile):
    largest = tl.max(tl.max(amaxes_of_columns(tile), axis=1), axis=0)
    tl.atomic_max(amax, largest.to(tl.int32, bitcast=True))


@jit
def encoding_at(amax, outer):
    """Return what `encoding_of` does, and write the tensor's scale."""
    largest = tl.load(amax)
    ratio, decode = encoding_of(largest)
    if tl.program_id(0) == 0:
        tl.store(outer, tl.where(largest < float("inf"), decode, float("nan")))
    return ratio, decode


@tiled_jit
def blocks_kernel(
    x, row_amax, column_amax, outer, outer_of_columns, inverse, transposed, by_row, by_column,
    calls, seed, layer, row_word, column_word, M, K, PADDED,
    HADAMARD: tl.constexpr, SQUARES: tl.constexpr, G: tl.constexpr,
    GROUPS: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    """Quantize a tile both ways, with scales for G numbers or for squares of them."""
    m, k = tile_of(K, 16 * GROUPS, TK)
    tile = in_float32(load_tile(x, m, k, M, K, GROUPS, TK))
    if SQUARES:
        of_tensor = encoding_of(tl.load(row_amax))
        squares = tl.reshape(amaxes_of_columns(tile), [GROUPS, TK // 16, 16])
        code, of_square = scales_of(tl.max(squares, axis=2), of_tensor)
        g, c = m // 16 + tl.arange(0, GROUPS)[:, None], k // 16 + tl.arange(0, TK // 16)[None, :]
        if by_row is not None:
            store_scales(inverse, code, g, c, M // 16, K // 16)
        if by_column is not None:
            store_scales(transposed, code, c, g, K // 16, M // 16)
    else:
        of_square = None
    if by_row is not None:
        of_tensor = None if row_amax is None else encoding_at(row_amax, outer)
        draw = None if calls is None else (calls, seed, layer, row_word)
        store_rows(by_row, inverse, tile, of_square, of_tensor, draw, m, k, M, K, G)
    if by_column is not None:
        of_tensor = None if column_amax is None else encoding_at(column_amax, outer_of_columns)
        draw = None if calls is None else (calls, seed, layer, column_word)
        if HADAMARD:
            tile = transformed(tile)
        if SQUARES:
            factor = spread_over_squares(of_square, TK)
        else:
            factor = column_factors(transposed, tile, of_tensor, m, k, K, PADDED, G)
        store_columns(by_column, tile, factor, draw, m, k, K, PADDED)
