"""The names of `apex.amp._initialize`, with which scripts cast the inputs of a model's forward."""

from collections.abc import Callable
from typing import Any

import torch

from amp.casting.containers import map_tensors

__all__ = ["applier", "to_type"]


def to_type(dtype: torch.dtype, t: Any) -> Any:
    """Return a floating-point tensor in another dtype, and any other tensor unchanged."""
    return t.to(dtype) if t.is_floating_point() else t


def applier(value: Any, fn: Callable[[Any], Any]) -> Any:
    """Return `value` with `fn` applied to each tensor in it.

    Containers keep their classes, named tuples and subclasses of dict too. An object with a `.to`
    method is copied, with its tensors replaced.
    """
    return map_tensors(fn, value)
