"""Ignite: its own apex mode under the alias, and the update function of amp."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from torch import nn
from torch.nn import functional as F

import amp
from amp.errors import AmpRuntimeError, AmpValueError
from amp.integrations.ignite import supervised_training_step
from tests.integrations.comparing import TOLERANCES, gap, levels, same_bits, values
from tests.models import batch, conv_net, initialize, sgd

BATCHES = [batch(step) for step in range(6)]


@pytest.fixture
def apex() -> Iterator[None]:
    amp.compat.install()
    yield
    amp.compat.uninstall()


def in_fp32(**options: Any) -> nn.Module:
    model = conv_net()
    create_supervised_trainer(model, sgd(model), F.cross_entropy, **options).run(BATCHES)
    return model


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("level", levels("O2"))
def test_the_apex_mode_of_ignite_trains_as_in_fp32(level: str, steps: int, apex: None) -> None:
    model = conv_net()
    model, optimizer = initialize(model, sgd(model), level)
    trainer = create_supervised_trainer(
        model, optimizer, F.cross_entropy, amp_mode="apex", gradient_accumulation_steps=steps
    )
    trainer.run(BATCHES)
    assert gap(values(model), values(in_fp32(gradient_accumulation_steps=steps))) <= TOLERANCES[level]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("level", levels("O2"))
def test_the_update_function_trains_as_in_fp32(level: str, steps: int) -> None:
    model = conv_net()
    model, optimizer = initialize(model, sgd(model), level)
    update = supervised_training_step(
        model, optimizer, F.cross_entropy, "cpu", gradient_accumulation_steps=steps
    )
    losses = []
    trainer = Engine(update)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output)
    )
    trainer.run(BATCHES)
    assert gap(values(model), values(in_fp32(gradient_accumulation_steps=steps))) <= TOLERANCES[level]
    assert losses[0] == pytest.approx(
        F.cross_entropy(conv_net()(BATCHES[0][0]), BATCHES[0][1]).item(), rel=2e-2
    )


def test_clipping_is_of_unscaled_gradients() -> None:
    start = conv_net()
    model = conv_net()
    model, optimizer = initialize(model, sgd(model, momentum=0.0), "O2")
    Engine(supervised_training_step(model, optimizer, F.cross_entropy, max_norm=0.01)).run(BATCHES[:1])
    steps = [
        (a - b).square().sum()
        for (name, a), b in zip(model.state_dict().items(), start.state_dict().values(), strict=True)
        if name in dict(start.named_parameters())
    ]
    assert sum(steps).sqrt().item() == pytest.approx(0.1 * 0.01, rel=1e-2)  # type: ignore[union-attr]


def test_a_checkpoint_of_ignite_resumes_bit_for_bit(tmp_path: Path) -> None:
    def objects() -> dict[str, Any]:
        model = conv_net()
        model, optimizer = initialize(model, sgd(model), "O2", loss_scale={"init": 2.0**24})
        return {"model": model, "optimizer": optimizer, "amp": amp.Stateful(amp.get_session())}

    def run(of: dict[str, Any], data: Any) -> Engine:
        return Engine(supervised_training_step(of["model"], of["optimizer"], F.cross_entropy))

    straight = objects()
    run(straight, BATCHES).run(BATCHES)
    saved = objects()
    trainer = run(saved, BATCHES)
    saver = Checkpoint(saved, DiskSaver(str(tmp_path), require_empty=False), filename_pattern="end.pt")
    trainer.add_event_handler(Events.COMPLETED, saver)
    trainer.run(BATCHES[:3])
    resumed = objects()
    with torch.no_grad():
        resumed["model"].conv.weight.zero_()
    Checkpoint.load_objects(resumed, torch.load(tmp_path / "end.pt", weights_only=True))
    run(resumed, BATCHES).run(BATCHES[3:])
    assert same_bits(values(resumed["model"]), values(straight["model"]))
    assert resumed["amp"].state_dict() == straight["amp"].state_dict()


def test_what_cannot_be_right_is_refused() -> None:
    model = conv_net()
    optimizer = sgd(model)
    with pytest.raises(AmpRuntimeError, match="did not come out of amp.initialize"):
        supervised_training_step(model, optimizer, F.cross_entropy)
    model, optimizer = initialize(model, optimizer, "O2")
    with pytest.raises(AmpValueError, match="gradient_accumulation_steps=0 is below 1"):
        supervised_training_step(model, optimizer, F.cross_entropy, gradient_accumulation_steps=0)
