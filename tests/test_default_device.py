"""A default device of torch's is for a script's own tensors: what amp makes is where its models are."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp
from amp.fp16_utils import FP16_Optimizer
from amp.numerics import bits, crises, gradient_survival, lab, simulate_scaler, watch
from amp.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from tests.covering import covering
from tests.levels import LEVELS
from tests.models import train_on


@pytest.fixture(params=[pytest.param(None, id="none", marks=pytest.mark.slow), "meta"])
def elsewhere(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield lambda: torch.set_default_device(request.param)
    torch.set_default_device(None)


def model_and_input() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    return model, torch.randn(6, 4)


KINDS: dict[Any, dict[str, Any]] = {
    torch.optim.SGD: {},
    torch.optim.AdamW: {"fused": True},
    FusedSGD: {"momentum": 0.9},
    FusedAdam: {"max_grad_norm": 1.0, "eps": 1e-4},
    FusedLAMB: {},
    FusedNovoGrad: {},
}


@pytest.mark.parametrize(("level", "kind"), covering(LEVELS, KINDS, strength=1))
def test_training_and_resuming(elsewhere: Any, level: str, kind: Any) -> None:
    model, x = model_and_input()
    optimizer = kind(model.parameters(), lr=0.01, **KINDS[kind])
    elsewhere()
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0
    )
    for _ in range(3):
        train_on(model(x).float().square().mean(), optimizer)
    assert not amp.step_was_skipped(optimizer)
    amp.load_state_dict(amp.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    model.load_state_dict(model.state_dict())
    tensors = [*model.parameters(), *amp.master_params(optimizer)]
    tensors += [v for entry in optimizer.state.values() for v in entry.values() if torch.is_tensor(v)]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}


def test_by_hand(elsewhere: Any) -> None:
    model, x = model_and_input()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    elsewhere()
    scaler = amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(x).mean()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    by_hand = FP16_Optimizer(torch.optim.SGD(model.half().parameters(), 0.1), verbose=False)
    by_hand.backward(model(x.half()).float().mean())
    by_hand.clip_master_grads(1.0)
    by_hand.step()
    by_hand.load_state_dict(by_hand.state_dict())


@pytest.mark.slow
def test_numerics(elsewhere: Any) -> None:
    model, x = model_and_input()
    elsewhere()
    assert bits(0.1, "float16").pattern == 0x2E66
    assert [step.overflow for step in simulate_scaler([1.0, 2.0], init=2**15)] == [False, True]
    assert [crisis.broken for crisis in crises()] == [0.0, float("inf"), 1.0]
    grads = torch.tensor([1e-8, 1.0], device="cpu")
    assert gradient_survival(grads, [1.0]).formats["float16"].zero == (0.5,)
    with watch(model) as seen:
        model(x).mean().backward()
    assert seen.report().survival([1.0]).formats["float16"].overflow == (0.0,)
    assert lab.vectors.__wrapped__()["numbers"]


def test_a_loss_scaler_of_apex(elsewhere: Any) -> None:
    elsewhere()
    scaler = importlib.import_module("amp.compat.state").LossScaler(8.0)
    assert scaler._overflow_buf.tolist() == [0]
    scaler.unscale([torch.ones(2, device="cpu")], [torch.ones(2, device="cpu")])
    assert not scaler.update_scale()
