"""`model.forward(x)` passes the hooks by that cast, and an error that it raises says so."""

import traceback
from types import FrameType

from torch import nn
from torch.nn.modules import module

from amp.casting.model_inputs import ModelInputs


def explain(error: BaseException | None) -> None:
    """Add a note to a RuntimeError that came of a direct call of a cast model's forward."""
    if not isinstance(error, RuntimeError):
        return
    if any(_is_direct_call(frame) for frame, _ in traceback.walk_tb(error.__traceback__)):
        error.add_note(
            "model.forward(x) was called, and amp does not cast its inputs and outputs: call model(x)"
        )


def _is_direct_call(frame: FrameType) -> bool:
    model, caller = frame.f_locals.get("self"), frame.f_back
    if frame.f_code.co_name != "forward" or not isinstance(model, nn.Module) or caller is None:
        return False
    is_cast = any(isinstance(hook, ModelInputs) for hook in model._forward_pre_hooks.values())
    return is_cast and caller.f_globals is not vars(module)  # where `model(x)` calls it
