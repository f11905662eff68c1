"""`StepInputs`: gradients and masters for an optimizer that takes scaled gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from amp.kernels.interrupts import Changes
from amp.kernels.tensor_lists import TensorList
from amp.lazy import kernels
from amp.masters.agreement import Pairs
from amp.training.deferral import Deferred

if TYPE_CHECKING:
    from amp.kernels.l2norm import Norms


def _no_names(tensors: Sequence[Tensor]) -> Sequence[str | None]:
    return [None] * len(tensors)


class StepInputs:
    """The `scaled_grads` of an optimizer that declares `_step_takes_scaled_grads = True`.

    Gradients are looked up on first use, inside the step: hooks that run before it may still read and
    change them. Parameters without a master are not included: their gradients are unscaled, in their
    `.grad`.

    Attributes:
        found_inf: float32 `[1]`; the step is to be skipped where it is not 0. None never skips.
        names_of: returns the names of parameters or masters in their models, None for unknown ones.
        changes: the plan of the step, for an optimizer that plans it first: an interrupt then leaves
            all changes made, or none. The planned changes raise the version of each of `models` by one.
        own_inv_scale: float32 `[1]`, what to multiply the gradients in `.grad` by; None is 1.
    """

    own_inv_scale: Tensor | None = None
    merges = False
    """Whether masters are first to take what other code has written to `models`."""

    def __init__(
        self,
        look_up: Callable[[], Deferred],
        low_halves: Callable[[Sequence[Tensor]], Sequence[Tensor] | None],
        found_inf: Tensor | None,
        names_of: Callable[[Sequence[Tensor]], Sequence[str | None]] = _no_names,
    ) -> None:
        self._look_up = look_up
        self.names_of = names_of
        self._low_halves = low_halves
        self.found_inf = found_inf
        self.changes = Changes()

    @cached_property
    def deferred(self) -> Deferred:
        """The gradients of masters, and the masters, with their current addresses."""
        return self._look_up()

    @property
    def stepped(self) -> Sequence[Tensor]:
        """The masters that have a gradient."""
        return self.deferred.of.masters

    @property
    def params(self) -> TensorList:
        """The same masters, to be updated in place."""
        return self.deferred.of.master_list

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
        return self._low_halves(self.deferred.of.masters)

    @property
    def inv_scale(self) -> Tensor | None:
        """What to multiply the gradients by, float32 `[1]`; None is 1."""
        return self.deferred.inv_scale

    @property
    def norms(self) -> Norms | None:
        """The norm of the unscaled gradients, and the factor that clips it, if they are known."""
        return self.deferred.norms


_NOTHING = Deferred(Pairs(()), TensorList([]))


def inputs_outside_of_a_session(optimizer: Any) -> StepInputs:
    """Return the inputs of an optimizer without masters, and perhaps with a GradScaler."""
    scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    found_inf = None if found_inf is None else found_inf.reshape(1)
    inputs = StepInputs(lambda: _NOTHING, lambda masters: None, found_inf)
    inputs.own_inv_scale = None if scale is None else kernels.update_scale.inverse(scale).reshape(1)
    return inputs
