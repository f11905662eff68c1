"""Verdicts: what the checks of gradients have found, and whether a step is skipped for it.

| the optimizer                                                  | who skips a step on overflow        |
|----------------------------------------------------------------|-------------------------------------|
| declares `_step_takes_scaled_grads`, as fused ones of amp do   | the optimizer, on the device        |
| declares `_step_supports_amp_scaling`, as torch's fused ones   | the optimizer, on the device        |
| any other                                                      | the host: it reads 4 bytes a block  |
| any, with a closure                                            | nobody: it is evaluated again       |
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp.kernels.tensor_lists import local

if TYPE_CHECKING:
    from amp.training.scaler import LossScaler


class Verdict:
    """The result of the check of one loss's gradients: `found_inf`, float32 `[1]`, 1 on overflow."""

    def __init__(self, scaler: LossScaler, found_inf: Tensor, step: int | None = None) -> None:
        self.scaler = scaler
        self.found_inf = found_inf
        self.step = scaler.updates if step is None else step

    def still(self, found_inf: Tensor) -> Verdict:
        """Return what is left of it, if its gradients were checked again. No host sync."""
        both = torch.minimum(self.found_inf, found_inf.to(self.found_inf.device))
        return Verdict(self.scaler, both, self.step)

    @property
    def known(self) -> bool | None:
        """Whether it was an overflow, if the host knows it; else None. No host sync."""
        is_known = self.scaler.is_on_host or "overflowed" in vars(self)
        return self.overflowed if is_known else None

    @functools.cached_property
    def overflowed(self) -> bool:
        """Whether it was an overflow. The host waits for the device, once, for 4 bytes."""
        return self.found_inf.item() > 0


