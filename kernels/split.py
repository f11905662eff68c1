"""FP32 masters stored as a model's 16-bit weights and 8 or 16 more bits.

    weight, low = encode(master)                      master = decode(weight, low)

The dtype of low selects one of four encodings:

- int16 (`split16`), for bfloat16: the master's remaining bits. Every FP32 number comes back bit
  for bit, apart from the payload of a NaN. The weight is the nearest; ties go to the larger
  magnitude, because the low bits could not tell which way a tie to even was rounded.
- int16 (`split16`), for float16: the same in units of float16. Every FP32 number of at least 2^-16
  (1.5e-5) comes back bit for bit, smaller ones within 2^-40 (9.1e-13). From 65520 on the weight is inf,
  and from 65791.99 on the master is too.
- int8 (`split24`): the master is rounded to 8 bits more than the weight has, in a step stochastically,
  and else to nearest. These are 16 significant bits with bfloat16, and 19 with float16, with units of
  at least 2^-32. Encoding a master that came from `decode` gives the same halves again.
- the weight's dtype (`kahan`): the master is rounded to 16 significant bits for bfloat16, 22 for
  float16, as in Kahan's summation. The weight is that number rounded to nearest even, and low is the
  remainder. Encoding a master that came from `decode` gives the same halves again.

A weight that a script writes is the master's value from then on. The low bits of the first three are
relative to the weight, and move it by half a unit of the weight at most. A remainder is absolute: one
that is too large for the weight is a remainder of another weight, and counts as 0.

Shapes: the i-th tensors of each list have one shape, of any size. Launches: one for each device and
dtype. Memory traffic: each tensor is read or written once. `amp.kernels.stochastic_rounding` has the
formulas.
Source: the remainders of NVIDIA apex's DistributedFusedAdam, which recovers a master by undoing the
rounding; here the sign of the low bits shows its direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from amp.kernels.language import (
    bits,
    each_part,
    if_less,
    if_number,
    jit,
    least,
    most,
    narrow,
    not_finite,
    number,
    real,
    tl,
    whole,
    widened,
)
from amp.kernels.launch_plans import Elementwise
from amp.kernels.stochastic_rounding import (
    NEAREST,
    TO_NEAREST,
    join_halves,
    joined,
    joined_half,
    part_halves,
    parted,
    parted_half,
)
from amp.kernels.tensor_lists import slices

BLOCK = 4096

Kind = Literal["split16", "split24", "kahan"]


def low_dtype(kind: Kind, weight_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the low halves of masters of 16-bit weights."""
    return {"split16": torch.int16, "split24": torch.int8, "kahan": weight_dtype}[kind]


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
    if low.dtype == weight.dtype:
        master = widened(weight) + widened(low)
        is_remainder = widened(narrow(master, weight.dtype)) == widened(weight)
        return tl.where(is_remainder, master, widened(weight))
    high, rest = weight.to(tl.int16, bitcast=True).to(tl.int32), low.to(tl.int32)
    if weight.dtype == tl.bfloat16:
        return joined(high, rest, number, if_less, low.dtype.primitive_bitwidth)
    return joined_half(
        high, rest, bits, number, real, least, most, if_less, low.dtype.primitive_bitwidth
    )


@jit
def _halves(master, DTYPE: tl.constexpr):
    weight = narrow(master, DTYPE)
    lost = tl.where(not_finite(weight), 0.0, master - weight.to(tl.float32))
    return weight, narrow(lost, DTYPE)


@jit
def encode_block(master, WEIGHT: tl.constexpr, LOW: tl.constexpr, noise):
    """Return the weights and low halves of a block of masters; `noise` is read if LOW is int8."""
    if WEIGHT == LOW:
        weight, low = _halves(master, WEIGHT)
        # Rounding low may have turned the master into a tie, which goes to the other weight.
        return _halves(weight.to(tl.float32) + low.to(tl.float32), WEIGHT)
    width: tl.constexpr = LOW.primitive_bitwidth  # pyright: ignore[reportAttributeAccessIssue]
    if WEIGHT == tl.bfloat16:  # noqa: SIM300
        high, rest = parted(master, noise, bits, if_number, width)
    else:
        high, rest = parted_half(master, noise, bits, number, real, whole, least, if_less, width)
    return high.to(tl.int16).to(WEIGHT, bitcast=True), rest.to(LOW)


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
    high, rest = encode_block(values, weight.dtype.element_ty, low.dtype.element_ty, NEAREST)
    tl.store(weight + i, high, mask=mask)
    tl.store(low + i, rest, mask=mask)
    return 0


@jit
def split_kernel(rows, chunks, DTYPES: tl.constexpr, BLOCK: tl.constexpr):
    each_part(_split, rows, chunks, (), DTYPES, BLOCK)


def join_reference(weights: list[Tensor], lows: list[Tensor], masters: list[Tensor]) -> None:
    """Do `join` in plain torch."""
    for tensors in zip(weights, lows, masters, strict=True):
        for weight, low, master in slices(*tensors):
            master.copy_(decode(weight, low))


def split_reference(masters: list[Tensor], weights: list[Tensor], lows: list[Tensor]) -> None:
    """Do `split` in plain torch."""
    for tensors in zip(masters, weights, lows, strict=True):
        for master, weight, low in slices(*tensors):
            high, rest = encode(master, weight.dtype, low.dtype)
            weight.copy_(high)
            low.copy_(rest)


def decode(weight: Tensor, low: Tensor) -> Tensor:
    """Return the masters, float32, that weights and low halves encode, in plain torch."""
    if low.dtype is weight.dtype:
        master = weight.float() + low.float()
        return torch.where(master.to(weight.dtype) == weight, master, weight.float())
    width = torch.iinfo(low.dtype).bits
    return join_halves(weight.view(torch.int16).int(), low.int(), weight.dtype is torch.float16, width)  # type: ignore[no-any-return]


def _halves_of(master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weight = master.to(dtype)
    lost = torch.where(weight.isfinite(), master - weight.float(), 0.0)
    return weight, lost.to(dtype)


def encode(
    master: Tensor, weight_dtype: torch.dtype, low_dtype: torch.dtype, noise: Any = TO_NEAREST
) -> tuple[Tensor, Tensor]:
    """Return the weights and low halves of masters, float32, in plain torch."""
    if low_dtype is weight_dtype:
        weight, low = _halves_of(master, weight_dtype)
        return _halves_of(weight.float() + low.float(), weight_dtype)  # see `encode_block`
    is_half, width = weight_dtype is torch.float16, torch.iinfo(low_dtype).bits
    high, rest = part_halves(master.contiguous(), noise, is_half, width)
    return high.short().view(weight_dtype), rest.to(low_dtype)


_JOIN = Elementwise(join_kernel, join_reference, writes=1, block=BLOCK)
_SPLIT = Elementwise(split_kernel, split_reference, writes=2, block=BLOCK)
