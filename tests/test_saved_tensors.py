"""Hooks on the tensors that autograd saves get them as they are, at every level."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import amp
from tests.models import sgd, started, train_on
from tests.states import assert_same


def train(level: str, hooks: Any) -> list[Tensor]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(32, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    model, optimizer = started(layers, sgd, level)
    for _ in range(3):
        with hooks():
            loss = nn.functional.cross_entropy(model(torch.randn(16, 32)), torch.arange(16) % 4)
        train_on(loss, optimizer)
    return [tensor.clone() for tensor in model.state_dict().values()]


@pytest.mark.parametrize(
    "hooks",
    [save_on_cpu, lambda: saved_tensors_hooks(lambda x: x.cpu(), lambda x: x)],
    ids=["save_on_cpu", "own"],
)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5", "O6", "O7"])
def test_saved_tensors_may_wait_on_the_cpu(level: str, hooks: Any) -> None:
    plain = train(level, lambda: saved_tensors_hooks(lambda x: x, lambda x: x))
    assert_same(train(level, hooks), plain)


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O6"])
def test_also_if_the_hooks_were_entered_before_initialize(level: str) -> None:
    plain = train(level, lambda: saved_tensors_hooks(lambda x: x, lambda x: x))
    with saved_tensors_hooks(lambda x: x.cpu(), lambda x: x), save_on_cpu():
        inside = train(level, nullcontext)
        amp.get_session().close()
    assert_same(inside, plain)
