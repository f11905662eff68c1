"""A verdict is about the gradients that a check has seen: other code may repair or replace them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp
from amp.torch_versions import HAS_GRAD_DTYPE
from tests import training
from tests.covering import covering
from tests.levels import DYNAMIC
from tests.models import run_backward, step_on

LEVELS = ["O1", "O2", "O4", "O5", "O7"]
OPTIMIZERS = {name: training.OPTIMIZERS[name] for name in ("SGD", "AdamW, fused", "FusedAdam")}


def in_place(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.nan_to_num_(0.0, 0.0, 0.0)


def without_trace(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.data.nan_to_num_(0.0, 0.0, 0.0)


def by_another(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.nan_to_num(0.0, 0.0, 0.0)


def by_removing(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    if not parameter.grad.isfinite().all():
        parameter.grad = None


class Training:
    """A model of two layers, the second of which may get gradients that are NaN."""

    def __init__(self, level: str, optimizer: str) -> None:
        torch.manual_seed(0)
        layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        made = OPTIMIZERS[optimizer](layers.parameters())
        options: Any = {"loss_scale": {"init": 4.0}} if level in DYNAMIC else {}
        self.layers: Any
        self.layers, self.optimizer = amp.initialize(
            layers, made, opt_level=level, verbosity=0, **options
        )

    def with_gradients(self) -> list[Any]:
        """Return the parameters, or before torch 2.10 those that have their FP32 gradients."""
        stepped = self.layers.parameters() if HAS_GRAD_DTYPE else amp.master_params(self.optimizer)
        return list(stepped)

    def backward(self, factor: float) -> None:
        first, second = [layer(torch.ones(2, 16)).float().sum() for layer in self.layers]
        run_backward(first + factor * second, self.optimizer)

    def values(self) -> list[Tensor]:
        return [p.detach().float().clone() for p in self.layers.parameters()]

    def step(self) -> list[bool]:
        """Step, and return for each parameter whether it has changed."""
        before = self.values()
        self.optimizer.step()
        return [not torch.equal(x, y) for x, y in zip(before, self.values(), strict=True)]


@pytest.mark.parametrize(
    ("level", "optimizer", "repair"),
    covering(LEVELS, OPTIMIZERS, [in_place, without_trace, by_another, by_removing]),
)
def test_gradients_that_were_repaired_are_stepped(
    level: str, optimizer: str, repair: Callable[[nn.Parameter], None]
) -> None:
    t = Training(level, optimizer)
    scale = amp.loss_scale()
    t.backward(math.nan)
    for parameter in t.with_gradients():
        repair(parameter)
    has_stepped = t.step()
    assert has_stepped[:2] == [True, True]
    assert not amp.step_was_skipped(t.optimizer)
    assert amp.loss_scale() == (scale / 2 if level in DYNAMIC else scale)
    assert amp.scalars(t.optimizer)["amp/skipped_steps"] == 0
    t.optimizer.zero_grad()
    t.backward(1.0)
    assert all(t.step())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradients_of_which_some_were_repaired_are_not_stepped(level: str, optimizer: str) -> None:
    t = Training(level, optimizer)
    t.backward(math.nan)
    *_, weight, bias = t.with_gradients()
    in_place(weight)
    assert not any(t.step())
    assert amp.step_was_skipped(t.optimizer)
    assert amp.scalars(t.optimizer)["amp/skipped_steps"] == 1
    if bias.grad is not None:  # the step that was skipped has left them
        in_place(bias)
        assert t.step()[:2] == [True, True]


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_closure_may_repair_gradients(level: str, optimizer: str) -> None:
    t = Training(level, optimizer)
    evaluations = []

    def closure() -> float:
        t.optimizer.zero_grad()
        t.backward(math.nan)
        for parameter in t.with_gradients():
            in_place(parameter)
        evaluations.append(1)
        return 0.0

    before = t.values()
    t.optimizer.step(closure)
    assert len(evaluations) == 1
    assert not torch.equal(before[0], t.values()[0])


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("is_on_host", [True, False])
def test_an_overflow_of_another_optimizer_skips_the_steps_of_its_block_alone(
    level: str, optimizer: str, is_on_host: bool, request: pytest.FixtureRequest
) -> None:
    if not is_on_host:
        request.getfixturevalue("the_cpu_is_a_device")
    layers: list[Any] = [nn.Linear(4, 4), nn.Linear(4, 4)]
    made = [OPTIMIZERS[optimizer](layer.parameters()) for layer in layers]
    layers, optimizers = amp.initialize(
        layers, made, opt_level=level, verbosity=0, loss_scale={"init": 4.0}
    )

    def backward(factor: float) -> None:
        first, second = [layer(torch.ones(2, 4)).float().sum() for layer in layers]
        run_backward(first + factor * second, optimizers)

    def step() -> list[bool]:
        before = [layer.weight.detach().clone() for layer in layers]
        for each in optimizers:
            each.step()
        return [not torch.equal(x, layer.weight) for x, layer in zip(before, layers, strict=True)]

    backward(math.nan)
    assert step() == [False, False]
    backward(1.0)  # to what was left, if it was
    assert step() == [True, not HAS_GRAD_DTYPE and level == "O2"]
    for factor in (math.nan, 1.0):
        for each in optimizers:
            each.zero_grad()
        backward(factor)
    assert step() == [True, True]


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_product_with_the_inverse_of_a_scale_below_1_overflows_still(max_norm: float | None) -> None:
    layer = nn.Linear(4, 4, bias=False)
    made = amp.optimizers.FusedAdam(layer.parameters(), 0.1, max_grad_norm=max_norm)
    model, optimizer = amp.initialize(
        layer, made, opt_level="O5", verbosity=0, loss_scale={"init": 0.25, "min": 0.01}
    )
    before = layer.weight.detach().clone()
    step_on(model(torch.full((1, 4), 4.0)).float().sum() * 2e38, optimizer)
    assert amp.step_was_skipped(optimizer)
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("is_on_host", [True, False])
def test_gradients_that_are_left_as_zeros_are_checked_again_once(
    is_on_host: bool, request: pytest.FixtureRequest
) -> None:
    if not is_on_host:
        request.getfixturevalue("the_cpu_is_a_device")
    t = Training("O2", "SGD")
    found = t.optimizer._amp_attached.gradients.verdicts
    for factor in (1.0, math.nan, 1.0, 1.0, 1.0, 1.0):
        t.backward(factor)
        assert any(t.step()) is (factor == 1.0)
        t.layers.zero_grad(set_to_none=False)
    assert len(found.found) == 1
    assert not found.may_be_of_others


@pytest.mark.usefixtures("the_cpu_is_a_device")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("optimizer", ["AdamW, fused", "FusedAdam"])
@pytest.mark.parametrize("bad", [False, True])
def test_on_a_device_gradients_that_were_assigned_after_others_were_cleared_are_checked(
    level: str, optimizer: str, bad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the host does not know of an overflow, it still does not wait."""
    t = Training(level, optimizer)
    t.backward(math.nan)
    parameters = t.with_gradients()
    kept = [p.grad.clone() for p in parameters if p.grad is not None]
    t.optimizer.zero_grad()
    for parameter, grad in zip(parameters, kept, strict=True):
        parameter.grad = grad if bad else torch.ones_like(grad)
    if optimizer == "AdamW, fused":  # in plain torch FusedAdam reads the flag by itself
        monkeypatch.setattr(Tensor, "item", refuse)
    has_stepped = t.step()
    monkeypatch.undo()
    assert has_stepped == [not bad] * 4


def refuse(*_: object) -> None:
    raise AssertionError("the host waited")


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_an_overflow_after_a_step_that_raised_was_not_skipped_by_it(level: str) -> None:
    t = Training(level, "SGD")
    t.backward(1.0)

    def fail(*_: object) -> None:
        raise ValueError

    handle = t.optimizer.register_step_pre_hook(fail)
    with pytest.raises(ValueError):
        t.optimizer.step()
    handle.remove()
    t.backward(math.inf)
    assert not amp.step_was_skipped(t.optimizer)
    t.optimizer.step()
    assert amp.step_was_skipped(t.optimizer)
