"""Tensors that lie on one memory: which they are, and a cast after which they still do."""

from __future__ import annotations

import gc
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
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


def place_of(tensor: Tensor) -> MemoryPlace | None:
    """Return where a tensor lies; None without memory, or of a class or layout with its own ideas.

    Such are shards, sparse, quantized, fake and lazy tensors, and those that were released.
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


def _runs(tensors: Iterable[Tensor], gap: int = -1) -> Iterator[list[Tensor]]:
    """Yield the lists of two and more tensors that lie one beside the other on one storage.

    Args:
        tensors: the tensors.
        gap: bytes between two of a list, at most; -1 if they must overlap.
    """
    on: defaultdict[Any, list[tuple[MemoryPlace, Tensor]]] = defaultdict(list)
    for tensor in dict.fromkeys(tensors):
        if place := place_of(tensor):
            on[place.storage].append((place, tensor))
    for placed in on.values():
        run: list[Tensor] = []
        end = 0
        for place, tensor in sorted(placed, key=lambda each: each[0].first):
            if run and place.first > end + gap:
                if len(run) > 1:
                    yield run
                run = []
            end = max(end, place.end) if run else place.end
            run.append(tensor)
        if len(run) > 1:
            yield run


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


def _overlapping(run: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the groups of a run that share elements; first and last bytes of the run overlap."""
    if all(map(_has_no_holes, run)):
        return [list(run)]
    unit = math.gcd(*(tensor.element_size() for tensor in run))
    places = [place for place in map(place_of, run) if place is not None]
    first, end = places[0].first, max(place.end for place in places)
    with _disable_current_modes():  # modes that watch the model should not see these ops
        owner = torch.full(((end - first) // unit,), -1, dtype=torch.int32, device="cpu")
        group_of = {i: [i] for i in range(len(run))}
        for i, (tensor, place) in enumerate(zip(run, places, strict=True)):
            size = tensor.element_size() // unit
            strides = (*(stride * size for stride in tensor.stride()), 1)
            view = owner.as_strided((*tensor.shape, size), strides, (place.first - first) // unit)
            for j in torch.unique(view[view >= 0]).tolist():
                if group_of[i] is not group_of[j]:
                    group_of[j] += group_of[i]
                    group_of |= dict.fromkeys(group_of[i], group_of[j])
            view.fill_(i)
    groups = {id(group): group for group in group_of.values() if len(group) > 1}
    return [[run[i] for i in sorted(group)] for group in groups.values()]


def _has_no_holes(tensor: Tensor) -> bool:
    place = place_of(tensor)
    return place is not None and place.end - place.first == tensor.numel() * tensor.element_size()


def outside_views(tensors: Collection[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    """Return other tensors that span several of these, each with those that it spans.

    This looks at all Python objects, if two tensors share a storage at all. A tensor on the memory of
    one tensor alone does not count: the entries of a state dict are such.
    """
    known = set(map(id, tensors))
    runs = [[(place, x) for x in run if (place := place_of(x))] for run in _runs(tensors, _PADDING)]
    storages = {run[0][0].storage for run in runs}
    found: dict[tuple[int, ...], tuple[Tensor, list[Tensor]]] = {}
    for other in gc.get_objects() if runs else ():
        if type(other) not in (Tensor, nn.Parameter) or id(other) in known:
            continue
        place = place_of(other)
        for run in runs if place is not None and place.storage in storages else ():
            inside = [(at, x) for at, x in run if _is_in(at, place)]
            if len({at for at, _ in inside}) > 1:
                of_these = [x for _, x in inside]
                found[tuple(map(id, of_these))] = other, of_these
    return list(found.values())


def _is_in(inner: MemoryPlace, outer: MemoryPlace | None) -> bool:
    if outer is None or outer.storage != inner.storage:
        return False
    return outer.first <= inner.first and inner.end <= outer.end


# Casts.


class _Run:
    """Tensors of one dtype that lie one beside the other, and the same memory in other dtypes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        places = [place for place in map(place_of, tensors) if place is not None]
        size = tensors[0].element_size()
        self.storage = places[0].storage
        self._first = places[0].first // size
        length = max(place.end for place in places) // size - self._first
        self._memory = tensors[0].data.as_strided((length,), (1,), self._first)
        self._cast: dict[torch.dtype, Tensor] = {}

    def view(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the view that a tensor is, of the same memory in another dtype."""
        if dtype not in self._cast:
            self._cast[dtype] = _shared_like(self._memory.to(dtype), self._memory)
        first = tensor.storage_offset() - self._first
        return self._cast[dtype].as_strided(tensor.shape, tensor.stride(), first)


class CastMemory:
    """Gives tensors memory in another dtype: those on one storage views of one storage again.

    It knows the tensors that were noted, until it forgets them, and keeps their memory meanwhile. Each
    element is cast once. What lies in shared memory stays in shared memory. Views of one storage with
    other things between them, as tensors of a file that is mapped, get memory of their own.
    """

    def __init__(self) -> None:
        self._run_of: dict[Tensor, _Run] | None = None

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Note which tensors lie on one storage, unless that is noted already. No host sync.

        After an interrupt a cast goes on with what was noted before it.
        """
        if self._run_of is not None:
            return
        of_dtype: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            of_dtype[tensor.dtype].append(tensor)
        run_of: dict[Tensor, _Run] = {}
        for alike in of_dtype.values():
            for run in _runs(alike, _PADDING):
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
