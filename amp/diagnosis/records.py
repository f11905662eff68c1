"""The records of a shadow: ops, gradients, and what was not finite before."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp.diagnosis.places import Place

CONSTANTS = {
    *("full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "where"),
    *("scalar_tensor", "lift_fresh", "lift_fresh_copy", "constant_pad_nd"),
}
"""Ops that write a constant, so that an inf may be intended."""
UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
"""Ops whose results have uninitialized memory."""
CASTS = frozenset(["_to_copy", "copy_", "to"])
MOVES = {
    *("index", "gather", "cat", "stack", "clone", "index_select", "constant_pad_nd", "roll", "repeat"),
}
"""Ops that compute nothing: what their results have lost was lost before."""
COUNTS = {"index_add", "index_add_", "index_put", "index_put_", "scatter_add", "scatter_add_", "cumsum"}
"""Ops that may add up many ones."""


class Owned(NamedTuple):
    """The kind and the name of a tensor's memory.

    Attributes:
        kind: `weight`, `buffer`, `moment`, `average`, `argument`, `gradient`, `number` or `tensor`.
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
        value: for a weight with a finite FP32 master, or a buffer that was finite before a cast, the
            largest magnitude there.
        is_mask: whether it has -inf and one finite number, or is a buffer with -inf.
    """

    owned: Owned
    at: tuple[int, ...]
    value: float | None = None
    is_mask: bool = False


class Gradient(NamedTuple):
    """The gradient that a backward has accumulated in a parameter.

    Attributes:
        made: the number of the op that made it, or its inf or NaN; 0 if that was not seen.
        is_bad: whether it has an inf or NaN.
        off: how far it is off, relative to its norm.
        size: the root of the mean of its exact square.
        gone: the share of it that is 0, and is not exactly.
        norm: its exact norm.
    """

    made: int
    is_bad: bool = False
    off: float = 0.0
    size: float = 0.0
    gone: float = 0.0
    norm: float = 0.0


@dataclass(eq=False)
class NotFinite:
    """What makes the result of an op inf or NaN, if it is.

    Attributes:
        parents: the numbers of those ops whose results, which it took, were inf or NaN.
        sources: inputs that were inf or NaN before the step.
        is_wrong: whether an element of the result that is inf or NaN is finite in its twin.
        inherits: whether the same is true of an input.
        value: the largest magnitude of these elements, or of all if there are none, in FP64 from the
            op's own inputs; None if that is not known.
        has_nan: whether there is a NaN in the result.
        is_minus_inf: whether all non-finite results are -inf.
    """

    parents: list[int] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    is_wrong: bool = False
    inherits: bool = False
    value: float | None = None
    has_nan: bool = False
    is_minus_inf: bool = False


@dataclass(eq=False)
class Op:
    """An op that ran.

    Attributes:
        number: its number in the step.
        place: where it was called; for a backward op, where its forward op was called.
        phase: `forward`, `backward`, `recompute` or `step`.
        func: the op.
        loss_scale: the loss scale of its backward, as far as that was known; 1 in a forward.
        argument: if it is a level's cast of an argument of the model, the name of the argument.
        args: its arguments, with a `Value` for each floating tensor; None if they were not kept.
        kwargs: likewise.
        takes: the dtypes of its floating inputs.
        gives: the dtype of its first floating result, or None; of the first bad one if there is one.
        outputs: the memory of each of its floating results, and a tensor with its place in it.
        parents: the numbers of the ops that made its floating inputs.
        error: how far its result is off, relative to its norm.
        largest: the largest magnitude of its twin.
        has_twin: whether it ran on twins.
        is_bad: whether its result has an inf or NaN.
        bad: where that comes from.
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
    error: float = 0.0
    largest: float = 0.0
    has_twin: bool = True
    is_bad: bool = False
    bad: NotFinite = field(default_factory=NotFinite)

    @property
    def aten(self) -> str:
        """Its name in ATen."""
        return str(self.func.overloadpacket.__name__)

    @property
    def is_root(self) -> bool:
        """Whether it made an inf or NaN: of finite inputs, or where its twin and theirs are finite."""
        if self.bad.is_wrong and (self.is_too_large or not self.bad.inherits):
            return True
        return self.is_bad and not self.bad.parents and not self.bad.sources

    @property
    def is_too_large(self) -> bool:
        """Whether FP64 has a number, made of the op's own inputs, that is too large for its format."""
        value = self.bad.value
        return self.gives is not None and torch.finfo(self.gives).max < (value or 0.0) < math.inf

    @property
    def is_masking(self) -> bool:
        """Whether it wrote or took an -inf that is meant as one."""
        is_written = self.aten in CONSTANTS or bool(self.bad.sources)
        is_given = all(source.is_mask for source in self.bad.sources)
        is_new = is_written and is_given and not (self.bad.parents or self.bad.is_wrong)
        return is_new and self.bad.is_minus_inf

    @property
    def is_constant(self) -> bool:
        """Whether it wrote a constant that is not finite."""
        return self.is_bad and self.aten in CONSTANTS and not self.bad.parents

    @property
    def is_collective(self) -> bool:
        """Whether it is an op of torch.distributed, whose result may be another rank's."""
        return any(word in self.func.namespace for word in ("c10d", "fsdp", "symm_mem"))


def ancestors(ops: Mapping[int, Op], numbers: Iterable[int], only_bad: bool = False) -> list[Op]:
    """Return ops and those that their inputs come from, in the order in which they ran.

    With `only_bad` those that their inputs' infs and NaNs come from.
    """
    seen: set[int] = set()
    todo = list(numbers)
    while todo:
        number = todo.pop()
        if number not in seen and number in ops:
            seen.add(number)
            todo += ops[number].bad.parents if only_bad else ops[number].parents
    return [ops[number] for number in sorted(seen)]


def origin(ops: Mapping[int, Op], number: int) -> Op | None:
    """Return the op that computed what an op has made, which may only have moved it."""
    op = ops.get(number)
    while op is not None and op.aten in MOVES and op.parents:
        op = ops.get(op.parents[0])
    return op
