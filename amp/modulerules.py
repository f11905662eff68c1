"""Modules that a user's rules run in FP32 at O1 and O4.

Such a module's class is replaced by a subclass of the same name whose `forward` casts its inputs up and
lets nothing inside cast. A hook could not hold the region open: an interrupt calls no hooks, and Dynamo
follows a `with` statement but not what two hooks do to each other.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from amp.dtypes import LOW_PRECISION
from amp.modelcast import map_tensors
from amp.regions import disable_casts
from amp.rules import Rule


class _InFloat32:
    """What a module's class is mixed with. A copy or pickle of the module is of its own class again."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        _, (cls, *args), *rest = reduced
        return (_new, (_plain_class(cls), *args), *rest)


def _new(cls: type, *args: Any) -> Any:
    return cls.__new__(cls, *args)


def run_in_float32(model: nn.Module, rules: Iterable[Rule]) -> list[nn.Module]:
    """Let the modules that the rules name run in FP32, and return them."""
    chosen = [
        module
        for name, module in model.named_modules()
        if not isinstance(module, (_InFloat32, torch.jit.ScriptModule))
        and any(rule.matches(name, module) for rule in rules)
    ]
    for module in chosen:
        cls: Any = type(module)
        module.__class__ = _float32_class(cls)
    return chosen


def restore_classes(modules: Iterable[nn.Module]) -> None:
    """Undo `run_in_float32`, where nothing else has changed the class since."""
    for module in modules:
        if "_amp_plain_class" in vars(type(module)):
            module.__class__ = _plain_class(type(module))


def _plain_class(cls: type) -> Any:
    return cls._amp_plain_class  # type: ignore[attr-defined]


@functools.cache
def _float32_class(base: Any) -> Any:
    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_tensors(_widen, args), map_tensors(_widen, kwargs)
        with disable_casts():
            return base.forward(self, *args, **kwargs)

    body = {
        "forward": forward,
        "_amp_plain_class": base,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    return type(base.__name__, (_InFloat32, base), body)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in LOW_PRECISION else tensor
