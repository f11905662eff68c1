"""Watching a running script, for `python -m amp doctor` and `python -m amp explain --script`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from amp.diagnosis.arming import Armed
from amp.diagnosis.diagnose import is_checked
from amp.diagnosis.findings import Finding
from amp.diagnosis.watching import Watch
from amp.observers import Observer, observing, watch_forwards
from amp.session import Session
from amp.training.attachment import AttachedOptimizer
from amp.trials import hazards
from amp.trials.checking import Checkup, check_forward, merged
from amp.trials.explaining import Explanation, explain_forward, is_about


class ScriptWatcher(Observer, AbstractContextManager["ScriptWatcher"]):
    """The base class of watchers: calls `look` before each forward that needs gradients.

    Args:
        when_complete: called when enough was seen; it raises an exception to end the script.

    Attributes:
        is_complete: whether enough was seen.
        has_begun: whether the script called `initialize`.
    """

    takes_half_models = True

    def __init__(self, when_complete: Callable[[], None]) -> None:
        self.is_complete = False
        self.has_begun = False
        self._when_complete = when_complete
        self._open = ExitStack()
        self._is_looking = False
        self._numbers: dict[int, int] = {}

    def __enter__(self) -> Self:
        self._open.enter_context(observing(self))
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def complete(self) -> None:
        """End the script."""
        self.is_complete = True
        self._when_complete()

    def look(self, session: Session, model: nn.Module, number: int, args: Any, kwargs: Any) -> None:
        """Examine a forward before it runs; `number` is the model's, in the order of `initialize`."""

    def initialize_ends(
        self, session: Session, models: Sequence[nn.Module], optimizers: Sequence[Any]
    ) -> None:
        """Watch the forwards of the models."""
        self.has_begun = True
        for model in models:
            self._numbers[id(model)] = len(self._numbers)
        self._open.callback(watch_forwards(self, session, models))

    def forward_begins(self, session: Session, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Examine a forward that needs gradients."""
        if not self._is_looking and torch.is_grad_enabled():
            self._is_looking = True
            try:
                self.look(session, model, self._numbers[id(model)], args, kwargs)
            finally:
                self._is_looking = False


class StepWatcher(Watch):
    """Watches the first steps of a script, and checks the first forward of each model of amp's.

    Args:
        steps: how many steps to watch, if the script uses amp.
        at: which steps to watch, if it does not.
        needs_amp: whether a script without amp is of no use, since a level was asked for.
        when_complete: as in `ScriptWatcher`.

    Attributes:
        is_complete: whether enough was seen.
    """

    def __init__(
        self, steps: int, at: Sequence[int], needs_amp: bool, when_complete: Callable[[], None]
    ) -> None:
        super().__init__(at)
        self.is_complete, self._needs_amp = False, needs_amp
        self._when_complete, self._limit = when_complete, steps
        self._found: list[Finding] = []
        self._checkups: dict[int, Checkup | None] = {}  # by the id of the model
        self._has_session = self._is_looking = False

    @property
    def has_begun(self) -> bool:
        """Whether anything is trained, at the level if one was asked for."""
        return self._has_session or (bool(self._models) and not self._needs_amp)

    def initialize_begins(self, session: Session, models: Sequence[nn.Module]) -> None:
        """Check for weights that are in 16 bits already."""
        super().initialize_begins(session, models)
        self._found += hazards.before_initialize(models)

    def initialize_ends(
        self, session: Session, models: Sequence[nn.Module], optimizers: Sequence[Any]
    ) -> None:
        """Check the profile, and watch other steps than those of a script without amp."""
        attached = list(filter(None, map(AttachedOptimizer.of, optimizers)))
        if not attached and not self._has_session:
            return
        self._has_session = True
        for model in models:
            self._found += hazards.of_properties(session.properties, model, is_checked(attached))
            self._checkups.setdefault(id(model), None)
        for known in [each for each in session.observers if isinstance(each, Armed)]:
            session.observers.remove(known)
            known.session_ends(session)
        self._open.callback(watch_forwards(self, session, models))
        self.watch_steps(range(self.steps + 1, self._limit + 1))

    def forward_begins(self, session: Session, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Check the first forward of a model, unseen by the shadow."""
        if not self._is_looking and self._checkups[id(model)] is None and torch.is_grad_enabled():
            self._is_looking = True
            try:
                self._checkups[id(model)] = Checkup(str(session.properties.opt_level))
                with _disable_current_modes():
                    self._checkups[id(model)] = check_forward(session, model, args, kwargs)
            finally:
                self._is_looking = False

    def root_called(self, model: nn.Module) -> None:
        """End the script when the last window has ended."""
        super().root_called(model)
        if self.has_begun and not self._has_session and not self.is_watching:
            self._complete()

    def step_begins(self, attached: AttachedOptimizer, closure: Any) -> Any:
        """Look at the weights; end the script before the first step beyond the limit."""
        if self.steps >= self._limit:
            self._complete()
        self._found += hazards.of_unseen_writes(attached)
        return super().step_begins(attached, closure)

    def _complete(self) -> None:
        self.is_complete = True
        self._when_complete()

    def seen(self) -> Any:
        """Return a `Checkup`, or for a script without amp a `Report`, as plain values."""
        self.look()
        if not self._has_session:
            return {"about": self.about, **self.report.to_json()}
        whole = merged([found for found in self._checkups.values() if found is not None])
        forward = {(x.op, x.file, x.line) for x in whole.findings}
        seen = self.report.findings
        later = [x for x in seen if not x.file or (x.op, x.file, x.line) not in forward]
        found = [*self._found, *whole.findings, *later]
        return replace(whole, findings=list(dict.fromkeys(found))).to_json()


class CallExplainer(ScriptWatcher):
    """Explains the first forward of each model, until one calls the op that was asked for.

    Args:
        op: as in `amp.explain`.
        module: as in `amp.explain`.
        when_complete: as in `ScriptWatcher`.
    """

    def __init__(self, op: str | None, module: str | None, when_complete: Callable[[], None]) -> None:
        super().__init__(when_complete)
        self._op, self._module = op, module
        self._explained: dict[int, Explanation] = {}

    def look(self, session: Session, model: nn.Module, number: int, args: Any, kwargs: Any) -> None:
        """Explain the first forward of a model."""
        if number not in self._explained:
            self._explained[number] = found = explain_forward(session, model, args, kwargs)
            if any(is_about(call, self._op, self._module) for call in found.calls):
                self.complete()

    def step_begins(self, attached: AttachedOptimizer, closure: Any) -> Any:
        """End the script at the first step."""
        self.complete()
        return closure

    def seen(self) -> Any:
        """Return an `Explanation` as plain values, or None."""
        found = list(self._explained.values())
        calls = tuple(call for each in found for call in each.calls)
        return Explanation(found[0].level, calls).to_json() if found else None
