"""The records of a shadow: ops, and what they have read."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from amp.diagnosis.places import Place
from amp.diagnosis.twins import Twins, identity_of

CONSTANTS = {
    *("full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "where"),
    *("scalar_tensor", "lift_fresh", "lift_fresh_copy", "constant_pad_nd"),
}
"""Ops that write a constant, so that an inf may be intended."""
UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
"""Ops whose results have uninitialized memory."""
CASTS = frozenset(["_to_copy", "copy_", "to"])
KEPT = 2**31
"""How many bytes of inputs are kept; beyond, those of the oldest ops are dropped."""


class Owned(NamedTuple):
    """What the memory of a tensor is known by.

    Attributes:
        kind: `weight`, `buffer`, `moment`, `average`, `argument`, `gradient` or `tensor`.
        name: its name, or an empty text.
        tensor: a tensor that has this memory, or None.
    """

    kind: str = "tensor"
    name: str = ""
    tensor: Tensor | None = None


class Source(NamedTuple):
    """A tensor that was inf or NaN before the step, and not made so by one of its ops.

    Attributes:
        owned: what it is.
        at: the index of its first element that is not finite.
        value: for a weight with a finite FP32 master, the largest magnitude of the master.
    """

    owned: Owned
    at: tuple[int, ...]
    value: float | None = None


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
    memory: int
    made: int


@dataclass(eq=False)
class Op:
    """An op that ran.

    Attributes:
        number: its number in the step.
        place: where it was called; for a backward op, where its forward op was called.
        phase: `forward`, `backward`, `recompute` or `step`.
        func: the op.
        loss_scale: the loss scale of its backward; 1 in a forward.
        argument: if it is a level's cast of an argument of the model, the name of the argument.
        args: its arguments, with a `Value` for each floating tensor; None if they were not kept.
        kwargs: likewise.
        takes: the dtypes of its floating inputs.
        gives: the dtype of its first floating result, or None; of the first bad one if there is one.
        outputs: the memory of each of its floating results, and a tensor with its place in it.
        parents: the numbers of the ops that made its floating inputs.
        bad_parents: those of them whose result was inf or NaN.
        sources: inputs that were inf or NaN before the step.
        error: how far its result is off, relative to its norm.
        largest: the largest magnitude of its twin.
        is_bad: whether its result has an inf or NaN.
        is_bad_exactly: whether its twin has one too.
        value: for a result that is not finite, the largest magnitude of the result in FP64 from the
            op's own inputs; None if that is not known.
        has_nan: whether there is a NaN in its result.
        rows_of_minus_inf: for a softmax, whether all of a row of its input is -inf.
        is_minus_inf: whether all its non-finite results are -inf.
    """

    number: int
    place: Place
    phase: str
    func: Any
    loss_scale: float = 1.0
    argument: str = ""
    args: Any = None
    kwargs: Any = None
    takes: tuple[torch.dtype, ...] = ()
    gives: torch.dtype | None = None
    outputs: tuple[tuple[int, Tensor], ...] = ()
    parents: tuple[int, ...] = ()
    bad_parents: list[int] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    error: float = 0.0
    largest: float = 0.0
    is_bad: bool = False
    is_bad_exactly: bool = False
    value: float | None = None
    has_nan: bool = False
    rows_of_minus_inf: bool = False
    is_minus_inf: bool = False

    @property
    def aten(self) -> str:
        """Its name in ATen."""
        return str(self.func.overloadpacket.__name__)

    @property
    def is_root(self) -> bool:
        """Whether it made an inf or NaN from finite inputs."""
        return self.is_bad and not self.bad_parents and not self.sources

    @property
    def is_constant(self) -> bool:
        """Whether it wrote a constant that is not finite."""
        return self.is_bad and self.aten in CONSTANTS and not self.bad_parents


class Inputs:
    """What ops have read, kept for the search of a cause while there is room for it."""

    def __init__(self, twins: Twins) -> None:
        self._twins = twins
        self._values: dict[int, WeakSet[Value]] = {}  # of a memory, while they are kept
        self._kept: deque[tuple[Op, int]] = deque()
        self._bytes = 0

    def read(self, x: Tensor, made: int) -> Value:
        """Return a value that stays as it is when its memory is written to."""
        value = Value(x.detach(), self._twins.of(x), identity_of(x), made)
        self._values.setdefault(value.memory, WeakSet()).add(value)
        return value

    def before_write(self, x: Tensor) -> None:
        """Give the kept values of a memory, which is about to be written to, memory of their own."""
        for value in self._values.pop(identity_of(x), ()):
            value.real = value.real.clone()
        self._twins.renew(x)

    def keep(
        self, op: Op, args: Any, kwargs: Any, values: dict[int, Value], outputs: list[Tensor]
    ) -> None:
        """Keep what an op has read, and where its results are."""
        op.args, op.kwargs = tree_map(lambda x: values.get(id(x), x), (args, kwargs))
        op.outputs = tuple([(identity_of(x), _placed_as(x)) for x in outputs])
        size = sum(x.real.nbytes + x.exact.nbytes for x in values.values())
        self._kept.append((op, size))
        self._bytes += size
        while self._bytes > KEPT:
            oldest, freed = self._kept.popleft()
            oldest.args = oldest.kwargs = None
            self._bytes -= freed


def _placed_as(x: Tensor) -> Tensor:
    """Return a tensor without memory that has the size, strides and offset of another."""
    length = x.untyped_storage().nbytes() // x.element_size()
    return torch.empty(length, device="meta").as_strided(x.size(), x.stride(), x.storage_offset())
