"""Asynchronous copies of small device tensors to the host, which need not wait for them."""

from collections import deque

import torch
from torch import Tensor


def is_on_host(tensor: Tensor) -> bool:
    """Whether the host reads a tensor without waiting for a device."""
    return tensor.device.type == "cpu"


class HostCopies:
    """A queue of copies on their way from a device to the host.

    Attributes:
        underway: the copies: number, tensor on the host, and what tells that it has come.
    """

    def __init__(self) -> None:
        # Copies that nobody asks for are dropped, the oldest first.
        self.underway: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque(maxlen=256)

    def send(self, tensor: Tensor, number: int = 0) -> None:
        """Start to copy what a tensor holds now. The host does not wait for the device.

        Nothing is sent in CUDA graph capture: the host does not see what a replay does.

        Args:
            tensor: a few numbers.
            number: the number of the copy; later copies have larger ones.
        """
        if not tensor.is_cuda:
            self.underway.append((number, tensor.clone(), None))
            return
        with torch.cuda.device(tensor.device):
            if torch.cuda.is_current_stream_capturing():
                return
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            copy.copy_(tensor, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self.underway.append((number, copy, event))

    def arrived(self, wait: bool = False, until: int = -1) -> list[tuple[int, list[float]]]:
        """Return the copies that came since the last call, with their numbers, oldest first.

        Args:
            wait: wait for copies that are still under way. Otherwise the host does not wait for a CUDA
                device; for other devices, which have no pinned memory here, it does.
            until: wait for copies with numbers up to this one.
        """
        if self.underway and self.underway[0][2] and torch.cuda.is_current_stream_capturing():
            return []  # there events cannot be queried
        values = []
        while self.underway:
            number, copy, event = self.underway[0]
            if event is not None:
                if wait or number <= until:
                    event.synchronize()
                elif not event.query():  # type: ignore[no-untyped-call]
                    break
            values.append((number, copy.tolist()))
            self.underway.popleft()
        return values
