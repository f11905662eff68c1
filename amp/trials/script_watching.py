"""Watching a running script, for `python -m amp doctor` and `python -m amp explain --script`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from amp.diagnosis.arming import Armed
from amp.diagnosis.diagnose import is_checked
from amp.diagnosis.findings import Finding
from amp.diagnosis.shadow import Shadow
from amp.diagnosis.watching import TrainingWatch
from amp.session import Session
from amp.training.attached_optimizer import AttachedOptimizer
from amp.trials import hazards
from amp.trials.checking import checkup_of
from amp.trials.explaining import explained


class ScriptWatch(TrainingWatch):
    """Watches the first steps of a script, and checks the first forward of each model of amp's.

    Args:
        needs_amp: whether a script without amp is of no use, since a level was asked for.
        when_complete: called when enough was seen; it raises an exception to end the script.
        at: which steps to watch, if the script does not use amp.
        steps: how many steps to watch, if it does.
        explains: whether the calls of the first forwards are explained, and nothing is judged.

    Attributes:
        is_complete: whether enough was seen.
        last_step: the number of the last step to be seen.
    """

    def __init__(
        self,
        needs_amp: bool,
        when_complete: Callable[[], None],
        at: Sequence[int],
        steps: int,
        explains: bool = False,
    ) -> None:
        super().__init__(at)
        self.is_complete, self.last_step = False, max(at)
        self._limit, self._needs_amp, self._when_complete = steps, needs_amp, when_complete
        self._explains = explains
        self._session: Session | None = None
        self._found: list[Finding] = []
        self._first_shadow: Shadow | None = None

    @property
    def has_begun(self) -> bool:
        """Whether anything is trained, at the level if one was asked for."""
        return self._session is not None or (bool(self._models) and not self._needs_amp)

    def initialize_ends(
        self, session: Session, models: Sequence[nn.Module], optimizers: Sequence[Any]
    ) -> None:
        """Check the profile, and watch other steps than those of a script without amp."""
        attached = list(filter(None, map(AttachedOptimizer.of, optimizers)))
        if attached or self._session is not None:
            self._session, self.last_step = session, self._limit
            for model in models:
                self._found += hazards.of_properties(session.properties, model, is_checked(attached))
            for known in [each for each in session.observers if isinstance(each, Armed)]:
                session.observers.remove(known)
                known.session_ends(session)
            super().initialize_ends(session, models, optimizers)
            self.watch_steps(range(self.steps + 1, self._limit + 1))

    def root_called(self, model: nn.Module, args: Any) -> None:
        """End a script without amp when the last window has ended."""
        super().root_called(model, args)
        if self.has_begun and self._session is None and not self.is_watching:
            self._complete()

    def step_begins(self, attached: AttachedOptimizer, closure: Any) -> Any:
        """End the script before the first step beyond the limit."""
        if self.steps >= self._limit:
            self._complete()
        return super().step_begins(attached, closure)

    def window_ends(self, shadow: Shadow) -> None:
        """Keep the shadow of the first forwards."""
        super().window_ends(shadow)
        if self._first_shadow is None and shadow.ledger.ops:
            self._first_shadow = shadow

    def _complete(self) -> None:
        self.is_complete = True
        self._when_complete()

    def seen(self, error: str = "") -> Any:
        """Return a `Checkup`, or for a script without amp a `Report`.

        If calls are explained, return an `Explanation`, or None if no forward was seen.

        Args:
            error: the error that the script has ended with, as one line.
        """
        last = self._shadow
        self.look()
        if self._explains:
            first = self._first_shadow
            return None if first is None else explained(self._session, first)
        self.report.about = "" if self._session else self.about
        if self._session is None:
            return self.report
        shadow = self._first_shadow or Shadow({})
        found = hazards.merged(self.report.findings, shadow)
        if last is not None and last.failed is not None and error:
            kind, _, message = error.partition(": ")
            found.insert(0, hazards.of_failure(last, message, kind))
        level = str(self._session.properties.opt_level or "this profile")
        every = dict.fromkeys([*self._found, *found])
        return checkup_of(shadow, level, sorted(every, key=lambda x: x.cause == "unchecked"))
