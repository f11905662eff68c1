"""`amp.doctor`: finding a change that makes a step finite, by trying it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from amp.arguments import advise_on_eps, attached_to
from amp.diagnosis.advice import with_range
from amp.diagnosis.causes import findings_of
from amp.diagnosis.diagnose import named_models
from amp.diagnosis.findings import Finding, Report, exact, rule_for
from amp.errors import AmpRuntimeError, AmpTypeError, check_function
from amp.other_names import names_keywords
from amp.profiles.properties import excepting
from amp.trials.replay import Replay

_RUINS = {"range", "absorbed range", "eps", "loss scale", "underflow", "mathematics"}
"""The causes that a trial must not have."""
_DIGITS = {"cancellation", "rounding", "cast"}
"""The causes that lose digits: those of FP32 cure them, and its range does not."""
CURABLE = _RUINS | _DIGITS
"""The causes that another precision may cure."""
_TRIES = 8
_ENOUGH = 3
"""If more modules than this need FP32, another level is the better advice."""
_LOWEST_SCALE = 2.0**-24


@dataclass(frozen=True)
class Cure:
    """A change that makes the step finite.

    Attributes:
        modules: the names of the modules that must run in FP32; may be empty.
        arguments: the arguments of the model that must not be cast, with those of the profile in
            force; may be empty.
        scale: the highest loss scale at which the step is finite; None if the scale need not change.
        is_dynamic: whether the loss scale is dynamic, so that `scale` is only where it begins.
        level: another level, if nothing else helps; else None.
        runs: how many replays were made.
    """

    modules: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    scale: float | None = None
    is_dynamic: bool = True
    level: str | None = None
    runs: int = 0

    @property
    def yaml(self) -> str:
        """The cure as YAML, to paste into a profile."""
        lines = []
        if self.level is not None:
            lines.append(f"extends: {self.level}")
        if self.modules:
            lines += ["rules:", *dict.fromkeys(f"  - {rule_for(name)}" for name in self.modules)]
        if self.arguments:
            lines.append(excepting(self.arguments))
        if self.scale is not None:
            scale = exact(self.scale)
            begins = f"{{init: {scale}}}" if self.is_dynamic else scale
            lines.append(f"loss_scale: {begins}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Prescription:
    """The result of `amp.doctor`.

    Attributes:
        report: what went wrong.
        cure: the change that helps, or None.
        why_not: why there is no cure; empty if there is one, or nothing went wrong.
        remark: on a healthy step: which layers are too small to gain in FP8; or empty.
    """

    report: Report
    cure: Cure | None = None
    why_not: str = ""
    remark: str = ""

    def __str__(self) -> str:
        if self.report.is_healthy:
            return f"{self.report}\n{self.remark}".strip()
        if self.cure is None:
            return f"{self.report}\nnot cured: {self.why_not}"
        return f"{self.report}\ncure, verified in {self.cure.runs} replays:\n{self.cure.yaml}"


@names_keywords
def doctor(
    step: Callable[[], Any], model: nn.Module | Sequence[nn.Module], optimizer: Any = None
) -> Prescription:
    """Find what made a step inf or NaN, and the smallest change that fixes it, by trying it.

        print(amp.doctor(lambda: train_step(model, optimizer, batch), model, optimizer))

    `step` is run repeatedly from the same state: with modules in FP32, as few as possible, and with
    lower loss scales. Afterwards weights, buffers, gradients, optimizer state, loss scales and random
    numbers are restored. The host waits for the device.

    Args:
        step: runs a forward, `amp.scale_loss` and a backward on one batch. It may call
            `optimizer.step()`, which does nothing here. It must not step a schedule or draw the next
            batch.
        model: the model from `amp.initialize`, or a list of models.
        optimizer: its optimizer, or a list of them.

    Returns:
        A `Prescription`, with a `report`, a `cure` and `why_not`, which can be printed.

    Raises:
        AmpTypeError: `step` is no function, `model` no module, or `optimizer` an empty list.
        AmpRuntimeError: the optimizer has not been through `initialize`, or `step` runs no op.
    """
    if optimizer is None:
        raise AmpTypeError(
            "amp.doctor takes a function first, which runs a forward, amp.scale_loss and a backward on "
            "one batch, and then the model and the optimizer: amp.doctor(step, model, optimizer)"
        )
    check_function("step", step, "runs a forward, amp.scale_loss and a backward")
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not optimizers:
        raise AmpTypeError("amp.doctor takes the optimizer of amp.initialize, and got an empty list")
    attached = list(map(attached_to, optimizers))
    replay = Replay(step, named_models(model, "amp.doctor"), attached[0].owner, attached)
    shadow, _ = replay.run()
    findings = findings_of(shadow)
    if not shadow.ops:
        raise AmpRuntimeError("step ran no op: it has to run a forward, amp.scale_loss and a backward")
    if not findings:  # then the step, which is not replayed, may still divide by 0
        said = [message.split(". ", 1) for one in attached for message in advise_on_eps(one.optimizer)]
        findings = [Finding("eps", what, todo, "step") for what, todo in said]
    report = Report(findings, len(shadow.ops), unfollowed=shadow.unfollowed)
    if not findings:
        fp8 = replay.owner.fp8
        return Prescription(report, remark="" if fp8 is None else fp8.small_said)
    cure = _Search(replay, findings[0]).cure()
    return Prescription(report, cure) if isinstance(cure, Cure) else Prescription(report, None, cure)


class _Search:
    """The search for a cure of a step.

    Args:
        replay: runs the step.
        first: the first finding; the search ends when none is left that precision can cure.
    """

    def __init__(self, replay: Replay, first: Finding) -> None:
        self._replay, self._first = replay, first
        self._scale = replay.owner.loss_scale()
        self._modules: list[str] = []
        self._arguments: list[str] = []
        self._refused: set[str] = set()  # arguments with which the step raises if they are not cast
        self._is_mask = first.value is not None and abs(first.value) > (first.limit or math.inf)
        loses_digits = first.cause in _DIGITS and not self._is_mask
        self._harmful = _RUINS | (_DIGITS if loses_digits else set())

    def cure(self) -> Cure | str:
        """Return a cure, or why there is none."""
        if self._first.cause not in CURABLE:
            return f"no precision cures the cause, {self._first.cause}"
        if self._first.phase == "step":
            return "it is in the optimizer's step, which a replay leaves out"
        if self._first.cause == "mathematics" and self._left(1.0, [*self._replay.models]):
            tried = "with everything in FP32, as was tried, it is not finite either"
            return f"no precision cures the cause, mathematics: {tried}"
        if self._first.cause == "underflow" and not self._first.op:  # of all gradients
            return self._by_level(self._first)
        try:
            return self._by_modules()
        except Exception:
            if not self._modules:
                raise
            self._modules = []  # with which the step fails, as where dtypes meet
            return self._by_level(self._first)

    def _by_modules(self) -> Cure | str:
        """Return the cure with as few modules in FP32 and as high a scale as possible."""
        lowest = min(self._scale, 1.0)
        while found := self._left(lowest):
            if not self._extend(found[0]):
                return self._by_level(found[0])
        for name in list(self._modules):
            others = [other for other in self._modules if other != name]
            if not self._left(lowest, others):
                self._modules = others
        if len(self._modules) > _ENOUGH and isinstance(better := self._by_level(self._first), Cure):
            return better
        scale = self._scale
        while found := self._left(scale):
            if scale < _LOWEST_SCALE:
                return self._by_level(found[0])
            scale /= 2
        properties = self._replay.owner.properties
        now = properties.cast_model_inputs
        excepted = () if isinstance(now, bool) or not self._arguments else now
        return Cure(
            modules=tuple(self._modules),
            arguments=(*excepted, *self._arguments),
            scale=None if scale == self._scale else scale,
            is_dynamic=properties.loss_scaling.dynamic,
            runs=self._replay.runs,
        )

    def _left(self, scale: float, modules: Sequence[str] | None = None) -> list[Finding]:
        """Run the step, and return the findings that a further trial may remove."""
        chosen = self._modules if modules is None else modules
        try:
            shadow, _ = self._replay.run(chosen, scale, self._arguments)
        except Exception:
            if not self._arguments:
                raise
            self._refused.add(self._arguments.pop())
            return self._left(scale, modules)
        is_finite = not (shadow.gradients.bad_loss or shadow.gradients.bad)
        harmful = self._harmful | (set() if is_finite else _DIGITS)
        return [x for x in findings_of(shadow) if x.cause in harmful]

    def _extend(self, finding: Finding) -> bool:
        """Add what a finding advises to the trial, and return whether there was something new."""
        if finding.cause == "loss scale":  # at the lowest scale
            return False
        argument = re.search(r"except: \[.*?(\w+)\]", finding.advice)
        if argument is not None and argument[1] not in {*self._arguments, *self._refused}:
            self._arguments.append(argument[1])
            return True
        name = finding.module
        while name in self._modules or any(name.startswith(f"{other}.") for other in self._modules):
            name = name.rpartition(".")[0]
        if not rule_for(name) or len(self._modules) == _TRIES:
            return False
        self._modules.append(name)
        return True

    def _by_level(self, finding: Finding) -> Cure | str:
        """Return the bfloat16 level if the step is finite with all of it in FP32, else why not."""
        level = with_range(self._replay.owner.properties)
        where = f"{finding.op}, line {finding.line}"
        if finding.cause in _DIGITS and not self._is_mask:
            return f"digits are lost at {where}, where no rule helps: change the line as advised"
        if not level:
            small = finding.cause in ("underflow", "eps")
            return f"the number is too {'small' if small else 'large'} for {finding.gives} ({where})"
        self._arguments = []
        if self._left(1.0, [*self._replay.models]):
            return f"it is not finite in FP32 either: look at {where}"
        return Cure(level=level, runs=self._replay.runs)
