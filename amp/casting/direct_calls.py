"""`model.forward(x)` passes the hooks by that cast, and an error of it that ends a script says so."""

import itertools
import sys
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType

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
    """Add a note to a RuntimeError that came of a direct call of a cast model's forward."""
    if not isinstance(error, RuntimeError):
        return
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    if any(itertools.starmap(_is_direct_call, itertools.pairwise(frames))):
        error.add_note(
            "model.forward(x) was called, and amp does not cast its inputs and outputs: call model(x)"
        )


def _is_direct_call(caller: FrameType, frame: FrameType) -> bool:
    model = frame.f_locals.get("self")
    if frame.f_code.co_name != "forward" or not isinstance(model, nn.Module):
        return False
    is_cast = any(isinstance(hook, ModelInputs) for hook in model._forward_pre_hooks.values())
    return is_cast and caller.f_globals is not vars(module)  # where `model(x)` calls it
