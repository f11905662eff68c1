"""`amp.doctor`: finding a change that makes a step finite, by trying it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from amp.arguments import attached_to
from amp.diagnosis.diagnose import named_models
from amp.diagnosis.findings import Finding, Report, rule_for
from amp.errors import AmpTypeError
from amp.trials.replay import Replay

CURABLE = ("range", "absorbed range", "eps", "loss scale", "underflow")
"""The causes that another precision can cure."""
_TRIES = 8
_ENOUGH = 3
"""If more modules than this need FP32, another level is the better advice."""
_LOWEST_SCALE = 2.0**-24


@dataclass(frozen=True)
class Cure:
    """A change that makes the step finite.

    Attributes:
        modules: the names of the modules that must run in FP32; may be empty.
        scale: the highest loss scale at which the step is finite; None if the scale need not change.
        level: another level, if nothing else helps; else None.
        runs: how many replays were made.
    """

    modules: tuple[str, ...] = ()
    scale: float | None = None
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
        if self.scale is not None:
            lines.append(f"loss_scale: {{init: {self.scale:g}, max: {self.scale:g}}}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Prescription:
    """The result of `amp.doctor`.

    Attributes:
        report: what went wrong.
        cure: the change that helps, or None.
        why_not: why there is no cure; empty if there is one, or nothing went wrong.
    """

    report: Report
    cure: Cure | None = None
    why_not: str = ""

    def __str__(self) -> str:
        if self.report.is_healthy:
            return str(self.report)
        if self.cure is None:
            return f"{self.report}\nnot cured: {self.why_not}"
        return f"{self.report}\ncure, verified in {self.cure.runs} replays:\n{self.cure.yaml}"


def doctor(
    step: Callable[[], Any], model: nn.Module | Sequence[nn.Module], optimizer: Any
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
        AmpTypeError: `model` is not a module, or `optimizer` is an empty list.
        AmpRuntimeError: the optimizer has not been through `initialize`.
    """
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not optimizers:
        raise AmpTypeError("amp.doctor takes the optimizer of amp.initialize, and got an empty list")
    attached = list(map(attached_to, optimizers))
    replay = Replay(step, named_models(model, "amp.doctor"), attached[0].owner, attached)
    findings = replay.run()
    report = Report(findings)
    if not findings:
        return Prescription(report)
    cause = findings[0].cause
    if cause not in CURABLE:
        return Prescription(
            report, why_not=f"no precision cures the cause, {cause}; {findings[0].advice}"
        )
    cure = _search(replay)
    if isinstance(cure, str):
        return Prescription(report, why_not=cure)
    return Prescription(report, cure)


def _search(replay: Replay) -> Cure | str:
    """Return a cure, or why there is none."""
    is_dynamic = replay.owner.properties.loss_scaling.dynamic
    lowest = 1.0 if is_dynamic else None
    modules: list[str] = []
    found_first: Finding | None = None
    while found := _curable(replay.run(modules, lowest)):
        found_first = found_first or found[0]
        name = _next_module(found[0], modules)
        if name is None or len(modules) == _TRIES:
            return _by_level(replay, found[0])
        modules.append(name)
    for name in list(modules):
        others = [other for other in modules if other != name]
        if not _curable(replay.run(others, lowest)):
            modules = others
    if found_first is not None and len(modules) > _ENOUGH:
        better = _by_level(replay, found_first)
        if isinstance(better, Cure):
            return better
    if not is_dynamic:
        return Cure(tuple(modules), runs=replay.runs)
    scale = highest = replay.owner.loss_scale()
    while _curable(found := replay.run(modules, highest)):
        if highest < _LOWEST_SCALE:
            return _by_level(replay, found[0])
        highest /= 2
    return Cure(tuple(modules), None if highest == scale else highest, runs=replay.runs)


def _curable(findings: list[Finding]) -> list[Finding]:
    """Return the findings that a further trial may remove, casts that ruined gradients included."""
    return [
        x for x in findings if x.cause in (*CURABLE, "mathematics") or (x.cause == "cast" and x.reached)
    ]


def _next_module(finding: Finding, modules: Sequence[str]) -> str | None:
    """Return the finding's module, or the innermost one around it, that is not tried yet, or None."""
    name = finding.module
    while name in modules or any(name.startswith(f"{other}.") for other in modules):
        name = name.rpartition(".")[0]
    return name if rule_for(name) else None


def _by_level(replay: Replay, finding: Finding) -> Cure | str:
    """Return the bfloat16 level if the step is finite with the whole model in FP32, else why not."""
    properties = replay.owner.properties
    level = {"O1": "O4", "O2": "O5", "O3": "O5"}.get(str(properties.opt_level))
    where = f"{finding.op}, line {finding.line}"
    if level is None:
        return f"the number is too large for the range of {finding.gives} too ({where})"
    prefixes = [name for name in replay.models if name == ""] or list(replay.models)
    if _curable(replay.run(prefixes, 1.0)):
        return f"it is not finite with all of the model in FP32 either: look at {where}, outside of it"
    return Cure(level=level, runs=replay.runs)
