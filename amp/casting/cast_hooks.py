"""Hooks that cast what a module is given, and what it returns. Those of a deep copy cast to FP32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from amp.casting.containers import cast_tensors
from amp.casting.model_inputs import ModelInputs
from amp.dtypes import CASTABLE, SCALABLE


class CastInputs:
    """A forward pre-hook: floating arguments, float64 included, go in as `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments to go in, or None for those that were given."""
        if len(args) == 1 and not kwargs and getattr(args[0], "dtype", None) is self.dtype:
            return None  # as most layers are called
        return cast_tensors(args, SCALABLE, self.dtype), cast_tensors(kwargs, SCALABLE, self.dtype)

    def __deepcopy__(self, memo: object) -> CastInputs:
        return CastInputs(torch.float32)


class CastOutput:
    """A forward hook: float16, bfloat16 and float32 outputs come out as `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output to come out, or None for that of the module."""
        if getattr(output, "dtype", None) is self.dtype:
            return None
        return cast_tensors(output, CASTABLE, self.dtype)

    def __deepcopy__(self, memo: object) -> CastOutput:
        return CastOutput(torch.float32)


def cast_by(hook: Any) -> torch.dtype | None:
    """Return what a hook casts to, or None for one that is none of ours."""
    return hook.dtype if isinstance(hook, (CastInputs, CastOutput, ModelInputs)) else None


def cast_inputs_to(module: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Let a module cast its inputs to this dtype alone, and return what undoes that."""
    hooks = module._forward_pre_hooks
    before = {i: hook for i, hook in hooks.items() if isinstance(hook, (CastInputs, ModelInputs))}
    hooks.update(dict.fromkeys(before, CastInputs(dtype)))
    added = None
    if not before:
        added = module.register_forward_pre_hook(CastInputs(dtype), with_kwargs=True)

    def undo() -> None:
        if added is not None:
            added.remove()
        hooks.update(before)

    return undo
