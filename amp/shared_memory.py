"""Tensors that share memory: finding them, and casting them so that they still share it."""

from __future__ import annotations

import gc
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

_PADDING = 512
"""Bytes that may lie between two tensors of one flat vector, which aligns them."""


class MemoryPlace(NamedTuple):
    """Where a tensor lies.

    Attributes:
        storage: the device and the address of its storage.
        first: the byte in the storage where its first element begins.
        end: the byte behind its last element.
    """

    storage: tuple[torch.device, int]
    first: int
    end: int

    def is_in(self, other: MemoryPlace) -> bool:
        """Whether another place contains all of this one."""
        is_there = self.storage == other.storage
        return is_there and other.first <= self.first and self.end <= other.end


def place_of(tensor: Tensor) -> MemoryPlace | None:
    """Return where a tensor lies, or None if it has no plain memory.

    That is so for shards, sparse, quantized, fake and lazy tensors, and for released ones.
    """
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.is_meta or tensor.is_quantized or not tensor.numel():
        return None
    try:
        address = tensor.untyped_storage().data_ptr()
    except RuntimeError:  # some devices have no storages
        address = 0
    if not address:
        return None
    size, first = tensor.element_size(), int(tensor.storage_offset())
    steps = ((n - 1) * int(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return MemoryPlace((tensor.device, address), first * size, (first + sum(steps) + 1) * size)


def is_shared(tensor: Tensor) -> bool:
    """Whether a tensor lies in memory on the CPU that other processes may see too.

    Every tensor on a GPU says that it does.
    """
    place = place_of(tensor)
    return place is not None and place.storage[0].type == "cpu" and bool(tensor.is_shared())  # type: ignore[no-untyped-call]


def _runs(tensors: Iterable[Tensor], gap: int = -1) -> list[dict[Tensor, MemoryPlace]]:
    """Return the runs of two or more tensors that lie side by side on one storage, in this order.

    Args:
        tensors: the tensors.
        gap: the most bytes between two neighbours of a run; -1 if they must overlap.
    """
    on: defaultdict[Any, list[tuple[MemoryPlace, Tensor]]] = defaultdict(list)
    for tensor in dict.fromkeys(tensors):
        if place := place_of(tensor):
            on[place.storage].append((place, tensor))
    runs: list[dict[Tensor, MemoryPlace]] = []
    for placed in on.values():
        end = -math.inf
        for place, tensor in sorted(placed, key=lambda each: each[0].first):
            if place.first > end + gap:
                runs.append({})
            runs[-1][tensor] = place
            end = max(end, place.end)
    return [run for run in runs if len(run) > 1]


# Which tensors share elements.


class Overlap(NamedTuple):
    """Tensors that share elements, each with at least one other.

    Attributes:
        tensors: two or more.
        is_one_view: whether all have the same address, dtype, shape and strides.
    """

    tensors: list[Tensor]
    is_one_view: bool


def same_memory(tensors: Iterable[Tensor]) -> list[Overlap]:
    """Return which of these tensors share elements. Views of one vector beside each other do not.

    Tensors without memory that can be looked at, as shards of DTensors, share none; see `place_of`.
    This asks each tensor for its address, and costs memory only where tensors with holes interlock: 4
    bytes for each element that they span. The host does not wait.
    """
    found = []
    for run in _runs(tensors):
        for group in _overlapping(run):
            views = {(x.storage_offset(), x.shape, x.stride(), x.dtype) for x in group}
            found.append(Overlap(group, len(views) == 1))
    return found


def _overlapping(run: Mapping[Tensor, MemoryPlace]) -> list[list[Tensor]]:
    """Return the groups of a run that share elements; first and last bytes of the run overlap."""
    if all(tensor.nbytes == place.end - place.first for tensor, place in run.items()):
        return [list(run)]  # no tensor has holes
    unit = math.gcd(*(tensor.element_size() for tensor in run))
    first, end = min(at.first for at in run.values()), max(at.end for at in run.values())
    group_of = list(range(len(run)))
    with _disable_current_modes():  # modes that watch the model should not see these ops
        owner = torch.full(((end - first) // unit,), -1, dtype=torch.int32, device="cpu")
        for i, (tensor, place) in enumerate(run.items()):
            size = tensor.element_size() // unit
            strides = (*(stride * size for stride in tensor.stride()), 1)
            view = owner.as_strided((*tensor.shape, size), strides, (place.first - first) // unit)
            met = {group_of[j] for j in torch.unique(view[view >= 0]).tolist()}
            group_of = [i if group in met else group for group in group_of]
            view.fill_(i)
    groups: defaultdict[int, list[Tensor]] = defaultdict(list)
    for tensor, group in zip(run, group_of, strict=True):
        groups[group].append(tensor)
    return [group for group in groups.values() if len(group) > 1]


def outside_views(tensors: Collection[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    """Return other tensors that span several of these, each with those that it spans.

    This looks at all Python objects, if two tensors share a storage at all. A tensor on the memory of
    one tensor alone does not count: the entries of a state dict are such.
    """
    known, runs = set(map(id, tensors)), _runs(tensors, _PADDING)
    storages = {place.storage for run in runs for place in run.values()}
    found: dict[tuple[int, ...], tuple[Tensor, list[Tensor]]] = {}
    for other in gc.get_objects() if runs else ():
        if type(other) not in (Tensor, nn.Parameter) or id(other) in known:
            continue
        outer = place_of(other)
        if outer is None or outer.storage not in storages:
            continue
        for run in runs:
            inside = {x: place for x, place in run.items() if place.is_in(outer)}
            if len(set(inside.values())) > 1:
                found[tuple(map(id, inside))] = other, list(inside)
    return list(found.values())


# Casts.


class _Run:
    """Tensors of one dtype that lie side by side, and their memory in other dtypes."""

    def __init__(self, run: Mapping[Tensor, MemoryPlace]) -> None:
        tensor, place = next(iter(run.items()))
        size = tensor.element_size()
        self.storage, self._first = place.storage, place.first // size
        length = max(at.end for at in run.values()) // size - self._first
        self._memory = tensor.data.as_strided((length,), (1,), self._first)
        self._cast: dict[torch.dtype, Tensor] = {}

    def view(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the view of the memory in another dtype that corresponds to a tensor."""
        if dtype not in self._cast:
            self._cast[dtype] = _shared_like(self._memory.to(dtype), self._memory)
        first = tensor.storage_offset() - self._first
        return self._cast[dtype].as_strided(tensor.shape, tensor.stride(), first)


class CastMemory:
    """Gives tensors memory in another dtype. Those on one storage are views of one storage again.

    It keeps the memory of the tensors that it has noted until it forgets them. Each element is cast
    once. What lies in shared memory stays in shared memory. Views of one storage with other data
    between them, such as tensors of a mapped file, get separate memory.
    """

    def __init__(self) -> None:
        self._run_of: dict[Tensor, _Run] | None = None

    def note(self, tensors: Collection[Tensor]) -> None:
        """Note which tensors lie on one storage, unless that is noted already. No host sync.

        After an interrupt a cast goes on with what was noted before it.
        """
        if self._run_of is not None:
            return
        run_of: dict[Tensor, _Run] = {}
        for dtype in {tensor.dtype for tensor in tensors}:
            for run in _runs([x for x in tensors if x.dtype is dtype], _PADDING):
                run_of |= dict.fromkeys(run, _Run(run))
        self._run_of = run_of

    def forget(self) -> None:
        """Forget the tensors."""
        self._run_of = None

    def cast(self, tensor: Tensor, dtype: torch.dtype, values: Tensor | None = None) -> Tensor:
        """Return memory for a tensor in another dtype. The tensor itself is not changed.

        Args:
            tensor: the tensor.
            dtype: the dtype.
            values: what the memory is to hold, of any dtype; None for the tensor's values.
        """
        run, place = (self._run_of or {}).get(tensor), place_of(tensor)
        if run is None or place is None or place.storage != run.storage:
            return _shared_like((tensor.data if values is None else values).to(dtype), tensor)
        view = run.view(tensor, dtype)
        return view if values is None else view.copy_(values.detach())


def _shared_like(memory: Tensor, tensor: Tensor) -> Tensor:
    if is_shared(tensor):
        memory.share_memory_()  # type: ignore[no-untyped-call]
    return memory
