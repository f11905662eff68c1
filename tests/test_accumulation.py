"""Whatever blocks gradients come from, their sum is exactly the sum of the unscaled gradients.

The random scripts of tests/test_gradient_states.py delay blocks, raise in them, overflow and clear in
any order; here is what these leave out, and what once went wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp
from amp.optimizers import FusedSGD
from tests.covering import covering
from tests.levels import DYNAMIC
from tests.models import DYNAMIC_LEVELS, LEVELS, initialize, run_backward, step_on


class Mixed(nn.Module):
    """A weight that is cast and one that is not; their gradients are the inputs, exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.cast = nn.Parameter(torch.zeros(3))
        self.norm = nn.BatchNorm1d(3, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        return ((self.cast + self.norm.bias.to(self.cast.dtype)) * x).sum()


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1.0),
    "SGD, fused": lambda groups: torch.optim.SGD(groups, lr=1.0, fused=True),
    "FusedSGD": lambda groups: FusedSGD(groups, lr=1.0),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1.0),
}


def micro_batch(i: int) -> Tensor:
    """Integers that every format holds, and so do all their sums here."""
    return torch.tensor([1.0, 2.0, 4.0]) * (i + 1)


def make(level: str, optimizer: str = "SGD", **kwargs: Any) -> tuple[Mixed, Any]:
    model = Mixed()
    groups = [{"params": [model.cast]}, {"params": [model.norm.bias]}]
    return initialize(model, OPTIMIZERS[optimizer](groups), level, **kwargs)


def run_block(model: Mixed, optimizer: Any, i: int, **kwargs: Any) -> None:
    run_backward(model(micro_batch(i)), optimizer, **kwargs)


def grads(optimizer: Any) -> list[Tensor]:
    return [p.grad.float() for p in amp.master_params(optimizer)]


def assert_sum(optimizer: Any, blocks: int | list[int]) -> None:
    indices = range(blocks) if isinstance(blocks, int) else blocks
    expected = torch.stack([micro_batch(i) for i in indices]).sum(0)
    for grad in grads(optimizer):
        assert torch.equal(grad, expected), (grad, expected)


@pytest.mark.parametrize(
    ("level", "loss_scale"), covering(LEVELS, [None, 1.0, 8.0, 3.0, "dynamic"], strength=1)
)
def test_plain_accumulation(level: str, loss_scale: Any) -> None:
    scaling = {"init": 256} if loss_scale == "dynamic" else loss_scale
    model, optimizer = make(level, **({} if scaling is None else {"loss_scale": scaling}))
    for i in range(4):
        run_block(model, optimizer, i)
    if loss_scale == 3.0:  # not a power of two: rounded, not exact
        for grad in grads(optimizer):
            torch.testing.assert_close(grad, 10 * torch.tensor([1.0, 2, 4]), rtol=1e-2, atol=0)
    else:
        assert_sum(optimizer, 4)


@pytest.mark.parametrize("level", LEVELS)
def test_the_first_use_ever_may_be_delayed(level: str) -> None:
    """In apex, FP32 gradients of a first delayed block were lost."""
    model, optimizer = make(level)
    run_block(model, optimizer, 0, delay_unscale=True)
    run_block(model, optimizer, 1)
    assert_sum(optimizer, 2)


@pytest.mark.parametrize("level", LEVELS)
def test_a_loss_of_any_shape_and_two_backwards_in_one_block(level: str) -> None:
    model, optimizer = make(level)
    loss = model(micro_batch(0)).expand(2, 2)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss.shape == (2, 2)
        assert scaled_loss.dtype is torch.float32
        scaled_loss.sum().backward(retain_graph=True)
        scaled_loss.sum().backward()
    assert_sum(optimizer, [0] * 8)


def empty_block(model: Mixed, optimizer: Any, **kwargs: Any) -> None:
    """Run a block whose loss reaches nothing of the model."""
    run_backward(torch.ones((), requires_grad=True) * 1.0, optimizer, **kwargs)


def step(model: Mixed, optimizer: Any) -> None:
    optimizer.step()


def delayed_empty_block(model: Mixed, optimizer: Any) -> None:
    empty_block(model, optimizer, delay_unscale=True)


BETWEEN: dict[str, Any] = {
    "nothing": (),
    "step": (step,),
    "block": (empty_block,),
    "block, step": (empty_block, step),
    "step, block, step": (step, empty_block, step),
    "delayed block": (delayed_empty_block,),
    "delayed block, step": (delayed_empty_block, step),
}


