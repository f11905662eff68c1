"""The `state` of an optimizer, in which a model's parameter finds the entry of its master."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import KeysView, MutableMapping
from typing import Any, Self

from torch import Tensor

from amp.distributed import set_values
from amp.dtypes import LOW_PRECISION
from amp.masters.master_weights import MasterWeights


class SharedState(defaultdict[Any, Any]):
    """The state of an optimizer with masters: its keys are what it steps, as for `optimizer.step`.

    A parameter of the model finds, sets and removes the entry of its master. A copy or a pickle of it
    is an ordinary `defaultdict`. A deep copy is FP32, as deep copies of the model are.

    Args:
        replaced: the mapping that it takes the place of, whose entries it has.
        masters: the session's.
    """

    def __init__(self, replaced: MutableMapping[Any, Any], masters: MasterWeights) -> None:
        super().__init__(getattr(replaced, "default_factory", None), replaced)
        self.replaced = replaced
        self._masters = masters

    def _key(self, key: Any) -> Any:
        master = self._masters.master(key) if isinstance(key, Tensor) else None
        return key if master is None else master

    def __missing__(self, key: Any) -> Any:
        """Return the entry of a parameter's master; make a new one for what has no master."""
        own = self._key(key)
        return super().__missing__(key) if own is key else self[own]

    def __contains__(self, key: object) -> bool:
        """Whether a parameter, or its master, has an entry."""
        return super().__contains__(key) or super().__contains__(self._key(key))

    def keys(self) -> Any:
        """Return a view of the keys, in which a parameter is if its master is."""
        return KeysView(self)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Set an entry."""
        super().__setitem__(self._key(key), value)

    def __delitem__(self, key: Any) -> None:
        """Remove an entry."""
        super().__delitem__(self._key(key))

    update: Any = MutableMapping.update  # it sets each entry by `__setitem__`

    def __ior__(self, mapping: Any) -> Self:
        """Set several entries."""
        self.update(mapping)
        return self

    def get(self, key: Any, default: Any = None) -> Any:
        """Return an entry, or `default`."""
        return super().get(self._key(key), default)

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove an entry and return it, or `default`."""
        return super().pop(self._key(key), *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return an entry; set it first, if there is none."""
        return super().setdefault(self._key(key), default)

    def copy(self) -> Any:
        """Return an ordinary `defaultdict` with the same entries."""
        return defaultdict(self.default_factory, self)

    __copy__ = copy

    def __or__(self, mapping: Any) -> Any:
        """Return an ordinary `defaultdict` with the entries of both."""
        return self.copy() | mapping

    def __ror__(self, mapping: Any) -> Any:
        """Return an ordinary mapping with the entries of both."""
        return mapping | self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a deep copy in which 16-bit parameters, and the tensors of their entries, are FP32."""
        copied: Any = copy.deepcopy(self.copy(), memo)
        for key, entries in copied.items():
            if not isinstance(key, Tensor) or not isinstance(entries, dict):
                continue
            if key.dtype in LOW_PRECISION:
                set_values(key, key.detach().float())
            for name, value in entries.items():
                if isinstance(value, Tensor) and value.dim() and value.dtype in LOW_PRECISION:
                    entries[name] = value.to(key.dtype)
        return copied

    def __reduce__(self) -> Any:
        return defaultdict, (self.default_factory, dict(self))
