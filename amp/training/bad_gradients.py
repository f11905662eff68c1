"""Which gradients were inf or NaN: a log that kernels write, and a check for the host."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from amp.kernels.tensor_lists import local
from amp.training.host_copies import HostCopies

_LISTS = 8
"""How many lists are remembered; there are several if some parameters get no gradient at times."""

Parameters = Sequence[Tensor]
Names = Callable[[Parameters], list[str]]


class BadGradientLog:
    """For each parameter of some lists, the last update of a scaler at which its gradient was bad.

    Kernels write it, for cases in which the host learns of an overflow too late to check the gradients.

    Attributes:
        underway: the names of the entries that the host has asked for and not got yet.
    """

    def __init__(self) -> None:
        self._lists: dict[int, tuple[Parameters, Tensor, Names]] = {}
        self._copies = HostCopies()
        self.underway: deque[list[str]] = deque(maxlen=256)

    def entries_of(self, parameters: Parameters, names: Names) -> Tensor:
        """Return the tensor that a kernel writes: float32 `[n]`, one entry a parameter, NaN at first.

        Args:
            parameters: the same list each time, of one device.
            names: returns the names of parameters.
        """
        known = self._lists.get(id(parameters))
        if known is None:
            if len(self._lists) == _LISTS:
                del self._lists[next(iter(self._lists))]
            entries = torch.full(
                (len(parameters),), math.nan, dtype=torch.float32, device=parameters[0].device
            )
            known = self._lists[id(parameters)] = parameters, entries, names
        return known[1]

    def fetch(self) -> None:
        """Start to copy all entries to the host. The host does not wait for the device."""
        for parameters, entries, names in self._lists.values():
            self._copies.send(entries)
            self.underway.append(names(parameters))

    def arrived(self, wait: bool) -> dict[str, int]:
        """Return the last bad update of each parameter that had one, as far as copies have arrived."""
        found: dict[str, int] = {}
        for _, steps in self._copies.arrived(wait):
            named = zip(self.underway.popleft(), steps, strict=True)
            found |= {name: int(step) for name, step in named if not math.isnan(step)}
        return found


def bad_flags(grads: Iterable[Tensor]) -> Tensor:
    """Return 1.0 for each gradient that has an inf or NaN, else 0.0, float32 `[n]`. No host sync."""
    values = [local(grad) for grad in grads]
    dense = [each._values() if each.is_sparse else each for each in values]
    flags = [each.isfinite().all().logical_not().to(torch.float32) for each in dense]
    if not flags:
        return torch.zeros(0, device="cpu")
    return torch.stack([flag.to(flags[0].device) for flag in flags])
