"""Watching a running script, for `python -m amp doctor` and `python -m amp explain --script`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from amp.diagnosis.shadow import Shadow
from amp.diagnosis.watching import TrainingWatch
from amp.session import Session
from amp.trials.explaining import explained


class ScriptWatch(TrainingWatch):
    """Watches some steps of a script, and ends it after the last of them.

    Args:
        needs_amp: whether a script without amp is of no use, since a level was asked for.
        when_complete: called when enough was seen; it raises an exception to end the script.
        at: which steps to watch.
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
        explains: bool = False,
    ) -> None:
        super().__init__(at)
        self.is_complete, self.last_step = False, max(at)
        self._needs_amp, self._when_complete, self._explains = needs_amp, when_complete, explains
        self._session: Session | None = None
        self._first_shadow: Shadow | None = None

    @property
    def has_begun(self) -> bool:
        """Whether anything is trained, at the level if one was asked for."""
        return self._session is not None or (bool(self._models) and not self._needs_amp)

    def initialize_ends(
        self, session: Session, models: Sequence[nn.Module], optimizers: Sequence[Any]
    ) -> None:
        """Note the session of what is trained."""
        self._session = session if any(optimizers) else self._session
        super().initialize_ends(session, models, optimizers)

    def root_called(self, model: nn.Module, args: Any) -> None:
        """End a script when the last window has ended."""
        super().root_called(model, args)
        if self.has_begun and not self.is_watching:
            self.is_complete = True
            self._when_complete()

    def window_ends(self, shadow: Shadow) -> None:
        """Keep the shadow of the first forwards."""
        super().window_ends(shadow)
        if self._first_shadow is None and shadow.ledger.calls:
            self._first_shadow = shadow

    def seen(self) -> Any:
        """Return the report; or an `Explanation`, or None if there is nothing to explain."""
        self.look()
        if self._explains:
            first = self._first_shadow
            return None if first is None else explained(self._session, first)
        self.report.about = self.about
        return self.report
