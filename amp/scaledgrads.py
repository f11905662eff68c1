"""Gradients that stay scaled until the step, and that nobody sees before they are unscaled.

An optimizer that says `_step_takes_scaled_grads = True` is shown a `StepInputs` as `scaled_grads` while
it steps: gradients as backward left them, what to multiply them by, and where the 16-bit weights are.
No FP32 gradient is ever written. Between `scale_loss` and the step such gradients are kept here, out of
`.grad`, and the parameters are of a class whose `.grad` first brings them back, unscaled: whoever looks
sees what any other optimizer would have shown.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class ScaledGrad(NamedTuple):
    """One gradient that is still scaled.

    Attributes:
        stepped: what the optimizer steps, a master or a parameter.
        parameter: the model's parameter.
        grad: its gradient, as backward left it.
    """

    stepped: Tensor
    parameter: Tensor
    grad: Tensor


class Incoming(NamedTuple):
    """What an optimizer that takes scaled gradients is shown for one parameter.

    Attributes:
        grad: the scaled gradient, dense.
        model: if what is stepped is a master, the 16-bit weights of the model.
        low: if the master's bits have no other place, the low half that makes it of the weights; see
            `amp.kernels.split`. What is stepped then has a shape and nothing else.
    """

    grad: Tensor
    model: Tensor | None
    low: Tensor | None


class StepInputs(NamedTuple):
    """What an optimizer that takes scaled gradients is shown for one step.

    Attributes:
        grads: by what is stepped.
        inv_scale: what to multiply the gradients by, float32 `[1]`; None is 1.
        found_inf: float32 `[1]`; the step is to be skipped where it is not 0. None never skips.
        clip: the same for clipping to the optimizer's `max_grad_norm`; None where it has none.
    """

    grads: dict[Tensor, Incoming]
    inv_scale: Tensor | None
    found_inf: Tensor | None
    clip: Tensor | None


def can_be_kept(entry: ScaledGrad) -> bool:
    """Whether a gradient is dense, and its parameter of no class of its own."""
    return type(entry.stepped) is nn.Parameter and entry.grad.layout is torch.strided


class Watched(nn.Parameter):
    """A parameter whose gradient is kept: before anything is done to `.grad`, it is brought back.

    Attributes:
        _amp_look: brings it back, and makes this an ordinary parameter.
    """

    _amp_look: Callable[[], None]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied: nn.Parameter = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        copied.__class__ = nn.Parameter
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._amp_look()
        return self.__reduce_ex__(protocol)

    @property
    def grad(self) -> Tensor | None:
        """The unscaled gradient."""
        self._amp_look()
        return self.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._amp_look()
        self.grad = value  # pyright: ignore[reportIncompatibleVariableOverride]

    @grad.deleter
    def grad(self) -> None:
        self._amp_look()
        del self.grad


class ScaledGrads:
    """The gradients of one loss for one optimizer.

    Args:
        kept: the gradients, each of its own parameter.
        look: called before a gradient that is kept is seen; it has to be back after that.
        inv_scale: float32 `[1]`, what they are to be multiplied by; None is 1.
    """

    def __init__(
        self, kept: list[ScaledGrad], look: Callable[[], None], inv_scale: Tensor | None
    ) -> None:
        self.kept = kept
        self.inv_scale = inv_scale
        self._look = look
        self._clip: Tensor | None = None

    def check(self, found_inf: Tensor, max_norm: float | None) -> None:
        """Set `found_inf`, float32 `[1]`, on overflow, and find out what clipping does. No host sync.

        Args:
            found_inf: never cleared.
            max_norm: what to clip the norm of all gradients to; None does not clip.
        """
        from amp.kernels.l2norm import l2norm  # load Triton
        from amp.kernels.unscale import check

        assert self.inv_scale is not None
        grads = [entry.grad for entry in self.kept]
        if max_norm is None:
            check(grads, self.inv_scale, found_inf)
        else:
            norms = l2norm(grads, self.inv_scale, found_inf=found_inf, max_norm=max_norm)
            self._clip = norms.clip

    def hide(self) -> None:
        """Keep the gradients from sight."""
        for entry in self.kept:
            stepped: Any = entry.stepped
            entry.parameter.grad = None
            stepped._amp_look = self._look
            stepped.__class__ = Watched

    def show(self) -> None:
        """Let `.grad` be what it is without any of this. The gradients are still not there."""
        for entry in self.kept:
            stepped: Any = entry.stepped
            kind: Any = type(stepped)
            if kind is Watched:
                stepped.__class__ = nn.Parameter
                del stepped._amp_look

    def put_back(self) -> None:
        """Put the gradients, scaled as they are, back into the `.grad` of the model's parameters."""
        self.show()
        for _, parameter, grad in self.kept:
            parameter.grad = grad

    def unscale(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return what is stepped and its unscaled gradient, FP32 for a master. No host sync."""
        from amp.kernels.unscale import unscale  # loads Triton

        self.show()
        sources = [entry.grad for entry in self.kept]
        targets = [
            grad if stepped is parameter else torch.empty_like(grad, dtype=torch.float32)
            for stepped, parameter, grad in self.kept
        ]
        if self.inv_scale is not None:
            unscale(sources, targets, self.inv_scale, None)
        elif targets:
            torch._foreach_copy_(targets, sources)
        return zip([entry.stepped for entry in self.kept], targets, strict=True)

    def for_step(
        self, found_inf: Tensor | None, low_of: Callable[[Tensor], Tensor | None]
    ) -> StepInputs:
        """Return what the optimizer is shown.

        Args:
            found_inf: what the checks found; None never skips.
            low_of: the low half of a master, or None.
        """
        grads = {
            stepped: Incoming(grad, None, None)
            if stepped is parameter
            else Incoming(grad, parameter, low_of(stepped))
            for stepped, parameter, grad in self.kept
        }
        found_inf = None if found_inf is None else found_inf.reshape(1)
        return StepInputs(grads, self.inv_scale, found_inf, self._clip)

    def without(self, stepped: Collection[Tensor]) -> ScaledGrads:
        """Return those of other parameters, to be looked at and not to be clipped."""
        kept = [entry for entry in self.kept if entry.stepped not in stepped]
        return ScaledGrads(kept, self._look, self.inv_scale)
