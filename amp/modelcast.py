"""O0, O2, O3, O5: casting a model's weights, and its inputs and outputs.

Weights are cast in place, so parameters keep their identity: optimizers, tied weights and hooks go
on working. Activations are cast by module hooks that are plain picklable objects, so a deep copy, a
pickle, DataParallel and DDP see an ordinary module.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.rnn import PackedSequence
from torch.utils.hooks import RemovableHandle

from amp.dtypes import CASTABLE
from amp.masters import Contents
from amp.properties import Properties
from amp.rules import Rule

_OTHER_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)
_ONE_DTYPE_LAYERS = (
    nn.Linear,
    nn.Bilinear,
    _ConvNd,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    nn.PReLU,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)
"""Layers of torch that fail when their input is not of their weight's dtype."""


def keeps_fp32(module: nn.Module, properties: Properties) -> bool:
    """Whether `module` is a norm that the properties keep in FP32."""
    has_statistics = isinstance(module, _BatchNorm) or getattr(module, "running_mean", None) is not None
    if properties.keep_batchnorm_fp32 and isinstance(module, _NormBase) and has_statistics:
        return True
    return bool(properties.keep_norm_fp32) and isinstance(module, (_NormBase, *_OTHER_NORMS))


def _ruled_modules(model: nn.Module, rules: Iterable[Rule]) -> dict[nn.Module, torch.dtype]:
    """Return the modules that a user's rules speak of, with all inside them, and their dtypes."""
    ruled: dict[nn.Module, torch.dtype] = {}
    for rule in rules:
        for name, module in model.named_modules():
            if rule.dtype is not None and rule.matches(name, module):
                ruled.update(dict.fromkeys(module.modules(), rule.dtype))
    return ruled


def _tensors_of(module: nn.Module) -> tuple[Tensor, ...]:
    return (*module.parameters(recurse=False), *module.buffers(recurse=False))


def dtypes_to_be(model: nn.Module, properties: Properties) -> dict[Tensor, torch.dtype]:
    """Return the parameters and buffers of `model` that are to be cast, and to what.

    Norms that the properties keep, and tensors that are neither float16, bfloat16 nor float32, stay
    as they are. A user's rules win, also over a tensor that other modules share.
    """
    if not isinstance(properties.cast_model_type, torch.dtype):
        return {}
    ruled = _ruled_modules(model, properties.rules)
    by_rule = {tensor: dtype for module, dtype in ruled.items() for tensor in _tensors_of(module)}
    return {
        tensor: by_rule.get(tensor, properties.cast_model_type)
        for module in model.modules()
        if module in ruled or not keeps_fp32(module, properties)
        for tensor in _tensors_of(module)
        if tensor.dtype in CASTABLE
    }


def cast_weights(model: nn.Module, properties: Properties, before: dict[Tensor, Contents]) -> None:
    """Cast the parameters, buffers and gradients of `model` in place, as `dtypes_to_be` says.

    What each tensor that is cast held is put into `before`.
    """
    for tensor, dtype in dtypes_to_be(model, properties).items():
        if tensor.dtype is not dtype:
            before[tensor] = held = Contents.of(tensor)
            grad = None if held.grad is None else held.grad.to(dtype)
            Contents(held.data.to(dtype), grad).put_into(tensor)
    for module in model.modules():
        if isinstance(module, nn.RNNBase) and isinstance(properties.cast_model_type, torch.dtype):
            module.flatten_parameters()


def install_hooks(model: nn.Module, properties: Properties) -> list[RemovableHandle]:
    """Make the model cast its inputs and outputs, and its layers what they are given.

    - The model casts floating inputs to its own dtype and floating outputs to FP32, or to
      `cast_model_outputs`.
    - A layer that needs its input in its weight's dtype casts it, so that a sub-module can be called
      on its own and FP32 activations may appear inside the model.
    - A norm kept in FP32 that cannot take half inputs casts them up and its output down again.
    - A module that a rule speaks of casts its inputs to the rule's dtype, and gives what comes out.
    """
    dtype = properties.cast_model_type
    outputs = properties.cast_model_outputs
    if not isinstance(dtype, torch.dtype) or _is_float64(model):
        return [] if outputs is None else [_cast_outputs(model, outputs)]
    handles = []
    ruled = _ruled_modules(model, properties.rules)
    for module in model.modules():
        if module in ruled:
            handles.append(_cast_inputs(module, ruled[module]))
            continue
        needed = _needed_input_dtype(module, dtype)
        if module is model or needed is None:
            continue
        handles.append(_cast_inputs(module, needed))
        if needed is not dtype:
            handles.append(_cast_outputs(module, dtype))
    if model not in ruled:
        handles.append(_cast_inputs(model, _needed_input_dtype(model, dtype) or dtype))
    handles.append(_cast_outputs(model, outputs or torch.float32))
    return handles


