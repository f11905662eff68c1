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
from amp.masters.values import is_of_a_model, master_of, values_of
from amp.patching import Patches
from amp.undo import Undo

_LITTLE = 0.1
"""Weights below this move an average in 16 bits by less than its digits can show, for the most part."""


def average_in_float32(undo: Undo) -> None:
    """Let `AveragedModel`, and averages by `lerp`, be in FP32, until `undo`; others warn."""
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


def _lerp(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what lies between two tensors, in FP32 if one of them is."""
    given = dict(zip(("input", "end", "weight"), args, strict=False)) | kwargs
    start, end = given.get("input"), given.get("end")
    if _are_different(start, end):
        given["input"], given["end"] = _as_wide_as(end, start), _as_wide_as(start, end)
        return original(given.pop("input"), given.pop("end"), **given)
    _meet_average(start, end, given.get("weight"), may_change=False)
    return original(*args, **kwargs)


def _lerp_(original: Callable[..., Any], start: Any, end: Any, *args: Any, **kwargs: Any) -> Any:
    """Move an average towards a weight, both in FP32."""
    _meet_average(start, end, args[0] if args else kwargs.get("weight"))
    return original(start, _as_wide_as(start, end), *args, **kwargs)


def _foreach_lerp_(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Move averages towards weights, all in FP32."""
    if len(args) < 2:
        return original(*args, **kwargs)
    starts, ends, *rest = args
    starts, ends = list(starts), list(ends)
    for start, end in zip(starts, ends, strict=False):
        _meet_average(start, end, rest[0] if rest else kwargs.get("weight"))
    ends[: len(starts)] = map(_as_wide_as, starts, ends)
    return original(starts, ends, *rest, **kwargs)


def _add_(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Add to a tensor in place, and warn if that is an average that cannot move."""
    if "alpha" in kwargs and len(args) == 2:
        _meet_average(*args, kwargs["alpha"], may_change=False)
    return original(*args, **kwargs)


def _foreach_add_(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if "alpha" in kwargs and len(args) == 2 and all(isinstance(x, (list, tuple)) for x in args):
        for average, tensor in zip(*args, strict=False):
            _meet_average(average, tensor, kwargs["alpha"], may_change=False)
    return original(*args, **kwargs)


def _are_different(start: Any, end: Any) -> bool:
    return isinstance(start, Tensor) and isinstance(end, Tensor) and start.dtype is not end.dtype


def _as_wide_as(other: Any, tensor: Any) -> Any:
    """Return what a tensor in 16 bits stands for, if it is to be averaged with an FP32 tensor."""
    if not _are_different(other, tensor):
        return tensor
    if tensor.dtype not in LOW_PRECISION or other.dtype is not torch.float32:
        return tensor
    return tensor.float() if _is_differentiated(other, tensor) else values_of(tensor)


def _is_differentiated(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _is_narrow_average(average: Any, tensor: Any, weight: Any) -> bool:
    """Whether a tensor in 16 bits is to be moved a little towards a weight that has a master."""
    if not (isinstance(weight, float) and 0 < weight < _LITTLE) or torch.compiler.is_compiling():
        return False
    if (
        not (isinstance(average, Tensor) and isinstance(tensor, Tensor))
        or average.shape != tensor.shape
    ):
        return False
    if average.dtype not in LOW_PRECISION or _is_differentiated(average, tensor):
        return False
    return master_of(tensor) is not None and master_of(average) is None


def _meet_average(average: Any, tensor: Any, weight: Any, may_change: bool = True) -> None:
    """Warn of an average in 16 bits, and make it FP32 if it may be changed and nobody else sees it."""
    if _is_narrow_average(average, tensor, weight):
        is_made_wide = may_change and _is_alone(average)
        _warn_of_narrow_average(average.dtype, is_made_wide)
        if is_made_wide:
            with torch.inference_mode(False):
                average.data = average.detach().float()


def _is_alone(tensor: Tensor) -> bool:
    """Whether a tensor is a plain one whose memory, and dtype, matter to nobody but who holds it."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or is_of_a_model(tensor):
        return False
    if tensor.is_inference() or _is_transformed():
        return False
    storage: Any = tensor.untyped_storage()
    if not storage.resizable() or (tensor.device.type == "cpu" and storage.is_shared()):
        return False  # a NumPy array, a mapped file, another process
    internals: Any = torch._C
    users = tensor._use_count(), internals._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
    return bool(users == (1, 2))  # the second user of the storage is its Python object


def _is_transformed() -> bool:
    """Whether a transform of torch.func, or forward-mode AD, is at work."""
    internals: Any = torch._C
    is_dual = torch.autograd.forward_ad._current_level >= 0
    return is_dual or internals._functorch.peek_interpreter_stack() is not None


@functools.cache  # once: a loop over parameters comes here for each of them
def _warn_of_narrow_average(dtype: torch.dtype, is_made_wide: bool) -> None:
    now = "It is FP32 from now on. " if is_made_wide else ""
    warnings.warn(
        f"an average in {dtype_name(dtype)} is moved towards a weight a little at a time, most of "
        f"which is rounded away. {now}Begin averages with copy.deepcopy(model), or with clones of the "
        "tensors of model.state_dict(), which are FP32",
        AmpWarning,
        stacklevel=5,
    )
