"""Moments in bfloat16: training that is resumed goes on bit for bit, however gradients were cleared."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import amp
from tests.models import step_on

BATCHES = 6


def build(level: str, cls: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Linear(24, 4))
    own: dict[str, Any] = {"momentum": 0.9} if cls is amp.optimizers.FusedSGD else {}
    optimizer = cls(model.parameters(), lr=1e-2, **own)
    return amp.initialize(model, optimizer, opt_level=level, state_dtype="bfloat16", verbosity=0)


def train(model: Any, optimizer: Any, batches: range, set_to_none: bool) -> None:
    for i in batches:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(i))
        step_on(model(x).square().mean(), optimizer)
        optimizer.zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("cls", [amp.optimizers.FusedSGD, amp.optimizers.FusedAdam])
@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_resume_is_exact(level: str, cls: Any, set_to_none: bool) -> None:
    model, optimizer = build(level, cls)
    train(model, optimizer, range(BATCHES // 2), set_to_none)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), amp.state_dict()])
    train(model, optimizer, range(BATCHES // 2, BATCHES), set_to_none)

    other, resumed = build(level, cls)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    amp.load_state_dict(saved[2])
    train(other, resumed, range(BATCHES // 2, BATCHES), not set_to_none)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    states = resumed.state_dict()["state"], optimizer.state_dict()["state"]
    for i, mine in states[0].items():
        for key, value in mine.items():
            assert torch.equal(value, states[1][i][key]), key
