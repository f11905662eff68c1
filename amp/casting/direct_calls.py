"""`model.forward(x)` passes the hooks by that cast, and an error of it that ends a script says so."""

import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import nn
from torch.nn.modules import module

from amp.casting.model_inputs import ModelInputs
from amp.patching import Patches


def explain_uncaught(patches: Patches) -> None:
    """Let `sys.excepthook` explain errors. No call of a model is any slower for it."""
    patches.surround(sys, "excepthook", _show)


def _show(
    original: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    tb: TracebackType | None,
) -> None:
    explain(error)
    original(kind, error, tb)


def explain(error: BaseException | None) -> None:
    """Add a note to an error of types that came of a direct call of a cast model's forward."""
    if not isinstance(error, RuntimeError) or "type" not in str(error):
        return
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    called = [frame.f_locals.get("self") for frame in frames if frame.f_globals is vars(module)]
    for frame in frames:
        model = frame.f_locals.get("self")
        is_forward = frame.f_code.co_name == "forward" and isinstance(model, nn.Module)
        if is_forward and _is_cast(model) and not any(each is model for each in called):
            if _NOTE not in getattr(error, "__notes__", ()):
                error.add_note(_NOTE)
            return


_NOTE = "model.forward(x) was called, and amp does not cast its inputs and outputs: call model(x)"


def _is_cast(model: Any) -> bool:
    hooks = vars(model).get("_forward_pre_hooks", {})
    return any(isinstance(hook, ModelInputs) for hook in hooks.values())
