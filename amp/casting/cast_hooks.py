"""Hooks that cast what a module is given, and what it returns."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from amp.casting.containers import cast_tensors
from amp.casting.model_inputs import ModelInputs
from amp.dtypes import CASTABLE, SCALABLE


def cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A forward pre-hook: floating arguments, float64 included, go in as `dtype`."""
    return cast_tensors(args, SCALABLE, dtype), cast_tensors(kwargs, SCALABLE, dtype)


def cast_output(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook: float16, bfloat16 and float32 outputs come out as `dtype`."""
    return cast_tensors(output, CASTABLE, dtype)


def cast_by(hook: Any) -> torch.dtype | None:
    """Return what a hook casts to, or None for one that is none of ours."""
    if isinstance(hook, ModelInputs):
        return hook.dtype
    is_ours = isinstance(hook, functools.partial) and hook.func in (cast_inputs, cast_output)
    return hook.args[0] if is_ours else None


def in_another_dtype(hook: Any, dtype: torch.dtype) -> Any:
    """Return what casts to another dtype in the place of a hook of ours."""
    if isinstance(hook, ModelInputs):
        return hook.in_dtype(dtype)
    return functools.partial(hook.func, dtype)


def cast_inputs_to(module: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Let a module cast its inputs to this dtype alone, and return what undoes that."""
    hooks = module._forward_pre_hooks
    before = dict(hooks)
    ours = [
        i
        for i, hook in hooks.items()
        if isinstance(hook, ModelInputs) or getattr(hook, "func", None) is cast_inputs
    ]
    for i in ours:
        hooks[i] = functools.partial(cast_inputs, dtype)
    added = None
    if not ours:
        hook = functools.partial(cast_inputs, dtype)
        added = module.register_forward_pre_hook(hook, with_kwargs=True)

    def undo() -> None:
        if added is not None:
            added.remove()
        for i in ours:
            hooks[i] = before[i]

    return undo
