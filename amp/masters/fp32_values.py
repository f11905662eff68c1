"""FP32 values of a model's 16-bit tensors: those of their masters, where they have any."""

import math

import torch
from torch import Tensor

from amp import active
from amp.dtypes import LOW_PRECISION
from amp.kernels.interrupts import without_grad
from amp.masters.master_weights import MasterWeights
from amp.masters.pair import Pair


def pair_of(tensor: Tensor) -> tuple[MasterWeights, Pair] | None:
    """Return a session's masters and the pair of a parameter, or of its detached alias, or None."""
    for session in active.open_sessions():
        masters: MasterWeights = session.masters
        pair = masters.pair(tensor)
        may_be_detached = type(tensor) is Tensor and tensor.dtype in LOW_PRECISION
        if pair is None and may_be_detached and not torch.compiler.is_compiling():
            pair = masters.pair_at(tensor)
        if pair is not None and pair.master is not tensor:
            return masters, pair
    return None


def values_of(tensor: Tensor) -> Tensor:
    """Return the values of a 16-bit tensor, float32, from its master if it has one. No host sync."""
    found = pair_of(tensor)
    if found is None:
        return tensor.detach().float()
    masters, pair = found
    with masters.lock:
        return masters.merged(pair)


@without_grad
def put_values(tensor: Tensor, values: Tensor) -> None:
    """Set the values of a weight, and of its master if it has one. No host sync.

    Args:
        tensor: a weight of a model; rounded if it is in 16 bits.
        values: float32, on any device.
    """
    found = pair_of(tensor)
    tensor.copy_(values if found is None else found[1].load(values))


def largest_in_master(tensor: Tensor) -> float:
    """Return the largest magnitude in a weight's master, NaN if it has none. The host waits."""
    if pair_of(tensor) is None:
        return math.nan
    return float(torch.linalg.vector_norm(values_of(tensor), math.inf))