def _is_float64(model: nn.Module) -> bool:
    """Whether every floating weight is float64, so that there is nothing to cast for."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return dtypes == {torch.float64}


def _needed_input_dtype(module: nn.Module, model_dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype that this layer must be given, or None if it is not a layer that must."""
    dtype = next((tensor.dtype for tensor in _tensors_of(module) if tensor.is_floating_point()), None)
    if isinstance(module, _ONE_DTYPE_LAYERS):
        return dtype
    if isinstance(module, _NormBase) and dtype is model_dtype:  # wider statistics take any input
        return dtype
    return None


def _cast_inputs(module: nn.Module, dtype: torch.dtype) -> RemovableHandle:
    return module.register_forward_pre_hook(CastInputs(dtype), with_kwargs=True)


def _cast_outputs(module: nn.Module, dtype: torch.dtype) -> RemovableHandle:
    return module.register_forward_hook(CastOutputs(dtype), prepend=True)


@dataclasses.dataclass(frozen=True)
class CastInputs:
    """A forward pre-hook: floating arguments, float64 included, go in as `dtype`."""

    dtype: torch.dtype

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, cast."""

        def cast(tensor: Tensor) -> Tensor:
            wide = tensor.dtype is torch.float64
            return tensor.to(self.dtype) if wide or tensor.dtype in CASTABLE else tensor

        return map_tensors(cast, args), map_tensors(cast, kwargs)


@dataclasses.dataclass(frozen=True)
class CastOutputs:
    """A forward hook: float16, bfloat16 and float32 outputs come out as `dtype`."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output, cast."""

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(self.dtype) if tensor.dtype in CASTABLE else tensor

        return map_tensors(cast, output)


Function = Callable[[Tensor], Tensor]


def map_tensors(function: Function, value: Any) -> Any:
    """Return `value` with `function` applied to every tensor in it.

    Goes through lists, tuples, named tuples, sets, mappings, dataclasses, packed sequences, and
    objects with a `.to` method. Types and the order of keys are kept. A container in which nothing
    changed is returned itself; one in which something did is a shallow copy, and the caller's stays
    as it was.
    """
    return _map(function, value, frozenset())


def _map(function: Function, value: Any, inside: frozenset[int]) -> Any:
    """Do it; `inside` holds the ids of the objects that `value` is an attribute of, if any."""
    if isinstance(value, Tensor):
        return function(value)
    if value is None or isinstance(value, (str, bytes, int, float, complex, nn.Module, type)):
        return value
    if isinstance(value, PackedSequence):
        return value._replace(data=function(value.data))
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return _map_sequence(function, value, inside)
    if isinstance(value, (Mapping, UserDict)):
        return _map_mapping(function, value, inside)
    if (dataclasses.is_dataclass(value) or hasattr(value, "to")) and id(value) not in inside:
        return _map_attributes(function, value, inside | {id(value)})
    return value


def _map_sequence(function: Function, value: Any, inside: frozenset[int]) -> Any:
    items = list(value)
    mapped = [_map(function, item, inside) for item in items]
    if all(new is old for new, old in zip(mapped, items, strict=True)):
        return value
    if hasattr(value, "_make"):  # a named tuple
        return value._make(mapped)
    if isinstance(value, tuple):  # a subclass may have a constructor of its own
        return tuple.__new__(type(value), mapped)
    if isinstance(value, (list, deque)):
        result = copy.copy(value)
        result.clear()
        result.extend(mapped)
        return result
    return type(value)(mapped)


def _map_mapping(function: Function, value: Any, inside: frozenset[int]) -> Any:
    mapped = {key: _map(function, old, inside) for key, old in value.items()}
    changed = {key: new for key, new in mapped.items() if new is not value[key]}
    if not changed:
        return value
    try:
        result = copy.copy(value)
        for key, new in changed.items():
            result[key] = new
    except TypeError:  # a read-only mapping
        return {**value, **changed}
    return result


def _map_attributes(function: Function, value: Any, inside: frozenset[int]) -> Any:
    names = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    names += [name for name in getattr(value, "__dict__", {}) if name not in names]
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        names += [name for name in ([slots] if isinstance(slots, str) else slots) if name not in names]
    changed = {}
    for name in names:
        old = getattr(value, name, None)
        if (new := _map(function, old, inside)) is not old:
            changed[name] = new
    if not changed:
        return value
    result = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(result, name, new)
    return result
