"""What the library asks of `torch.distributed`; one process is a world of its own."""

from __future__ import annotations

from torch import distributed


def rank() -> int:
    """Return this process's rank, 0 where there is no process group."""
    return distributed.get_rank() if _initialized() else 0


def world_size() -> int:
    """Return the number of processes, 1 where there is no process group."""
    return distributed.get_world_size() if _initialized() else 1


def _initialized() -> bool:
    return distributed.is_available() and distributed.is_initialized()
