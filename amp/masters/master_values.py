"""FP32 values of a model's 16-bit tensors: those of their masters, where they have any."""

import math
from typing import Any

import torch
from torch import Tensor

from amp import active
from amp.distributed import shard_like
from amp.dtypes import LOW_PRECISION
from amp.kernels.grad_mode import without_grad
from amp.kernels.tensor_lists import local
from amp.masters.whole import MasterWeights, merged


def master_of(tensor: Tensor) -> tuple[MasterWeights, Any] | None:
    """Return the session's masters and the master of a parameter, or of its detached alias, or None."""
    for session in active.open_sessions():
        masters: MasterWeights = session.masters
        master: Tensor | None = masters.master(tensor)
        may_be_detached = type(tensor) is Tensor and tensor.dtype in LOW_PRECISION
        if master is None and may_be_detached and not torch.compiler.is_compiling():
            master = masters.master_at(tensor)
        if master is not None:
            return masters, master
    return None


def values_of(tensor: Tensor, to_save: bool = False) -> Tensor:
    """Return the values of a 16-bit tensor, float32, from its master if it has one. No host sync.

    `to_save` notices writes to the tensor that have left no trace. For this the host waits.
    """
    found = master_of(tensor)
    if found is None:
        return tensor.detach().float()
    masters, master = found
    with masters.lock:
        if to_save:
            return values_to_save(masters, master)
        masters.follow(master)
        return masters.values(master)


@without_grad
def values_to_save(masters: MasterWeights, master: Tensor) -> Tensor:
    """Return a master's values, float32, as a state dict has them. The host waits for the device.

    Where its parameter was written in a way that torch does not count, they are the parameter's. The
    master does not get them before the next step: an average that is written to the model to be saved
    is often taken back.
    """
    masters.follow(master)
    if not masters.are_whole:
        masters.follow(master, compares=True)
    is_given = masters.are_ahead or master in masters.given_out
    parameter = masters.model(master)
    if parameter is None or is_given or not masters.was_written_unseen(master):
        return masters.values(master)
    masters.traces.suspect([master])
    return shard_like(merged(local(master), local(parameter)), master)


@without_grad
def put_values(tensor: Tensor, values: Tensor) -> None:
    """Set the values of a weight, and of its master if it has one. No host sync.

    Args:
        tensor: a weight of a model; rounded if it is in 16 bits.
        values: float32, on any device.
    """
    found = master_of(tensor)
    tensor.copy_(values if found is None else found[0].load(found[1], values))


def largest_in_master(tensor: Tensor) -> float:
    """Return the largest magnitude in a weight's master, NaN if it has none. The host waits."""
    if master_of(tensor) is None:
        return math.nan
    return float(torch.linalg.vector_norm(values_of(tensor), math.inf))
