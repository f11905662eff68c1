"""The records of a trace: non-finite results and their sources, lost scalars, and lossy casts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from amp.diagnosis.places import Place


class Source(NamedTuple):
    """A tensor that was inf or NaN before the step, and not made so by one of its ops.

    Attributes:
        kind: `data`, `weight` or `buffer`.
        name: the name of the model's argument, the parameter or the buffer; else empty.
        at: the index of its first element that is not finite.
        value: for a weight with a finite FP32 master, the largest magnitude of the master.
    """

    kind: str
    name: str
    at: tuple[int, ...]
    value: float | None = None


@dataclass
class Event:
    """An op whose result is not finite.

    Attributes:
        number: the number of the op in the step.
        place: where it was called; for a backward op, where its forward op was called.
        phase: `forward`, `backward` or `recompute`.
        aten: the op's name in ATen.
        takes: the dtypes of its floating inputs.
        gives: the dtype of its result.
        parents: numbers of the events that made its non-finite inputs.
        sources: inputs that were inf or NaN before the step.
        value: the largest magnitude of its result in FP64; None if that is not known.
        is_constant: whether it wrote a constant that is not finite.
        has_nan: whether there is a NaN in its result.
        rows_of_minus_inf: for a softmax, whether all of a row of its input is -inf.
        is_minus_inf: whether all its non-finite results are -inf.
        loss_scale: the loss scale of its backward; 1 in a forward.
    """

    number: int
    place: Place
    phase: str
    aten: str
    takes: tuple[torch.dtype, ...]
    gives: torch.dtype
    parents: list[int] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    value: float | None = None
    is_constant: bool = False
    has_nan: bool = False
    rows_of_minus_inf: bool = False
    is_minus_inf: bool = False
    loss_scale: float = 1.0

    @property
    def is_root(self) -> bool:
        """Whether it made an inf or NaN from finite inputs."""
        return not self.parents and not self.sources

    @property
    def is_benign(self) -> bool:
        """Whether it wrote an intended -inf, as in a mask."""
        return self.is_constant and self.is_minus_inf


class LostScalar(NamedTuple):
    """A Python number other than 0 that becomes 0 in the dtype of the op that takes it."""

    place: Place
    value: float
    dtype: torch.dtype


class LossyCast(NamedTuple):
    """A cast that rounded integers, or made -inf of a finite number."""

    place: Place
    kind: str
    takes: torch.dtype
    gives: torch.dtype
    argument: str
    largest: float
