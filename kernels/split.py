"""FP32 masters stored as a model's 16-bit weights and 16 more bits.

    weight, low = encode(master)                      master = decode(weight, low)

The dtype of low selects one of two encodings:

- int16 (`split16`), for bfloat16: the master's remaining bits. Every FP32 number comes back bit
  for bit, apart from the payload of a NaN. The weight is the nearest; ties go to the larger
  magnitude, because the low bits could not tell which way a tie to even was rounded.
- int16 (`split16`), for float16: the same in units of float16. Every FP32 number of at least 2^-16
  (1.5e-5) comes back bit for bit, smaller ones within 2^-40 (9.1e-13). From 65520 on the weight is inf,
  and from 65791.99 on the master is too.
- the weight's dtype (`kahan`): the master is rounded to 16 significant bits for bfloat16, 22 for
  float16, as in Kahan's summation. The weight is that number rounded to nearest even, and low is the
  remainder. Encoding a master that came from `decode` gives the same halves again.

Shapes: the i-th tensors of each list have one shape, of any size. Launches: one for each device and
dtype. Memory traffic: each tensor is read or written once.
Source: the remainders of NVIDIA apex's DistributedFusedAdam, which recovers a master by undoing the
rounding; here the sign of the low bits shows its direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from amp.kernels.elementwise import Elementwise
from amp.kernels.language import constant, each_part, jit, narrow, not_finite, tl

BLOCK = 4096

_FP16_TO_FP32 = 112 << 23
"""Added to the bits of a normal float16, shifted left by 13, to make them FP32's."""
_SMALLEST = 2.0**-40
FP16_TO_FP32 = constant(_FP16_TO_FP32)
SMALLEST = constant(_SMALLEST)

Kind = Literal["split16", "kahan"]


