"""Averages of a model's weights are taken in FP32, of what its weights in 16 bits stand for.

An average in 16 bits does not move: most of an update of a thousandth is rounded away.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from amp.dtypes import LOW_PRECISION, dtype_name
from amp.errors import AmpWarning
from amp.masters.values import master_of, values_of
from amp.patching import Patches
from amp.undo import Undo

_LITTLE = 0.1
"""Weights below this move an average in 16 bits by less than its digits can show, for the most part."""


def average_in_float32(undo: Undo) -> None:
    """Let `AveragedModel`, and averages by `lerp` or by `mul_` and `add_`, be in FP32, until `undo`."""
    from torch.optim import swa_utils  # brings the schedulers with it

    patches = Patches()
    undo.always(patches.undo)
    patches.surround(swa_utils.AveragedModel, "update_parameters", _update_parameters)
    for holder in (Tensor, torch):
        patches.surround(holder, "lerp", _lerp)
    patches.surround(Tensor, "lerp_", _lerp_)
    patches.surround(torch, "_foreach_lerp_", _foreach_lerp_)
    patches.surround(Tensor, "add_", _add_)
    patches.surround(torch, "_foreach_add_", _foreach_add_)


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
    original: Callable[..., Any], start: Any, end: Any, weight: Any, *args: Any, **kwargs: Any
) -> Any:
    """Return what lies between an average and a weight, in FP32."""
    if _is_narrow_average(start, end, weight):
        _warn_of_narrow_average(start.dtype, is_made_wide=True)
        start = start.float()
    return original(_as_wide_as(end, start), _as_wide_as(start, end), weight, *args, **kwargs)


def _lerp_(
    original: Callable[..., Any], start: Any, end: Any, weight: Any, *args: Any, **kwargs: Any
) -> Any:
    """Move an average towards a weight, both in FP32."""
    _make_wide(start, end, weight)
    return original(start, _as_wide_as(start, end), weight, *args, **kwargs)


def _foreach_lerp_(
    original: Callable[..., Any], starts: Any, ends: Any, weight: Any, *args: Any, **kwargs: Any
) -> Any:
    for start, end in zip(starts, ends, strict=False):
        _make_wide(start, end, weight)
    return original(starts, _all_as_wide_as(starts, ends), weight, *args, **kwargs)


def _add_(original: Callable[..., Any], start: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
    """Add a weight to an average, both in FP32."""
    if _is_little(kwargs.get("alpha")):
        _make_wide(start, other, kwargs["alpha"])
        other = _as_wide_as(start, other)
    return original(start, other, *args, **kwargs)


def _foreach_add_(
    original: Callable[..., Any], starts: Any, others: Any, *args: Any, **kwargs: Any
) -> Any:
    if _is_little(kwargs.get("alpha")) and not isinstance(others, Tensor):
        for start, other in zip(starts, others, strict=False):
            _make_wide(start, other, kwargs["alpha"])
        others = _all_as_wide_as(starts, others)
    return original(starts, others, *args, **kwargs)


def _all_as_wide_as(starts: Any, ends: Any) -> Any:
    wide = list(map(_as_wide_as, starts, ends))
    return wide if len(wide) == len(ends) else ends


def _as_wide_as(other: Any, tensor: Any) -> Any:
    """Return what a tensor in 16 bits stands for, if it is to be averaged with an FP32 tensor."""
    if not (isinstance(other, Tensor) and isinstance(tensor, Tensor)):
        return tensor
    if tensor.dtype not in LOW_PRECISION or other.dtype is not torch.float32:
        return tensor
    return tensor.float() if _is_differentiated(other, tensor) else values_of(tensor)


def _is_differentiated(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _is_little(weight: Any) -> bool:
    return isinstance(weight, float) and 0 < weight < _LITTLE


def _is_narrow_average(average: Any, tensor: Any, weight: Any) -> bool:
    """Whether an average in 16 bits is to be moved a little towards a weight that has a master."""
    if not (_is_little(weight) and isinstance(average, Tensor) and isinstance(tensor, Tensor)):
        return False
    if average.dtype not in LOW_PRECISION or _is_differentiated(average, tensor):
        return False
    return master_of(tensor) is not None and master_of(average) is None


def _make_wide(average: Any, tensor: Any, weight: Any) -> None:
    """Make an average FP32 before it is moved a little towards a weight, if its memory is its own."""
    if _is_narrow_average(average, tensor, weight):
        is_made_wide = _owns_its_memory(average)
        _warn_of_narrow_average(average.dtype, is_made_wide)
        if is_made_wide:
            average.data = average.detach().float()


def _owns_its_memory(tensor: Tensor) -> bool:
    """Whether nobody would see the values of a plain tensor in the memory that it has now."""
    if (
        type(tensor) is not Tensor
        or tensor.layout is not torch.strided
        or torch.compiler.is_compiling()
    ):
        return False
    storage: Any = tensor.untyped_storage()
    of_processes = tensor.device.type == "cpu" and storage.is_shared()
    users = torch._C._storage_Use_Count(storage._cdata)
    return not (of_processes or tensor.is_inference()) and users == _ONE_USER


_ONE_USER = 2
"""A tensor, and the Python object of its storage."""


@functools.cache  # once: a loop over parameters comes here for each of them
def _warn_of_narrow_average(dtype: torch.dtype, is_made_wide: bool) -> None:
    why_not = "It stays so: it is a parameter, or shares its memory"
    warnings.warn(
        f"an average in {dtype_name(dtype)} is moved towards a weight a little at a time, most of "
        f"which is rounded away. {'It is FP32 from now on' if is_made_wide else why_not}. Begin "
        "averages with copy.deepcopy(model), or with clones of the tensors of model.state_dict(), "
        "which are FP32",
        AmpWarning,
        stacklevel=5,
    )
