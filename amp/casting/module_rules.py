"""Modules that a user's rules run in FP32 at O1 and O4.

Such a module's class is replaced by a subclass of the same name whose `forward` casts its inputs up,
and in which nothing casts. Hooks could not hold that region open: an interrupt calls no hooks, and
Dynamo follows a `with` statement, but not a region that one hook opens and another closes.
"""

import copy
import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.jit import ScriptModule
from torch.nn.modules.lazy import LazyModuleMixin

from amp.casting.containers import cast_tensors
from amp.casting.regions import Caster, disable_casts
from amp.dtypes import LOW_PRECISION
from amp.errors import AmpWarning
from amp.profiles.rules import Rule


class _InFloat32:
    """A mixin for classes of modules that run in FP32. A pickled module is of its own class again."""

    _amp_plain_class: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Call no `__init_subclass__` of the user's: the subclass is none of theirs."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        _, (cls, *args), *rest = reduced
        return (_new, (cls._amp_plain_class, *args), *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the module as its own class would, and let the rule hold for the copy too."""
        cls = type(self)
        self.__class__ = cls._amp_plain_class
        try:
            copied = copy.deepcopy(self, memo)
        finally:
            self.__class__ = cls
        copied.__class__ = cls
        return copied


def _new(cls: type, *args: Any) -> Any:
    return cls.__new__(cls, *args)


def run_in_float32(model: nn.Module, rules: Sequence[Rule], caster: Caster) -> list[nn.Module]:
    """Let the modules that the rules name run in FP32 while the caster is live, and return them.

    A module whose `forward` is not its class's gets a warning, since no rule can hold for it.
    """
    chosen = []
    for name, module in model.named_modules():
        rule = next((rule for rule in rules if rule.matches(name, module)), None)
        if rule is None or isinstance(module, _InFloat32):
            continue
        cls = type(module)
        if "forward" in vars(module) or isinstance(module, (ScriptModule, LazyModuleMixin)):
            warnings.warn(
                f"{rule.source}: the rule for modules '{rule.pattern}' cannot hold for '{name}' "
                f"({cls.__name__}), whose forward is scripted, lazy, or set on the module itself",
                AmpWarning,
                stacklevel=2,
            )
            continue
        chosen.append(module)
    classes = {cls: _float32_class(cls, caster) for cls in dict.fromkeys(map(type, chosen))}
    for module in chosen:  # last: a warning may be an error
        module.__class__ = classes[type(module)]
    return chosen


def restore_classes(modules: Iterable[nn.Module]) -> None:
    """Undo `run_in_float32`, where nothing else has changed the class since."""
    for module in modules:
        module.__class__ = vars(type(module)).get("_amp_plain_class", type(module))


def _float32_class(base: Any, caster: Caster) -> Any:
    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not caster.live:
            return base.forward(self, *args, **kwargs)
        args = cast_tensors(args, LOW_PRECISION, torch.float32)
        kwargs = cast_tensors(kwargs, LOW_PRECISION, torch.float32)
        with disable_casts():
            return base.forward(self, *args, **kwargs)

    body = {
        "forward": forward,
        "_amp_plain_class": base,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    # Past the metaclass, which may keep a registry of the user's classes.
    return type.__new__(type(base), base.__name__, (_InFloat32, base), body)
