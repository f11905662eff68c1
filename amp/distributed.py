"""What the library asks of `torch.distributed`; one process is a world of its own."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed

from amp.errors import AmpRuntimeError, AmpTypeError

_DATA: Any = torch.Tensor.data

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


def groups_of_meshes(tensors: Iterable[Tensor]) -> list[ProcessGroup]:
    """Return the process groups whose ranks hold parts or copies of DTensors, each once.

    All ranks of a device mesh are one group, whatever its dimensions are for: copies that should be
    equal decide together too, so that nothing can take them apart.
    """
    tensors = list(tensors)
    if not any(hasattr(cls, "device_mesh") for cls in set(map(type, tensors))):
        return []
    meshes: Any = dict.fromkeys(tensor.device_mesh for tensor in tensors if is_sharded(tensor))  # type: ignore[attr-defined]
    own = [mesh for mesh in meshes if mesh.get_coordinate() is not None]  # with this rank in it
    return list(dict.fromkeys(map(group_of_mesh, own)))


def group_of_mesh(mesh: Any) -> ProcessGroup:
    """Return the process group of all ranks of a device mesh, who all call this."""
    if mesh.ndim == 1:
        return mesh.get_group()  # type: ignore[no-any-return]
    return _group_of_ranks(tuple(mesh.mesh.flatten().tolist()))


_made_groups: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], ProcessGroup]]
_made_groups = WeakKeyDictionary()
"""Groups by their ranks, for each default group, with which they end."""


def _group_of_ranks(ranks: tuple[int, ...]) -> ProcessGroup:
    """Return a group of some ranks, who all call this: of all that there are, or a new one."""
    world: Any = distributed.group.WORLD
    if len(ranks) == distributed.get_world_size():
        return world  # type: ignore[no-any-return]
    made = _made_groups.setdefault(world, {})
    if ranks not in made:
        group: Any = distributed.new_group(list(ranks), use_local_synchronization=True)
        made[ranks] = group
    return made[ranks]


def without_contained(groups: Iterable[ProcessGroup]) -> list[ProcessGroup]:
    """Return those of some groups that have ranks which none of the others has.

    Of groups of one size the order stays: where they are the dimensions of a grid of ranks, each rank
    names those in one order, and what one rank has found reaches all when each group has talked once.
    """
    found: dict[ProcessGroup, set[int]] = {}
    for group in sorted(dict.fromkeys(groups), key=distributed.get_world_size, reverse=True):
        ranks = set(distributed.get_process_group_ranks(group))
        if not any(ranks <= others for others in found.values()):
            found[group] = ranks
    return list(found)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which each rank has a part or a copy."""
    return hasattr(tensor, "device_mesh")


class Cut(NamedTuple):
    """How a tensor is cut among ranks.

    Attributes:
        layout: the device mesh and the placements, equal on all ranks; None for a tensor that is no
            DTensor.
        shard: the number of this rank's part, which is equal on ranks that hold copies of it.
        copies: how many ranks hold what this rank holds.
        groups: the process groups of all of them, none for a tensor that is no DTensor.
    """

    layout: Any
    shard: int
    copies: int
    groups: tuple[ProcessGroup, ...]


WHOLE = Cut(None, 0, 1, ())
"""How a tensor is that is not cut."""


def cut_of(tensor: Any) -> Cut:
    """Return how a tensor is cut."""
    if not is_sharded(tensor):
        return WHOLE
    shard, copies, mesh = 0, 1, tensor.device_mesh
    own = mesh.get_coordinate() or (0,) * mesh.ndim  # none where this rank is not of the mesh
    for at, size, placement in zip(own, mesh.shape, tensor.placements, strict=True):
        if placement.is_replicate():
            copies *= size
        else:
            shard = shard * size + at
    return Cut((mesh, tensor.placements), shard, copies, tuple(groups_of_meshes([tensor])))


