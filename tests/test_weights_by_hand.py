"""Scripts that write weights, freeze them and register hooks train as they do in FP32."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

import amp
from amp.errors import AmpRuntimeError, AmpWarning
from tests import training
from tests.covering import covering
from tests.models import run_backward, started, step_on
from tests.training import Training, vector

LEVELS = ("O1", "O2", "O5", "O5 split16")
OPTIMIZERS = ("SGD", "AdamW", "FusedSGD", "FusedAdam")


def hook_that_reads(t: Training) -> None:
    hook = t.optimizer.register_step_post_hook(lambda *_: t.results.append(vector(t.parameters)))
    t.iterate(2)
    hook.remove()
    t.iterate()


def hook_that_reads_after_a_closure(t: Training) -> None:
    t.optimizer.register_step_post_hook(lambda *_: t.results.append(vector(t.parameters)))
    for _ in range(3):
        t.optimizer.step(t.backward)


def frozen_in_the_groups(t: Training) -> None:
    """Some parameters after others, while a gradient of theirs is there or is not."""
    t.iterate()
    for chosen in (slice(2), slice(2, 4)):
        for p in t.stepped[chosen]:
            p.requires_grad_(False)
            p.grad = None
        t.iterate(2)
        assert not any(p.requires_grad for p in t.parameters[chosen])
        for p in t.stepped[chosen]:
            p.requires_grad_(True)
        t.iterate()


def found_in_the_state(t: Training) -> None:
    t.iterate()
    assert all(p in t.optimizer.state.keys() for p in t.parameters[:4])  # noqa: SIM118
    for copied in (t.optimizer.state.copy(), copy.copy(t.optimizer.state), t.optimizer.state | {}):
        assert type(copied) is defaultdict
        assert list(copied) == t.stepped[: len(copied)]
        assert len(copied) >= 4


@pytest.mark.parametrize(
    ("script", "level", "optimizer"),
    covering(
        (hook_that_reads, hook_that_reads_after_a_closure, frozen_in_the_groups, found_in_the_state),
        LEVELS,
        OPTIMIZERS,
    ),
)
def test_a_script_that_writes_nothing_trains_as_in_fp32(
    script: training.Script, level: str, optimizer: str
) -> None:
    in_fp32 = training.run_in_fp32(script, optimizer, "unseen")
    assert training.distance(training.run(script, level, optimizer, "unseen"), in_fp32) < 0.01


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loss_of_masters_is_refused_where_it_is_scaled(optimizer: str, dynamic: bool) -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    scale: Any = "dynamic" if dynamic else 128.0
    model, made = started(layers, training.OPTIMIZERS[optimizer], "O2", loss_scale=scale)
    penalty = sum(p.square().sum() for p in amp.master_params(made))
    with pytest.raises(AmpRuntimeError, match=r"master of a parameter of shape .*model.parameters\(\)"):
        run_backward(model(torch.ones(2, 8)).float().sum() + penalty, made)


def test_zeros_inside_of_a_block_are_no_gradients_of_a_loss() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    model, made = started(layers, training.OPTIMIZERS["SGD"], "O2", loss_scale=128.0)
    for _ in range(2):
        with amp.scale_loss(model(torch.ones(2, 8)).float().sum(), made) as scaled_loss:
            made.zero_grad(set_to_none=False)
            scaled_loss.backward()
    made.step()


@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_hook_of_a_master_is_told_that_it_never_runs(level: str, post: bool) -> None:
    model, made = started(nn.Linear(8, 1), lambda p: torch.optim.SGD(p, 0.1), level)
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

    model, made = started(nn.Linear(8, 1), lambda p: TwiceDifferentiated(p, 0.1), "O5")
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
    make = training.OPTIMIZERS[kind]
    made = [make(model[0].parameters()), make(model[2].parameters())]
    amp.initialize(model, made, opt_level=level, loss_scale=128.0, verbosity=0)

    def backward(*optimizers: Any) -> None:
        run_backward(model(torch.ones(2, 8)).float().sum(), list(optimizers))

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


def test_an_optimizer_that_begins_slowly_is_told_nothing() -> None:
    model, made = started(nn.Linear(8, 1), lambda p: BeginsSlowly(p, 0.1), "O5")
    for _ in range(3):
        step_on(model(torch.ones(2, 8)).float().sum(), made)
