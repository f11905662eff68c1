"""What `python -m amp doctor` and `python -m amp explain --script` see of a script that runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from amp.arguments import as_models
from amp.diagnosis.arming import Armed
from amp.diagnosis.diagnose import is_checked
from amp.diagnosis.findings import Finding, Report
from amp.patching import Patches
from amp.session import Session
from amp.training.attachment import AttachedOptimizer
from amp.trials import hazards
from amp.trials.checking import Checkup, check_forward, merged
from amp.trials.explaining import Explanation, explain_forward, is_about


class ScriptWatcher(AbstractContextManager["ScriptWatcher"]):
    """Looks at the first forward of each model in which gradients are wanted, and counts steps.

    Args:
        when_complete: called once enough was seen; what it raises ends the script.

    Attributes:
        is_complete: whether enough was seen.
        has_begun: whether anything came through `initialize`.
    """

    def __init__(self, when_complete: Callable[[], None]) -> None:
        self.is_complete = False
        self.has_begun = False
        self._when_complete = when_complete
        self._patches = Patches()
        self._hooks = ExitStack()
        self._is_looking = False
        self._models = 0

    def __enter__(self) -> ScriptWatcher:
        self._patches.surround(Session, "initialize", self._around_initialize)
        self._patches.surround(AttachedOptimizer, "_step", self._around_step)
        return self

    def __exit__(self, *exception: object) -> None:
        self._patches.undo()
        self._hooks.close()

    def complete(self) -> None:
        """End the script."""
        self.is_complete = True
        self._when_complete()

    def before(self, models: Sequence[nn.Module]) -> None:
        """Look at models before `initialize` has touched them."""

    def after(self, session: Session, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
        """Look at what `initialize` has made of them."""

    def look(self, session: Session, model: nn.Module, number: int, args: Any, kwargs: Any) -> None:
        """Look at the first forward of a model, before it runs."""

    def before_step(self, attached: AttachedOptimizer) -> None:
        """Look at an optimizer that is about to step."""

    def _around_initialize(
        self,
        original: Callable[..., Any],
        session: Session,
        models: Any,
        optimizers: Any = None,
        **kwargs: Any,
    ) -> Any:
        if not session.properties.enabled:
            return original(session, models, optimizers, **kwargs)
        given = as_models(models)
        self.before(given)
        result = original(
            session, models, optimizers, **{**kwargs, "allow_incoming_model_not_fp32": True}
        )
        self.has_begun = True
        self.after(session, given, optimizers if isinstance(optimizers, list) else [optimizers])
        for model in given:
            hook = functools.partial(self._hook, session, self._models)
            handle = model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
            self._hooks.callback(handle.remove)
            self._models += 1
        return result

    def _hook(self, session: Session, number: int, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_looking and torch.is_grad_enabled():
            self._is_looking = True
            try:
                self.look(session, model, number, args, kwargs)
            finally:
                self._is_looking = False

    def _around_step(
        self, original: Callable[..., Any], attached: AttachedOptimizer, *args: Any, **kwargs: Any
    ) -> Any:
        self.before_step(attached)
        return original(attached, *args, **kwargs)


class StepWatcher(ScriptWatcher):
    """Checks the first forward of each model, and diagnoses some steps.

    Args:
        steps: how many.
        when_complete: as in `ScriptWatcher`.
    """

    def __init__(self, steps: int, when_complete: Callable[[], None]) -> None:
        super().__init__(when_complete)
        self._limit = steps
        self._steps: dict[int, int] = {}
        self._found: list[Finding] = []
        self._of_steps: list[Finding] = []
        self._checkups: dict[int, Checkup] = {}

    def before(self, models: Sequence[nn.Module]) -> None:
        """Look for weights that are in 16 bits already."""
        self._found += hazards.before_initialize(models)

    def after(self, session: Session, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
        """Look at the profile, and arm a diagnosis."""
        attached = list(filter(None, map(AttachedOptimizer.of, optimizers)))
        checked = is_checked(attached)
        for model in models:
            self._found += hazards.of_properties(session.properties, model, checked)
        if session._armed is not None:
            session._armed.close()
        session._armed = Armed(session._alive, functools.partial(self._tell, session))
        session._armed.arm()

    def _tell(self, session: Session, report: Report) -> None:
        is_dynamic = session.properties.loss_scaling.dynamic
        self._of_steps += [x for x in report.findings if not (is_dynamic and x.cause == "loss scale")]
        if session._armed is not None:
            session._armed.arm()

    def look(self, session: Session, model: nn.Module, number: int, args: Any, kwargs: Any) -> None:
        """Check it."""
        if number not in self._checkups:
            self._checkups[number] = Checkup(str(session.properties.opt_level))
            self._checkups[number] = check_forward(session, model, args, kwargs)

    def before_step(self, attached: AttachedOptimizer) -> None:
        """Count steps."""
        made = self._steps.setdefault(id(attached), 0)
        if made == self._limit:
            self.complete()
        self._steps[id(attached)] += 1

    def seen(self) -> Any:
        """Return a `Checkup` as plain values."""
        whole = merged([self._checkups[i] for i in sorted(self._checkups)])
        forward = {(x.op, x.file, x.line) for x in whole.findings}
        later = [x for x in self._of_steps if not x.file or (x.op, x.file, x.line) not in forward]
        found = [*self._found, *whole.findings, *hazards.grouped(later)]
        return replace(whole, findings=list(dict.fromkeys(found))).to_json()


class CallExplainer(ScriptWatcher):
    """Explains the first forward of each model, up to the first that calls what is asked for.

    Args:
        op, module: as in `amp.explain`.
        when_complete: as in `ScriptWatcher`.
    """

    def __init__(self, op: str | None, module: str | None, when_complete: Callable[[], None]) -> None:
        super().__init__(when_complete)
        self._op, self._module = op, module
        self._explained: dict[int, Explanation] = {}

    def look(self, session: Session, model: nn.Module, number: int, args: Any, kwargs: Any) -> None:
        """Explain it."""
        if number not in self._explained:
            self._explained[number] = found = explain_forward(session, model, args, kwargs)
            if any(is_about(call, self._op, self._module) for call in found.calls):
                self.complete()

    def before_step(self, attached: AttachedOptimizer) -> None:
        """Look no further than the first step."""
        self.complete()

    def seen(self) -> Any:
        """Return an `Explanation` as plain values, or None."""
        found = list(self._explained.values())
        calls = tuple(call for each in found for call in each.calls)
        return Explanation(found[0].level, calls).to_json() if found else None