def place_gradients(parameters: Iterable[Any]) -> None:
    """Lay the gradients of DTensors out as the parameters: summed over the ranks, and cut alike.

    Sequence parallelism leaves those of its norms to be summed. All ranks of the mesh call this.
    """
    for parameter in parameters:
        spec, grad = getattr(parameter, "_spec", None), parameter.grad
        if spec is None or grad is None or grad._spec is spec:
            continue
        if grad.placements != parameter.placements:
            with _names_the_collective(grad.device_mesh, "the sums of gradients"):
                parameter.grad = grad.redistribute(placements=parameter.placements)


def set_values(tensor: Any, values: Any) -> None:
    """Let a tensor have other memory, of any dtype, and stay the same object."""
    _DATA.__set__(tensor, values)  # whatever its class makes of `.data`
    if is_sharded(tensor):  # `.data` is only its shell: it says what the values are, and has none
        tensor._local_tensor, tensor._spec = values._local_tensor, values._spec


def shard_like(local: Tensor, like: Any) -> Tensor:
    """Return the DTensor that is cut as `like` and of which this rank holds `local`; else `local`."""
    if not is_sharded(like):
        return local
    from torch.distributed.tensor import DTensor

    if local.dtype is like.dtype:
        return DTensor(local, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    size = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, **size)


def reduce_largest(tensors: Sequence[Tensor], groups: Iterable[ProcessGroup]) -> None:
    """Make each element the largest of all ranks of the groups, which all call this.

    So an overflow on one rank is one on all. Tensors, float32 `[n]` without NaN, are changed in place,
    by one collective for each group. The host waits only where the groups' backend makes it, as gloo
    does.
    """
    together = tensors[0] if len(tensors) == 1 else None
    for group in groups if tensors else ():
        if together is None:
            together = torch.cat([tensor.to(tensors[0].device) for tensor in tensors])
        _all_reduce(together, "max", group, "found_inf, whether there was an overflow")
    if together is not None and len(tensors) > 1:
        parts = torch.split(together, [len(tensor) for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part)


def reduce_norm(norm: Tensor, cut: Cut, is_largest: bool = False) -> Tensor:
    """Return the norm of what the ranks hold together of tensors, given that of each one's own.

    Norms are float32 `[n]`: Euclidean, or the largest magnitudes. All ranks of the cut call this, and
    get inf where the norm is inf or NaN on any.
    """
    if not cut.groups:
        return norm
    if is_largest:
        norm = norm.nan_to_num(nan=torch.inf, posinf=torch.inf)
        for group in cut.groups:
            _all_reduce(norm, "max", group, "the norms of gradients")
        return norm
    square = norm.square() / cut.copies
    for group in cut.groups:
        _all_reduce(square, "sum", group, "the norms of gradients")
    return square.sqrt().nan_to_num(nan=torch.inf, posinf=torch.inf)


def _all_reduce(tensor: Tensor, how: Literal["max", "sum"], group: ProcessGroup, what: str) -> None:
    op = distributed.ReduceOp.MAX if how == "max" else distributed.ReduceOp.SUM
    with _names_the_collective(group, what):
        distributed.all_reduce(tensor, op=op, group=group)


@contextmanager
def _names_the_collective(among: Any, what: str) -> Iterator[None]:
    """Let a collective of a group, or of a device mesh, that fails say what was to be agreed on."""
    try:
        yield
    except RuntimeError as error:
        of_mesh = hasattr(among, "mesh")
        ranks = among.mesh.flatten().tolist() if of_mesh else distributed.get_process_group_ranks(among)
        raise AmpRuntimeError(
            f"rank {rank()} could not agree with ranks {ranks} on {what}: {error}. Every rank has to "
            "come to the end of its scale_loss block, and to its step, as often as the others; look "
            "for one that raised, or had no more data"
        ) from error


def _initialized() -> bool:
    return distributed.is_available() and distributed.is_initialized()
