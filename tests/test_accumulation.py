"""Whatever blocks gradients come from, their sum is exactly the sum of the unscaled gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp
from amp.optimizers import FusedSGD
from tests.covering import covering
from tests.levels import DYNAMIC, WITH_MASTERS
from tests.models import DYNAMIC_LEVELS, LEVELS, initialize


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
}


def micro_batch(i: int) -> Tensor:
    """Integers that every format holds, and so do all their sums here."""
    return torch.tensor([1.0, 2.0, 4.0]) * (i + 1)


def make(level: str, **kwargs: Any) -> tuple[Mixed, Any]:
    model = Mixed()
    optimizer = torch.optim.SGD([{"params": [model.cast]}, {"params": [model.norm.bias]}], lr=1.0)
    return initialize(model, optimizer, level, **kwargs)


def set_scale(loss_id: int, scale: float) -> None:
    """Move a dynamic scale, as some overflow long ago would have."""
    amp.get_session().scalers[loss_id]._set(scale, 0, 1)


def run_block(model: Mixed, optimizer: Any, i: int, **kwargs: Any) -> None:
    with amp.scale_loss(model(micro_batch(i)), optimizer, **kwargs) as scaled_loss:
        scaled_loss.backward()


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


@pytest.mark.parametrize(
    ("level", "delays"), covering(LEVELS, list(itertools.product([False, True], repeat=3)), strength=1)
)
def test_every_pattern_of_delays(level: str, delays: tuple[bool, ...]) -> None:
    model, optimizer = make(level)
    for i, delay in enumerate(delays):
        run_block(model, optimizer, i, delay_unscale=delay)
    run_block(model, optimizer, 3)
    assert_sum(optimizer, 4)
    optimizer.step()
    expected = -10 * torch.tensor([1.0, 2.0, 4.0])
    assert torch.equal(model.state_dict()["cast"].float(), expected)


@pytest.mark.parametrize(
    ("level", "delays", "loss_ids"),
    covering(
        DYNAMIC_LEVELS,
        itertools.product([False, True], repeat=3),
        itertools.product([0, 1], repeat=3),
        strength=1,
    ),
)
def test_scales_that_differ_and_change(
    level: str, delays: tuple[bool, ...], loss_ids: tuple[int, ...]
) -> None:
    model, optimizer = make(level, num_losses=2)
    set_scale(0, 64.0)
    set_scale(1, 512.0)
    for i, (delay, loss_id) in enumerate(zip(delays, loss_ids, strict=True)):
        run_block(model, optimizer, i, delay_unscale=delay, loss_id=loss_id)
        set_scale(loss_id, 2.0 ** (i + 3))
    run_block(model, optimizer, 3, loss_id=0)
    assert_sum(optimizer, 4)


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_after_delayed_blocks_alone_uses_unscaled_gradients(level: str) -> None:
    model, optimizer = make(level)
    run_block(model, optimizer, 0, delay_unscale=True)
    run_block(model, optimizer, 1, delay_unscale=True)
    optimizer.step()
    assert torch.equal(model.state_dict()["cast"].float(), torch.tensor([-3.0, -6.0, -12.0]))
    assert torch.equal(model.norm.bias.float(), torch.tensor([-3.0, -6.0, -12.0]))


@pytest.mark.parametrize("level", LEVELS)
def test_zero_grad_forgets_what_was_delayed(level: str) -> None:
    model, optimizer = make(level)
    run_block(model, optimizer, 5, delay_unscale=True)
    optimizer.zero_grad()
    run_block(model, optimizer, 0)
    assert_sum(optimizer, 1)


@pytest.mark.parametrize("level", LEVELS)
def test_several_backwards_in_one_block(level: str) -> None:
    model, optimizer = make(level)
    with amp.scale_loss(model(micro_batch(0)), optimizer) as scaled_loss:
        scaled_loss.backward(retain_graph=True)
        scaled_loss.backward()
    assert_sum(optimizer, [0, 0])


@pytest.mark.parametrize("level", LEVELS)
def test_a_loss_of_any_shape(level: str) -> None:
    model, optimizer = make(level)
    loss = model(micro_batch(0)).expand(2, 2)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss.shape == (2, 2)
        assert scaled_loss.dtype is torch.float32
        scaled_loss.sum().backward()
    assert_sum(optimizer, [0, 0, 0, 0])


@pytest.mark.parametrize("level", LEVELS)
def test_one_loss_for_two_optimizers_and_one_for_each(level: str) -> None:
    a, b = Mixed(), Mixed()
    optimizers = [torch.optim.SGD([m.cast, m.norm.bias], lr=1.0) for m in (a, b)]
    (a, b), optimizers = initialize([a, b], optimizers, level, num_losses=3)
    with amp.scale_loss(a(micro_batch(0)) + b(micro_batch(0)), optimizers, loss_id=2) as scaled_loss:
        scaled_loss.backward()
    for model, optimizer, loss_id in ((a, optimizers[0], 0), (b, optimizers[1], 1)):
        run_block(model, optimizer, 1, loss_id=loss_id)
    for optimizer in optimizers:
        assert_sum(optimizer, 2)


@pytest.mark.parametrize("level", DYNAMIC_LEVELS)
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("delay", [False, True])
def test_an_overflow_in_any_micro_batch_skips_the_step_once(
    level: str, position: int, delay: bool
) -> None:
    model, optimizer = make(level)
    for i in range(3):
        loss = model(micro_batch(i)) * (math.inf if i == position else 1.0)
        with amp.scale_loss(loss, optimizer, delay_unscale=delay and i < 2) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert torch.equal(model.state_dict()["cast"].float(), torch.zeros(3))
    assert amp.loss_scale() == 512.0
    optimizer.zero_grad()
    run_block(model, optimizer, 0)
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)
    assert torch.equal(model.state_dict()["cast"].float(), -micro_batch(0))


def empty_block(model: Mixed, optimizer: Any, **kwargs: Any) -> None:
    """Run a block whose loss reaches nothing of the model."""
    with amp.scale_loss(torch.ones((), requires_grad=True) * 1.0, optimizer, **kwargs) as scaled_loss:
        scaled_loss.backward()


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


@pytest.mark.parametrize("clears", ["the model", "each parameter"])
@pytest.mark.parametrize(
    ("between", "optimizer", "level"), covering(BETWEEN, [*OPTIMIZERS, "AdamW"], DYNAMIC)
)
@pytest.mark.filterwarnings("ignore:an amp.scale_loss block has ended, and no")
def test_an_overflow_whose_gradients_somebody_clears_skips_no_later_step(
    between: str, optimizer: str, level: str, clears: str
) -> None:
    """Though a block comes in between that makes no gradients, or a step that uses none."""
    model = Mixed()
    make_it: Any = OPTIMIZERS.get(optimizer, lambda groups: torch.optim.AdamW(groups, lr=1.0))
    groups = [{"params": [model.cast]}, {"params": [model.norm.bias]}]
    model, opt = initialize(model, make_it(groups), level)

    def clear() -> None:
        if clears == "the model":
            model.zero_grad(set_to_none=True)
            return
        for parameter in model.parameters():
            parameter.grad = None

    with amp.scale_loss(model(micro_batch(0) * math.inf), opt) as scaled_loss:
        scaled_loss.backward()
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


@pytest.mark.parametrize(
    ("zeros", "optimizer", "level"), covering(ZEROS, [*OPTIMIZERS, "AdamW"], DYNAMIC)
)
def test_a_skipped_step_whose_gradients_somebody_sets_to_zero_skips_no_later_step(
    zeros: str, optimizer: str, level: str
) -> None:
    model = Mixed()
    make_it: Any = OPTIMIZERS.get(optimizer, lambda groups: torch.optim.AdamW(groups, lr=1.0))
    groups = [{"params": [model.cast]}, {"params": [model.norm.bias]}]
    model, opt = initialize(model, make_it(groups), level)
    model.norm.weight.requires_grad_(False)
    for factor in (math.inf, 1.0, 1.0, math.inf, 1.0):
        before = model.cast.detach().clone()
        with amp.scale_loss(model(micro_batch(0) * factor), opt) as scaled_loss:
            scaled_loss.backward()
        opt.step()
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
        with amp.scale_loss(model(micro_batch(0) * factor), opt) as scaled_loss:
            scaled_loss.backward()
        opt.step()
        assert amp.step_was_skipped(opt)
        assert torch.equal(model.cast, before)


@pytest.mark.parametrize("level", DYNAMIC_LEVELS)
def test_a_delayed_overflow_of_another_loss_is_not_lost(level: str) -> None:
    """Loss 0 is only ever delayed; its scale must fall all the same."""
    model, optimizer = make(level, num_losses=2)
    with amp.scale_loss(model(micro_batch(0)) * math.inf, optimizer, delay_unscale=True) as s:
        s.backward()
    run_block(model, optimizer, 1, loss_id=1)
    assert (amp.loss_scale(0), amp.loss_scale(1)) == (512.0, 1024.0)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("level", DYNAMIC_LEVELS)
@pytest.mark.parametrize("then", ["block", "step"])
def test_what_one_block_delayed_for_two_optimizers_counts_once(level: str, then: str) -> None:
    """An overflow in one of them skips both, and the scale falls once."""
    a, b = Mixed(), Mixed()
    optimizers = [torch.optim.SGD([m.cast, m.norm.bias], lr=1.0) for m in (a, b)]
    (a, b), optimizers = initialize([a, b], optimizers, level, num_losses=2)
    loss = a(micro_batch(0)) * math.inf + b(micro_batch(0))
    with amp.scale_loss(loss, optimizers, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    if then == "block":
        with amp.scale_loss(a(micro_batch(0)) + b(micro_batch(0)), optimizers, loss_id=1) as s:
            s.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert amp.loss_scale(0) == 512.0
    assert all(amp.step_was_skipped(optimizer) for optimizer in optimizers)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
def test_blocks_of_two_optimizers_that_share_parameters_count_each_gradient_once(level: str) -> None:
    model = Mixed()
    parameters = [model.cast, model.norm.bias]
    optimizers = [torch.optim.SGD(parameters, lr=1.0) for _ in range(2)]
    model, optimizers = initialize(model, optimizers, level)
    for i in range(3):
        with amp.scale_loss(model(micro_batch(i)), optimizers) as scaled_loss:
            scaled_loss.backward()
    for optimizer in optimizers:
        cast = next(iter(amp.master_params(optimizer)))
        assert torch.equal(cast.grad.float(), 6 * micro_batch(0))


def test_close_unscales_what_was_delayed() -> None:
    model, optimizer = make("O1")
    run_block(model, optimizer, 0, delay_unscale=True)
    amp.get_session().close()
    assert model.cast.grad is not None
    assert torch.equal(model.cast.grad, micro_batch(0))


@pytest.mark.parametrize("level", DYNAMIC_LEVELS)
def test_delay_overflow_check_leaves_the_scale_to_the_next_block(level: str) -> None:
    model, optimizer = make(level)
    with amp.scale_loss(model(micro_batch(0)) * math.inf, optimizer, delay_overflow_check=True) as s:
        s.backward()
    assert amp.loss_scale() == 1024.0
    run_block(model, optimizer, 1)
    assert amp.loss_scale() == 512.0
    optimizer.step()
    assert amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("level", DYNAMIC_LEVELS)
def test_delay_overflow_check_unscales(level: str) -> None:
    model, optimizer = make(level)
    run_block(model, optimizer, 0, delay_overflow_check=True)
    run_block(model, optimizer, 1)
    assert_sum(optimizer, 2)
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 1


# Exceptions inside the block.


def fail_in_block(model: Mixed, optimizer: Any, when: str, **kwargs: Any) -> None:
    def blow(loss: Tensor) -> None:
        if when == "after backward":
            loss.backward()
        raise KeyError("boom")

    with (
        pytest.raises(KeyError, match="boom"),
        amp.scale_loss(model(micro_batch(7)), optimizer, **kwargs) as scaled_loss,
    ):
        blow(scaled_loss)


@pytest.mark.parametrize("level", DYNAMIC)
@pytest.mark.parametrize("when", ["before backward", "after backward"])
@pytest.mark.parametrize("delay", [False, True])
def test_a_block_that_raises_leaves_no_trace(level: str, when: str, delay: bool) -> None:
    model, optimizer = make(level)
    run_block(model, optimizer, 0)
    state = amp.state_dict()
    fail_in_block(model, optimizer, when, delay_unscale=delay)
    assert amp.state_dict() == state
    assert_sum(optimizer, 1)
    run_block(model, optimizer, 1)
    assert_sum(optimizer, 2)
    optimizer.step()
    assert torch.equal(model.state_dict()["cast"].float(), torch.tensor([-3.0, -6.0, -12.0]))


@pytest.mark.parametrize(
    ("level", "optimizer", "blocks", "masters", "delay"),
    covering(WITH_MASTERS, OPTIMIZERS, [0, 1, 2], [True, "split16"], [False, True]),
)
def test_a_block_that_raises_drops_what_masters_got_from_it_at_a_scale_of_1_too(
    level: str, optimizer: str, blocks: int, masters: Any, delay: bool
) -> None:
    """And with them those of the optimizer's parameters without a master."""
    model = Mixed()
    groups = [{"params": [model.cast]}, {"params": [model.norm.bias]}]
    options: dict[str, Any] = {"loss_scale": 1.0, "master_weights": masters}
    model, opt = initialize(model, OPTIMIZERS[optimizer](groups), level, **options)
    for i in range(blocks):
        run_block(model, opt, i)
    fail_in_block(model, opt, "after backward", delay_unscale=delay)
    total = sum(map(micro_batch, range(blocks)), torch.zeros(3))
    master, bias = [p for group in opt.param_groups for p in group["params"]]
    for grad in (model.cast.grad, master.grad, bias.grad):
        assert (grad is None) == (blocks == 0)
        assert grad is None or torch.equal(grad, total)
    run_block(model, opt, blocks)
    opt.step()
    total += micro_batch(blocks)
    assert torch.equal(model.state_dict()["cast"], -total)
    assert torch.equal(model.cast.float(), -total)