def low_dtype(kind: Kind, weight_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the low halves of masters of 16-bit weights."""
    return weight_dtype if kind == "kahan" else torch.int16


def join(
    weights: Sequence[Tensor],
    lows: Sequence[Tensor],
    masters: Sequence[Tensor],
    *,
    backend: str | None = None,
) -> None:
    """Write the masters that weights and low halves encode. The host does not wait.

    Args:
        weights: float16 or bfloat16.
        lows: of the dtype that `low_dtype` returns.
        masters: float32.
        backend: see `amp.kernels.backend`.
    """
    _JOIN.run((weights, lows, masters), backend)


def split(
    masters: Sequence[Tensor],
    weights: Sequence[Tensor],
    lows: Sequence[Tensor],
    *,
    backend: str | None = None,
) -> None:
    """Write the weights and low halves of masters. The host does not wait.

    Arguments are those of `join`.
    """
    _SPLIT.run((masters, weights, lows), backend)


@jit
def decode_block(weight, low):
    """Return the masters, float32, that blocks of weights and low halves encode."""
    if low.dtype != tl.int16:
        master = weight.to(tl.float32) + low.to(tl.float32)
    else:
        high = weight.to(tl.int16, bitcast=True).to(tl.int32)
        rest = low.to(tl.int32)
        if weight.dtype == tl.bfloat16:
            whole = high << 16
            # The user may have written a zero: old low bits must not make it NaN.
            is_zero = (high & 0x7FFF) == 0
            bits = tl.where(is_zero & (rest < 0), whole, whole + rest)
            master = bits.to(tl.float32, bitcast=True)
        else:
            magnitude = high & 0x7FFF
            normal = ((magnitude << 13) + rest + FP16_TO_FP32).to(tl.float32, bitcast=True)
            small = (magnitude * 65536 + rest).to(tl.float32) * SMALLEST
            master = tl.where(magnitude < 0x400, small, normal)
            master = tl.where((magnitude == 0x7C00) & (rest == 0x7FFF), float("inf"), master)
            master = tl.where(magnitude > 0x7C00, float("nan"), master)
            # By bits: Triton makes 0 - x of -x, and of 0.0 so 0.0.
            signed = master.to(tl.int32, bitcast=True) | (high >> 31 << 31)
            master = signed.to(tl.float32, bitcast=True)
    return master


@jit
def _halves(master, DTYPE: tl.constexpr):
    weight = narrow(master, DTYPE)
    lost = tl.where(not_finite(weight), 0.0, master - weight.to(tl.float32))
    return weight, narrow(lost, DTYPE)


@jit
def encode_block(master, WEIGHT: tl.constexpr, LOW: tl.constexpr):
    """Return the weights and low halves of a block of masters."""
    if WEIGHT == LOW:
        weight, low = _halves(master, WEIGHT)
        # Rounding low may have turned the master into a tie, which goes to the other weight.
        weight, low = _halves(weight.to(tl.float32) + low.to(tl.float32), WEIGHT)
    else:
        bits = master.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        is_nan = magnitude > 0x7F800000
        if WEIGHT == tl.bfloat16:  # noqa: SIM300
            high = (bits + 0x8000) >> 16
            rest = bits - (high << 16)
            high = tl.where(is_nan, 0x7FC0, high)
        else:
            normal = magnitude - FP16_TO_FP32
            units = tl.minimum(tl.abs(master), 0.000122) * 16777216.0  # of float16's smallest number
            down = units.to(tl.int32)
            left = units - down.to(tl.float32)
            whole = tl.where(left < 0.5, down, down + 1)
            part = (left * 65536.0 + 0.5).to(tl.int32) - ((whole - down) << 16)
            high = tl.where(normal < 0x800000, whole, (normal + 0x1000) >> 13)
            high = tl.minimum(high, 0x7C00)
            rest = tl.minimum(tl.where(high < 0x400, part, normal - (high << 13)), 0x7FFF)
            high = tl.where(is_nan, 0x7E00, high)
            high = tl.where(bits < 0, high | 0x8000, high)
        weight = high.to(tl.int16).to(WEIGHT, bitcast=True)
        low = tl.where(is_nan, 0, rest).to(tl.int16)
    return weight, low


@jit
def _join(pointers, i, mask, arguments):
    weight, low, master = pointers
    joined = decode_block(tl.load(weight + i, mask=mask), tl.load(low + i, mask=mask))
    tl.store(master + i, joined, mask=mask)
    return 0


@jit
def join_kernel(rows, chunks, DTYPES: tl.constexpr, BLOCK: tl.constexpr):
    each_part(_join, rows, chunks, (), DTYPES, BLOCK)


@jit
def _split(pointers, i, mask, arguments):
    master, weight, low = pointers
    values = tl.load(master + i, mask=mask, other=0.0)
    high, rest = encode_block(values, weight.dtype.element_ty, low.dtype.element_ty)
    tl.store(weight + i, high, mask=mask)
    tl.store(low + i, rest, mask=mask)
    return 0


@jit
def split_kernel(rows, chunks, DTYPES: tl.constexpr, BLOCK: tl.constexpr):
    each_part(_split, rows, chunks, (), DTYPES, BLOCK)


def join_reference(weights: list[Tensor], lows: list[Tensor], masters: list[Tensor]) -> None:
    """Do `join` in plain torch."""
    for weight, low, master in zip(weights, lows, masters, strict=True):
        master.copy_(decode(weight, low))


def split_reference(masters: list[Tensor], weights: list[Tensor], lows: list[Tensor]) -> None:
    """Do `split` in plain torch."""
    for master, weight, low in zip(masters, weights, lows, strict=True):
        high, rest = encode(master, weight.dtype, low.dtype)
        weight.copy_(high)
        low.copy_(rest)


def decode(weight: Tensor, low: Tensor) -> Tensor:
    """Return the masters, float32, that weights and low halves encode, in plain torch."""
    if low.dtype is not torch.int16:
        return weight.float() + low.float()
    high, rest = weight.view(torch.int16).int(), low.int()
    if weight.dtype is torch.bfloat16:
        rest = torch.where((high & 0x7FFF) == 0, rest.clamp(min=0), rest)  # a zero that the user wrote
        return ((high << 16) + rest).view(torch.float32)
    magnitude = high & 0x7FFF
    normal = ((magnitude << 13) + rest + _FP16_TO_FP32).view(torch.float32)
    small = (magnitude * 65536 + rest).float() * _SMALLEST
    master = torch.where(magnitude < 0x400, small, normal)
    master.masked_fill_((magnitude == 0x7C00) & (rest == 0x7FFF), torch.inf)
    master.masked_fill_(magnitude > 0x7C00, torch.nan)
    return torch.where(high < 0, -master, master)


def _halves_of(master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weight = master.to(dtype)
    lost = torch.where(weight.isfinite(), master - weight.float(), 0.0)
    return weight, lost.to(dtype)


def encode(master: Tensor, weight_dtype: torch.dtype, low_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the weights and low halves of masters, float32, in plain torch."""
    if low_dtype is not torch.int16:
        weight, low = _halves_of(master, weight_dtype)
        return _halves_of(weight.float() + low.float(), weight_dtype)  # see `encode_block`
    bits = master.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    if weight_dtype is torch.bfloat16:
        high = (bits + 0x8000) >> 16
        low = bits - (high << 16)
        high.masked_fill_(is_nan, 0x7FC0)
    else:
        normal = magnitude - _FP16_TO_FP32
        units = master.abs().clamp(max=0.000122).nan_to_num() * 2.0**24
        down = units.int()
        left = units - down
        whole = torch.where(left < 0.5, down, down + 1)
        part = (left * 65536.0 + 0.5).int() - ((whole - down) << 16)
        high = torch.where(normal < 0x800000, whole, (normal + 0x1000) >> 13).clamp(max=0x7C00)
        low = torch.where(high < 0x400, part, normal - (high << 13)).clamp(max=0x7FFF)
        high.masked_fill_(is_nan, 0x7E00)
        high |= torch.where(bits < 0, 0x8000, 0)
    low.masked_fill_(is_nan, 0)
    return high.short().view(weight_dtype), low.short()


_JOIN = Elementwise(join_kernel, join_reference, writes=1, block=BLOCK)
_SPLIT = Elementwise(split_kernel, split_reference, writes=2, block=BLOCK)
