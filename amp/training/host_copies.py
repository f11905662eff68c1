"""Copies of small device tensors that reach the host late, so that it need not wait for them."""

from collections import deque

import torch
from torch import Tensor


def is_on_host(tensor: Tensor) -> bool:
    """Whether the host reads a tensor without waiting for a device."""
    return tensor.device.type == "cpu"


class HostCopies:
    """A queue of copies on their way from a device to the host."""

    def __init__(self) -> None:
        # What nobody asks for is forgotten, the oldest first.
        self._underway: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque(maxlen=256)

    def send(self, tensor: Tensor, number: int = 0) -> None:
        """Start to copy what a tensor holds now. The host does not wait for the device.

        Nothing is sent in CUDA graph capture: what a graph does, each replay does unseen.

        Args:
            tensor: of a few numbers.
            number: what to call the copy; they grow.
        """
        if not tensor.is_cuda:
            self._underway.append((number, tensor.clone(), None))
            return
        with torch.cuda.device(tensor.device):
            if torch.cuda.is_current_stream_capturing():
                return
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            copy.copy_(tensor, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._underway.append((number, copy, event))

    def arrived(self, wait: bool = False, until: int = -1) -> list[tuple[int, list[float]]]:
        """Return the copies that came since the last call, and what they are called, oldest first.

        Args:
            wait: for those that are still under way. Otherwise the host waits for no CUDA device; on
                other kinds of device, which have no pinned memory here, it does.
            until: wait for those of numbers up to this one.
        """
        if self._underway and self._underway[0][2] and torch.cuda.is_current_stream_capturing():
            return []  # there it is forbidden to ask for an event
        values = []
        while self._underway:
            number, copy, event = self._underway[0]
            if event is not None:
                if wait or number <= until:
                    event.synchronize()
                elif not event.query():  # type: ignore[no-untyped-call]
                    break
            values.append((number, copy.tolist()))
            self._underway.popleft()
        return values
