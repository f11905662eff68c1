"""Checks of hyper-parameters, and of the tensors of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp.dtypes import SCALABLE
from amp.errors import AmpRuntimeError, AmpTypeError, AmpValueError, brief, shape_of
from amp.kernels.tensor_lists import has_no_memory, local
from amp.optimizers.state_dicts import PACKED
from amp.state_checks import as_float

if TYPE_CHECKING:
    from amp.optimizers.batches import Batch
    from amp.optimizers.fused import FusedOptimizer


def check_range(name: str, value: Any, low: float = 0.0, below: float = math.inf) -> None:
    """Raise AmpValueError unless `low <= value < below`.

    The value of a tensor on a device is not checked: the host would wait for it.
    """
    if type(value) is float and low <= value < below:
        return
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise AmpValueError(f"{name} has shape {shape_of(value)}; give it one element")
        if value.is_meta or value.is_complex() or value.layout is not torch.strided:
            raise AmpValueError(f"{name} is {brief(value)} on {value.device}, which is no number")
        if value.device.type != "cpu":
            return
        value = value.item()
    number = as_float(value)
    if number is None:
        raise AmpValueError(f"{name}={brief(value)} is no number")
    if not low <= number < below:
        limits = f"at least {low:g}" + (f" and below {below:g}" if below < math.inf else " and finite")
        raise AmpValueError(f"{name}={number:g} must be {limits}")


def check_betas(betas: Any) -> None:
    """Raise AmpValueError unless these are two numbers in [0, 1)."""
    is_list = isinstance(betas, (list, tuple)) or (isinstance(betas, Tensor) and betas.dim() == 1)
    if not is_list or len(betas := list(betas)) != 2:
        raise AmpValueError(f"betas={brief(betas)} must be two numbers")
    for name, beta in zip(("betas[0]", "betas[1]"), betas, strict=True):
        check_range(name, beta, below=1.0)


def unusable_entry(optimizer: FusedOptimizer, parameter: Tensor) -> str | None:
    """Return the name of an entry of a parameter's state that no step could have made, or None."""
    state, moments = optimizer.state.get(parameter, {}), (*optimizer._moments(), PACKED)
    for name in (*moments, "step", *optimizer._scalars):
        if name in state and not _is_usable(state[name], parameter, is_moment=name in moments):
            return name
    return None


def _is_usable(value: Any, parameter: Tensor, is_moment: bool) -> bool:
    """Whether a value is a dense tensor of real numbers: a moment of a parameter, or one number."""
    if not isinstance(value, Tensor):
        return False
    own = local(value)
    is_dense = own.layout is torch.strided and not (own.is_nested or own.is_quantized)
    has_values = not own.is_meta or local(parameter).is_meta
    has_size = own.shape == local(parameter).shape if is_moment else value.numel() == 1
    return is_dense and has_values and has_size and not own.is_complex()


def check_entries(optimizer: FusedOptimizer, index: int, place: int) -> None:
    """Raise AmpValueError if no step could have made the state of a group's parameter."""
    group = optimizer.param_groups[index]
    parameter = group["params"][place]
    if (name := unusable_entry(optimizer, parameter)) is None:
        return
    value = optimizer.state[parameter][name]
    where = f" on {value.device}" if isinstance(value, Tensor) and value.is_meta else ""
    is_number = name == "step" or name in optimizer._scalars
    expected = "one element" if is_number else f"shape {tuple(parameter.shape)}"
    raise AmpValueError(
        f"the state of {_called(group, index, place)} has no usable '{name}': it is "
        f"{brief(value)}{where}; expected a dense tensor of real numbers, of {expected}. Repair "
        f"optimizer.state, or load a state dict of a {type(optimizer).__name__}"
    )


def _called(group: Mapping[str, Any], index: int, place: int) -> str:
    """Return how to call a parameter of a group in a message."""
    shape, names = tuple(group["params"][place].shape), group.get("param_names")
    called = f"param_groups[{index}]['params'][{place}], of shape {shape},"
    return f"'{names[place]}', {called}" if names else called


def check_batch(optimizer: FusedOptimizer, batch: Batch, lists: Mapping[str, Sequence[Tensor]]) -> None:
    """Raise if a step cannot take a gradient, or the state. Nothing has been stepped then.

    Args:
        optimizer: the optimizer that is about to step.
        batch: some of its parameters.
        lists: the result of `Batch.tensors`.
    """
    group = optimizer.param_groups[batch.index]
    kept = *optimizer._kept(group), "step"
    for i, (place, parameter) in enumerate(zip(batch.places, batch.stepped, strict=True)):
        called = _called(group, batch.index, place)
        state = optimizer.state.get(parameter, {})
        check_entries(optimizer, batch.index, place)
        tensors = {name: some[i] for name, some in lists.items()}
        tensors |= {name: local(state[name]) for name in kept if isinstance(state.get(name), Tensor)}
        _check_tensors(optimizer, parameter, called, tensors)


_MEANINGS = {
    "params": "what is stepped",
    "grads": "the gradient",
    "models": "the model's weight",
    "lows": "the low half of the master",
    "step": "the step",
}
"""Descriptions of the tensors of a step, besides moments."""


def _check_tensors(
    optimizer: FusedOptimizer, parameter: Tensor, called: str, tensors: Mapping[str, Tensor]
) -> None:
    """Raise if a step cannot take the tensors of a parameter."""
    kind, grad = type(optimizer).__name__, tensors["grads"]
    for name, tensor in tensors.items():
        if tensor.layout is torch.strided and has_no_memory(tensor):
            raise AmpRuntimeError(
                f"{_MEANINGS.get(name, f'the {name}')} of {called} has no memory: it was released, as "
                "by untyped_storage().resize_(0). Restore it before the step"
            )
    needs_norms = optimizer._goes_by_norms or optimizer.max_grad_norm
    if needs_norms and hasattr(parameter, "_fsdp_flattened"):
        raise AmpTypeError(
            f"{called} is a flat shard of FullyShardedDataParallel, whose norm {kind} cannot tell. "
            "Cut the model by fully_shard instead, or leave max_grad_norm out and call the "
            "model's clip_grad_norm_"
        )
    if grad.layout is not torch.strided or grad.dtype not in SCALABLE:
        what = grad.dtype if grad.layout is torch.strided else f"sparse ({grad.layout})"
        raise AmpTypeError(
            f"the gradient of {called} is {what}; {kind} takes dense float16, bfloat16, float32 "
            "and float64"
        )
    if parameter.device != grad.device:
        raise AmpRuntimeError(
            f"the gradient of {called} is on {grad.device}, and the stepped tensor on "
            f"{parameter.device}: the model was moved. Move it before amp.initialize"
        )
    if optimizer.state_dtype and torch.float64 in (parameter.dtype, grad.dtype):
        raise AmpTypeError(
            f"{called} is {parameter.dtype} and its gradient {grad.dtype}: moments in "
            f"{optimizer.state_dtype} are of float32 at most. Leave state_dtype out"
        )
    for name, moment in tensors.items():
        if name in _MEANINGS:
            continue
        if moment.dtype is not (optimizer.kept_dtype or parameter.dtype):
            raise AmpRuntimeError(
                f"{called} is {parameter.dtype} and its {name} {moment.dtype}: the parameter's dtype "
                "was changed after its first step. Change it before, and make a new optimizer"
            )
        if moment.device != grad.device:
            raise AmpRuntimeError(
                f"the gradient of {called} is on {grad.device} and its {name} on {moment.device}: the "
                "model was moved after its first step. Move it before, or load the optimizer's state "
                "dict into a new optimizer"
            )
