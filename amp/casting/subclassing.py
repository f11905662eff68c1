"""Other methods for single modules: a module's class becomes a subclass of the same name.

Parameters, names, hooks and `isinstance` stay what they are, a pickled module is of its own class
again, and it can be undone.
"""

import copy
import copyreg
import functools
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from torch import nn
from torch.jit import ScriptModule
from torch.nn.modules.lazy import LazyModuleMixin

from amp.casting.scripting import NotScriptable

_OWN = "_amp_"
"""What the names of attributes of ours begin with."""


class _OfAmp:
    """A mixin for subclasses of modules' classes. A pickled module is of its own class again."""

    _amp_plain_class: Any
    """The user's own."""
    _amp_base: Any
    """The class that this one is put on: the user's own, or another subclass of ours."""
    _amp_is_over = False
    """Whether it was given up while another one was on top of it."""

    def __prepare_scriptable__(self) -> NoReturn:
        NotScriptable(type(self).__name__)()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Call no `__init_subclass__` of the user's: the subclass is none of theirs."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        if isinstance(reduced, str):  # the user's own says so
            return reduced
        make, args, *rest = reduced
        plain = self._amp_plain_class
        make = _OF_OBJECTS.get(make, plain if make is type(self) else make)
        args = tuple(plain if each is type(self) else each for each in args)
        if rest and isinstance(rest[0], dict):
            rest[0] = {name: value for name, value in rest[0].items() if not _is_own(name)}
        return (make, args, *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the module as its own class would, and let the copy run as it does.

        The module stays what it is meanwhile: other threads may run it.
        """
        cls = type(self)
        of_plain_class = getattr(super(), "__deepcopy__", None)
        if of_plain_class is None:
            reduced: Any = super().__reduce_ex__(4)
            copied = self if isinstance(reduced, str) else _copied(self, memo, *reduced)
        else:
            copied = of_plain_class(memo)
        if copied is not self and type(copied) in (cls, cls._amp_plain_class):
            for name, value in list(vars(self).items()):
                if _is_own(name) and name not in vars(copied):
                    vars(copied)[name] = copy.deepcopy(value, memo)
            copied.__class__ = cls
        return copied


def _is_own(name: Any) -> bool:
    return isinstance(name, str) and name.startswith(_OWN)


def _new(cls: type, *args: Any) -> Any:
    return cls.__new__(cls, *args)


def _new_ex(cls: type, args: Any, kwargs: Any) -> Any:
    return cls.__new__(cls, *args, **kwargs)


_OF_OBJECTS: dict[Any, Any] = {copyreg.__newobj__: _new, copyreg.__newobj_ex__: _new_ex}  # type: ignore[attr-defined]
"""Ours in place of what makes a pickled object, with which pickle insists on the object's class."""

_copied: Any = copy._reconstruct  # type: ignore[attr-defined]
"""What `copy.deepcopy` does with what `__reduce_ex__` returned; with a memo it copies deeply."""


def has_forward_of_its_own(module: nn.Module) -> bool:
    """Whether a module's forward is not its class's: scripted, lazy, or set on the module itself."""
    return "forward" in vars(module) or isinstance(module, (ScriptModule, LazyModuleMixin))


def subclass_of(base: Any, **methods: Any) -> Any:
    """Return a subclass of a module's class with other methods, of the same name and docs."""
    for method in methods.values():
        method.__code__ = method.__code__.replace()  # torch.compile counts recompilations by code
    body = {
        **{name: functools.wraps(getattr(base, name))(method) for name, method in methods.items()},
        "_amp_plain_class": getattr(base, "_amp_plain_class", base),
        "_amp_base": base,
        "_amp_is_over": False,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    bases = (base,) if issubclass(base, _OfAmp) else (_OfAmp, base)
    # Past the metaclass, which may keep a registry of the user's classes.
    return type.__new__(type(base), base.__name__, bases, body)


def has_forward_of_ours(module: nn.Module) -> bool:
    """Whether the module's forward is one that `subclass_of` was given."""
    return isinstance(module, _OfAmp) and type(module).forward is not module._amp_plain_class.forward


def swap_classes(modules: Collection[nn.Module], make: Callable[[Any], Any]) -> Callable[[], None]:
    """Give modules the subclasses that `make` makes of their classes, and return what undoes it.

    A class that another one was put on meanwhile goes when that one does.
    """
    classes = {cls: make(cls) for cls in dict.fromkeys(map(type, modules))}
    for module in modules:
        module.__class__ = classes[type(module)]

    def undo() -> None:
        for cls in classes.values():
            cls._amp_is_over = True
        _take_off(modules)

    return undo


def restore_classes(modules: Collection[nn.Module]) -> None:
    """Take the forward that `subclass_of` was given off modules that have it on top."""
    for module in modules:
        if "forward" in vars(type(module)) and has_forward_of_ours(module):
            module.__class__ = vars(type(module))["_amp_base"]
    _take_off(modules)


def _take_off(modules: Collection[nn.Module]) -> None:
    for module in modules:
        while vars(type(module)).get("_amp_is_over"):
            module.__class__ = vars(type(module))["_amp_base"]
