"""Replacing functions, and restoring them in whatever order their owners close.

Several owners may patch the same function and close in any order. The first one puts a `_Site` there,
which remembers the original, and each owner has one layer on it. A layer replaces one of the same
order, and wraps the newest one of a lower order. When the last layer goes, the attribute is the
original object again.

A replacement has the name, module, signature and docstring of the function, pickles as it does, and
`inspect.unwrap` finds the original.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, NamedTuple

_SITE = "__amp_site__"
_lock = threading.RLock()
"""Held while a site gets a layer or loses one: two threads may patch the same attribute."""

Make = Callable[[Any], Any]
"""Takes a function, and returns what to call instead: a function, a bound method or a static method."""


class Patch(NamedTuple):
    """One function of torch, or of a package, that is replaced while a session is open.

    Attributes:
        places: the full names of the modules or the class that have it; pickle looks in the first.
        name: its name there.
        make: what is called instead.
        why: what would silently be wrong without it.
    """

    places: tuple[str, ...]
    name: str
    make: Make
    why: str

    def targets(self) -> list[Any]:
        """Return those of the modules and classes that are loaded and have the function."""
        found = [_loaded(place) for place in self.places]
        return [target for target in found if hasattr(target, self.name)]


def _loaded(place: str) -> Any:
    """Return a module or class of this name, or None where nobody has imported it."""
    module, _, name = place.rpartition(".")
    return sys.modules.get(place) or getattr(sys.modules.get(module), name, None)


class _Layer:
    """One owner's replacement of a function."""

    def __init__(self, owner: Patches, make: Make) -> None:
        self.owner = owner
        self._make = make
        self._below: Any = None
        self._made: Any = None

    def on(self, below: Any, site: _Site) -> Any:
        """Return what is called instead of `below`; it is made again if `below` is another one."""
        if self._made is None or below is not self._below:
            self._below, self._made = below, site.named(self._make(below))
        return self._made


class _Site:
    """A function that is patched, in one place or under several names."""

    def __init__(self, target: Any, name: str) -> None:
        self.name = name
        self.original = getattr(target, name)
        self._places: dict[int, tuple[Any, Any]] = {}
        self.layers: list[_Layer] = []
        self.shown: Any = None
        self._path = _path_of(target, name)
        self.add_place(target)

    def add_place(self, target: Any) -> None:
        """Let `target` show what the first place shows."""
        if id(target) not in self._places:
            # In a class perhaps a staticmethod of the original; None where it is inherited.
            self._places[id(target)] = target, vars(target).get(self.name)

    def show(self) -> None:
        """Put the newest layer, or the original if there is none, where callers look."""
        base = shown = self.original
        by_order = sorted(self.layers, key=lambda layer: layer.owner.order)
        for _, alike in itertools.groupby(by_order, key=lambda layer: layer.owner.order):
            for layer in alike:  # the newest one counts
                shown = layer.on(base, self)
            base = shown
        changes = []
        for target, attribute in self._places.values():
            new = shown if self.layers else attribute
            if new is None:
                changes.append(functools.partial(delattr, target, self.name))
            else:
                changes.append(functools.partial(setattr, target, self.name, new))
        changes.append(functools.partial(setattr, self, "shown", shown if self.layers else None))
        tuple(map(operator.call, changes))  # by one call: an interrupt finds all of it done, or none

    def named(self, new: Any) -> Any:
        """Let the replacement be found, described and pickled like the function."""
        function = getattr(new, "__func__", new)
        functools.update_wrapper(function, getattr(self.original, "__func__", self.original))
        setattr(function, _SITE, self)
        if self._path is not None:
            function.__module__, function.__qualname__ = self._path
        return new

    def is_shown(self) -> bool:
        """Whether the attribute is still ours: nobody else has patched it since."""
        targets = [target for target, _ in self._places.values()]
        return self.shown is not None and all(vars(x).get(self.name) is self.shown for x in targets)


def _path_of(target: Any, name: str) -> tuple[str, str] | None:
    """Return the module that has a function, and its name there, by which pickle finds it.

    The `__name__` of many functions of torch leads nowhere. Return None for a function of an object.
    """
    if isinstance(target, type):
        return target.__module__, f"{target.__qualname__}.{name}"
    return (target.__name__, name) if isinstance(target, ModuleType) else None