@pytest.mark.parametrize("level", LEVELS)
def test_a_block_that_raises_before_backward_keeps_what_was_delayed(level: str) -> None:
    model, optimizer = make(level)
    run_block(model, optimizer, 0, delay_unscale=True)
    fail_in_block(model, optimizer, "before backward")
    run_block(model, optimizer, 1)
    assert_sum(optimizer, 2)


def test_nested_blocks_of_one_optimizer_are_an_error_that_undoes_itself() -> None:
    model, optimizer = make("O2")
    with (
        pytest.raises(RuntimeError, match="inside another amp.scale_loss block"),
        amp.scale_loss(model(micro_batch(0)), optimizer),
        amp.scale_loss(model(micro_batch(0)), optimizer),
    ):
        pass
    run_block(model, optimizer, 0)
    assert_sum(optimizer, 1)


def test_an_optimizer_given_twice_counts_once() -> None:
    model, optimizer = make("O1")
    run_block(model, [optimizer, optimizer], 0)  # type: ignore[arg-type]
    assert_sum(optimizer, 1)


def test_a_tuple_of_optimizers_is_as_good_as_a_list() -> None:
    model, optimizer = make("O2")
    run_block(model, (optimizer,), 0)
    run_block(model, (optimizer,), 1)
    assert_sum(optimizer, 2)


