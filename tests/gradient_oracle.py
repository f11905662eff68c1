"""What the gradients, verdicts and scales of a training loop must be, in plain FP64.

Written from docs/gradients.md and from the table of `amp/training/gradients.py`. Gradients are kept
unscaled, and it notes which of them are of the newest block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from amp.profiles.loss_scaling import LossScaling
from amp.training.gradients import State


def total_of(*parts: Tensor | None) -> Tensor | None:
    """Return the sum of the parts that are there; None if none is."""
    there = [part for part in parts if part is not None]
    return torch.stack(there).sum(0) if there else None


@dataclass
class Scale:
    """The documented state machine of one dynamic, static or absent loss scale."""

    config: LossScaling
    value: float = 0.0
    good: int = 0
    hysteresis: int = 0
    found_inf: bool = False
    version: int = 0
    """Moves with each update: gradients of an older version are not added to newer scaled ones."""

    def __post_init__(self) -> None:
        self.value, self.hysteresis = self.config.start, self.config.hysteresis

    @property
    def is_one(self) -> bool:
        """Whether there is no scaling at all."""
        return not self.config.dynamic and self.config.init == 1.0

    def update(self) -> None:
        """Move by what was found since the last update."""
        config, found, self.found_inf = self.config, self.found_inf, False
        self.version += not self.is_one
        if not config.dynamic:
            return
        if found:
            self.good, self.hysteresis = 0, max(self.hysteresis - 1, 0)
            if self.hysteresis == 0:
                self.value = min(self.value, max(self.value * config.backoff_factor, config.floor))
            return
        self.good += 1
        if config.consecutive_hysteresis:
            self.hysteresis = config.hysteresis
        if self.good >= config.growth_interval:
            self.value = max(self.value, min(self.value * config.growth_factor, config.max))
            self.good, self.hysteresis = 0, config.hysteresis


@dataclass(eq=False)
class Gradient:
    """The gradient of one parameter: the sum of its parts, each unscaled.

    Attributes:
        has_master: whether the optimizer steps a master of the parameter.
        total: what earlier blocks have left.
        newest: what the open block, or delayed ones, have made.
    """

    has_master: bool
    total: Tensor | None = None
    newest: Tensor | None = None

    @property
    def parts(self) -> list[Tensor]:
        """Those that are there."""
        return [part for part in (self.total, self.newest) if part is not None]

    def change(self, by: Callable[[Tensor], Tensor]) -> None:
        """Change the total, as a script does through `.grad`."""
        if self.total is not None:
            self.total = by(self.total)

    def add(self, gradient: Tensor) -> None:
        """Add what backward has made outside of any block."""
        self.total = total_of(self.total, gradient)


@dataclass(eq=False)
class Optimizer:
    """The gradients of one optimizer.

    Attributes:
        holds: whether it takes scaled gradients of masters.
        gradients: by the name of the parameter.
        verdicts: whether the checks since the last step have found an overflow, "elsewhere" if only in
            gradients of other optimizers; and those before it whose gradients are still there.
        used: how many of the verdicts the last step has gone by.
        in_doubt: whether the next step checks the gradients again, whatever the verdicts are.
        open: the block that it is inside.
        delayed: the block that left its gradients scaled.
        is_held: whether gradients of masters wait scaled; None where the table leaves it open.
    """

    holds: bool
    gradients: dict[str, Gradient] = field(default_factory=dict)
    verdicts: list[bool | str] = field(default_factory=list)
    used: int = 0
    in_doubt: bool = False
    open: Block | None = None
    delayed: Block | None = None
    is_held: bool | None = False

    @property
    def is_finite(self) -> bool:
        """Whether no gradient has an inf or NaN."""
        return all(part.isfinite().all() for g in self.gradients.values() for part in g.parts)

    @property
    def must_skip(self) -> bool:
        """Whether a step now must do nothing."""
        assert self.delayed is None
        return "elsewhere" in self.verdicts or (any(self.verdicts) and not self.is_finite)

    @property
    def states(self) -> tuple[State, ...]:
        """Those that the table allows now."""
        if self.open is not None:
            return (State.OPEN,)
        if self.delayed is not None:
            return (State.DELAYED,)
        if self.is_held is None:
            return (State.DEFERRED, State.SETTLED)
        return (State.DEFERRED if self.is_held else State.SETTLED,)

    def in_model(self, gradient: Gradient) -> Tensor | None:
        """Return what `.grad` of the model's parameter must be."""
        block = self.open or self.delayed
        newest = gradient.newest
        if newest is not None and block is not None:
            newest = newest * block.scale_of_loss
        is_hidden = block is not None and self.sets_aside(block)
        return total_of(None if is_hidden else gradient.total, newest)

    def sets_aside(self, block: Block) -> bool:
        """Whether a block keeps earlier gradients apart, so that it can drop its own."""
        return not block.scale.is_one or bool(self.masters())

    def masters(self) -> list[Gradient]:
        """Return the gradients of masters."""
        return [gradient for gradient in self.gradients.values() if gradient.has_master]

    def finish_delayed(self) -> None:
        """Unscale what is delayed, as leaving its block would have done."""
        if self.delayed is not None:
            self.delayed.finish()

    def add(self, name: str, gradient: Tensor) -> None:
        """Add what backward has made outside of any block: to what is there, or a new gradient."""
        self.gradients[name].add(gradient)
        self.is_held = None

    def clear_verdicts(self) -> None:
        """The gradients that they are about are gone; those since the step may be assigned again."""
        self.verdicts = [True for overflow in self.verdicts[self.used :] if overflow]
        self.used, self.in_doubt = 0, bool(self.verdicts)

    def zero_grad_of_model(self) -> None:
        """Clear the gradients of the model, also those that a block hides."""
        for gradient in self.gradients.values():
            gradient.newest = gradient.total = None
        self.is_held = None

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear everything, and what checks found."""
        for gradient in self.gradients.values():
            total, newest = [
                None if set_to_none or part is None else torch.zeros_like(part)
                for part in (gradient.total, gradient.newest)
            ]
            if not gradient.has_master:  # backward adds to where the zeros are
                total, newest = None, total_of(total, newest)
            gradient.total, gradient.newest = total, newest
            if self.open is None:
                gradient.total, gradient.newest = total_of(total, newest), None
        self.clear_verdicts()
        self.delayed, self.is_held = None, None if self.is_held else False

    def stepped(self) -> None:
        """The step was taken or skipped; gradients stay."""
        self.is_held = None
        first = next(filter(None, self.verdicts), None)
        if first is not None and (self.in_doubt or first is True) and self.is_finite:
            self.verdicts = [verdict == "elsewhere" and verdict for verdict in self.verdicts]
        self.used = len(self.verdicts)

    def settle(self, overflow: bool | None, is_alone: bool) -> None:
        """Add newest to the totals: the block is left.

        Args:
            overflow: what the check has found, if there was one.
            is_alone: whether it was of this optimizer's gradients alone.
        """
        new = [gradient for gradient in self.masters() if gradient.newest is not None]
        if self.holds and new:
            settled = any(gradient.total is not None for gradient in self.masters())
            self.is_held = True if not settled and self.is_held is not None else None
        for gradient in self.gradients.values():
            gradient.total, gradient.newest = total_of(gradient.total, gradient.newest), None
        if overflow is not None:
            left = [True for verdict in self.verdicts[: self.used] if verdict]
            self.in_doubt = bool(left) if self.used else self.in_doubt
            verdict = "elsewhere" if overflow and not is_alone and self.is_finite else overflow
            self.verdicts = [*left, *self.verdicts[self.used :], verdict]
            self.used = len(left)
        self.open = self.delayed = None


class Block:
    """One `scale_loss` block."""

    def __init__(self, scale: Scale, optimizers: Iterable[Optimizer]) -> None:
        self.scale = scale
        self.optimizers = list(optimizers)
        while any(list(map(self._finish_other_scale, self.optimizers))):
            pass
        self.version, self.scale_of_loss = scale.version, scale.value
        for optimizer in self.optimizers:
            optimizer.open = self
            if not any(gradient.parts for gradient in optimizer.gradients.values()):
                optimizer.clear_verdicts()  # what overflowed was cleared by hand

    def _finish_other_scale(self, optimizer: Optimizer) -> bool:
        delayed = optimizer.delayed
        if delayed is None or (delayed.scale.is_one and self.scale.is_one):
            return False
        if delayed.scale is self.scale and delayed.version == self.scale.version:
            return False
        delayed.finish()
        return True

    def backward(self, name: str, gradient: Tensor) -> None:
        """Add to the newest gradient of a parameter."""
        for optimizer in self.optimizers:
            if (known := optimizer.gradients.get(name)) is not None:
                known.newest = total_of(known.newest, gradient)

    def leave(self, update: bool = True) -> None:
        """Check and unscale."""
        self._unscale(self.optimizers, update)

    def finish(self) -> None:
        """Do the same for those optimizers that still have this block delayed."""
        self._unscale([o for o in self.optimizers if o.delayed is self and o.open is None], True)

    def _unscale(self, optimizers: list[Optimizer], update: bool) -> None:
        newest = [g.newest for o in optimizers for g in o.gradients.values() if g.newest is not None]
        overflow = None
        if self.scale.config.check:
            in_place = [o for o in optimizers if not o.sets_aside(self)]  # backward adds to totals
            newest += [g.total for o in in_place for g in o.gradients.values() if g.total is not None]
            self.scale.found_inf |= not all(gradient.isfinite().all() for gradient in newest)
            overflow = self.scale.found_inf
        for optimizer in optimizers:
            optimizer.settle(overflow, len(optimizers) == 1)
        if update:
            self.scale.update()

    def delay(self) -> None:
        """Leave the gradients scaled."""
        for optimizer in self.optimizers:
            optimizer.open, optimizer.delayed = None, optimizer.delayed or self

    def abort(self) -> None:
        """Drop the newest, but for what backward has added to others, of delayed blocks or in place."""
        for optimizer in self.optimizers:
            optimizer.open = None
            if optimizer.delayed is not None:
                continue
            for gradient in optimizer.gradients.values():
                if not optimizer.sets_aside(self) and gradient.newest is not None:
                    gradient.add(gradient.newest)
                gradient.newest = None
