"""Other forwards for single modules: a module's class becomes a subclass of the same name.

Parameters, names, hooks and `isinstance` stay what they are, a pickled module is of its own class
again, and `restore_classes` undoes it.
"""

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.jit import ScriptModule
from torch.nn.modules.lazy import LazyModuleMixin

_OWN = "_amp_"
"""What the names of attributes of ours begin with."""


class _OfAmp:
    """A mixin for subclasses of modules' classes. A pickled module is of its own class again."""

    _amp_plain_class: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Call no `__init_subclass__` of the user's: the subclass is none of theirs."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        _, (cls, *args), state, *rest = reduced
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if not name.startswith(_OWN)}
        return (_new, (cls._amp_plain_class, *args), state, *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the module as its own class would, and let the copy run as it does."""
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


def has_forward_of_its_own(module: nn.Module) -> bool:
    """Whether a module's forward is not its class's: scripted, lazy, or set on the module itself."""
    return "forward" in vars(module) or isinstance(module, (ScriptModule, LazyModuleMixin))


def subclass_of(base: Any, forward: Callable[..., Any], **attributes: Any) -> Any:
    """Return a subclass of a module's class with another forward, of the same name and docs."""
    body = {
        "forward": functools.wraps(base.forward)(forward),
        "_amp_plain_class": base,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        **attributes,
    }
    # Past the metaclass, which may keep a registry of the user's classes.
    return type.__new__(type(base), base.__name__, (_OfAmp, base), body)


def is_subclassed(module: nn.Module) -> bool:
    """Whether the module has a forward of ours."""
    return isinstance(module, _OfAmp)


def restore_classes(modules: Iterable[nn.Module]) -> None:
    """Give modules their classes back, where nothing else has changed them since."""
    for module in modules:
        module.__class__ = vars(type(module)).get("_amp_plain_class", type(module))
