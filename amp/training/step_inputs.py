"""What an optimizer that takes scaled gradients is shown while it steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from amp.kernels.tensor_lists import TensorList

if TYPE_CHECKING:
    from amp.kernels.l2norm import Norms
    from amp.training.held import Held


class StepInputs:
    """What an optimizer that says `_step_takes_scaled_grads = True` finds as its `scaled_grads`.

    It is looked up when it is first asked for, inside the step: hooks that run before may still look at
    gradients and change them. Parameters without a master are not among it: their gradients are
    unscaled, in their `.grad`.

    Attributes:
        found_inf: float32 `[1]`; the step is to be skipped where it is not 0. None never skips.
        wrote_models_once: to be set by an optimizer that has raised the version of each of `models` by
            one, as `amp.kernels.stepping.step` does; then nobody asks for it.
    """

    own_inv_scale = None
    """What is in `.grad` is unscaled."""

    def __init__(
        self,
        look_up: Callable[[], Held],
        low_halves: Callable[[Sequence[Tensor]], Sequence[Tensor] | None],
        found_inf: Tensor | None,
    ) -> None:
        self._look_up = look_up
        self._low_halves = low_halves
        self.found_inf = found_inf
        self.wrote_models_once = False

    @cached_property
    def held(self) -> Held:
        """The gradients of masters, and the masters."""
        return self._look_up()

    @property
    def stepped(self) -> TensorList:
        """The masters that have a gradient."""
        return self.held.of.master_list

    @property
    def grads(self) -> TensorList:
        """Their gradients: dense, as backward left them, or float32 sums of several blocks."""
        return self.held.grads

    @property
    def models(self) -> TensorList:
        """The 16-bit weights of the masters, to be written."""
        return self.held.of.model_list

    @cached_property
    def lows(self) -> Sequence[Tensor] | None:
        """The low halves that make masters of the weights (`amp.kernels.split`), if masters are lean.

        What is in `stepped` has a shape and nothing else then. None where masters are whole.
        """
        return self._low_halves(self.stepped)

    @property
    def inv_scale(self) -> Tensor | None:
        """What to multiply the gradients by, float32 `[1]`; None is 1."""
        return self.held.inv_scale

    @property
    def norms(self) -> Norms | None:
        """The norm of the unscaled gradients, and what clips it to `max_grad_norm`, if it is known."""
        return self.held.norms
