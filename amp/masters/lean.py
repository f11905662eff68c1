"""Lean masters, stored as the model's 16-bit weights and 16 more bits; see `amp.kernels.split`.

The optimizer holds a placeholder with a master's shape and gradient. Its values are NaN, except while
an optimizer that does not know halves is stepping. A fused optimizer joins the halves in registers.
"""

from collections.abc import Iterable, Sequence

import torch

from amp.distributed import set_values, shard_like
from amp.kernels.interrupts import without_grad
from amp.kernels.tensor_lists import local, slices
from amp.lazy import kernels
from amp.masters.pair import Pair, untraced


def join(pairs: Sequence[Pair]) -> None:
    """Let split masters hold FP32 values. No host sync."""
    if pairs:
        for pair in pairs:
            memory = torch.empty_like(pair.parameter, dtype=torch.float32, requires_grad=False)
            set_values(pair.master, memory)
        parameters, lows = [pair.parameter for pair in pairs], [pair.low for pair in pairs]
        kernels.split.join(parameters, lows, [pair.master for pair in pairs])
    for pair in pairs:
        pair.holder = pair.master
        pair.note_agreement()


def split(pairs: Iterable[Pair], may_be_written: bool = False) -> None:
    """Split those masters that hold FP32 values. Idempotent. No host sync.

    Args:
        pairs: the pairs.
        may_be_written: whether a script may have written to parameters since the masters were joined.
            Masters that it has not changed take the written values.
    """
    joined = joined_of(pairs)
    if may_be_written:
        merge([pair for pair in joined if not pair.has_changed])
    write_halves(joined)
    for pair in joined:
        pair.holder = pair.parameter  # first: from here on the halves are valid
        pair.note_agreement()
        nan = torch.full((), torch.nan, dtype=torch.float32, device=pair.parameter.device)
        placeholder = nan.expand(local(pair.parameter).shape)  # it has the memory of one number
        set_values(pair.master, shard_like(placeholder, pair.parameter))


def joined_of(pairs: Iterable[Pair]) -> list[Pair]:
    """Return the lean pairs whose masters hold FP32 values."""
    return [pair for pair in pairs if pair.holder is pair.master]


def write_halves(joined: Sequence[Pair]) -> None:
    """Write masters that hold FP32 values to both halves. No host sync."""
    if joined:
        masters, parameters = [pair.master for pair in joined], [pair.parameter for pair in joined]
        kernels.split.split(masters, parameters, [pair.low for pair in joined])


@without_grad
def merge(joined: Iterable[Pair]) -> None:
    """Let masters that hold FP32 values take the values written to their parameters. No host sync."""
    for pair in joined:
        both = local(pair.parameter), local(pair.low)
        for master, weight, low in slices(untraced(pair.master), *both):
            high, _ = kernels.split.encode(master, weight.dtype, low.dtype)
            master.copy_(torch.where(high == weight, master, weight.float()))


@without_grad
def clear_low(parted: Iterable[Pair]) -> None:
    """Clear the low bits of split masters where a script has written weights, and those of zeros."""
    for pair in parted:
        for weight, low in slices(local(pair.parameter), local(pair.low)):
            high, _ = kernels.split.encode(kernels.split.decode(weight, low), weight.dtype, low.dtype)
            low.copy_(torch.where((high == weight) & (weight != 0), low, 0))
