"""Two ranks in Lightning: `python -m tests.integrations.lightning_ddp FOLDER STRATEGY LEVEL...`.

The strategy is `ddp`, or `fsdp2`, which is Lightning's ModelParallelStrategy.

Each level is trained, accumulated, saved and resumed.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.integrations.lightning_models import (
    QUIET,
    Classifier,
    L,
    ModelCheckpoint,
    batches,
    loader,
    plugins,
)

# isort: split

from tests.integrations.comparing import on_two_ranks, weights

warnings.simplefilter("ignore")


class OneOfTwo(Classifier):
    """Takes every second row of a batch on either rank, and starts from other weights on the second."""

    def on_fit_start(self) -> None:
        self.is_batch_fp32 = True

    def setup(self, stage: str) -> None:
        if self.global_rank:
            with torch.no_grad():
                self.net[0].weight.add_(0.5)

    def loss(self, batch: tuple[Tensor, Tensor], i: int) -> Tensor:
        x, y = batch
        assert x.dtype is torch.float32, "the batch was cast"
        return super().loss((x[self.global_rank :: 2], y[self.global_rank :: 2]), i)


class Sharded(OneOfTwo):
    """Is cut over the ranks by FSDP2."""

    def setup(self, stage: str) -> None:
        pass

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        for part in (self.net[0], self.net[4], self.net):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])


def train(
    strategy: str, level: str | None, epochs: int, path: str | None = None, **kwargs: Any
) -> list[Tensor]:
    model = Sharded() if strategy == "fsdp2" else OneOfTwo()
    options = {
        **QUIET,
        "devices": 2,
        "strategy": by_fsdp2() if strategy == "fsdp2" else strategy,
        "use_distributed_sampler": False,
        "max_epochs": epochs,
        "plugins": plugins(level),
        **kwargs,
    }
    trainer = L.Trainer(**options)
    trainer.fit(model, loader(batches()), ckpt_path=path)
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in weights(model)]


def by_fsdp2() -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)


def main(rank: int, folder: str, strategy: str, *levels: str) -> None:
    results: dict[str, Any] = {}
    for level in levels:
        name = None if level == "FP32" else level
        accumulating = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3}
        results[level, "plain"] = train(strategy, name, 1)
        results[level, "accumulated"] = train(strategy, name, 1, **accumulating)
        at = f"{folder}/{level}"
        checkpoint = ModelCheckpoint(at, save_last=True, save_on_train_epoch_end=True)
        train(strategy, name, 1, callbacks=[checkpoint], enable_checkpointing=True)
        results[level, "straight"] = train(strategy, name, 2)
        results[level, "resumed"] = train(strategy, name, 2, path=f"{at}/last.ckpt")
    torch.save(results, Path(folder, f"{rank}.pt"))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    on_two_ranks(main, *sys.argv[1:])