@pytest.mark.parametrize("level", LEVELS)
def test_accumulated_gradients_equal_those_of_one_big_batch(level: str) -> None:
    """The same with a real model, in which casts and batch statistics take part."""

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2))

    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(1))
    reference = make_model().double()
    reference(x.double()).pow(2).mean().backward()
    model = make_model()
    model, optimizer = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level)
    for chunk in x.chunk(3):
        loss = model(chunk).float().pow(2).mean() / 3
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    tolerance = {"O0": 1e-5, "O4": 5e-2, "O5": 5e-2}.get(level, 1e-2)
    for p, q in zip(amp.master_params(optimizer), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.double(), q.grad, rtol=tolerance, atol=tolerance / 5)


@pytest.mark.filterwarnings("ignore:the loss is in float16")
def test_gradients_keep_the_precision_that_half_would_lose() -> None:
    """2048 + 1 is 2048 in float16; the masters' gradients know better."""
    model, optimizer = make("O2")
    with amp.scale_loss((model.cast * 2048).sum() / 64, optimizer) as scaled_loss:
        scaled_loss.backward()
    for _ in range(3):
        with amp.scale_loss(model.cast.sum() / 64, optimizer) as scaled_loss:
            scaled_loss.backward()
    assert (next(amp.master_params(optimizer)).grad * 64 == 2051).all()
