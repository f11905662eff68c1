"""A whole training step in one CUDA graph, replayed, is the step run eagerly, skips included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp
from amp.optimizers import FusedAdam, FusedLAMB, FusedSGD
from tests.states import assert_same

pytestmark = pytest.mark.gpu
REPLAYS = 200
OVERFLOWS = {3, 4, 50, 117, 118, 119}

OPTIMIZERS: dict[str, Any] = {
    "FusedAdam": lambda params, lr: FusedAdam(params, lr=lr, weight_decay=0.01, max_grad_norm=1.0),
    "FusedLAMB": lambda params, lr: FusedLAMB(params, lr=lr),
    "FusedSGD": lambda params, lr: FusedSGD(params, lr=lr, momentum=0.9),
}


def rate(i: int) -> float:
    return 1e-3 / (1 + i)


class Training:
    """A model, what it is given, and one step of it on static memory."""

    def __init__(self, name: str, level: str, overrides: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8)).cuda()
        self.lr = torch.tensor(rate(0), device="cuda")
        optimizer = OPTIMIZERS[name](model.parameters(), self.lr)
        self.session = amp.Session(
            level, verbosity=0, loss_scale={"init": 2.0**12, "growth_interval": 20}, **overrides
        )
        self.model, self.optimizer = self.session.initialize(model, optimizer)
        self.x = torch.zeros(16, 32, device="cuda")
        self.factor = torch.ones((), device="cuda")

    def feed(self, i: int) -> None:
        generator = torch.Generator("cuda").manual_seed(i)
        self.x.copy_(torch.randn(16, 32, device="cuda", generator=generator))
        self.factor.fill_(torch.inf if i in OVERFLOWS else 1.0)
        self.lr.fill_(rate(i))

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(self.x).float().square().mean() * self.factor
        with self.session.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        self.optimizer.step()

    def everything(self) -> dict[str, Tensor]:
        state = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        weights = {f"weight.{i}": p.detach() for i, p in enumerate(self.model.parameters())}
        for i, entry in enumerate(self.optimizer.state.values()):
            state |= {f"state.{i}.{name}": value for name, value in entry.items()}
        scaler = self.session.scalers[0]._state
        return {k: v.clone() for k, v in (state | weights | {"scaler": scaler}).items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("level", "overrides"),
    [
        ("O1", {}),
        ("O2", {}),
        ("O5", {"master_weights": "split16"}),
        ("O2", {"master_weights": "split16", "state_dtype": "bfloat16"}),
    ],
)
def test_replays_are_bitwise_what_eager_steps_are(
    name: str, level: str, overrides: dict[str, Any]
) -> None:
    eager, captured = Training(name, level, overrides), Training(name, level, overrides)
    with eager.session, captured.session:
        train_and_compare(eager, captured)


def train_and_compare(eager: Training, captured: Training) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for i in range(3):  # state is made, kernels are compiled
        for training in (eager, captured):
            with torch.cuda.stream(side):
                training.feed(1000 + i)
                training.step()
    torch.cuda.current_stream().wait_stream(side)
    captured.optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for i in range(REPLAYS):
        eager.feed(i)
        eager.step()
        captured.feed(i)
        graph.replay()
    expected, found = eager.everything(), captured.everything()
    assert_same(expected, found)
    steps = {float(v) for k, v in found.items() if k.endswith(".step")}
    assert steps == {3.0 + REPLAYS - len(OVERFLOWS)}
