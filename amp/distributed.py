"""Functions on `torch.distributed`, which also work without a process group."""

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed

from amp.errors import AmpRuntimeError, AmpTypeError

_DATA: Any = torch.Tensor.data

ProcessGroup: TypeAlias = "distributed.ProcessGroup"  # in quotes: a build of torch may have none


def rank() -> int:
    """Return the rank of this process, 0 if there is no process group."""
    return distributed.get_rank() if _initialized() else 0


def world_size() -> int:
    """Return the number of processes, 1 if there is no process group."""
    return distributed.get_world_size() if _initialized() else 1


def as_process_groups(value: Any) -> tuple[ProcessGroup, ...]:
    """Return the process groups that a user passed: one, several, or None."""
    if value is None:
        return ()
    if not _initialized():
        raise AmpRuntimeError(
            "process_group was given before torch.distributed.init_process_group was called. Call it "
            "first, or leave out process_group."
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

    All ranks of a device mesh are one group, whatever its dimensions are for. So ranks with copies of
    the same values decide together too, and the copies stay equal.
    """
    tensors = list(tensors)
    if not any(hasattr(cls, "device_mesh") for cls in set(map(type, tensors))):
        return []
    meshes: Any = dict.fromkeys(tensor.device_mesh for tensor in tensors if is_sharded(tensor))  # type: ignore[attr-defined]
    own = [mesh for mesh in meshes if mesh.get_coordinate() is not None]  # this rank is in it
    return list(dict.fromkeys(map(group_of_mesh, own)))


_made_groups = WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], ProcessGroup]]()
"""The groups that were made for a default group, by their ranks. They end with that group."""


def group_of_mesh(mesh: Any) -> ProcessGroup:
    """Return the process group of all ranks of a device mesh. Each of these ranks calls this."""
    if mesh.ndim == 1:
        return mesh.get_group()  # type: ignore[no-any-return]
    ranks = tuple(mesh.mesh.flatten().tolist())
    world: Any = distributed.group.WORLD
    if len(ranks) == distributed.get_world_size():
        return world  # type: ignore[no-any-return]
    made = _made_groups.setdefault(world, {})
    if ranks not in made:
        group: Any = distributed.new_group(list(ranks), use_local_synchronization=True)
        made[ranks] = group
    return made[ranks]


def without_contained(groups: Iterable[ProcessGroup]) -> list[ProcessGroup]:
    """Return the groups that are not contained in another one.

    Larger groups come first, and groups of one size keep their order. That matters if they are the
    dimensions of a grid of ranks: all ranks then go through the dimensions in the same order, and one
    reduction over each of them reaches all ranks.
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
    """How a tensor is divided among ranks.

    Attributes:
        layout: the device mesh and the placements, equal on all ranks; None if it is not a DTensor.
        copies: how many ranks have a copy of this rank's part, this rank included.
        groups: the process groups of all these ranks; none if it is not a DTensor.
    """

    layout: Any
    copies: int
    groups: tuple[ProcessGroup, ...]


WHOLE = Cut(None, 1, ())
"""The `Cut` of a tensor that is not divided."""


def cut_of(tensor: Any) -> Cut:
    """Return how a tensor is divided among ranks."""
    if not is_sharded(tensor):
        return WHOLE
    mesh, placements = tensor.device_mesh, tensor.placements
    pairs = zip(mesh.shape, placements, strict=True)
    copies = math.prod(size for size, placement in pairs if placement.is_replicate())
    return Cut((mesh, placements), copies, tuple(groups_of_meshes([tensor])))


def shard_in_whole(tensor: Any) -> tuple[int, int, int]:
    """Return where the elements of this rank's part lie in the whole tensor.

    Element i of the part is element `first + i // run * pitch + i % run` of the whole tensor, or
    `first + i` if `run` is 0.

    Returns:
        `first`, `run` and `pitch`.

    Raises:
        AmpTypeError: the tensor is cut in several of its inner dimensions.
    """
    if not is_sharded(tensor) or not tensor.numel():
        return 0, 0, 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole = list(tensor.shape)
    part, offset = compute_local_shape_and_global_offset(whole, tensor.device_mesh, tensor.placements)
    cut = [dim for dim in range(len(whole)) if part[dim] != whole[dim]]
    sizes = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    first = sum(map(operator.mul, offset, sizes))
    if not cut or math.prod(whole[: cut[-1]]) == 1:
        return first, 0, 0
    if any(math.prod(whole[:dim]) != 1 for dim in cut[:-1]):
        raise AmpTypeError(
            f"a parameter of shape {tuple(whole)} is cut in its dimensions {cut}, and stochastic "
            "rounding tells the place of its elements only if one of these is the first. Leave out "
            "state_dtype and master_weights='split24'"
        )
    return first, math.prod(part[cut[-1] :]), math.prod(whole[cut[-1] :])


_grad = operator.attrgetter("grad")
_placements = operator.attrgetter("_spec.placements")


def place_gradients(parameters: Sequence[Any]) -> list[Any]:
    """Return the `.grad` of each parameter; one of a DTensor is first placed as its parameter is.

    Sequence parallelism, for example, leaves partial sums as the gradients of its norms. They are then
    summed over the ranks. All ranks of the mesh call this.
    """
    grads = list(map(_grad, parameters))
    try:
        if list(map(_placements, grads)) == list(map(_placements, parameters)):
            return grads  # the usual case
    except AttributeError:  # there are parameters without a gradient, or that are no DTensors
        pass
    for i, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
        if grad is None or not is_sharded(parameter) or grad.placements == parameter.placements:
            continue
        with _names_the_collective(grad.device_mesh, "the sums of gradients"):
            grads[i] = parameter.grad = grad.redistribute(placements=parameter.placements)
    return grads


def set_values(tensor: Any, values: Any) -> None:
    """Give a tensor the memory of `values`, of any dtype. It stays the same object."""
    _DATA.__set__(tensor, values)  # also if its class defines `.data` in another way
    if is_sharded(tensor):  # for a DTensor `.data` is only the outer tensor, which has no values
        tensor._local_tensor, tensor._spec = values._local_tensor, values._spec


def shard_like(local: Tensor, like: Any) -> Tensor:
    """Return a DTensor divided as `like`, with `local` as this rank's part; else `local` itself."""
    if not is_sharded(like):
        return local
    from torch.distributed.tensor import DTensor

    if local.dtype is like.dtype:
        return DTensor(local, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    size = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, **size)


def reduce_largest(
    tensors: Sequence[Tensor],
    groups: Sequence[ProcessGroup],
    what: str = "found_inf, whether there was an overflow",
) -> None:
    """Replace each element by the largest one of all ranks of the groups. All these ranks call this.

    So an overflow on one rank becomes one on all ranks. The tensors, float32 `[n]` without NaN, or one
    of any shape, are changed in place, by one collective for each group. The host waits only if the
    groups' backend does, such as gloo. An error says what ranks could not agree on.
    """
    if not groups or not tensors:
        return
    is_one = len(tensors) == 1  # the usual case, which needs no copies
    together = tensors[0] if is_one else torch.cat([each.to(tensors[0].device) for each in tensors])
    for group in groups:
        _all_reduce(together, distributed.ReduceOp.MAX, group, what)
    parts = torch.split(together, [len(tensor) for tensor in tensors])
    for tensor, part in () if is_one else zip(tensors, parts, strict=True):
        tensor.copy_(part)


def reduce_norm(norm: Tensor, cut: Cut, is_largest: bool = False) -> Tensor:
    """Return the norms of whole tensors, given the norms of this rank's parts of them.

    Norms are float32 `[n]`: Euclidean, or the largest magnitudes. All ranks of the cut call this. The
    result is inf where the norm is inf or NaN on any rank.
    """
    if not cut.groups:
        return norm
    op = distributed.ReduceOp.MAX if is_largest else distributed.ReduceOp.SUM
    reduced = norm if is_largest else norm.square() / cut.copies
    reduced = reduced.nan_to_num(nan=torch.inf, posinf=torch.inf)
    for group in cut.groups:
        _all_reduce(reduced, op, group, "the norms of gradients")
    return reduced if is_largest else reduced.sqrt()


def _all_reduce(tensor: Tensor, op: Any, group: ProcessGroup, what: str) -> None:
    with _names_the_collective(group, what):
        distributed.all_reduce(tensor, op=op, group=group)


@contextmanager
def _names_the_collective(among: Any, what: str) -> Iterator[None]:
    """If a collective in the block fails, raise an error that names it and its ranks.

    `among` is the process group or the device mesh.
    """
    try:
        yield
    except RuntimeError as error:
        of_mesh = hasattr(among, "mesh")
        ranks = among.mesh.flatten().tolist() if of_mesh else distributed.get_process_group_ranks(among)
        raise AmpRuntimeError(
            f"rank {rank()} could not agree with ranks {ranks} on {what}: {error}. Every rank has to "
            "leave its scale_loss block, and to step, as often as the others. Look for a rank that "
            "raised an error, or ran out of data"
        ) from error


def _initialized() -> bool:
    return distributed.is_available() and distributed.is_initialized()
