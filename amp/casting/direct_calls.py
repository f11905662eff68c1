"""`model.forward(x)`, called directly, passes the hooks by that cast inputs: its errors say so."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from amp.casting.model_inputs import ModelInputs
from amp.casting.subclassing import has_forward_of_its_own, subclass_of, swap_classes
from amp.dtypes import dtype_name


class DirectCalls:
    """Lets errors of direct calls of forwards say what to call, for the models of one session."""

    def __init__(self) -> None:
        # By the user's class: what torch.compile made for one model serves all of its class.
        self._classes: dict[type, Any] = {}

    def explain(self, model: nn.Module) -> Callable[[], None]:
        """Let them do so for a model; return what undoes it.

        The forwards of torch's own containers are left alone: `torch.compile` makes one graph of such a
        model and its hooks.
        """
        cls = type(model)
        of_torch = (getattr(cls.forward, "__module__", None) or "").startswith("torch.")
        if of_torch or has_forward_of_its_own(model):
            return lambda: None
        if cls not in self._classes:
            self._classes[cls] = _explaining_class(cls)
        return swap_classes({model: self._classes[cls]})


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
