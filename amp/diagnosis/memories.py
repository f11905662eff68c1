"""The memory of tensors that a shadow has seen: its twin, what it is, and which op wrote to it last.

A twin is memory in FP64 beside the memory of a tensor, with as many numbers. So a view of the tensor
has the same view of the twin, and what is written through one view is seen through the others. Memory
that was there before the watch is widened when it is first read. A complex number is two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

from amp.diagnosis.places import Place
from amp.diagnosis.records import Op, Owned
from amp.diagnosis.twins import CANNOT_RUN, as_real, fresh_in, has_twin, is_float, run_wide, written_by

_WeakReference: Any = StorageWeakRef
KEPT = 2**31
"""How many bytes of inputs are kept; beyond, those of the oldest ops are dropped."""


@dataclass(eq=False)
class Value:
    """A floating tensor at the moment when an op read it.

    Attributes:
        real: its values.
        exact: those of its twin, a view of a copy of its memory.
        memory: its memory.
        made: the number of the op that made it; 0 if it was there before.
    """

    real: Tensor
    exact: Tensor
    memory: Memory
    made: int

    @property
    def rounded(self) -> Tensor:
        """Its exact values, rounded correctly to its format, in the dtype of the twin."""
        return self.exact.to(self.real.dtype).to(self.exact.dtype)


@dataclass(eq=False)
class Memory:
    """The memory of a tensor.

    Attributes:
        key: identifies it as long as it lives.
        reference: a weak reference to it.
        owned: what it is.
        made: the number of the op that wrote to it last; 0 if none did.
        bad: the number of the op that made its inf or NaN; 0 if none did.
        is_new: whether its first values are of this watch.
        gradient: the name of the parameter whose gradient it is, or an empty text.
        written: where this gradient was written to since its backward, or None.
        scale: the loss scale of this gradient, or None.
        mixed: the scales of two gradients whose sum it is, and the place of the second backward.
        twin: its twin; None until it is read, or if its values are exact.
        readers: the values that ops have read from it since it was last written to.
    """

    key: int
    reference: Any
    owned: Owned = field(default_factory=Owned)
    made: int = 0
    bad: int = 0
    is_new: bool = False
    gradient: str = ""
    written: Place | None = None
    scale: float | None = None
    mixed: tuple[float, float, Place] | None = None
    twin: Tensor | None = None
    readers: WeakSet[Value] = field(default_factory=WeakSet)


class Memories:
    """The memory of all tensors that were read or written, by tensor.

    Attributes:
        bytes: how many bytes of inputs are kept.
    """

    def __init__(self) -> None:
        self._known: dict[int, Memory] = {}
        self._kept: deque[tuple[Op, int]] = deque()
        self.bytes = 0

    def __getitem__(self, x: Tensor) -> Memory:
        storage = own_part(x).untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None or known.reference.expired():
            known = self._known[storage._cdata] = Memory(storage._cdata, _WeakReference(storage))
            if len(self._known) % 256 == 0:
                self._known = {
                    key: one for key, one in self._known.items() if not one.reference.expired()
                }
        return known

    def twin(self, x: Tensor) -> Tensor:
        """Return the twin of a tensor, a view of the twin of its memory."""
        if x.is_conj():
            return self.twin(x.conj()).conj()
        memory, x = self[x], own_part(x)
        parts = as_real(x.detach())
        length = _length(parts)
        if memory.twin is None or memory.twin.numel() != length:
            memory.twin = parts.as_strided((length,), (1,), 0).to(torch.float64, copy=True)
        twin = memory.twin.as_strided(parts.size(), parts.stride(), parts.storage_offset())
        return torch.view_as_complex(twin) if x.is_complex() else twin

    def own(self, kind: str, name: str, tensor: Tensor) -> None:
        """Give a tensor a name, by which findings call it, unless it has one; see `Owned`."""
        memory = self[tensor]
        if memory.owned.tensor is None:
            memory.owned = Owned(kind, name, tensor)

    def put(self, x: Tensor, exact: Tensor) -> None:
        """Set the twin of a tensor, such as one that was rounded before the watch."""
        self.twin(x).copy_(own_part(exact))

    def forget(self, x: Tensor) -> None:
        """Take a tensor's values for exact when it is read again."""
        self[x].twin = None

    def read(self, x: Tensor) -> Value:
        """Return a value that does not change when its memory is written to."""
        memory = self[x]
        value = Value(x.detach(), self.twin(x), memory, memory.made)
        memory.readers.add(value)
        return value

    def before_write(self, x: Tensor) -> None:
        """Copy the values that ops have read from a memory that is about to be written to."""
        memory = self[x]
        for value in memory.readers:
            value.real = value.real.clone()
        memory.readers.clear()
        memory.twin = None if memory.twin is None else memory.twin.clone()

    def run_on_twins(self, func: Any, args: Any, kwargs: Any, result: Any, fresh: list[Tensor]) -> bool:
        """Run an op on twins, and set those of its new results; return whether it can.

        What it has written in place is right then.
        """
        if not has_twin(func):
            return False
        try:
            wide = tree_map(lambda x: self.twin(x) if is_float(x) else x, (args, kwargs))
            exact = run_wide(func, wide[0], wide[1], result)
        except CANNOT_RUN:
            return False
        ids = set(map(id, fresh))
        for x, y in zip(tree_leaves(result), tree_leaves(exact), strict=True):
            if id(x) in ids:
                self.put(x, y)
        return True

    def keep(
        self, op: Op, args: Any, kwargs: Any, values: dict[int, Value], outputs: list[Tensor]
    ) -> None:
        """Keep what an op has read, and where its results are, while there is room for it."""
        op.args, op.kwargs = tree_map(lambda x: values.get(id(x), x), (args, kwargs))
        op.outputs = tuple([(self[x].key, _placed_as(as_real(x))) for x in outputs])
        self._kept.append((op, sum(x.real.nbytes + x.exact.nbytes for x in values.values())))
        self.bytes += self._kept[-1][1]
        while self.bytes > KEPT:
            oldest, freed = self._kept.popleft()
            oldest.args = oldest.kwargs = None
            self.bytes -= freed


def inputs_of(op: Op) -> list[Value]:
    """Return the floating inputs of an op; none if they were not kept."""
    return [x for x in tree_leaves((op.args, op.kwargs)) if isinstance(x, Value)]


def results_from(op: Op, of: Callable[..., Tensor]) -> list[Tensor]:
    """Return the floating results of an op on other values in FP64; none if it cannot run again."""
    if op.args is None or not has_twin(op.func):
        return []
    given = op.args, op.kwargs
    try:
        args, kwargs = tree_map(lambda x: of(x).clone() if isinstance(x, Value) else x, given)
        result = run_wide(op.func, args, kwargs)
    except CANNOT_RUN:
        return []
    written = written_by(op.func, args, kwargs)
    return [*written, *fresh_in(result, written)]


def own_part(x: Any) -> Tensor:
    """Return what a rank holds of a tensor: all of it, unless it is a DTensor."""
    part: Tensor = getattr(x, "_local_tensor", x)
    return part


def _length(x: Tensor) -> int:
    return x.untyped_storage().nbytes() // x.element_size()


def _placed_as(x: Tensor) -> Tensor:
    """Return a tensor without memory that has the size, strides and offset of another."""
    return torch.empty(_length(x), device="meta").as_strided(x.size(), x.stride(), x.storage_offset())
