"""What a trace has seen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from amp.diagnosis.places import Place


class Source(NamedTuple):
    """A tensor that is not finite and that no op of the step has made.

    Attributes:
        kind: `data`, `weight` or `buffer`.
        name: of the argument of the model, the parameter or the buffer; empty if it is none of these.
        at: the indices of its first element that is not finite.
        value: of a weight whose FP32 master is finite, the largest magnitude of that.
    """

    kind: str
    name: str
    at: tuple[int, ...]
    value: float | None = None


@dataclass
class Event:
    """An op whose result is not finite.

    Attributes:
        number: of the op in the step.
        place: where it was called; of a backward op, where its forward op was.
        phase: `forward`, `backward` or `recompute`.
        aten: the op's own name.
        takes: the dtypes of its floating inputs.
        gives: the dtype of the result.
        parents: numbers of the events that its inputs come from.
        sources: inputs that were so when the step began.
        value: the largest magnitude of its result in FP64; None where that is not known.
        is_constant: whether it wrote a constant that is not finite.
        has_nan: whether there is a NaN in its result.
        rows_of_minus_inf: a softmax: whether a row of its input is -inf throughout.
        is_minus_inf: whether there is nothing but -inf that is not finite.
        loss_scale: of the backward that it is of.
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
        """Whether it made an inf or NaN of finite numbers."""
        return not self.parents and not self.sources

    @property
    def is_benign(self) -> bool:
        """Whether it wrote -inf because it was asked for, as into a mask."""
        return self.is_constant and self.is_minus_inf


class LostScalar(NamedTuple):
    """A Python number other than 0 that is 0 in the dtype of the op that takes it."""

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
