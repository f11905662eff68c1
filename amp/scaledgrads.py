"""Gradients that stay scaled until the step, and that nobody sees before they are unscaled.

An optimizer that says `_step_takes_scaled_grads = True` is shown a `StepInputs` as `scaled_grads` while
it steps: gradients as backward left them, what to multiply them by, and where the 16-bit weights are.
No FP32 gradient is ever written. Between `scale_loss` and the step such gradients are kept here, out of
`.grad`, and the parameters are of a class whose `.grad` first brings them back, unscaled: whoever looks
sees what any other optimizer would have shown.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp.dtypes import SCALABLE
from amp.kernels import bulk


class StepInputs(NamedTuple):
    """What an optimizer that takes scaled gradients is shown for one step.

    Attributes:
        stepped: what is to be stepped, masters first; others may have a gradient in their `.grad`.
        grads: their gradients, dense, as backward left them.
        models: the 16-bit weights of the masters.
        lows: the low halves that make masters of the weights, if masters have no other place
            (`amp.kernels.split`); what is stepped then has a shape and nothing else. Else None.
        inv_scale: what to multiply the gradients by, float32 `[1]`; None is 1.
        found_inf: float32 `[1]`; the step is to be skipped where it is not 0. None never skips.
        clip: what to multiply them by for clipping to the optimizer's `max_grad_norm`, likewise; None
            where that is not known.
    """

    stepped: Sequence[Tensor]
    grads: Sequence[Tensor]
    models: Sequence[Tensor]
    lows: Sequence[Tensor] | None
    inv_scale: Tensor | None
    found_inf: Tensor | None
    clip: Tensor | None


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
        look: called before a gradient that is kept is seen; it has to be back after that.
        masters: masters that the optimizer steps.
        models: the model's parameter of each.
        direct: parameters of the model that it steps themselves.
        inv_scale: float32 `[1]`, what the gradients are to be multiplied by; None is 1.
        done: ids of parameters of the model that are not to be among them.
        grads: the gradients of masters, if they are not what the model's parameters have.

    Attributes:
        masters: those that have a gradient.
        models: likewise.
        direct: likewise.
        grads: the gradients, of masters first.
    """

    def __init__(
        self,
        look: Callable[[], None],
        masters: Sequence[Tensor],
        models: Sequence[Tensor],
        direct: Sequence[Tensor],
        inv_scale: Tensor | None,
        done: Collection[int] = (),
        grads: Sequence[Tensor | None] | None = None,
    ) -> None:
        self.inv_scale = inv_scale
        self._look = look
        self._clip: Tensor | None = None
        of_models = bulk.grads(models) if grads is None else grads
        self.masters, self.models, of_models = _with_grads(of_models, done, masters, models)
        self.direct, of_direct = _with_grads(bulk.grads(direct), done, direct)
        self.grads: list[Tensor] = of_models + of_direct

    @property
    def stepped(self) -> list[Any]:
        """What the optimizer steps."""
        return self.masters + self.direct

    def can_be_kept(self) -> bool:
        """Whether all gradients are dense numbers, and no parameter is of a class of its own."""
        return (
            bulk.types(self.stepped) <= {nn.Parameter}
            and bulk.layouts(self.grads) <= {torch.strided}
            and set(bulk.dtypes(self.grads)) <= SCALABLE
        )

    def check(self, found_inf: Tensor, max_norm: float | None) -> None:
        """Set `found_inf`, float32 `[1]`, on overflow, and find out what clipping does. No host sync.

        Args:
            found_inf: never cleared.
            max_norm: what to clip the norm of all gradients to; None does not clip.
        """
        from amp.kernels.l2norm import l2norm  # load Triton
        from amp.kernels.tables import Located
        from amp.kernels.unscale import check

        assert self.inv_scale is not None
        self.grads = Located(self.grads)  # until they are stepped on, or shown
        if max_norm is None:
            check(self.grads, self.inv_scale, found_inf)
        else:
            norms = l2norm(self.grads, self.inv_scale, found_inf=found_inf, max_norm=max_norm)
            self._clip = norms.clip

    def hide(self) -> None:
        """Keep the gradients from sight."""
        bulk.clear_grads(self.models)
        bulk.clear_grads(self.direct)
        look = self._look
        for parameter in self.stepped:
            parameter._amp_look = look
            parameter.__class__ = Watched

    def show(self) -> None:
        """Let `.grad` be what it is without any of this. The gradients are still not there."""
        for parameter in self.stepped:
            kind: type = type(parameter)
            if kind is Watched:
                parameter.__class__ = nn.Parameter
                del parameter._amp_look

    def put_back(self) -> None:
        """Put the gradients, scaled as they are, back into the `.grad` of the model's parameters."""
        self.show()
        for parameter, grad in zip(self.models + self.direct, self.grads, strict=True):
            parameter.grad = grad

    def unscale(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return what is stepped and its unscaled gradient, FP32 for a master. No host sync."""
        from amp.kernels.unscale import unscale  # loads Triton

        self.show()
        of_masters, of_direct = self.grads[: len(self.masters)], self.grads[len(self.masters) :]
        targets = [torch.empty_like(grad, dtype=torch.float32) for grad in of_masters] + of_direct
        if self.inv_scale is not None:
            unscale(self.grads, targets, self.inv_scale, None)
        elif targets:
            torch._foreach_copy_(targets, self.grads)
        return zip(self.stepped, targets, strict=True)

    def for_step(
        self, found_inf: Tensor | None, low_of: Callable[[Tensor], Tensor] | None
    ) -> StepInputs:
        """Return what the optimizer is shown.

        Args:
            found_inf: what the checks found; None never skips.
            low_of: returns the low half of a master; None where masters are whole.
        """
        return StepInputs(
            self.stepped,
            self.grads,
            self.models,
            None if low_of is None else list(map(low_of, self.masters)),
            self.inv_scale,
            None if found_inf is None else found_inf.reshape(1),
            self._clip,
        )

    def without_masters(self) -> ScaledGrads | None:
        """Return those of parameters without a master, to be looked at and not to be clipped."""
        if not self.direct:
            return None
        others = ScaledGrads(self._look, (), (), (), self.inv_scale)
        others.direct = self.direct
        others.grads += self.grads[len(self.masters) :]
        return others


def _with_grads(
    grads: Sequence[Tensor | None], done: Collection[int], *lists: Sequence[Tensor]
) -> list[list[Any]]:
    """Return of parallel lists, and of their gradients, what has a gradient and is not done.

    Args:
        grads: the gradients.
        done: ids of tensors in the last list.
        *lists: the lists.
    """
    if not done and type(None) not in bulk.types(grads):
        return [list(tensors) for tensors in (*lists, grads)]
    there = [grad is not None for grad in grads]
    if done:
        there = [has and id(p) not in done for has, p in zip(there, lists[-1], strict=True)]
    return [list(compress(tensors, there)) for tensors in (*lists, grads)]
