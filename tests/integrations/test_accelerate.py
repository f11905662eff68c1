"""Accelerate scripts at an opt level, against the same scripts in FP32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import amp
from amp.errors import AmpError, AmpRuntimeError
from amp.integrations.accelerate import end, prepare
from tests.integrations.comparing import (
    TOLERANCES,
    gap,
    levels,
    options_for,
    results_of_two_ranks,
    same_bits,
)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Dropout(0.0), nn.Linear(16, 3)
    )


def data(n: int = 48, bad: int | None = None) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 8, generator=generator)
    if bad is not None:
        x[bad] = torch.inf
    return TensorDataset(x, torch.randint(0, 3, (n,), generator=generator))


class Script:
    """A script of an Accelerate user, with accumulation over 2 batches, clipping and a schedule."""

    def __init__(
        self,
        level: str | None,
        where: str = "in place of prepare",
        bad: int | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        GradientState._reset_state()
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = net()
        model[3].p = dropout
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
        objects: Any = model, optimizer, DataLoader(data(bad=bad), 8), schedule
        options = {"opt_level": level, **options_for(str(level), **options)}
        if level is None:
            objects = self.accelerator.prepare(*objects)
        elif where == "in place of prepare":
            objects = prepare(self.accelerator, *objects, **options)
        elif where == "after prepare":
            objects = self.accelerator.prepare(*objects)
            objects = *prepare(self.accelerator, *objects[:2], **options), *objects[2:]
        else:
            objects = self.accelerator.prepare(*prepare(self.accelerator, *objects, **options))
        self.model, self.optimizer, self.loader, self.schedule = objects
        self.rates: list[float] = []
        self.norms: list[float] = []

    def epoch(self) -> Script:
        for i, (x, y) in enumerate(self.loader):
            torch.manual_seed(i)
            with self.accelerator.accumulate(self.model):
                loss = F.cross_entropy(self.model(x).float(), y)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.3)
                    self.norms.append(float(norm))
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
                if self.accelerator.sync_gradients:
                    self.rates.append(self.schedule.get_last_lr()[0])
        return self

    def values(self) -> list[Tensor]:
        return [value.clone() for value in self.accelerator.get_state_dict(self.model).values()]


@pytest.mark.parametrize("where", ["in place of prepare", "after prepare", "before prepare"])
@pytest.mark.parametrize("level", levels("O2", "O4"))
def test_a_script_trains_as_in_fp32(level: str, where: str) -> None:
    reference, script = Script(None).epoch(), Script(level, where).epoch()
    assert gap(reference.values(), script.values()) <= TOLERANCES[level]
    assert script.norms == pytest.approx(reference.norms, rel=2e-2)
    assert script.rates == reference.rates
    assert {value.dtype for value in script.values()} == {torch.float32}


@pytest.mark.parametrize("level", levels("O2"))
def test_a_run_that_is_saved_and_loaded_goes_on_bit_for_bit(level: str, tmp_path: Path) -> None:
    options = {"bad": 20, "dropout": 0.2} if level in ("O1", "O2") else {"dropout": 0.2}
    straight = Script(level, **options).epoch().epoch()  # type: ignore[arg-type]
    state = straight.accelerator.scaler.state_dict()  # type: ignore[union-attr]
    saved = Script(level, **options).epoch()  # type: ignore[arg-type]
    saved.accelerator.save_state(str(tmp_path))
    resumed = Script(level, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        resumed.model[0].weight.zero_()
    resumed.accelerator.load_state(str(tmp_path))
    assert same_bits(resumed.values(), saved.values())
    resumed.epoch()
    assert same_bits(resumed.values(), straight.values())
    assert resumed.rates == straight.rates[3:]
    assert resumed.accelerator.scaler.state_dict() == state  # type: ignore[union-attr]


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_moves_neither_weights_nor_schedule(fused: bool) -> None:
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, schedule = prepare(
        accelerator, model, optimizer, schedule, opt_level="O2", loss_scale={"init": 1024}, verbosity=0
    )
    skipped = []
    before = [value.clone() for value in model.state_dict().values()]
    for i in range(3):
        x, y = data(8, bad=0 if i == 0 else None).tensors
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
        if i == 0:
            assert all(map(torch.equal, model.state_dict().values(), before))
    assert skipped == [True, False, False]
    assert schedule.get_last_lr() == [1e-3 / 4]
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 512


def test_model_and_optimizer_in_two_calls() -> None:
    reference = Script(None)
    script = Script(None)
    options = {"opt_level": "O2", "loss_scale": {"init": 1024}, "verbosity": 0}
    script.model = prepare(script.accelerator, net(), **options)
    optimizer = torch.optim.SGD(script.model.parameters(), lr=0.2, momentum=0.9)
    script.optimizer = prepare(script.accelerator, optimizer)
    script.schedule = torch.optim.lr_scheduler.StepLR(script.optimizer, 10**6)
    reference.schedule = torch.optim.lr_scheduler.StepLR(reference.optimizer, 10**6)
    assert 0 < gap(reference.epoch().values(), script.epoch().values()) < 2e-3
    assert script.model[0].weight.dtype is torch.float16


def test_the_end_leaves_fp32_and_a_plain_optimizer() -> None:
    script = Script("O2").epoch()
    trained = script.values()
    end(script.accelerator)
    assert all(map(torch.equal, script.model.parameters(), trained))
    assert script.optimizer.optimizer.param_groups[0]["params"][0] is script.model[0].weight
    assert amp.get_session().closed
    with pytest.raises(AmpRuntimeError, match="its session was closed"):
        script.accelerator.backward(script.model(torch.ones(1, 8)).sum())


def test_an_accelerator_that_casts_is_refused() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.raises(AmpRuntimeError, match="mixed_precision='bf16', and would cast what amp casts"):
        prepare(accelerator, net(), opt_level="O2")


def test_an_optimizer_before_its_model_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(AmpRuntimeError, match="no model before it or with it"):
        prepare(accelerator, torch.optim.SGD(net().parameters(), lr=0.1), opt_level="O2")


def test_a_wrong_level_is_refused() -> None:
    with pytest.raises(AmpError, match="'02' is not one of"):
        prepare(Accelerator(cpu=True), net(), opt_level="02")


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    found = results_of_two_ranks("tests.integrations.accelerate_ddp", tmp_path)
    for level in ("O1", "O2", "O5"):
        assert gap(found[level], found["FP32"]) < TOLERANCES[level]
        assert same_bits(found[f"{level} straight"], found[f"{level} resumed"]), level
