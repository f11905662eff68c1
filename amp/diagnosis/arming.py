"""`diagnose="on_overflow"`: watching a step after a streak of overflows, with an unchanged loop."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from amp import distributed
from amp.diagnosis.diagnose import diagnosing, gather, named_models
from amp.diagnosis.findings import Report
from amp.diagnosis.guard import Unfollowed, guarded
from amp.diagnosis.places import open_modes
from amp.observers import Observer, watch_forwards
from amp.training.scaler import LossScaler

logger = logging.getLogger("amp")

TRIES = 8
"""How many iterations are watched after a streak, until something is found."""
LAG = 8
"""After so many steps the host of every rank is sure to know of a streak."""


class Armed(Observer):
    """Watches an iteration of a session: from a forward on, until all of its optimizers have stepped.

    If nothing was found, it watches the next one, up to `TRIES` times: with several losses or
    optimizers another one may overflow in each. The report of the last one is the session's.

    All ranks watch the same step, because each waits `LAG` steps before it acts on a streak that the
    device has found.

    Args:
        session: the session.
    """

    def __init__(self, session: Any) -> None:
        self._session = weakref.ref(session)
        self.unfollowed = Unfollowed()
        self._report: Report | None = None
        self._open = ExitStack()  # the shadow, or the wait for a forward
        self._stepped: set[int] = set()
        self._tries = 0

    def must_know(self, scaler: LossScaler) -> int:
        """Return the latest update of a scaler that the host of every rank must know of by now."""
        return scaler.updates - 1 - (0 if scaler.is_on_host else LAG)

    def verdicts(self, session: Any, scaler: LossScaler, rows: Sequence[Any]) -> None:
        """Watch from the next forward on, if a scaler's streak is due."""
        streaks = scaler.recorder.streaks
        if streaks and streaks[0] <= self.must_know(scaler):
            streaks.popleft()
            self._tries = TRIES
            if self._report is None:
                self._wait(session)

    def _wait(self, session: Any) -> None:
        self._open.close()
        self._open.callback(watch_forwards(self, session, session.live_models()))

    @guarded
    def forward_begins(self, session: Any, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Start to watch, at the beginning of a forward."""
        if torch.is_grad_enabled() and not open_modes():
            self._open.close()
            self._stepped.clear()
            models = named_models(session.live_models(), "diagnose")
            shadow, self._report = self._open.enter_context(diagnosing(models, session.attached))
            shadow.model_called(model, args, kwargs)

    def step_ends(self, attached: Any) -> None:
        """Report the findings after the last step of an iteration. The host waits for the device."""
        session, report = self._session(), self._report
        if report is None or session is None or attached not in session.attached:
            return
        is_again = id(attached) in self._stepped  # then another optimizer does not step each time
        self._stepped.add(id(attached))
        if is_again or self._stepped >= set(map(id, session.attached)):
            self.session_ends(session)
            gather(report)
            session.last_report = report
            if distributed.rank() == 0:  # whatever the verbosity
                logger.warning("an iteration after a streak of overflows was watched:\n%s", report)
            self._tries -= 1
            if not report.findings and self._tries > 0:
                self._wait(session)

    def session_ends(self, session: Any) -> None:
        """Stop watching."""
        self._report = None
        self._open.close()
