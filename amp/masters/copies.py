"""Copies, averages and saved files of a model that was cast are in FP32, with the values of masters.

A copy in 16 bits could not take part in an average: an update of a thousandth is rounded away.
"""

from __future__ import annotations

import copy
import functools
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from amp.casting.cast_hooks import cast_by, in_another_dtype
from amp.dtypes import LOW_PRECISION, dtype_name
from amp.errors import AmpWarning
from amp.kernels.grad_mode import without_grad
from amp.masters.whole import MasterWeights
from amp.patching import Patches
from amp.undo import Undo
from amp.weak import members

_live: weakref.WeakSet[MasterWeights] = weakref.WeakSet()
"""The masters of open sessions."""

_LOST = 0.1
"""Weights below this move an average in 16 bits by less than its digits can show, for the most part."""

_SEEN = "amp.masters.copies"
"""The key in a memo of `copy.deepcopy` under which are the ids of modules that were looked at."""


def copy_in_float32(masters: MasterWeights, undo: Undo) -> None:
    """Let models of a session with these masters be copied and averaged in FP32, until `undo`."""
    from torch.optim import swa_utils  # brings the schedulers with it

    patches = Patches()
    undo.always(patches.undo)
    undo.always(_stop_copying)
    undo.callback(_live.discard, masters)
    _live.add(masters)
    module: Any = nn.Module
    if "__deepcopy__" not in vars(module):
        module.__deepcopy__ = _deepcopy
    patches.surround(swa_utils.AveragedModel, "update_parameters", _update_parameters)
    for holder in (Tensor, torch):
        patches.surround(holder, "lerp", _lerp)
    patches.surround(Tensor, "lerp_", _lerp)
    patches.surround(torch, "_foreach_lerp_", _foreach_lerp)
    transformers = sys.modules.get("transformers.modeling_utils")
    if hasattr(transformers, "PreTrainedModel"):
        patches.surround(transformers.PreTrainedModel, "save_pretrained", _save_pretrained)  # type: ignore[union-attr]


def _stop_copying() -> None:
    module: Any = nn.Module
    if not members(_live) and vars(module).get("__deepcopy__") is _deepcopy:
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
    return any(_master_of(parameter) is not None for parameter in module.parameters()) or any(
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
        found = _master_of(tensor)
        if found is not None:  # the copy of its optimizer, before or after this one, steps the model's
            values, wide = wide.detach(), memo.setdefault(id(found[1]), wide)
            wide.detach().copy_(values)
        memo[id(tensor)] = wide
    for each in module.modules():
        for hook in (*each._forward_pre_hooks.values(), *each._forward_hooks.values()):
            if cast_by(hook) is not None:
                memo[id(hook)] = in_another_dtype(hook, torch.float32)


def _master_of(tensor: Tensor) -> tuple[MasterWeights, Any] | None:
    for masters in members(_live):
        master: Tensor | None = masters.master(tensor)
        may_be_detached = type(tensor) is Tensor and tensor.dtype in LOW_PRECISION
        if master is None and may_be_detached and not torch.compiler.is_compiling():
            master = masters.master_at(tensor)
        if master is not None:
            return masters, master
    return None


def values_of(tensor: Tensor) -> Tensor:
    """Return what a tensor in 16 bits stands for, float32. No host sync."""
    found = _master_of(tensor)
    if found is None:
        return tensor.detach().float()
    masters, master = found
    with masters.lock:
        masters.follow(master)
        return masters.values(master)


@without_grad
def put_values(tensor: Tensor, values: Tensor) -> None:
    """Make a weight, and its master if it has one, stand for other values. No host sync.

    Args:
        tensor: of a model; in 16 bits without a master it takes them rounded.
        values: float32, on any device.
    """
    found = _master_of(tensor)
    tensor.copy_(values if found is None else found[0].load(found[1], values))


def largest_in_master(tensor: Tensor) -> float:
    """Return the largest magnitude in a weight's master, NaN if it has none. The host waits."""
    if _master_of(tensor) is None:
        return math.nan
    return float(torch.linalg.vector_norm(values_of(tensor), math.inf))


# Averages.


class _InFloat32:
    """A model as an average sees it: its tensors in 16 bits are those that they stand for.

    The model's own keep their dtype: torch forgets what hooks the gradient of one that changes it, and
    DistributedDataParallel would reduce no more.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def parameters(self, recurse: bool = True) -> Iterator[Tensor]:
        return map(_in_float32, self._model.parameters(recurse))

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        return map(_in_float32, self._model.buffers(recurse))


def _in_float32(tensor: Tensor) -> Tensor:
    return values_of(tensor) if tensor.dtype in LOW_PRECISION else tensor


def _update_parameters(original: Callable[..., Any], averaged: nn.Module, model: nn.Module) -> Any:
    """Run `AveragedModel.update_parameters` on the values of the masters."""
    return original(averaged, _InFloat32(model))


def _lerp(
    original: Callable[..., Any], start: Tensor, end: Tensor, weight: Any, *args: Any, **kwargs: Any
) -> Any:
    """Let an average in FP32 be moved towards what weights in 16 bits stand for."""
    return original(start, _as_wide_as(start, end, weight), weight, *args, **kwargs)


def _foreach_lerp(
    original: Callable[..., Any], starts: Any, ends: Any, weight: Any, *args: Any, **kwargs: Any
) -> Any:
    wide = list(map(_as_wide_as, starts, ends, repeat(weight)))
    return original(starts, wide if len(wide) == len(ends) else ends, weight, *args, **kwargs)


def _as_wide_as(start: Any, end: Any, weight: Any) -> Any:
    if not (isinstance(start, Tensor) and isinstance(end, Tensor)) or end.dtype not in LOW_PRECISION:
        return end
    if torch.is_grad_enabled() and (start.requires_grad or end.requires_grad):  # no average
        return end.float() if start.dtype is torch.float32 else end
    if start.dtype is torch.float32:
        return values_of(end)
    is_small = isinstance(weight, float) and weight < _LOST
    if is_small and _master_of(end) and not _master_of(start):
        _warn_of_narrow_average(start.dtype)
    return end


@functools.cache  # once: a loop over parameters comes here for each of them
def _warn_of_narrow_average(dtype: torch.dtype) -> None:
    warnings.warn(
        f"an average in {dtype_name(dtype)} is moved towards a weight by lerp, a little at a time: "
        "most of that is rounded away. Begin the average with copy.deepcopy(model), or with clones of "
        "the tensors of model.state_dict(), which are FP32",
        AmpWarning,
        stacklevel=5,
    )


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
