"""A LightningModule and what surrounds it."""

from __future__ import annotations

from tests.integrations import importing  # noqa: F401  # before the frameworks

# isort: split

import logging
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint as ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from amp.integrations.lightning import AmpPrecision
from tests.integrations.comparing import options_for

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


def batches(n: int = 8, bad: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """Return batches of 8 vectors and their classes; the one numbered `bad` has an inf."""
    generator = torch.Generator().manual_seed(1)
    found = [
        (torch.randn(8, 8, generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(n)
    ]
    if bad is not None:
        found[bad][0][0, 0] = torch.inf
    return found


def loader(data: list[Any], **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=None, **kwargs)  # type: ignore[arg-type]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.ReLU(),
        nn.Dropout(0.0),
        nn.LayerNorm(16),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, 3),
    )


class Classifier(L.LightningModule):
    """Calls itself in even steps, and its net in odd ones."""

    def __init__(self, dropout: float = 0.0, **sgd: Any) -> None:
        super().__init__()
        self.net = net()
        self.net[2].p = dropout
        self._sgd = {"lr": 0.1, "momentum": 0.9, **sgd}
        self.losses: list[float] = []
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: tuple[Tensor, Tensor], i: int) -> Tensor:
        x, y = batch
        out = self.net(x) if i % 2 else self(x)
        self.dtypes |= {x.dtype, out.dtype}
        return F.cross_entropy(out, y)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch, batch_idx)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch, batch_idx))

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch, batch_idx))

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), **self._sgd)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def plugins(level: str | None, **kwargs: Any) -> Any:
    """Return `Trainer(plugins=...)` for a level; None is Lightning's own FP32."""
    if level is None:
        return None
    return [AmpPrecision(level, **options_for(level, **kwargs))]


def fit(model: Any, level: str | None, data: Any = None, amp_options: Any = None, **kwargs: Any) -> Any:
    options = {**QUIET, "max_epochs": 2, "plugins": plugins(level, **(amp_options or {})), **kwargs}
    trainer = L.Trainer(**options)
    trainer.fit(model, loader(batches() if data is None else data), loader(batches(2)))
    return trainer
