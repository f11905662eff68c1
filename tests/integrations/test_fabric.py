"""AmpPrecision in Fabric, against Fabric's own FP32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.accelerators import CPUAccelerator
from lightning.fabric.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn import functional as F

import amp
from amp.errors import AmpRuntimeError
from tests.integrations.comparing import TOLERANCES, gap, levels, same_bits, values, weights
from tests.integrations.lightning_models import L, batches, net, plugins


class Run:
    """A model and its optimizer under Fabric."""

    def __init__(self, level: str | None) -> None:
        self.fabric, self.precision = fabric_at(level)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x).float(), y)

    def train(self, data: Any, every: int = 1, **clip: Any) -> Run:
        for i, batch in enumerate(data):
            is_last = (i + 1) % every == 0
            with self.fabric.no_backward_sync(self.model, enabled=not is_last):
                self.fabric.backward(self.loss(batch) / every)
            if is_last:
                if clip:
                    self.fabric.clip_gradients(self.model, self.optimizer, **clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self

    def values(self) -> list[Tensor]:
        return values(self.model)


def fabric_at(level: str | None) -> tuple[L.Fabric, Any]:
    """Return Fabric at a level, and its plugin; None is Fabric's own FP32."""
    own = plugins(level)
    return L.Fabric(accelerator="cpu", devices=1, plugins=own), own and own[0]


@pytest.mark.parametrize("clip", [{"max_norm": 0.5}, {"clip_val": 1e-2}], ids=["norm", "value"])
@pytest.mark.parametrize("level", levels("O2", "O4"))
def test_a_fabric_script_trains_as_in_fp32(level: str, clip: Any) -> None:
    reference, run = (Run(each).train(batches(), every=2, **clip) for each in (None, level))
    assert gap(run.values(), reference.values()) <= TOLERANCES[level]
    assert all(value.dtype is torch.float32 for value in run.values())


@pytest.mark.parametrize("level", ["O2", "O4"])
def test_a_run_that_is_saved_and_loaded_goes_on_bit_for_bit(level: str, tmp_path: Path) -> None:
    straight = Run(level).train(batches(8, bad=1))
    saved = Run(level).train(batches(8, bad=1)[:4])
    state = {"model": saved.model, "optimizer": saved.optimizer, "amp": saved.precision}
    saved.fabric.save(tmp_path / "state.ckpt", state)
    resumed = Run(level)
    with torch.no_grad():
        resumed.model.module[0].weight.zero_()
    state = {"model": resumed.model, "optimizer": resumed.optimizer, "amp": resumed.precision}
    resumed.fabric.load(tmp_path / "state.ckpt", state)
    resumed.train(batches(8, bad=1)[4:])
    assert same_bits(resumed.values(), straight.values())
    assert resumed.precision is not None
    assert straight.precision is not None
    assert resumed.precision.state_dict() == straight.precision.state_dict()


def test_an_overflow_skips_the_step_and_training_goes_on() -> None:
    run = Run("O2")
    start = run.values()
    run.train(batches(1, bad=0))
    assert same_bits(run.values(), start)
    assert amp.step_was_skipped(run.optimizer)
    assert amp.loss_scale() == 512
    run.train(batches(2))
    assert not same_bits(run.values(), start)


def test_two_models_with_an_optimizer_each() -> None:
    def train(level: str | None) -> list[Tensor]:
        fabric, _ = fabric_at(level)
        torch.manual_seed(0)
        parts = [nn.Linear(8, 8), nn.Linear(8, 3)]
        (first, a), (second, b) = (
            fabric.setup(part, torch.optim.SGD(part.parameters(), lr=0.1)) for part in parts
        )
        for x, y in batches(4):
            fabric.backward(F.cross_entropy(second(first(x)), y))
            for optimizer in (a, b):
                optimizer.step()
                optimizer.zero_grad()
        return [*first.state_dict().values(), *second.state_dict().values()]

    assert gap(train("O2"), train(None)) < 2e-3


def test_a_closure_is_evaluated_by_the_optimizer() -> None:
    def train(level: str | None) -> list[Tensor]:
        fabric, _ = fabric_at(level)
        model = net()
        model, optimizer = fabric.setup(
            model, torch.optim.LBFGS(model.parameters(), max_iter=2, lr=0.1)
        )
        x, y = batches(1)[0]

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss)
            return loss

        optimizer.step(closure)
        return list(model.state_dict().values())

    assert gap(train("O2"), train(None)) < 1e-2


def test_the_module_keeps_nothing_of_fabric() -> None:
    run = Run("O2")
    assert not {"_fabric", "_fabric_optimizers", "on_after_setup"} & vars(run.model.module).keys()
    assert run.model.module not in run.fabric._callbacks


def test_a_model_for_inference_alone() -> None:
    fabric, _ = fabric_at("O2")
    model = fabric.setup(net())
    with torch.no_grad():
        assert model(batches(1)[0][0]).dtype is torch.float32


def test_deepspeed_is_refused_by_name_and_the_model_is_fp32_again() -> None:
    class DeepSpeedStrategy(SingleDeviceStrategy):
        """By its name, as the real one needs deepspeed."""

    strategy = DeepSpeedStrategy(torch.device("cpu"), accelerator=CPUAccelerator())
    fabric = L.Fabric(strategy=strategy, plugins=plugins("O2"))
    bare = net()
    before = weights(bare)
    with pytest.raises(AmpRuntimeError, match="AmpPrecision does not work with DeepSpeedStrategy"):
        fabric.setup(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    assert same_bits(weights(bare), before)


@pytest.mark.parametrize("has_optimizer", [False, True])
def test_a_backward_without_an_optimizer_that_was_set_up_with_the_model_is_refused(
    has_optimizer: bool,
) -> None:
    fabric, _ = fabric_at("O2")
    bare = net()
    model = fabric.setup_module(bare) if has_optimizer else fabric.setup(bare)
    if has_optimizer:
        fabric.setup_optimizers(torch.optim.SGD(bare.parameters(), lr=0.1))
    with pytest.raises(AmpRuntimeError, match=r"Set up both together.*With ModelParallelStrategy"):
        fabric.backward(model(batches(1)[0][0]).sum())


def test_a_lightning_module_in_fabric_hears_of_its_setup() -> None:
    heard = []

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def on_after_setup(self, fabric: Any, module: Any) -> None:
            heard.append(fabric)

    fabric, _ = fabric_at("O5")
    module = Module()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    fabric.backward(model.training_step(batches(1)[0]))
    optimizer.step()
    assert heard == [fabric]
    assert module._fabric_optimizers == [optimizer]
