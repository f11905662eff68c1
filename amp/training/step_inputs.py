"""`StepInputs`: gradients and masters for an optimizer that takes scaled gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from amp.kernels.interrupts import Changes
from amp.kernels.tensor_lists import TensorList
from amp.lazy import kernels
from amp.masters.agreement import Pairs
from amp.training.deferred_gradients import Deferred


@dataclass(eq=False)
class StepInputs:
    """The `scaled_grads` of an optimizer that declares `_step_takes_scaled_grads = True`.

    Gradients are looked up on first use, inside the step: hooks that run before it may still read and
    change them. Parameters without a master are not included: their gradients are unscaled, in their
    `.grad`.

    Attributes:
        names_of: returns the number of the model of each parameter or master and its name there,
            without the names of wrappers, and None for unknown ones.
        found_inf: float32 `[1]`; the step is to be skipped where it is not 0. None never skips.
        merges: whether masters first take what a script has written to `models`.
        own_inv_scale: float32 `[1]`, what to multiply the gradients in `.grad` by; None is 1.
        changes: the plan of the step, for an optimizer that plans it first: an interrupt then leaves
            all changes made, or none. The planned changes raise the version of each of `models` by one.
    """

    _look_up: Callable[[], Deferred]
    names_of: Callable[[Sequence[Tensor]], Sequence[str | None]]
    found_inf: Tensor | None
    merges: bool = False
    own_inv_scale: Tensor | None = None
    changes: Changes = field(default_factory=Changes)

    @cached_property
    def deferred(self) -> Deferred:
        """The gradients of masters, and the masters, with their current addresses."""
        return self._look_up()

    @property
    def stepped(self) -> Sequence[Tensor]:
        """The masters that have a gradient."""
        return self.deferred.of.masters

    @property
    def grads(self) -> TensorList:
        """Their gradients: dense, as backward left them, or float32 sums of several blocks."""
        return self.deferred.grads

    @property
    def models(self) -> TensorList:
        """The 16-bit weights of the masters, to be written."""
        return self.deferred.of.model_list

    @cached_property
    def lows(self) -> Sequence[Tensor] | None:
        """The low halves of lean masters (`amp.kernels.split`); None if masters are whole.

        Lean masters in `stepped` have a shape, and no values.
        """
        of = self.deferred.of
        return None if of.are_whole else [pair.low for pair in of.pairs]

    @property
    def inv_scale(self) -> Tensor | None:
        """What to multiply the gradients by, float32 `[1]`; None is 1."""
        return self.deferred.inv_scale


_NOTHING = Deferred(Pairs(()), TensorList([]))


def inputs_outside_of_a_session(optimizer: Any) -> StepInputs:
    """Return the inputs of an optimizer without masters, and perhaps with a GradScaler."""
    scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    return StepInputs(
        lambda: _NOTHING,
        lambda tensors: [None] * len(tensors),
        found_inf=None if found_inf is None else found_inf.reshape(1),
        own_inv_scale=None if scale is None else kernels.update_scale.inverse(scale).reshape(1),
    )
