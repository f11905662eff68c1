"""How many bytes of tensors are alive while code runs, whatever the allocator keeps of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Living(TorchDispatchMode):
    """Counts the bytes of storages that are alive after each operation.

    Args:
        known: tensors that are there before.

    Attributes:
        peak: the most bytes that were alive at once.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self._note(known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(tree_leaves((args, kwargs, result)))
        return result

    def _note(self, found: Iterable[Any]) -> None:
        for x in found:
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now())

    def now(self) -> int:
        """Return how many bytes are alive."""
        for key in [key for key, (storage, _) in self._storages.items() if storage.expired()]:
            del self._storages[key]
        return sum(size for _, size in self._storages.values())


def tensors_in(*trees: Any) -> list[Tensor]:
    """Return the tensors in dicts and lists."""
    return [x for x in tree_leaves(trees) if isinstance(x, torch.Tensor)]
