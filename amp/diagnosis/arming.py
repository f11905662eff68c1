"""`diagnose="on_overflow"`: after a streak of overflows a step is watched, the loop being as it was."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from amp import distributed
from amp.diagnosis.causes import findings_of
from amp.diagnosis.diagnose import gathered, named_models
from amp.diagnosis.findings import Report
from amp.diagnosis.trace import Trace
from amp.training.scaler import LossScaler

LAG = 8
"""How many steps after a streak the host is sure to know of it, on every rank."""


class Armed:
    """Watches a step of a session's models, from a forward to the end of the next `scale_loss`.

    Ranks watch the same step: what a device has decided, each learns after so many steps.

    Args:
        models: returns the models.
        tell: is given the report.
    """

    def __init__(
        self, models: Callable[[], Sequence[nn.Module]], tell: Callable[[Report], None]
    ) -> None:
        self._models, self._tell = models, tell
        self._handles: list[Any] = []
        self._trace: Trace | None = None
        self._scale: torch.Tensor | None = None

    def until(self, scaler: LossScaler) -> int:
        """Return up to which update the host must have learnt of a scaler by now."""
        return scaler.updates - 1 - (0 if scaler.is_on_host else LAG)

    def look(self, scaler: LossScaler) -> None:
        """Watch the next forward, if a scaler's streak is due."""
        streaks = scaler.recorder.streaks
        if not streaks or streaks[0] > self.until(scaler):
            return
        streaks.popleft()
        self.arm()

    def arm(self) -> None:
        """Watch from the next forward on."""
        if self._trace is None and not self._handles:
            hook = _begin_of(weakref.ref(self))
            for model in self._models():
                self._handles.append(
                    model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
                )

    def begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Start to watch, in a forward of a model."""
        if not torch.is_grad_enabled() or _get_current_dispatch_mode_stack():
            return
        modes: Any = _get_current_function_mode_stack
        if modes():  # what is entered last has to be left first
            return
        self._remove_hooks()
        self._trace = Trace(named_models(self._models(), "diagnose"), lambda: self._scale)
        self._trace.__enter__()
        self._trace.note_arguments(module, args, kwargs)

    def begin_block(self, scale: torch.Tensor) -> None:
        """Note the loss scale of a block that is entered."""
        self._scale = scale

    def end(self) -> None:
        """Say what was seen: a block is left. The host waits for the device."""
        self._scale = None
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.__exit__(None, None, None)
            findings = gathered(findings_of(trace))
            self._tell(Report(findings, trace.ops, distributed.world_size()))

    def close(self) -> None:
        """Watch nothing more."""
        self._remove_hooks()
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.__exit__(None, None, None)

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()


def _begin_of(armed: weakref.ref[Armed]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if (one := armed()) is not None:
            one.begin(module, args, kwargs)

    return hook
