"""Mapping a function over the tensors inside containers that models take and return."""

import copy
import dataclasses
from collections import UserDict, deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

Function = Callable[[Tensor], Tensor]


def map_tensors(function: Function, value: Any, inside: frozenset[int] = frozenset()) -> Any:
    """Return `value` with `function` applied to every tensor in it.

    Goes through lists, tuples, named tuples, sets, mappings, dataclasses, packed sequences, and
    objects with a `.to` method. Types and the order of keys are kept. An unchanged container is
    returned itself; otherwise a shallow copy is returned, and the original is not modified.

    Args:
        function: takes a tensor and returns a tensor, perhaps the same one.
        value: a tensor, a container, or anything else.
        inside: the ids of the objects around the value, so that cycles end.
    """
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


def cast_tensors(value: Any, dtypes: Collection[torch.dtype], dtype: torch.dtype) -> Any:
    """Return `value` with each tensor in it whose dtype is in `dtypes` cast to `dtype`."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.dtype in dtypes else tensor, value)


def _map_sequence(function: Function, value: Any, inside: frozenset[int]) -> Any:
    items = list(value)
    mapped = [map_tensors(function, item, inside) for item in items]
    if all(new is old for new, old in zip(mapped, items, strict=True)):
        return value
    if hasattr(value, "_make"):  # a named tuple
        return value._make(mapped)
    if hasattr(value, "n_sequence_fields"):  # a named result of torch, as of `torch.topk`
        return type(value)(mapped)
    if isinstance(value, tuple):  # a subclass may have a constructor of its own
        return tuple.__new__(type(value), mapped)
    if isinstance(value, (list, deque)):
        result = copy.copy(value)
        result.clear()
        result.extend(mapped)
        return result
    return type(value)(mapped)


def _map_mapping(function: Function, value: Any, inside: frozenset[int]) -> Any:
    changed = _changed(function, value, inside)
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
    names = dict.fromkeys(getattr(value, "__dict__", ()))
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        names |= dict.fromkeys([slots] if isinstance(slots, str) else slots)
    changed = _changed(function, {name: getattr(value, name, None) for name in names}, inside)
    if not changed:
        return value
    result = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(result, name, new)
    return result


def _changed(function: Function, values: Any, inside: frozenset[int]) -> dict[Any, Any]:
    """Return the new values of a mapping, only where the function changes them."""
    mapped = {key: map_tensors(function, old, inside) for key, old in values.items()}
    return {key: new for key, new in mapped.items() if new is not values[key]}
