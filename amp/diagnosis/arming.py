"""`diagnose="on_overflow"`: watching a step after a streak of overflows, with an unchanged loop."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from amp import distributed
from amp.diagnosis.causes import findings_of
from amp.diagnosis.diagnose import gathered, named_models
from amp.diagnosis.findings import Report
from amp.diagnosis.trace import Trace
from amp.observers import Observer, watch_forwards
from amp.training.scaler import LossScaler

LAG = 8
"""After so many steps the host of every rank is sure to know of a streak."""


class Armed(Observer):
    """Watches a step of a session's models, from a forward to the end of the next `scale_loss`.

    All ranks watch the same step, because each waits `LAG` steps before it acts on a streak that the
    device has found.

    Args:
        session: the session.
        tell: called with the report; None keeps and logs the report.
    """

    def __init__(self, session: Any, tell: Callable[[Report], None] | None = None) -> None:
        self._session = weakref.ref(session)
        self._tell = tell or self._log
        self._stop: Callable[[], None] | None = None
        self._trace: Trace | None = None
        self._scale: Tensor | None = None

    def must_know(self, scaler: LossScaler) -> int:
        """Return the latest update of a scaler that the host of every rank must know of by now."""
        return scaler.updates - 1 - (0 if scaler.is_on_host else LAG)

    def verdicts(self, session: Any, scaler: LossScaler, rows: Sequence[Any]) -> None:
        """Watch the next forward, if a scaler's streak is due."""
        streaks = scaler.recorder.streaks
        if streaks and streaks[0] <= self.must_know(scaler):
            streaks.popleft()
            self.arm()

    def arm(self) -> None:
        """Watch from the next forward on."""
        session = self._session()
        if self._trace is None and self._stop is None and session is not None:
            self._stop = watch_forwards(self, session, session.live_models())

    def forward_begins(self, session: Any, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Start to watch, at the beginning of a forward."""
        if not torch.is_grad_enabled() or _get_current_dispatch_mode_stack():
            return
        modes: Any = _get_current_function_mode_stack
        if modes():  # the trace's mode would be on top, but modes must be left in reverse order
            return
        self._disarm()
        self._trace = Trace(named_models(session.live_models(), "diagnose"), lambda: self._scale)
        self._trace.__enter__()
        self._trace.note_arguments(model, args, kwargs)

    def block_entered(self, session: Any, block: Any, loss: Tensor, attached: Sequence[Any]) -> None:
        """Note the loss scale of the block."""
        self._scale = block.scale.scale

    def block_left(self, session: Any, block: Any) -> None:
        """Report the findings. The host waits for the device."""
        trace = self._end()
        if trace is not None:
            findings = gathered(findings_of(trace))
            self._tell(Report(findings, trace.ops, distributed.world_size()))

    def session_ends(self, session: Any) -> None:
        """Stop watching."""
        self._disarm()
        self._end()

    def _end(self) -> Trace | None:
        self._scale = None
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.__exit__(None, None, None)
        return trace

    def _disarm(self) -> None:
        if self._stop is not None:
            self._stop()
            self._stop = None

    def _log(self, report: Report) -> None:
        session = self._session()
        if session is not None:
            session.last_report = report
            session.log(logging.WARNING, "a step after a streak of overflows was watched:\n%s", report)
