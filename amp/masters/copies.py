"""Copies and saved files of a model that was cast are in FP32, with the values of masters.

A copy in 16 bits could not take part in an average: see `amp.masters.averages`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from amp.casting.cast_hooks import cast_by, in_another_dtype
from amp.dtypes import LOW_PRECISION
from amp.masters.values import live, master_of, values_of
from amp.patching import Patches
from amp.undo import Undo
from amp.weak import members

_SEEN = "amp.masters.copies"
"""The key in a memo of `copy.deepcopy` under which are the ids of modules that were looked at."""


def copy_in_float32(undo: Undo) -> None:
    """Let models that sessions have cast be copied in FP32, until `undo`."""
    patches = Patches()
    undo.always(patches.undo)
    undo.always(_stop_copying)
    module: Any = nn.Module
    if "__deepcopy__" not in vars(module):
        module.__deepcopy__ = _deepcopy
    transformers = sys.modules.get("transformers.modeling_utils")
    if hasattr(transformers, "PreTrainedModel"):
        patches.surround(transformers.PreTrainedModel, "save_pretrained", _save_pretrained)  # type: ignore[union-attr]


def _stop_copying() -> None:
    module: Any = nn.Module
    if not members(live) and vars(module).get("__deepcopy__") is _deepcopy:
        del module.__deepcopy__


def _deepcopy(module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    """Do what `copy.deepcopy` does without a `__deepcopy__`, in FP32 if the module has masters."""
    seen = memo.setdefault(_SEEN, set())
    if id(module) not in seen:
        seen.update(map(id, module.modules()))
        if _is_cast(module):
            _widen(module, memo)
    reduced: Any = module.__reduce_ex__(4)
    make, arguments, state, *_ = reduced
    copied: nn.Module = make(*arguments)
    memo[id(module)] = copied
    copied.__setstate__(copy.deepcopy(state, memo))  # type: ignore[no-untyped-call]
    return copied


def _is_cast(module: nn.Module) -> bool:
    """Whether a session has cast the module: it has masters, or casts what it is given to 16 bits."""
    hooks = (hook for each in module.modules() for hook in each._forward_pre_hooks.values())
    return any(master_of(parameter) is not None for parameter in module.parameters()) or any(
        cast_by(hook) in LOW_PRECISION for hook in hooks
    )


def _widen(module: nn.Module, memo: dict[Any, Any]) -> None:
    """Put copies in FP32 into a memo, of tensors in 16 bits and of the hooks that cast to these."""
    for tensor in chain(module.parameters(), module.buffers()):
        if tensor.dtype not in LOW_PRECISION:
            continue
        wide = values_of(tensor).clone()
        if isinstance(tensor, nn.Parameter):
            wide = nn.Parameter(wide, tensor.requires_grad)
        found = master_of(tensor)
        if found is not None:  # the copy of its optimizer, before or after this one, steps the model's
            values, wide = wide.detach(), memo.setdefault(id(found[1]), wide)
            wide.detach().copy_(values)
        memo[id(tensor)] = wide
    for each in module.modules():
        for hook in (*each._forward_pre_hooks.values(), *each._forward_hooks.values()):
            if cast_by(hook) is not None:
                memo[id(hook)] = in_another_dtype(hook, torch.float32)


# Models of transformers.


def _save_pretrained(
    original: Callable[..., Any], model: Any, save_directory: Any, *args: Any, **kwargs: Any
) -> Any:
    """Save a configuration that has the dtype of the weights beside it: `from_pretrained` goes by it.

    The weights are those of `state_dict()`, in FP32; else the configuration has the model's dtype.
    """
    result = original(model, save_directory, *args, **kwargs)
    if _is_cast(model) and (Path(save_directory) / "config.json").is_file():
        weights = kwargs.get("state_dict") or {}
        dtypes = (value.dtype for value in weights.values() if value.is_floating_point())
        model.config.dtype = next(dtypes, torch.float32)
        model.config.save_pretrained(save_directory)
    return result
