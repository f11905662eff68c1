"""Kernels note whose gradients were bad where an optimizer skips on the device; the host asks later."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp
import amp.training.verdicts
from amp.kernels.backend import uses_triton
from tests.devices import GPU
from tests.models import run_backward

DEVICE = torch.device("cuda" if GPU else "cpu")

pytestmark = [
    pytest.mark.triton,
    pytest.mark.usefixtures("the_cpu_is_a_device"),
    pytest.mark.skipif(not uses_triton(DEVICE), reason="plain torch notes nothing"),
]

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "FusedAdam": lambda p: amp.optimizers.FusedAdam(p, 1e-3),
    "FusedAdam that clips": lambda p: amp.optimizers.FusedAdam(p, 1e-3, max_grad_norm=1.0),
}


def train(level: str, optimizer: str, bad: dict[int, str], blocks: int = 1, **options: Any) -> Any:
    """Train three layers, whose gradients are NaN at some steps, and return the history."""
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"}).to(DEVICE)
    one = OPTIMIZERS[optimizer](model.parameters())
    scaling = {"init": 4.0, **options} if level in ("O1", "O2") else options
    model, one = amp.initialize(model, one, opt_level=level, loss_scale=scaling or None, verbosity=0)
    x = torch.ones(2, 4, device=DEVICE)
    for i in range(5):
        for block in range(blocks):
            factor = math.nan if block == blocks - 1 else 1.0
            losses = [model[n](x).float().sum() * (factor if bad.get(i) == n else 1) for n in "abc"]
            run_backward(torch.stack(losses).sum(), one)
        one.step()
        one.zero_grad()
    return amp.history()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_names_come_from_the_device(level: str, optimizer: str) -> None:
    rows = train(level, optimizer, {1: "b", 3: "a"})
    assert [(row.overflow, row.bad) for row in rows] == [
        (False, ()),
        (True, ("b.weight", "b.bias")),
        (False, ()),
        (True, ("a.weight", "a.bias")),
        (False, ()),
    ]


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_so_they_do_where_gradients_are_added(level: str) -> None:
    rows = train(level, "FusedAdam", {3: "c"}, blocks=2)
    assert [row.bad for row in rows if row.bad] == [("c.weight", "c.bias")]


def test_a_streak_names_them() -> None:
    bad = dict.fromkeys(range(1, 5), "b")
    with pytest.warns(amp.AmpWarning, match=r"The gradients of b.weight, b.bias were inf or NaN"):
        train("O2", "FusedAdam", bad, overflow_patience=3)
