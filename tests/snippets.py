"""What snippets of the docs take for granted: a model, an optimizer, a few batches. Pages import it in
their setup comments."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp

__all__ = [
    "F",
    "Net",
    "Tensor",
    "amp",
    "batches",
    "compute_loss",
    "contextlib",
    "fresh",
    "lone_rank",
    "loss_of",
    "nn",
    "started",
    "torch",
    "x",
    "y",
]

x, y = torch.randn(8, 16), torch.randn(8, 4)
batches = [(x, y)] * 4


class Net(nn.Module):
    """Two blocks and a head: `[N, 16]` to `[N, 4]`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()) for _ in range(2)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, batch: Any = (x, y)) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


compute_loss = loss_of


def fresh() -> tuple[Any, Any]:
    """Return a model and its optimizer, in FP32."""
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def started(opt_level: str, **overrides: Any) -> tuple[Any, Any]:
    """Return a model and its optimizer, initialized at a level."""
    return amp.initialize(*fresh(), opt_level=opt_level, verbosity=0, **overrides)


@contextlib.contextmanager
def lone_rank() -> Iterator[None]:
    """Be the only rank of a process group."""
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
