"""Counting the bytes of a run: of given tensors, and of tensors that autograd saves for backward."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def address_of(tensor: Tensor) -> int:
    """Return an identifier of a tensor's memory."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


def size_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of dense tensors, counting each storage once."""
    strided = [tensor for tensor in tensors if tensor.layout is torch.strided]
    return sum({address_of(t): t.untyped_storage().nbytes() for t in strided}.values())


class Activations:
    """Counts the bytes that autograd saves for backward, by `pack` and `unpack` hooks on saved tensors.

    Args:
        weights: tensors that exist anyway, and are not counted.

    Attributes:
        most: the most bytes that were saved at once.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = set(map(address_of, weights))
        self._users: dict[int, int] = {}
        self._now = 0
        self.most = 0

    def pack(self, tensor: Tensor) -> _Saved:
        """Return the object that a node of the graph saves instead of a tensor."""
        return _Saved(self, tensor)

    @staticmethod
    def unpack(saved: _Saved) -> Tensor:
        """Return the saved tensor."""
        return saved.tensor

    def count(self, address: int, size: int, more: int) -> None:
        """Count one node more, or less, that saves a storage, whose bytes count once."""
        if address not in self._weights:
            before = self._users.get(address, 0)
            self._users[address] = after = before + more
            self._now += size * ((after > 0) - (before > 0))
            self.most = max(self.most, self._now)


class _Saved:
    """A tensor that a node of the graph saves."""

    def __init__(self, activations: Activations, tensor: Tensor) -> None:
        self.tensor = tensor
        self._activations = activations
        self._memory = address_of(tensor), size_of([tensor])
        activations.count(*self._memory, 1)

    def __del__(self) -> None:
        self._activations.count(*self._memory, -1)