class Patches(AbstractContextManager["Patches"]):
    """The functions that one owner has replaced. A context manager; `undo` is idempotent.

    Args:
        order: its layers wrap the newest ones of a lower order, and replace those of the same order.
    """

    def __init__(self, order: int = 0) -> None:
        self.order = order
        self._sites: list[_Site] = []

    def wrap(self, target: Any, name: str, make: Make, *others: Any) -> Any:
        """Replace `target.name` by what `make` returns for it, and return the original.

        `make` is called again when the layer below has changed. A new layer replaces an old one of this
        owner.

        Args:
            target: a module, a class or an object.
            name: the name of the function in it.
            make: see `Make`.
            *others: modules that have the same function under the same name.
        """
        with _lock:
            shown = vars(target).get(name)
            site = getattr(getattr(shown, "__func__", shown), _SITE, None)
            if site is None or not site.is_shown():
                site = _Site(target, name)
            for other in others:
                if getattr(other, name, None) is getattr(target, name):
                    site.add_place(other)
            site.layers = [layer for layer in site.layers if layer.owner is not self]
            site.layers.append(_Layer(self, make))
            self._sites.append(site)
            site.show()
            return site.original

    def install(self, patches: Iterable[Patch]) -> None:
        """Make the patches whose places are loaded."""
        for patch in patches:
            if targets := patch.targets():
                self.wrap(targets[0], patch.name, patch.make, *targets[1:])

    def undo(self) -> None:
        """Take this owner's layers away, newest first.

        An attribute that somebody else patched on top of ours is left alone: the layer stays under
        it, and its owner must make it harmless.
        """
        while self._sites:
            with _lock:
                site = self._sites[-1]
                is_shown = site.is_shown()
                site.layers = [layer for layer in site.layers if layer.owner is not self]
                if is_shown:
                    site.show()
                self._sites.pop()  # last: an interrupted `undo` may be repeated

    def __exit__(self, *exception: object) -> None:
        self.undo()


def around(function: Callable[..., Any]) -> Make:
    """Return a `Make` whose result calls `function(original, *args, **kwargs)`."""

    def make(original: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return wrapper

    return make


def unpatched(function: Any) -> Any:
    """Return the original of a replacement, and anything else unchanged."""
    if not inspect.isroutine(function):  # and might have any `__getattr__`
        return function
    site = getattr(getattr(function, "__func__", function), _SITE, None)
    return site.original if isinstance(site, _Site) else function


# Functions that were imported by name.


_WITHOUT_TORCH = {"torch", "amp", "triton", "numpy", "sympy", "mpmath", "networkx", "jinja2", "yaml"}
"""Packages that take no function of torch by name: torch, what it imports, and ours."""
_STDLIB = os.path.dirname(os.__file__)  # noqa: PTH120


def modules_of_others() -> Iterator[ModuleType]:
    """Yield the loaded modules that may have imported a function of torch by name."""
    for name, module in sys.modules.copy().items():  # at once: another thread may import meanwhile
        package = name.partition(".")[0]
        if package in _WITHOUT_TORCH or not isinstance(module, ModuleType):
            continue
        # A script's own module may be called as one of the standard library.
        is_pythons = package in sys.stdlib_module_names
        if not (is_pythons and str(vars(module).get("__file__")).startswith(_STDLIB)):
            yield module


def show_patched(holder: Any, attributes: Mapping[int, tuple[Any, ...]]) -> None:
    """Set attributes of `holder` that are patched functions to what stands in the functions' place now.

    Args:
        holder: a module, or any object with a `__dict__`.
        attributes: by the id of a function, where it is patched, its name there, and the function
        itself, so that no other object gets its id.
    """
    if attributes.keys().isdisjoint(map(id, vars(holder).copy().values())):
        return  # as nearly all modules, of which a process may have thousands
    for name, value in vars(holder).copy().items():
        if id(value) in attributes:
            target, attribute, *_ = attributes[id(value)]
            setattr(holder, name, getattr(target, attribute))
