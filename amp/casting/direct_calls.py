"""`model.forward(x)`, called directly, passes the hooks by that cast inputs: its errors say so."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from amp.casting.model_inputs import ModelInputs
from amp.casting.subclassing import has_forward_of_its_own, subclass_of, swap_classes
from amp.dtypes import dtype_name


def explain_direct_calls(model: nn.Module) -> Callable[[], None]:
    """Let an error of a direct call of the model's forward say what to call; return what undoes it."""
    if has_forward_of_its_own(model):
        return lambda: None
    return swap_classes({model: _explaining_class(type(model))})


def _explaining_class(base: Any) -> Any:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return base.forward(self, *args, **kwargs)
        try:
            return base.forward(self, *args, **kwargs)
        except RuntimeError as error:
            for hook in self._forward_pre_hooks.values():
                if isinstance(hook, ModelInputs) and hook.would_cast(args, kwargs):
                    error.add_note(_advice(hook.dtype))
            raise

    return subclass_of(base, forward=forward)


def _advice(dtype: torch.dtype) -> str:
    return (
        "forward was called directly, past the casts of amp: call model(x), not model.forward(x). "
        f"The former casts its inputs to {dtype_name(dtype)}."
    )
