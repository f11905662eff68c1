"""Gradients that stay scaled until the step, and that nobody sees before they are unscaled.

An optimizer that says `_step_takes_scaled_grads = True` is shown a `StepInputs` as `scaled_grads` while
it steps: gradients as backward left them, what to multiply them by, and where the 16-bit weights are.
No FP32 gradient is ever written. Between `scale_loss` and the step such gradients are kept here, out of
`.grad`, and the parameters are of a class whose `.grad` first brings them back, unscaled: whoever looks
sees what any other optimizer would have shown.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import compress
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from amp.dtypes import SCALABLE

Incoming: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None]
"""What an optimizer that takes scaled gradients is shown for one parameter: the scaled gradient, dense;
if what is stepped is a master, the 16-bit weights of the model; and, if the master's bits have no other
place, the low half that makes it of the weights (`amp.kernels.split`). What is stepped then has a shape
and nothing else."""


class StepInputs(NamedTuple):
    """What an optimizer that takes scaled gradients is shown for one step.

    Attributes:
        grads: by the id of what is stepped.
        inv_scale: what to multiply the gradients by, float32 `[1]`; None is 1.
        found_inf: float32 `[1]`; the step is to be skipped where it is not 0. None never skips.
        clip: the same for clipping to the optimizer's `max_grad_norm`; None where it has none.
    """

    grads: dict[int, Incoming]
    inv_scale: Tensor | None
    found_inf: Tensor | None
    clip: Tensor | None


_SCALABLE = frozenset(SCALABLE)


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
        stepped: what the optimizer steps, masters or parameters.
        parameters: the model's parameter of each.
        inv_scale: float32 `[1]`, what the gradients are to be multiplied by; None is 1.
        done: ids of parameters that are not to be among them.
        grads: the gradient of each, if it is not what the model's parameter has.

    Attributes:
        stepped: those of them that have a gradient.
        parameters: likewise.
        grads: their gradients.
    """

    def __init__(
        self,
        look: Callable[[], None],
        stepped: Sequence[Tensor],
        parameters: Sequence[Tensor],
        inv_scale: Tensor | None,
        done: Collection[int] = (),
        grads: Sequence[Tensor | None] | None = None,
    ) -> None:
        self.inv_scale = inv_scale
        self._look = look
        self._clip: Tensor | None = None
        if grads is None:
            grads = [parameter.grad for parameter in parameters]
        there = [grad is not None for grad in grads]
        if done:
            there = [has and id(p) not in done for has, p in zip(there, parameters, strict=True)]
        self.stepped = list(compress(stepped, there))
        self.parameters = list(compress(parameters, there))
        self.grads: list[Tensor] = list(compress(grads, there))  # type: ignore[arg-type]

    def can_be_kept(self) -> bool:
        """Whether all gradients are dense numbers, and no parameter is of a class of its own."""
        return (
            set(map(type, self.stepped)) <= {nn.Parameter}
            and {grad.layout for grad in self.grads} <= {torch.strided}
            and {grad.dtype for grad in self.grads} <= _SCALABLE
        )

    def check(self, found_inf: Tensor, max_norm: float | None) -> None:
        """Set `found_inf`, float32 `[1]`, on overflow, and find out what clipping does. No host sync.

        Args:
            found_inf: never cleared.
            max_norm: what to clip the norm of all gradients to; None does not clip.
        """
        from amp.kernels.l2norm import l2norm  # load Triton
        from amp.kernels.unscale import check

        assert self.inv_scale is not None
        if max_norm is None:
            check(self.grads, self.inv_scale, found_inf)
        else:
            norms = l2norm(self.grads, self.inv_scale, found_inf=found_inf, max_norm=max_norm)
            self._clip = norms.clip

    def hide(self) -> None:
        """Keep the gradients from sight."""
        look = self._look
        stepped: Any
        for stepped, parameter in zip(self.stepped, self.parameters, strict=True):
            parameter.grad = None
            stepped._amp_look = look
            stepped.__class__ = Watched

    def show(self) -> None:
        """Let `.grad` be what it is without any of this. The gradients are still not there."""
        stepped: Any
        for stepped in self.stepped:
            kind: Any = type(stepped)
            if kind is Watched:
                stepped.__class__ = nn.Parameter
                del stepped._amp_look

    def put_back(self) -> None:
        """Put the gradients, scaled as they are, back into the `.grad` of the model's parameters."""
        self.show()
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            parameter.grad = grad

    def unscale(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return what is stepped and its unscaled gradient, FP32 for a master. No host sync."""
        from amp.kernels.unscale import unscale  # loads Triton

        self.show()
        targets = [
            grad if stepped is parameter else torch.empty_like(grad, dtype=torch.float32)
            for stepped, parameter, grad in zip(self.stepped, self.parameters, self.grads, strict=True)
        ]
        if self.inv_scale is not None:
            unscale(self.grads, targets, self.inv_scale, None)
        elif targets:
            torch._foreach_copy_(targets, self.grads)
        return zip(self.stepped, targets, strict=True)

    def for_step(
        self, found_inf: Tensor | None, low_of: Callable[[Tensor], Tensor | None] | None
    ) -> StepInputs:
        """Return what the optimizer is shown.

        Args:
            found_inf: what the checks found; None never skips.
            low_of: returns the low half of a master; None where masters are whole.
        """
        models = [
            None if parameter is stepped else parameter
            for stepped, parameter in zip(self.stepped, self.parameters, strict=True)
        ]
        lows: Iterable[Tensor | None] = (
            itertools.repeat(None) if low_of is None else map(low_of, self.stepped)
        )
        found_inf = None if found_inf is None else found_inf.reshape(1)
        incoming = zip(self.grads, models, lows, strict=False)
        grads = dict(zip(map(id, self.stepped), incoming, strict=True))
        return StepInputs(grads, self.inv_scale, found_inf, self._clip)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return what is stepped in the place of a model's parameter, with that."""
        return [(s, p) for s, p in zip(self.stepped, self.parameters, strict=True) if s is not p]

    def without_masters(self) -> ScaledGrads:
        """Return those of parameters without a master, to be looked at and not to be clipped."""
        grads = [
            grad if stepped is parameter else None
            for stepped, parameter, grad in zip(self.stepped, self.parameters, self.grads, strict=True)
        ]
        return ScaledGrads(self._look, self.stepped, self.parameters, self.inv_scale, grads=grads)
