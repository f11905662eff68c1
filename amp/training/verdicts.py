"""Verdicts: results of the checks of gradients, and whether a step is skipped for them.

| the optimizer                                                  | who skips a step on overflow        |
|----------------------------------------------------------------|-------------------------------------|
| declares `_step_takes_scaled_grads`, as fused ones of amp do   | the optimizer, on the device        |
| declares `_step_supports_amp_scaling`, as torch's fused ones   | the optimizer, on the device        |
| any other                                                      | the host: it reads 4 bytes a block  |
| any, with a closure                                            | nobody: it is evaluated again       |
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp.kernels.tensor_lists import local

if TYPE_CHECKING:
    from amp.training.scaler import LossScaler


class Verdict:
    """The result of the check of one loss's gradients.

    Args:
        scaler: of the loss.
        found_inf: float32 `[1]`, 1 on overflow.
        step: the number of the scaler's update; None for the next one.
        is_final: whether it may be about gradients of other optimizers, so that it counts for the next
            step whatever its gradients are.
    """

    def __init__(
        self, scaler: LossScaler, found_inf: Tensor, step: int | None = None, is_final: bool = False
    ) -> None:
        self.scaler, self.found_inf, self.is_final = scaler, found_inf, is_final
        self.step = scaler.updates if step is None else step

    def still(self, found_inf: Tensor) -> Verdict:
        """Return the verdict after gradients were checked again. No host sync."""
        if self.is_final:
            return self
        both = torch.minimum(self.found_inf, found_inf.to(self.found_inf.device))
        return Verdict(self.scaler, both, self.step)

    def open_to_doubt(self) -> Verdict:
        """Return the same for later steps, which may check the gradients again."""
        if not self.is_final:
            return self
        same = copy.copy(self)
        same.is_final = False
        return same

    @property
    def overflowed_if_known(self) -> bool | None:
        """Whether it was an overflow, if the host knows it; else None. No host sync."""
        is_known = self.scaler.is_on_host or "overflowed" in vars(self)
        return self.overflowed if is_known else None

    def ask(self) -> bool:
        """Return whether it was an overflow, and do not remember it: only one rank may have asked.

        The host waits for the device, for 4 bytes, if it does not know.
        """
        known = self.overflowed_if_known
        return self.found_inf.item() > 0 if known is None else known

    @functools.cached_property
    def overflowed(self) -> bool:
        """Whether it was an overflow. The host waits for the device, once, for 4 bytes."""
        return self.found_inf.item() > 0


def joined(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Return one verdict for each scaler: an overflow if any of its verdicts is one. No host sync.

    It has the number of a known overflow, if there is one, and else of the newest verdict.
    """
    alike: dict[LossScaler, list[Verdict]] = {}
    for verdict in verdicts:
        alike.setdefault(verdict.scaler, []).append(verdict)
    result = []
    for scaler, each in alike.items():
        found = [verdict.found_inf.to(each[0].found_inf.device) for verdict in each]
        step = next((verdict.step for verdict in each if verdict.overflowed_if_known), each[-1].step)
        is_final = any(verdict.is_final for verdict in each)
        result.append(Verdict(scaler, torch.stack(found).amax(dim=0), step, is_final))
    return result


class Capabilities:
    """The capabilities that an optimizer declares.

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


def note_step(verdicts: Sequence[Verdict], attached: Any) -> None:
    """Note in the record of each scaler which of its updates a step belongs to. No host sync.

    After a known overflow, note whose gradients were bad too.

    Args:
        verdicts: those that the step went by.
        attached: the `AttachedOptimizer`.
    """
    verdicts = [verdict for verdict in verdicts if verdict.overflowed_if_known is not False]
    for scaler in {verdict.scaler: None for verdict in verdicts}:
        scaler.recorder.note_step([each.step for each in verdicts if each.scaler is scaler])
    overflows = [verdict for verdict in verdicts if verdict.overflowed_if_known]
    if overflows and (pairs := attached.gradients.grads_for_step()):
        names = attached.named.names_of([each for each, _ in pairs])
        are_good = _are_finite(grad for _, grad in pairs)
        for verdict in overflows:
            steps = torch.full_like(are_good, verdict.step, dtype=torch.float32)
            verdict.scaler.recorder.bad.send(steps.masked_fill(are_good, math.nan), names)


def _are_finite(grads: Iterable[Tensor]) -> Tensor:
    """Return whether each gradient has no inf or NaN, bool `[n]`. No host sync."""
    values = [local(grad) for grad in grads]
    dense = [each._values() if each.is_sparse else each for each in values]
    flags = [each.isfinite().all() for each in dense]
    return torch.stack([flag.to(flags[0].device) for flag in flags])


def decide(verdicts: Sequence[Verdict], capabilities: Capabilities) -> tuple[bool, Tensor | None]:
    """Decide about a step.

    The host waits for 4 bytes of each verdict that it does not know, unless the optimizer skips itself.

    Returns:
        Whether it is skipped; and for an optimizer that skips by itself, whether it must, float32
        `[1]`.
    """
    if not verdicts:
        return False, None
    if capabilities.may_skip and capabilities.skips_on_device():
        is_good = [verdict.overflowed_if_known is False for verdict in verdicts]
        if all(is_good) and not capabilities.takes_scaled:
            return False, None  # torch's fused ones take longer with a flag
        found = [verdict.found_inf for verdict in verdicts]
        return False, functools.reduce(lambda x, y: torch.maximum(x, y.to(x.device)), found)
    return any(verdict.overflowed for verdict in verdicts), None


MOST_VERDICTS = 256
"""How many verdicts are kept until a step, which may never come; more than these are joined."""


class Verdicts:
    """The results of the checks of an optimizer's gradients.

    Attributes:
        found: the verdicts since the last step, also about gradients that were cleared since then and
            may be assigned again; and those of earlier steps whose gradients are still there.
        stepped: how many of them the last step has gone by.
        may_be_of_others: whether they may be about other gradients than those that are there.
    """

    def __init__(self) -> None:
        self.found: list[Verdict] = []
        self.stepped = 0
        self.may_be_of_others = False

    def add(self, verdict: Verdict) -> None:
        """Note what the check of a block has found."""
        if self.stepped:  # the gradients of a skipped step are left, if they were not set to zero
            known = self.found[: self.stepped]
            left = [each.open_to_doubt() for each in known if each.overflowed_if_known is not False]
            self.found[: self.stepped], self.stepped = left, len(left)
            self.may_be_of_others = bool(left)
        self.found.append(verdict)
        if len(self.found) > MOST_VERDICTS:
            self.found, self.stepped, self.may_be_of_others = joined(self.found), 0, True

    def clear(self) -> None:
        """Note that the gradients were cleared."""
        new, self.stepped = self.found[self.stepped :], 0
        self.found = [each.open_to_doubt() for each in new if each.overflowed_if_known is not False]
        self.may_be_of_others = bool(self.found)

    def forget(self) -> None:
        """Forget all of them."""
        self.found, self.stepped, self.may_be_of_others = [], 0, False

    def end_step(self, verdicts: Sequence[Verdict]) -> None:
        """Note that a step has gone by verdicts, which it may have asked again. Idempotent."""
        known, now = [[(each.scaler, each.step) for each in those] for those in (self.found, verdicts)]
        if known == now:  # no hook of the step has had a block
            self.found = list(verdicts)
        self.stepped = len(self.found)
