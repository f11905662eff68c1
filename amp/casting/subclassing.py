"""Replacing methods of single modules: a module's class becomes a subclass of the same name.

Parameters, names, hooks and `isinstance` stay the same, a module is pickled as its original class, and
the replacement can be undone.
"""

import copy
import copyreg
import functools
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from torch import nn
from torch.jit import ScriptModule
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from amp.casting.scripting import NotScriptable

_OWN = "_amp_"
"""The prefix of the attributes that this library adds."""


class _OfAmp:
    """A mixin for subclasses of modules' classes. Modules are pickled as their original class."""

    _amp_plain_class: Any
    """The user's class."""
    _amp_base: Any
    """The direct base class: the user's class, or another of these subclasses."""
    _amp_is_over = False
    """Whether this class was undone, perhaps while a module had another one on top of it."""

    def __prepare_scriptable__(self) -> NoReturn:
        NotScriptable(type(self).__name__)()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Do not call the user's `__init_subclass__`, which is meant for the user's own subclasses."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        if isinstance(reduced, str):  # from the user's own `__reduce__`: the name of a global
            return reduced
        make, args, *rest = reduced
        plain = self._amp_plain_class
        make = _OF_OBJECTS.get(make, plain if make is type(self) else make)
        args = tuple(plain if each is type(self) else each for each in args)
        if rest and isinstance(rest[0], dict):
            rest[0] = {name: value for name, value in rest[0].items() if not _is_own(name)}
        return (make, args, *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the module as its original class would, and give the copy this class.

        The module itself is not changed meanwhile, because other threads may run it.
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
            _set_class(copied, cls)
        return copied


def _set_class(module: Any, cls: Any) -> None:
    object.__setattr__(module, "__class__", cls)  # a traced module would set that of the one inside it


def _is_own(name: Any) -> bool:
    return isinstance(name, str) and name.startswith(_OWN)


def _new(cls: type, *args: Any) -> Any:
    return cls.__new__(cls, *args)


def _new_ex(cls: type, args: Any, kwargs: Any) -> Any:
    return cls.__new__(cls, *args, **kwargs)


_OF_OBJECTS: dict[Any, Any] = {copyreg.__newobj__: _new, copyreg.__newobj_ex__: _new_ex}  # type: ignore[attr-defined]
"""Replacements for the constructors of copyreg, with which pickle insists on the object's class."""

_copied: Any = copy._reconstruct  # type: ignore[attr-defined]
"""The function by which `copy.deepcopy` builds a copy from the result of `__reduce_ex__`."""


def has_forward_of_its_own(module: nn.Module) -> bool:
    """Whether a module's forward is not its class's: scripted, lazy, or set on the module itself."""
    return "forward" in vars(module) or isinstance(module, (ScriptModule, LazyModuleMixin))


def subclass_of(base: Any, **methods: Any) -> Any:
    """Return a subclass of a module's class with the same name and docstring, and other methods."""
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
    # Bypass the metaclass, which may keep a registry of the user's classes.
    return type.__new__(type(base), base.__name__, bases, body)


def has_forward_of_ours(module: nn.Module) -> bool:
    """Whether the module's forward was replaced by `subclass_of`."""
    return isinstance(module, _OfAmp) and type(module).forward is not module._amp_plain_class.forward


def swap_classes(modules: Collection[nn.Module], make: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace the classes of modules by `make(class)`, and return a function that undoes it.

    If a module's class has been replaced again meanwhile, this class goes when the newer one does.
    """
    made = []

    def make_and_note(cls: Any) -> Any:
        made.append(make(cls))
        return made[-1]

    classes = {cls: _replacement(cls, make_and_note) for cls in dict.fromkeys(map(type, modules))}
    for module in modules:
        _set_class(module, classes[type(module)])

    def undo() -> None:
        for cls in (*made, *classes.values()):
            cls._amp_is_over = True
        _take_off(modules)

    return undo


def _replacement(cls: Any, make: Callable[[Any], Any]) -> Any:
    """Return `make(cls)`, or a copy of a parametrized module's class with such a base.

    Torch makes that class for the one module, adds properties to it, and takes it off with the last
    parametrization. So it stays the module's outermost class.
    """
    base = cls.__base__
    if cls.__module__ != parametrize.__name__ or cls.__name__ != f"Parametrized{base.__name__}":
        return make(cls)
    inner = make(base)
    body = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    methods = {name: vars(inner)[name] for name in ("forward", "__call__") if name in vars(inner)}
    own = {"_amp_base": cls, "_amp_is_over": False}
    return type.__new__(type(cls), cls.__name__, (inner,), {**body, **methods, **own})


def restore_classes(modules: Collection[nn.Module]) -> None:
    """Undo the last `swap_classes` of each module where it replaced `forward`."""
    for module in modules:
        if "forward" in vars(type(module)) and has_forward_of_ours(module):
            _set_class(module, vars(type(module))["_amp_base"])
    _take_off(modules)


def _take_off(modules: Collection[nn.Module]) -> None:
    for module in modules:
        while vars(type(module)).get("_amp_is_over"):
            _set_class(module, vars(type(module))["_amp_base"])
