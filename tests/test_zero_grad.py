"""What `zero_grad` does by default: one answer at every level."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp
from amp.optimizers import FusedAdam, FusedSGD
from tests.covering import covering
from tests.levels import LEVELS
from tests.models import run_backward, sgd, started, step_on


class Heads(nn.Module):
    """Two layers, of which each forward runs some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, which: list[int]) -> torch.Tensor:
        x = torch.ones(2, 4, dtype=self.heads[0].weight.dtype)  # type: ignore[arg-type]
        return torch.stack([self.heads[i](x) for i in which])


def train(model: Any, optimizer: Any, in_session: bool) -> list[torch.Tensor]:
    """Train two heads in turn, so that one has no gradient in each step, and return the weights."""
    for i in range(8):
        optimizer.zero_grad()
        run_backward(model([i % 2]).float().pow(2).mean(), optimizer if in_session else None)
        optimizer.step()
    return [p.detach().float() for p in model.parameters()]


@pytest.mark.parametrize("level", LEVELS)
def test_a_head_without_a_gradient_is_not_moved_by_its_momentum(level: str) -> None:
    plain = Heads()
    expected = train(plain, sgd(plain), False)
    make = functools.partial(FusedSGD, lr=0.1, momentum=0.9)
    model, optimizer = started(Heads(), make, level, loss_scale=1.0)
    torch.testing.assert_close(train(model, optimizer, True), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("optimizer_class", [FusedAdam, FusedSGD])
@pytest.mark.parametrize(
    ("clear", "is_none"),
    [
        (lambda optimizer: optimizer.zero_grad(), False),
        (lambda optimizer: optimizer.zero_grad(False), False),
        (lambda optimizer: optimizer.zero_grad(True), True),
        (lambda optimizer: optimizer.zero_grad(set_to_none=None), False),
        (lambda optimizer: optimizer.zero_grad(set_to_none=True), True),
    ],
)
def test_an_optimizer_that_was_made_to_write_zeros_writes_them(
    level: str, optimizer_class: Any, clear: Callable[[Any], None], is_none: bool
) -> None:
    make = functools.partial(optimizer_class, lr=0.1, set_grad_none=False)
    model, optimizer = started(Heads(), make, level, loss_scale=1.0)
    for _ in range(2):
        step_on(model([0, 1]).float().sum(), optimizer)
        clear(optimizer)
        grads = [p.grad for p in model.parameters()]
        assert [grad is None for grad in grads] == [is_none] * len(grads)
        assert is_none or not any(grad.any() for grad in grads)


CLEARS = {
    "the model": lambda model: model.zero_grad(),
    "a part": lambda model: model.heads.zero_grad(),
    "a wrapper": lambda model: nn.Sequential(model).zero_grad(),
    "zeros": lambda model: model.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize(
    ("clears", "when", "optimizer_class", "level"),
    covering(
        CLEARS,
        ["before backward", "after backward", "after a delay"],
        [torch.optim.AdamW, FusedAdam],
        [*LEVELS, "O1 and a scale of 1", "O5 and split16"],
    ),
)
def test_the_model_clears_gradients_of_earlier_blocks_inside_of_a_block(
    level: str, optimizer_class: Any, when: str, clears: str
) -> None:
    level, _, what = level.partition(" and ")
    more: dict[str, Any] = {"loss_scale": 128.0} if level in ("O1", "O2") else {}
    more |= {"a scale of 1": {"loss_scale": 1.0}, "split16": {"master_weights": "split16"}}.get(
        what, {}
    )
    model, optimizer = started(Heads(), lambda p: optimizer_class(p, lr=0.1), level, **more)
    clear = CLEARS[clears]

    def loss(which: list[int]) -> torch.Tensor:
        return 3 * model(which).float().sum()

    run_backward(loss([0, 1]), optimizer)
    is_delayed = when == "after a delay"
    with amp.scale_loss(loss([1]), optimizer, delay_unscale=is_delayed) as scaled_loss:
        if when == "before backward":
            clear(model)
        scaled_loss.backward()
        if when == "after backward":
            clear(model)
    if is_delayed:
        clear(model)
        run_backward(loss([1]), optimizer)
    grads = [p.grad for p in amp.master_params(optimizer)]
    found = [None if grad is None else float(grad.abs().max()) for grad in grads]
    nothing = None if clears != "zeros" else 0.0
    of_second = nothing if when == "after backward" else 6.0
    assert found == [nothing] * 2 + [of_second] * 2


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_compiled_code_clears_the_models_gradients(level: str) -> None:
    model, optimizer = started(nn.Linear(8, 1), sgd, level, loss_scale=1.0)
    clear = torch.compile(lambda: model.zero_grad(), backend="eager")
    for _ in range(3):
        run_backward(model(torch.ones(4, 8)).float().mean(), optimizer)
        assert model.weight.grad.float().max().item() == pytest.approx(1.0)
        optimizer.step()
        clear()
        assert model.weight.grad is None