@pytest.mark.parametrize(
    ("between", "optimizer", "level", "clears"),
    covering(BETWEEN, OPTIMIZERS, DYNAMIC, ["the model", "each parameter"]),
)
@pytest.mark.filterwarnings("ignore:an amp.scale_loss block has ended, and no")
def test_an_overflow_whose_gradients_somebody_clears_skips_no_later_step(
    between: str, optimizer: str, level: str, clears: str
) -> None:
    """Though a block comes in between that makes no gradients, or a step that uses none."""
    model, opt = make(level, optimizer)

    def clear() -> None:
        if clears == "the model":
            model.zero_grad(set_to_none=True)
            return
        for parameter in model.parameters():
            parameter.grad = None

    run_backward(model(micro_batch(0) * math.inf), opt)
    clear()
    for each in BETWEEN[between]:
        each(model, opt)
    for _ in range(2):
        clear()
        before = model.cast.detach().clone()
        run_block(model, opt, 0)
        opt.step()
        assert not amp.step_was_skipped(opt)
        assert not torch.equal(model.cast, before)


ZEROS: dict[str, Callable[[nn.Module], object]] = {
    "zero_grad": lambda model: model.zero_grad(set_to_none=False),
    "zero_": lambda model: [p.grad.zero_() for p in model.parameters() if p.grad is not None],
    "foreach": lambda model: torch._foreach_zero_(
        [p.grad for p in model.parameters() if p.grad is not None]
    ),
}


@pytest.mark.parametrize(("zeros", "optimizer", "level"), covering(ZEROS, OPTIMIZERS, DYNAMIC))
def test_a_skipped_step_whose_gradients_somebody_sets_to_zero_skips_no_later_step(
    zeros: str, optimizer: str, level: str
) -> None:
    model, opt = make(level, optimizer)
    model.norm.weight.requires_grad_(False)
    for factor in (math.inf, 1.0, 1.0, math.inf, 1.0):
        before = model.cast.detach().clone()
        step_on(model(micro_batch(0) * factor), opt)
        assert amp.step_was_skipped(opt) == (factor == math.inf)
        assert torch.equal(model.cast, before) == (factor == math.inf)
        ZEROS[zeros](model)


@pytest.mark.parametrize("level", DYNAMIC)
def test_a_step_is_skipped_for_what_an_overflow_has_left(level: str) -> None:
    """As long as nobody clears it: a sum with an inf is one."""
    model = Mixed()
    model, opt = initialize(model, torch.optim.SGD([model.cast], 0.1), level)
    before = model.cast.detach().clone()
    for factor in (math.inf, 1.0, 1.0):
        step_on(model(micro_batch(0) * factor), opt)
        assert amp.step_was_skipped(opt)
        assert torch.equal(model.cast, before)


@pytest.mark.parametrize("level", DYNAMIC_LEVELS)
def test_a_delayed_overflow_of_another_loss_is_not_lost(level: str) -> None:
    """Loss 0 is only ever delayed; its scale must fall all the same."""
    model, optimizer = make(level, num_losses=2)
    run_backward(model(micro_batch(0)) * math.inf, optimizer, delay_unscale=True)
    run_block(model, optimizer, 1, loss_id=1)
    assert (amp.loss_scale(0), amp.loss_scale(1)) == (512.0, 1024.0)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
def test_blocks_of_two_optimizers_that_share_parameters_count_each_gradient_once(level: str) -> None:
    model = Mixed()
    parameters = [model.cast, model.norm.bias]
    optimizers = [torch.optim.SGD(parameters, lr=1.0) for _ in range(2)]
    model, optimizers = initialize(model, optimizers, level)
    for i in range(3):
        run_backward(model(micro_batch(i)), optimizers)
    for optimizer in optimizers:
        cast = next(iter(amp.master_params(optimizer)))
        assert torch.equal(cast.grad.float(), 6 * micro_batch(0))


def test_close_unscales_what_was_delayed() -> None:
    model, optimizer = make("O1")
    run_block(model, optimizer, 0, delay_unscale=True)
    amp.get_session().close()
    assert model.cast.grad is not None
    assert torch.equal(model.cast.grad, micro_batch(0))


# Exceptions inside the block.


@pytest.mark.parametrize("given", [lambda made: [made, made], lambda made: (made,)])
def test_an_optimizer_given_twice_counts_once_and_a_tuple_is_as_good_as_a_list(given: Any) -> None:
    model, optimizer = make("O2")
    run_block(model, given(optimizer), 0)
    run_block(model, given(optimizer), 1)
    assert_sum(optimizer, 2)


@pytest.mark.filterwarnings("ignore:the loss is in float16")
def test_gradients_keep_the_precision_that_half_would_lose() -> None:
    """2048 + 1 is 2048 in float16; the masters' gradients know better."""
    model, optimizer = make("O2")
    run_backward((model.cast * 2048).sum() / 64, optimizer)
    for _ in range(3):
        run_backward(model.cast.sum() / 64, optimizer)
    assert (next(amp.master_params(optimizer)).grad * 64 == 2051).all()
