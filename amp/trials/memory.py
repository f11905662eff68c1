"""The bytes of a run: of tensors that last, and of those that autograd keeps for a backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def address_of(tensor: Tensor) -> int:
    """Return what tells one memory from another."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


def size_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the memory of dense tensors, each memory counted once."""
    strided = [tensor for tensor in tensors if tensor.layout is torch.strided]
    return sum({address_of(t): t.untyped_storage().nbytes() for t in strided}.values())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


class Activations:
    """Counts what autograd keeps for a backward, as hooks on saved tensors.

    Args:
        weights: what is there anyway, and is not counted.

    Attributes:
        most: the most bytes that were kept at once.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = set(map(address_of, weights))
        self._users: dict[int, int] = {}
        self._now = 0
        self.most = 0

    def pack(self, tensor: Tensor) -> _Saved:
        """Return what stands for a tensor that a node of the graph keeps."""
        return _Saved(self, tensor)

    @staticmethod
    def unpack(saved: _Saved) -> Tensor:
        """Return the tensor."""
        return saved.tensor

    def take(self, address: int, size: int) -> None:
        """Count a memory, once for all nodes that keep it."""
        if address not in self._weights:
            self._users[address] = self._users.get(address, 0) + 1
            self._now += size if self._users[address] == 1 else 0
            self.most = max(self.most, self._now)

    def let_go(self, address: int, size: int) -> None:
        """Take it off again, when the last of them lets it go."""
        if self._users.get(address, 0):
            self._users[address] -= 1
            self._now -= 0 if self._users[address] else size


class _Saved:
    """A tensor that a node of the graph keeps."""

    def __init__(self, activations: Activations, tensor: Tensor) -> None:
        self.tensor = tensor
        self._activations = activations
        self._memory = address_of(tensor), size_of([tensor])
        activations.take(*self._memory)

    def __del__(self) -> None:
        self._activations.let_go(*self._memory)
