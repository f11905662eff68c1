"""Copies of small device tensors that reach the host late, so that it need not wait for them."""

from collections import deque

import torch
from torch import Tensor


class HostCopies:
    """A queue of copies on their way from a device to the host."""

    def __init__(self) -> None:
        # What nobody asks for is forgotten, the oldest first.
        self._underway: deque[tuple[Tensor, torch.cuda.Event | None]] = deque(maxlen=256)

    def send(self, tensor: Tensor) -> None:
        """Start to copy what a tensor holds now. The host does not wait for the device.

        Nothing is sent in CUDA graph capture: what a graph does, each replay does unseen.
        """
        if not tensor.is_cuda:
            self._underway.append((tensor.clone(), None))
            return
        with torch.cuda.device(tensor.device):
            if torch.cuda.is_current_stream_capturing():
                return
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            copy.copy_(tensor, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._underway.append((copy, event))

    def arrived(self, wait: bool = False) -> list[list[float]]:
        """Return the copies that came since the last call, oldest first.

        Args:
            wait: for those that are still under way. Otherwise the host waits for no CUDA device; on
                other kinds of device, which have no pinned memory here, it does.
        """
        if self._underway and self._underway[0][1] and torch.cuda.is_current_stream_capturing():
            return []  # there it is forbidden to ask for an event
        values = []
        while self._underway:
            copy, event = self._underway[0]
            if event is not None:
                if wait:
                    event.synchronize()
                elif not event.query():  # type: ignore[no-untyped-call]
                    break
            values.append(copy.tolist())
            self._underway.popleft()
        return values
