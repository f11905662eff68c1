"""Replacing attributes so that they can be given back, in whatever order their owners leave.

Several owners may patch the same attribute and close in any order. The first one puts a `_Site` there,
which remembers the original, and each owner has one layer on it. Callers see the newest layer; when
the last layer goes, the attribute is the original object again.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

_SITE = "__amp_site__"
_lock = threading.RLock()
"""Held while a site gets a layer or loses one: two threads may patch the same attribute."""


class _Site:
    """One patched attribute: its original and the layers on it, oldest first."""

    def __init__(self, target: Any, name: str) -> None:
        self.target = target
        self.name = name
        self.original = getattr(target, name)
        self.inherited = name not in vars(target)
        self.attribute = vars(target).get(name)  # of a class, perhaps a staticmethod of the original
        self.layers: list[tuple[Patches, Any]] = []

    def show(self, layers: Sequence[tuple[Patches, Any]]) -> None:
        """Put the newest of these layers, or else the original, where callers look."""
        if layers:
            setattr(self.target, self.name, layers[-1][1])
        elif self.inherited:
            delattr(self.target, self.name)
        else:
            setattr(self.target, self.name, self.attribute)

    def is_shown(self) -> bool:
        """Whether the attribute is still ours: nobody else has patched it since."""
        return bool(self.layers) and vars(self.target).get(self.name) is self.layers[-1][1]


class Patches(AbstractContextManager["Patches"]):
    """The attributes that one owner has replaced. A context manager; `undo` is idempotent."""

    def __init__(self) -> None:
        self._sites: list[_Site] = []

    def wrap(self, target: Any, name: str, make: Callable[[Any], Any]) -> Any:
        """Replace `target.name` by `make(original)`, and return the original.

        `make` is given the unpatched original, whatever layers are on it already, and returns a
        function, a bound method or a static method. A layer of this same owner is replaced by the
        new one.
        """
        with _lock:
            return self._wrap(target, name, make)

    def _wrap(self, target: Any, name: str, make: Callable[[Any], Any]) -> Any:
        shown = vars(target).get(name)
        site = getattr(getattr(shown, "__func__", shown), _SITE, None)
        if site is None or not site.is_shown():
            site = _Site(target, name)
        new = make(site.original)
        setattr(getattr(new, "__func__", new), _SITE, site)
        site.layers = [layer for layer in site.layers if layer[0] is not self]
        site.layers.append((self, new))
        site.show(site.layers)
        self._sites.append(site)
        return site.original

    def surround(self, target: Any, name: str, function: Callable[..., Any]) -> None:
        """Let each call of `target.name` be one of `function(original, *args, **kwargs)`."""

        def make(original: Any) -> Any:
            @functools.wraps(original)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                return function(original, *args, **kwargs)

            return wrapper

        self.wrap(target, name, make)

    def undo(self) -> None:
        """Take this owner's layers away, newest first.

        An attribute that somebody else patched on top of ours is left alone: the layer stays under
        it, and its owner must make it harmless.
        """
        while self._sites:
            with _lock:
                site = self._sites[-1]
                others = [layer for layer in site.layers if layer[0] is not self]
                if site.is_shown():
                    site.show(others)
                site.layers = others
                self._sites.pop()  # last: an interrupted `undo` may be repeated

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Run the block with the originals where this owner has patched, whoever else has too."""
        sites = [site for site in self._sites if site.is_shown()]
        for site in sites:
            site.show(())
        try:
            yield
        finally:
            for site in sites:
                site.show(site.layers)

    def __exit__(self, *exception: object) -> None:
        self.undo()


def unpatched(function: Any) -> Any:
    """Return the original of what stands where an attribute is patched; anything else as it is."""
    if not inspect.isroutine(function):  # and might have any `__getattr__`
        return function
    site = getattr(getattr(function, "__func__", function), _SITE, None)
    return site.original if isinstance(site, _Site) else function


# Functions that were imported by name.


def modules_of_others() -> Iterator[ModuleType]:
    """Yield the loaded modules that are neither torch's nor ours."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] not in ("torch", "amp"):
            yield module


def show_patched(holder: Any, attributes: Mapping[int, tuple[Any, str, Any]]) -> None:
    """Let attributes of `holder` that are patched functions be what those are in their place now.

    Args:
        holder: a module, or any object with a `__dict__`.
        attributes: where a function is patched, its name there and the function, by the function's id.
    """
    for name, value in list(vars(holder).items()):
        if id(value) in attributes:
            target, attribute, _ = attributes[id(value)]
            setattr(holder, name, getattr(target, attribute))
