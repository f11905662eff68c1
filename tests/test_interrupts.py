"""Ctrl-C at any line of the library leaves torch's autocast state what it was, and training goes on."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amp
from tests.interrupting import Interrupter


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(16, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Any:
        h = checkpoint(self.hidden, x, use_reentrant=False)
        with torch.autocast("cpu", enabled=False):
            h = h.float().tanh()
        return self.out(h)


def state_of_torch() -> tuple[Any, ...]:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("ipu"),
        torch.is_autocast_cache_enabled(),
        depth,
    )


def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss = nn.functional.mse_loss(model(x), y) + (model.out.weight @ model.out.weight.t()).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def make(level: str, optimizer: Callable[..., Any]) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = Net()
    made = optimizer(model.parameters(), lr=1e-2)
    model, made = amp.initialize(model, made, opt_level=level, verbosity=0)
    return model, made, torch.randn(8, 16), torch.randn(8, 1)


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, amp.optimizers.FusedAdam], ids=lambda c: c.__name__
)
@pytest.mark.parametrize("level", ["O1", "O4", "O2", "O6"])
@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_line_leaves_autocast_as_it_was(
    level: str, optimizer: Any, every: int
) -> None:
    parts = make(level, optimizer)
    for _ in range(2):
        step(*parts)
    counted = Interrupter()
    with counted.active():
        step(*parts)
    assert counted.lines > 300
    before = state_of_torch()
    for line in range(0, counted.lines, every):
        interrupter = Interrupter(line)
        with interrupter.active(), suppress(KeyboardInterrupt):
            step(*parts)
        assert state_of_torch() == before, interrupter.place
        parts[1].zero_grad()
