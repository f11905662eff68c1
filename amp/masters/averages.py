"""Averages of a model's weights in FP32: where weights are in 16 bits, their masters are averaged.

An average in 16 bits hardly moves: most of an update of a thousandth is rounded away.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from amp import active
from amp.dtypes import LOW_PRECISION, dtype_name
from amp.errors import warn
from amp.kernels.interrupts import outside_inference_mode, without_grad
from amp.masters.fp32_values import pair_of, values_of
from amp.patching import Patch, around

_LITTLE = 0.1
"""Below this weight, most updates of a 16-bit average are rounded away."""


class _InFloat32:
    """A view of a model for an average: its 16-bit tensors appear with their FP32 values.

    The model's own tensors keep their dtype: a change would drop their gradient hooks, and
    DistributedDataParallel would stop reducing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def parameters(self, *args: Any) -> Iterator[Tensor]:
        return map(_in_float32, self._model.parameters(*args))

    def buffers(self, *args: Any) -> Iterator[Tensor]:
        return map(_in_float32, self._model.buffers(*args))


def _in_float32(tensor: Tensor) -> Tensor:
    return values_of(tensor) if tensor.dtype in LOW_PRECISION else tensor


def _update_parameters(original: Callable[..., Any], average: nn.Module, model: nn.Module) -> Any:
    """Do `AveragedModel.update_parameters` with the values of the masters."""
    return original(average, _InFloat32(model))


_FLOAT32 = torch.float32


def _make_lerp(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make `lerp` compute in FP32 if one of its tensors is FP32."""

    def lerp(input: Any, end: Any, weight: Any, **kwargs: Any) -> Any:
        if getattr(input, "dtype", None) is getattr(end, "dtype", None) is _FLOAT32 and not kwargs:
            return original(input, end, weight)
        input, end = _as_wide_as(end, input), _as_wide_as(input, end)
        if _is_narrow_average(input, end, weight):
            _warn_of_narrow_average(input.dtype)
        return original(input, end, weight, **kwargs)

    return lerp


def _make_lerp_(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make `lerp_` move an average towards a weight in FP32."""

    def lerp_(self: Any, end: Any, weight: Any) -> Any:
        if getattr(end, "dtype", None) is _FLOAT32:
            return original(self, end, weight)
        if _is_narrow_average(self, end, weight):
            return _move(original, self, values_of(end), weight)
        return original(self, _as_wide_as(self, end), weight)

    return lerp_


def _make_foreach_lerp_(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make `_foreach_lerp_` move averages towards weights in FP32."""

    def _foreach_lerp_(self: Any, tensors1: Any, weight: Any = None, *, weights: Any = None) -> Any:
        weight = weights if weight is None else weight
        if all([getattr(end, "dtype", None) is _FLOAT32 for end in tensors1]):  # noqa: C419 (is faster)
            return original(self, tensors1, weight)
        starts, ends = list(self), list(tensors1)
        if len(starts) == len(ends) and any(map(_is_narrow_average, starts, ends, repeat(weight))):
            for start, end in zip(starts, ends, strict=True):
                start.lerp_(end, weight)
            return None
        ends[: len(starts)] = map(_as_wide_as, starts, ends)
        return original(starts, ends, weight)

    return _foreach_lerp_


def _as_wide_as(other: Any, tensor: Any) -> Any:
    """Return the FP32 values of a 16-bit tensor if it is averaged with FP32, else the tensor itself."""
    if not (isinstance(other, Tensor) and isinstance(tensor, Tensor)):
        return tensor
    if tensor.dtype not in LOW_PRECISION or other.dtype is not _FLOAT32:
        return tensor
    return tensor.float() if _is_differentiated(other, tensor) else values_of(tensor)


def _is_differentiated(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _is_narrow_average(average: Any, tensor: Any, weight: Any) -> bool:
    """Whether a 16-bit average without a master is moved a little towards a weight that has one."""
    if not (isinstance(weight, float) and 0 < weight < _LITTLE) or torch.compiler.is_compiling():
        return False
    if type(average) not in (Tensor, nn.Parameter) or average.dtype not in LOW_PRECISION:
        return False
    if not isinstance(tensor, Tensor) or average.shape != tensor.shape or _is_transformed():
        return False
    if average.layout is not torch.strided or _is_differentiated(average, tensor):
        return False
    return pair_of(tensor) is not None and pair_of(average) is None


def _is_transformed() -> bool:
    """Whether a transform of torch.func, or forward-mode AD, is active."""
    internals: Any = torch._C
    is_dual = torch.autograd.forward_ad._current_level >= 0
    return is_dual or internals._functorch.peek_interpreter_stack() is not None


_exact: WeakKeyDictionary[Any, dict[Any, Tensor]] = WeakKeyDictionary()
"""FP32 values of 16-bit averages, like masters of weights, by storage and the place in it."""


@without_grad
def _move(lerp_: Callable[..., Any], average: Tensor, towards: Tensor, weight: float) -> Tensor:
    """Move the FP32 values of a 16-bit average, and round them into it. No host sync."""
    with outside_inference_mode():
        of_storage = _exact.setdefault(average.untyped_storage(), {})
        place = average.storage_offset(), average.shape, average.stride()
        if place not in of_storage:
            of_storage[place] = average.float()
        exact = of_storage[place]
        is_known = exact.to(average.dtype) == average  # else the user wrote to it
        exact.copy_(torch.where(is_known, exact, average.float()))
        lerp_(exact, towards, weight)
    return average.copy_(exact)


@functools.cache  # once: a loop over parameters comes here for each of them
def _warn_of_narrow_average(dtype: torch.dtype) -> None:
    warn(
        f"an average in {dtype_name(dtype)} is moved towards a weight a little at a time, most of "
        "which is rounded away. Move it by average.lerp_(weight, part), which amp computes in FP32, or "
        "begin it with copy.deepcopy(model) or with clones of the tensors of model.state_dict()"
    )


_LOST = "an average in 16 bits does not move, and one in FP32 learns rounded weights"
_AVERAGED = ("torch.optim.swa_utils.AveragedModel",)
PATCHES = (
    Patch(_AVERAGED, "update_parameters", around(_update_parameters), _LOST),
    Patch(("torch",), "lerp", _make_lerp, _LOST),
    Patch(("torch.Tensor",), "lerp", _make_lerp, _LOST),
    Patch(("torch.Tensor",), "lerp_", _make_lerp_, _LOST),
    Patch(("torch",), "_foreach_lerp_", _make_foreach_lerp_, _LOST),
)
"""The functions that are patched in a session with masters, or with weights in 16 bits."""


def is_exact(tensor: Tensor) -> bool:
    """Whether `lerp_` moves a tensor, or another one in its storage, with FP32 values behind it."""
    return tensor.untyped_storage() in _exact


def forget_averages() -> None:
    """Forget the FP32 values of 16-bit averages, once no open session may move them."""
    if not any(session.properties.has_half for session in active.open_sessions()):
        _exact.clear()
