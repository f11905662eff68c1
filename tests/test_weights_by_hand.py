"""Scripts that write weights, freeze them and register hooks train as they do in FP32."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import amp
from amp.errors import AmpRuntimeError, AmpWarning
from amp.optimizers import FusedAdam, FusedSGD
from tests.covering import covering
from tests.models import initialize

LEVELS: dict[str, dict[str, Any]] = {
    "O1": {"loss_scale": 128.0},
    "O2": {"loss_scale": 128.0},
    "O5": {},
    "O5 split16": {"master_weights": "split16"},
}
OPTIMIZERS: dict[str, Any] = {
    "SGD": (lambda p: torch.optim.SGD(p, 0.05, 0.9),) * 2,
    "AdamW": (lambda p: torch.optim.AdamW(p, 0.01),) * 2,
    "FusedSGD": (lambda p: torch.optim.SGD(p, 0.05, 0.9), lambda p: FusedSGD(p, 0.05, 0.9)),
    "FusedAdam": (
        lambda p: torch.optim.AdamW(p, 0.01),
        lambda p: FusedAdam(p, 0.01, weight_decay=0.01),
    ),
}


class Training:
    """A small net under an optimizer, at a level or in FP32 without amp."""

    def __init__(self, level: str | None, optimizer: str) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = OPTIMIZERS[optimizer][level is not None](self.model.parameters())
        self.level = level
        self.x = torch.randn(16, 8)
        self.seen: list[Tensor] = []
        self.with_closure = False
        if level is not None:
            options = {"opt_level": level.split()[0], "verbosity": 0, **LEVELS[level]}
            amp.initialize(self.model, self.optimizer, **options)

    def iterate(self, times: int = 1) -> None:
        for _ in range(times):
            if self.with_closure:
                self.optimizer.step(self.backward)
                continue
            self.backward()
            self.optimizer.step()

    def backward(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = (self.model(self.x).float() - self.x.sum(1, keepdim=True)).square().mean()
        if self.level is None:
            loss.backward()
            return loss
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        return loss

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @property
    def stepped(self) -> list[Any]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def masters(self) -> list[Any]:
        """Those of amp.master_params."""
        return list(amp.master_params(self.optimizer))


def average_that_is_saved(t: Training) -> None:
    """Write an average through `.data`, save it, take it back: training goes on from the weights."""
    average = [p.detach().clone() for p in t.parameters]
    for _ in range(3):
        t.iterate()
        backup = [p.detach().clone() for p in t.parameters]
        for p, mean in zip(t.parameters, average, strict=True):
            p.data.copy_(mean)
        t.seen += [value.clone() for value in t.model.state_dict().values()]
        for p, values in zip(t.parameters, backup, strict=True):
            p.data.copy_(values)


def saved_and_kept(t: Training) -> None:
    """Write through `.data` and save: the next step goes on from what was saved."""
    t.iterate(2)
    t.model[0].weight.data.mul_(0.5)
    t.seen += [value.clone() for value in t.model.state_dict().values()]
    t.iterate(2)


@torch.no_grad()
def two_writes(t: Training) -> None:
    """SAM by hand, at what the optimizer steps."""
    for _ in range(3):
        with torch.enable_grad():
            t.backward()
        before = [p.detach().clone() for p in t.stepped]
        for p in t.stepped:
            p.add_(0.1 * p.grad)
        with torch.enable_grad():
            t.backward()
        for p, values in zip(t.stepped, before, strict=True):
            p.copy_(values)
        t.optimizer.step()


def hook_that_clamps(t: Training) -> None:
    @torch.no_grad()
    def clamp(*_: Any) -> None:
        for p in t.parameters:
            p.clamp_(-0.1, 0.1)

    t.optimizer.register_step_post_hook(clamp)
    t.iterate(3)


def hook_that_reads(t: Training) -> None:
    hook = t.optimizer.register_step_post_hook(
        lambda *_: t.seen.extend(p.detach().float().clone() for p in t.parameters)
    )
    t.iterate(2)
    hook.remove()
    t.iterate()


def hook_that_writes_what_is_stepped(t: Training) -> None:
    @torch.no_grad()
    def clamp(*_: Any) -> None:
        for p in t.stepped:
            p.clamp_(-0.1, 0.1)

    t.optimizer.register_step_post_hook(clamp)
    t.iterate(3)


def hook_of_all_optimizers(t: Training) -> None:
    @torch.no_grad()
    def shrink(*_: Any) -> None:
        for p in t.parameters:
            p.mul_(0.5)

    hook = register_optimizer_step_post_hook(shrink)
    try:
        t.iterate(3)
    finally:
        hook.remove()


def hook_before_the_step(t: Training) -> None:
    @torch.no_grad()
    def shrink(*_: Any) -> None:
        for p in t.parameters:
            p.mul_(0.5)

    t.optimizer.register_step_pre_hook(shrink)
    t.iterate(3)


def hook_that_clamps_after_a_closure(t: Training) -> None:
    t.with_closure = True
    hook_that_clamps(t)


def hook_that_reads_after_a_closure(t: Training) -> None:
    t.with_closure = True
    hook_that_reads(t)


def hook_before_a_step_with_a_closure(t: Training) -> None:
    t.with_closure = True
    hook_before_the_step(t)


def frozen_in_the_groups(t: Training) -> None:
    t.iterate()
    for p in t.stepped[:2]:
        p.requires_grad_(False)
        p.grad = None
    t.iterate(2)
    assert not any(p.requires_grad for p in t.parameters[:2])
    for p in t.stepped[:2]:
        p.requires_grad_(True)
    t.iterate()
    for p in t.parameters[2:]:
        p.requires_grad_(False)
        p.grad = None
    t.iterate()
    for p in t.parameters[2:]:
        p.requires_grad_(True)
    t.iterate()


def masters_clamped_through_data(t: Training) -> None:
    for _ in range(3):
        t.iterate()
        for p in t.masters if t.level is not None else t.parameters:
            p.data.clamp_(-0.1, 0.1)
        t.seen += [value.clone() for value in t.model.state_dict().values()]


def found_in_the_state(t: Training) -> None:
    t.iterate()
    assert all(p in t.optimizer.state.keys() for p in t.parameters)  # noqa: SIM118
    assert len(list(t.optimizer.state.keys())) == 4
    for copied in (t.optimizer.state.copy(), copy.copy(t.optimizer.state), t.optimizer.state | {}):
        assert type(copied) is defaultdict
        assert list(copied) == list(t.stepped)


SCRIPTS: dict[str, Callable[[Training], None]] = {
    script.__name__: script
    for script in (
        average_that_is_saved,
        saved_and_kept,
        two_writes,
        hook_that_clamps,
        hook_that_reads,
        hook_that_writes_what_is_stepped,
        hook_of_all_optimizers,
        hook_before_the_step,
        hook_that_clamps_after_a_closure,
        hook_that_reads_after_a_closure,
        hook_before_a_step_with_a_closure,
        frozen_in_the_groups,
        masters_clamped_through_data,
        found_in_the_state,
    )
}
OF_MASTERS = ("two_writes", "hook_that_writes_what_is_stepped", "masters_clamped_through_data")
"""Those that write to masters, which are NaN outside of a step if they are lean."""


@pytest.mark.parametrize(("script", "level", "optimizer"), covering(SCRIPTS, LEVELS, OPTIMIZERS))
def test_a_script_trains_as_in_fp32(script: str, level: str, optimizer: str) -> None:
    if "split16" in level and script in OF_MASTERS:
        pytest.skip("masters have no values")
    found, before = [], [p.detach().clone() for p in Training(None, optimizer).parameters]
    for each in (None, level):
        training = Training(each, optimizer)
        SCRIPTS[script](training)
        after = training.model.state_dict().values()
        moved = torch.cat([(a.float() - b).flatten() for a, b in zip(after, before, strict=True)])
        found.append((moved, torch.cat([moved, *[each.float().flatten() for each in training.seen]])))
    (expected, all_expected), (moved, all_moved) = found
    assert expected.norm() > 0.01
    assert (moved - expected).norm() < 0.03 * expected.norm()
    assert (all_moved - all_expected).norm() < 0.03 * all_expected.norm()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loss_of_masters_is_refused_where_it_is_scaled(optimizer: str, dynamic: bool) -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    options: dict[str, Any] = {"loss_scale": "dynamic" if dynamic else 128.0}
    model, made = initialize(model, OPTIMIZERS[optimizer][1](model.parameters()), "O2", **options)
    penalty = sum(p.square().sum() for p in amp.master_params(made))
    with (
        pytest.raises(AmpRuntimeError, match=r"master of a parameter of shape .*model.parameters\(\)"),
        amp.scale_loss(model(torch.ones(2, 8)).float().sum() + penalty, made) as scaled_loss,
    ):
        scaled_loss.backward()


def test_zeros_inside_of_a_block_are_no_gradients_of_a_loss() -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    model, made = initialize(model, torch.optim.SGD(model.parameters(), 0.1), "O2", loss_scale=128.0)
    for _ in range(2):
        with amp.scale_loss(model(torch.ones(2, 8)).float().sum(), made) as scaled_loss:
            made.zero_grad(set_to_none=False)
            scaled_loss.backward()
    made.step()


@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_hook_of_a_master_is_told_that_it_never_runs(level: str, post: bool) -> None:
    model: Any = nn.Linear(8, 1)
    model, made = initialize(model, torch.optim.SGD(model.parameters(), 0.1), level)
    for p in made.param_groups[0]["params"]:
        if post:
            p.register_post_accumulate_grad_hook(lambda _: None)
        else:
            p.register_hook(lambda grad: grad * 2)
    with pytest.warns(
        AmpWarning, match="hook was registered on .*Register it on the model's parameter"
    ):
        amp.scale_loss(model(torch.ones(2, 8)).float().sum(), made).__enter__()


@pytest.mark.parametrize("inside", [False, True])
def test_gradients_for_masters_have_a_hint(inside: bool) -> None:
    class TwiceDifferentiated(torch.optim.SGD):
        loss: Any

        def step(self, closure: Any = None) -> None:
            parameters = self.param_groups[0]["params"]
            torch.autograd.grad(self.loss, parameters)

    model: Any = nn.Linear(8, 1)
    model, made = initialize(model, TwiceDifferentiated(model.parameters(), 0.1), "O5")
    made.loss = model(torch.ones(2, 8)).float().sum()
    with pytest.raises(RuntimeError, match="not have been used") as caught:
        if inside:
            with amp.scale_loss(made.loss, made) as scaled_loss:
                torch.autograd.grad(scaled_loss, list(amp.master_params(made)))
        made.step()
    assert "model.parameters()" in caught.value.__notes__[0]


TWO = "does not name its optimizer"


def two_optimizers(level: str, kind: str) -> tuple[Any, Any, Any]:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    make = OPTIMIZERS[kind][1]
    made = [make(model[0].parameters()), make(model[2].parameters())]
    amp.initialize(model, made, opt_level=level, loss_scale=128.0, verbosity=0)

    def backward(*optimizers: Any) -> None:
        with amp.scale_loss(model(torch.ones(2, 8)).float().sum(), list(optimizers)) as scaled_loss:
            scaled_loss.backward()

    return model, made, backward


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_that_stay_scaled_are_named(level: str, kind: str) -> None:
    _, (first, second), backward = two_optimizers(level, kind)
    backward(first)
    with pytest.warns(AmpWarning, match=rf"'2.weight'.*{TWO}"):
        backward(second)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_with_gradients_that_stay_scaled_is_told(level: str, kind: str) -> None:
    _, (first, second), backward = two_optimizers(level, kind)
    backward(second)
    second.step()
    first.zero_grad()
    backward(first)
    with pytest.warns(AmpWarning, match=TWO):
        second.step()


@pytest.mark.parametrize("clear", ["optimizer", "model", "zeros"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.filterwarnings("error")
def test_two_players_that_clear_their_gradients_are_told_nothing(level: str, clear: str) -> None:
    model, made, backward = two_optimizers(level, "SGD")
    for _ in range(3):
        for player in made:
            if clear == "model":
                model.zero_grad()
            else:
                player.zero_grad(set_to_none=clear == "optimizer")
            backward(player)
            player.step()
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    both = [torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(model[2].parameters(), 0.1)]
    amp.initialize(model, both, opt_level=level, loss_scale=128.0, verbosity=0)
    for each in (both[0], both):
        with amp.scale_loss(model(torch.ones(2, 8)).float().sum(), each) as scaled_loss:
            scaled_loss.backward()  # the second one has some parameters of the first


class BeginsSlowly(torch.optim.SGD):
    """Its first step makes its state alone, as ADOPT's does."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p not in self.state:
                self.state[p]["step"] = 1
            else:
                p.data.sub_(p.grad)


@pytest.mark.filterwarnings("error")
def test_an_optimizer_that_begins_slowly_is_told_nothing() -> None:
    model: Any = nn.Linear(8, 1)
    model, made = initialize(model, BeginsSlowly(model.parameters(), 0.1), "O5")
    for _ in range(3):
        with amp.scale_loss(model(torch.ones(2, 8)).float().sum(), made) as scaled_loss:
            scaled_loss.backward()
        made.step()
