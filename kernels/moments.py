"""Both moments of Adam put into words of 16 bits, and taken out again.

    word = pack(m, v)                                 m, v = unpack(word)

A fused step does both in registers; these operations convert the moments of state dicts. The formulas
and the format are those of `amp.kernels.stochastic_rounding`. Words are int16; a moment is read in any
floating-point dtype, by way of FP32, and both are rounded to nearest.

Shapes: the i-th tensors of each list have one shape, of any size. Launches: one for each device and
combination of dtypes. Memory traffic: each tensor is read or written once, and nothing is allocated.
Plain torch goes by slices, and takes up to 52 bytes for each element of a slice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp.kernels import stochastic_rounding
from amp.kernels.language import (
    bits,
    each_part,
    if_less,
    if_number,
    jit,
    least,
    most,
    narrow,
    number,
    tl,
    widened,
)
from amp.kernels.launch_plans import Elementwise
from amp.kernels.rule import square_root
from amp.kernels.stochastic_rounding import NEAREST, TO_NEAREST, inverse, packed, unpacked
from amp.kernels.tensor_lists import slices

BLOCK = 4096


def pack(
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    words: Sequence[Tensor],
    *,
    backend: str | None = None,
) -> None:
    """Write the words of moments. The host does not wait.

    Args:
        firsts: the first moments.
        seconds: the second moments.
        words: int16.
        backend: see `amp.kernels.backend`.
    """
    _PACK.run((firsts, seconds, words), backend)


def unpack(
    words: Sequence[Tensor],
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    *,
    backend: str | None = None,
) -> None:
    """Write the moments of words. The host does not wait.

    Arguments are those of `pack`.
    """
    _UNPACK.run((words, firsts, seconds), backend)


@jit
def _pack(pointers, i, mask, arguments):
    first, second, words = pointers
    m = widened(tl.load(first + i, mask=mask, other=0.0))
    v = widened(tl.load(second + i, mask=mask, other=0.0))
    v = tl.where(v >= 0.0, v, float("inf"))
    word = packed(m, v, NEAREST, square_root, inverse, bits, number, least, most, if_less, if_number)
    tl.store(words + i, word.to(tl.int16), mask=mask)
    return 0


@jit
def pack_kernel(rows, chunks, DTYPES: tl.constexpr, BLOCK: tl.constexpr):
    each_part(_pack, rows, chunks, (), DTYPES, BLOCK)


@jit
def _unpack(pointers, i, mask, arguments):
    words, first, second = pointers
    word = tl.load(words + i, mask=mask, other=0).to(tl.int32)
    m, v = unpacked(word, bits, number, most, if_less)
    tl.store(first + i, narrow(m, first.dtype.element_ty), mask=mask)
    tl.store(second + i, narrow(v, second.dtype.element_ty), mask=mask)
    return 0


@jit
def unpack_kernel(rows, chunks, DTYPES: tl.constexpr, BLOCK: tl.constexpr):
    each_part(_unpack, rows, chunks, (), DTYPES, BLOCK)


def pack_reference(firsts: list[Tensor], seconds: list[Tensor], words: list[Tensor]) -> None:
    """Do `pack` in plain torch."""
    for tensors in zip(firsts, seconds, words, strict=True):
        for first, second, word in slices(*tensors):
            v = second.float()
            v = torch.where(v >= 0, v, torch.inf)
            word.copy_(stochastic_rounding.pack(first.float(), v, TO_NEAREST))


def unpack_reference(words: list[Tensor], firsts: list[Tensor], seconds: list[Tensor]) -> None:
    """Do `unpack` in plain torch."""
    for tensors in zip(words, firsts, seconds, strict=True):
        for word, *moments in slices(*tensors):
            for moment, values in zip(moments, stochastic_rounding.unpack(word.int()), strict=True):
                moment.copy_(values)


_PACK = Elementwise(pack_kernel, pack_reference, writes=1, block=BLOCK)
_UNPACK = Elementwise(unpack_kernel, unpack_reference, writes=2, block=BLOCK)