def joined(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Return one verdict for each scaler: an overflow if any of its verdicts is one. No host sync."""
    found: dict[LossScaler, list[Tensor]] = {}
    for verdict in verdicts:
        each = found.setdefault(verdict.scaler, [])
        each.append(verdict.found_inf.to(each[0].device) if each else verdict.found_inf)
    return [Verdict(scaler, torch.stack(each).amax(dim=0)) for scaler, each in found.items()]


class Capabilities:
    """What an optimizer declares that it can do.

    Attributes:
        takes_scaled: whether it unscales gradients itself, and writes the model.
        may_skip: whether it skips steps after an overflow by itself, if its groups allow it.
        needs_inputs: whether it steps only from the `scaled_grads` that a session gives it.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.takes_scaled = declares(optimizer, "_step_takes_scaled_grads")
        works_alone = declares(optimizer, "_step_supports_amp_scaling")
        self.needs_inputs = self.takes_scaled and not works_alone
        self.may_skip = self.takes_scaled or (
            works_alone and "grad_scaler" not in inspect.signature(optimizer.step).parameters
        )

    def skips_on_device(self) -> bool:
        """Whether it skips its next step after an overflow by itself, without the host.

        Torch's SGD reads `found_inf` only if `fused` is set. If a parameter's first step is skipped,
        its momentum stays uninitialized, so the host decides about that step.
        """
        if self.takes_scaled or not self.may_skip:
            return self.takes_scaled
        state = self._optimizer.state
        return all(
            group.get("fused", True)
            and (not group.get("momentum") or all(p in state for p in group["params"]))
            for group in self._optimizer.param_groups
        )


def declares(optimizer: Any, capability: str) -> bool:
    """Whether the optimizer itself declares it; what a wrapper passes on does not count."""
    return inspect.getattr_static(optimizer, capability, False) is True


def note_step(
    verdicts: Sequence[Verdict],
    of_model: Callable[[], Iterable[tuple[Tensor, Tensor]]],
    names_of: Callable[[Sequence[Tensor]], list[str]],
) -> None:
    """Note in the record of each scaler which of its updates a step belongs to. No host sync.

    After a known overflow, note whose gradients were bad too.

    Args:
        verdicts: those that the step went by.
        of_model: returns the parameters that have a gradient, with it.
        names_of: returns the names of parameters.
    """
    for scaler in {verdict.scaler: None for verdict in verdicts}:
        scaler.recorder.note_step([each.step for each in verdicts if each.scaler is scaler])
    overflows = [verdict for verdict in verdicts if verdict.known]
    if overflows and (pairs := list(of_model())):
        names, are_good = names_of([each for each, _ in pairs]), _are_finite(grad for _, grad in pairs)
        for verdict in overflows:
            steps = torch.full_like(are_good, verdict.step, dtype=torch.float32)
            verdict.scaler.recorder.bad.send(names, steps.masked_fill(are_good, math.nan))


def _are_finite(grads: Iterable[Tensor]) -> Tensor:
    """Return whether each gradient has no inf or NaN, bool `[n]`. No host sync."""
    values = [local(grad) for grad in grads]
    dense = [each._values() if each.is_sparse else each for each in values]
    flags = [each.isfinite().all() for each in dense]
    return torch.stack([flag.to(flags[0].device) for flag in flags])


STEP, SKIP = "step", "skip"


def decide(verdicts: Sequence[Verdict], capabilities: Capabilities) -> str | Tensor:
    """Decide about a step.

    The host waits for 4 bytes of each verdict that it does not know, unless the optimizer skips itself.

    Returns:
        `STEP` or `SKIP`; or for an optimizer that skips by itself, whether it must, float32 `[1]`.
    """
    if not verdicts:
        return STEP
    if capabilities.may_skip and capabilities.skips_on_device():
        is_good = [verdict.known is False for verdict in verdicts]
        if all(is_good) and not capabilities.takes_scaled:
            return STEP  # torch's fused ones take longer with a flag
        found = [verdict.found_inf for verdict in verdicts]
        return functools.reduce(lambda x, y: torch.maximum(x, y.to(x.device)), found)
    return SKIP if any(verdict.overflowed for verdict in verdicts) else STEP


MOST_VERDICTS = 256
"""How many verdicts are kept until a step, which may never come; more than these are joined."""


class Verdicts:
    """The verdicts about the gradients of one optimizer since they were cleared, or checked anew.

    Attributes:
        of_gradients: what the checks found in the gradients that are there.
        of_cleared: what they found in gradients that were cleared since the last step, and may be
            assigned again.
        stepped: how many of `of_gradients` the last step has gone by.
    """

    def __init__(self) -> None:
        self.of_gradients: list[Verdict] = []
        self.of_cleared: list[Verdict] = []
        self.stepped = 0
        self._were_assigned = False
        self._left: set[Tensor | None] = set()
        """The gradients of parameters without a master that are not assigned, if any were cleared."""

    def add(self, verdict: Verdict, left: Tensor | None) -> None:
        """Note what the check of a block has found.

        Args:
            verdict: the verdict.
            left: whether gradients that the last step has left are bad still, float32 `[1]`, if they
                were checked again.
        """
        old, new = self.of_gradients[: self.stepped], [*self.of_gradients[self.stepped :], verdict]
        still = [] if left is None else [each.still(left) for each in old if each.known is not False]
        new = joined(new) if len(new) > MOST_VERDICTS else new
        self.of_gradients, self.stepped = [*still, *new], len(still)

    def note_left(self, grads: Sequence[Tensor | None]) -> None:
        """Note gradients of parameters without a master: a block has left them, or they are zeros."""
        if self.of_cleared:
            self._left = set(grads)

    def clear(self) -> None:
        """Note that the gradients were cleared."""
        if new := self.of_gradients[self.stepped :]:
            cleared = [*self.of_cleared, *new]
            self.of_cleared = joined(cleared) if len(cleared) > MOST_VERDICTS else cleared
        self.of_gradients, self._left, self.stepped = [], set(), 0
        self._were_assigned = False

    def look_for_assigned(self, grads: Sequence[Tensor | None]) -> None:
        """Note whether a parameter without a master was given a gradient since some were cleared."""
        if self.of_cleared and set(grads) - self._left - {None}:
            self._were_assigned = True

    def for_step(self, were_assigned: bool) -> list[Verdict]:
        """Return the verdicts that a step must go by.

        A gradient that was assigned may come from any block since the last step, although the gradients
        of that block were cleared.

        Args:
            were_assigned: whether gradients of masters were assigned.
        """
        if self.of_cleared and (were_assigned or self._were_assigned):
            self.of_gradients, self.of_cleared = [*self.of_cleared, *self.of_gradients], []
        return self.of_gradients

    @property
    def may_be_of_left(self) -> bool:
        """Whether a step may have been skipped for gradients that it has left. No host sync."""
        return any(verdict.known is not False for verdict in self.of_gradients[: self.stepped])

    def take(self) -> list[Verdict]:
        """Return the verdicts about the gradients that are there, and forget them."""
        taken, self.of_gradients, self.stepped = self.of_gradients, [], 0
        return taken

    def end_step(self) -> None:
        """Note that a step has gone by all of them."""
        self.of_cleared, self._were_assigned, self.stepped = [], False, len(self.of_gradients)
