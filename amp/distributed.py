"""What the library asks of `torch.distributed`; one process is a world of its own."""

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed

from amp.errors import AmpRuntimeError, AmpTypeError

ProcessGroup: TypeAlias = "distributed.ProcessGroup"  # in quotes: a build of torch may have none


def rank() -> int:
    """Return this process's rank, 0 where there is no process group."""
    return distributed.get_rank() if _initialized() else 0


def world_size() -> int:
    """Return the number of processes, 1 where there is no process group."""
    return distributed.get_world_size() if _initialized() else 1


def as_process_groups(value: Any) -> tuple[ProcessGroup, ...]:
    """Return the process groups that a user passed: one, several, or None."""
    if value is None:
        return ()
    if not _initialized():
        raise AmpRuntimeError(
            "process_group was given before torch.distributed.init_process_group was called. Call it "
            "first, or leave process_group out."
        )
    groups = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for group in groups:
        if not isinstance(group, distributed.ProcessGroup):
            raise AmpTypeError(
                "process_group must be a torch.distributed.ProcessGroup or a list of them, and got "
                f"{type(group).__name__}; the group of all ranks is torch.distributed.group.WORLD"
            )
    return groups


def groups_of_shards(tensors: Iterable[Tensor]) -> list[ProcessGroup]:
    """Return the process groups over which DTensors are cut into shards, each once."""
    groups: list[ProcessGroup] = []
    tensors = list(tensors)
    if not any(hasattr(cls, "device_mesh") for cls in set(map(type, tensors))):
        return groups
    for tensor in tensors:
        mesh: Any = getattr(tensor, "device_mesh", None)
        for dim, placement in enumerate(getattr(tensor, "placements", ())):
            group = mesh.get_group(dim)
            if not placement.is_replicate() and group not in groups:
                groups.append(group)
    return groups


def check_placements(grad: Tensor) -> None:
    """Raise if a DTensor's gradient is not summed over its ranks yet."""
    for placement in getattr(grad, "placements", ()):
        if placement.is_partial():
            raise AmpRuntimeError(
                f"a gradient of shape {tuple(grad.shape)} has the placement {placement}: it is not "
                "summed over its ranks yet, and cannot be checked. Redistribute it first."
            )


def reduce_found_inf(found_inf: Tensor, groups: Iterable[ProcessGroup]) -> None:
    """Make an overflow on one rank an overflow on all ranks of the groups, which all call this.

    `found_inf`, float32 `[1]`, is changed in place. The host waits only where the groups' backend makes
    it, as gloo does.
    """
    for group in groups:
        distributed.all_reduce(found_inf, op=distributed.ReduceOp.MAX, group=group)


def reduce_norm(norm: Tensor, groups: Iterable[ProcessGroup]) -> Tensor:
    """Return the norm of what the ranks of the groups hold together, given that of each one's own.

    Norms are float32 `[1]`. All ranks of the groups call this, and get inf if the norm is inf or NaN on
    any.
    """
    groups = tuple(groups)
    if not groups:
        return norm
    norm = norm.nan_to_num(nan=torch.inf, posinf=torch.inf)
    largest = norm.clone()  # to measure by, so that no square overflows
    for group in groups:
        distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=group)
    square = (norm / largest).square()
    for group in groups:
        distributed.all_reduce(square, group=group)
    return torch.where(square > 0, square.sqrt() * largest, largest)  # NaN if all are 0, or one is inf


def _initialized() -> bool:
    return distributed.is_available() and distributed.is_initialized()
