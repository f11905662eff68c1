"""State dicts with anything wrong: a right result, or one AmpError and nothing changed, bit for bit."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import amp
from amp.errors import AmpError, AmpWarning
from amp.fp16_utils import FP16_Optimizer
from amp.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedLion, FusedNovoGrad, FusedSGD
from tests.fuzz.inputs import bits, fuzz, groups, model, mutated

Made = tuple[nn.Module, Any]

FUSED: dict[str, Callable[..., Any]] = {
    cls.__name__: functools.partial(cls, lr=0.01)
    for cls in (FusedAdagrad, FusedAdam, FusedLAMB, FusedLion, FusedNovoGrad)
} | {"FusedSGD": functools.partial(FusedSGD, lr=0.01, momentum=0.9)}
OPTIMIZERS = FUSED | {"AdamW": functools.partial(torch.optim.AdamW, lr=0.01)}
MASTERS: dict[str, dict[str, Any]] = {
    "none": {"opt_level": "O0"},
    "FP32": {"opt_level": "O2", "loss_scale": {"init": 1024.0}},
    "split16": {"opt_level": "O2", "master_weights": "split16", "loss_scale": {"init": 1024.0}},
    "kahan": {"opt_level": "O5", "master_weights": "kahan"},
    "of its own": {"opt_level": "O3"},
}


def step(net: nn.Module, optimizer: Any) -> None:
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    optimizer.zero_grad()
    with amp.scale_loss(net(x).float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


def started(name: str, masters: str) -> Made:
    """Return a model and an optimizer that have been trained for two steps."""
    net = model()
    options: Any = {**MASTERS[masters], "verbosity": 0}
    net, optimizer = amp.initialize(net, OPTIMIZERS[name](groups(net)), **options)
    for _ in range(2):
        step(net, optimizer)
    return net, optimizer


def state_of(net: nn.Module, optimizer: Any) -> Any:
    """Return all that a load may change, and which objects hold it."""
    held = [id(optimizer.state), *map(id, optimizer.state.values()), *map(id, optimizer.param_groups)]
    held += [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    return bits(
        [net.state_dict(), list(net.parameters()), optimizer.state_dict(), amp.state_dict()]
    ), held


@pytest.mark.parametrize(
    ("name", "masters", "examples"),
    [
        ("FusedSGD", "kahan", 60),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *(("FusedLion", "split16", 60), ("FusedAdam", "FP32", 60)),
                *((name, masters, 16) for name in FUSED for masters in MASTERS),
            )
        ),
    ],
)
def test_optimizers(name: str, masters: str, examples: int) -> None:
    """Load bad state dicts; where one is taken, a step must come of it."""
    made = [started(name, masters)]
    valid = copy.deepcopy(made[0][1].state_dict())

    @fuzz(examples)
    @given(mutated(valid))
    def load(state: Any) -> None:
        net, optimizer = made[0]
        before = state_of(net, optimizer)
        try:
            optimizer.load_state_dict(state)
        except AmpError as error:
            assert len(str(error)) < 2000
            assert state_of(net, optimizer) == before
            return
        step(net, optimizer)
        amp.get_session().close()
        made[0] = started(name, masters)

    load()


@pytest.mark.parametrize("is_error", [False, True])
@pytest.mark.parametrize(
    "options", [{"num_losses": 2}, {"fp8": {"recipe": "delayed"}}, {"loss_scale": {"hysteresis": 3}}]
)
def test_loss_scalers(options: Any, is_error: bool) -> None:
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    amp.initialize(net, opt_level="O2", verbosity=0, **options)
    valid = dict(amp.state_dict())

    @fuzz(80)
    @given(mutated(valid))
    def load(state: Any) -> None:
        before = bits(dict(amp.state_dict()))
        with warnings.catch_warnings():
            warnings.simplefilter("error" if is_error else "ignore", AmpWarning)
            try:
                amp.load_state_dict(state)
            except (AmpError, AmpWarning) as error:
                assert len(str(error)) < 2000
                assert bits(dict(amp.state_dict())) == before
                return
        amp.load_state_dict(dict(amp.state_dict()))  # it is one that loads
        amp.load_state_dict(valid)

    load()


@fuzz(150)
@given(mutated(amp.GradScaler("cpu", hysteresis=2).state_dict()))
def test_grad_scaler(state: Any) -> None:
    scaler = amp.GradScaler("cpu", hysteresis=2)
    before = bits(scaler.state_dict()), scaler._scaler.config
    try:
        scaler.load_state_dict(state)
    except AmpError as error:
        assert len(str(error)) < 2000
        assert (bits(scaler.state_dict()), scaler._scaler.config) == before
        return
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scaler.load_state_dict(scaler.state_dict())


@pytest.mark.parametrize("dynamic", [False, True])
def test_fp16_optimizer(dynamic: bool) -> None:
    def made() -> Made:
        net = model().half()
        inner = FusedAdam(groups(net), lr=0.01)
        wrapped = FP16_Optimizer(inner, 8.0, dynamic_loss_scale=dynamic, verbose=False)
        wrapped.backward(net(torch.ones(2, 4).half()).float().square().mean() * 1e-3)
        wrapped.step()
        return net, wrapped

    at_hand = [made()]
    valid = copy.deepcopy(at_hand[0][1].state_dict())

    @fuzz(60)
    @given(mutated(valid))
    def load(state: Any) -> None:
        net, optimizer = at_hand[0]
        before = bits([list(net.parameters()), optimizer.state_dict()])
        try:
            optimizer.load_state_dict(state)
        except AmpError as error:
            assert len(str(error)) < 3000
            assert bits([list(net.parameters()), optimizer.state_dict()]) == before
            return
        at_hand[0] = made()

    load()


# Sequences of actions.

ACTIONS = ("step", "save and load", "bad optimizer", "bad amp", "bad initialize")


def run(actions: list[Any], masters: str, *, with_bad: bool) -> Any:
    """Do what is asked, with what must fail or without, and return what has come of it."""
    net, optimizer = started("AdamW", masters)
    for action, bad in actions:
        if action == "step":
            step(net, optimizer)
        elif action == "save and load":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            amp.load_state_dict(amp.state_dict())
        elif with_bad:
            states: dict[str, Callable[[], Any]] = {
                "bad optimizer": lambda bad=bad: optimizer.load_state_dict(
                    {**optimizer.state_dict(), "state": {0: {"step": bad, "exp_avg": bad}}}
                ),
                "bad amp": lambda bad=bad: amp.load_state_dict(
                    {"loss_scaler0": {"loss_scale": 2.0, "unskipped": bad}, "opt_level": None}
                ),
                "bad initialize": lambda bad=bad: amp.initialize(net, optimizer, loss_scale=bad),
            }
            with pytest.raises(AmpError):
                states[action]()
    outcome = bits([net.state_dict(), list(net.parameters()), optimizer.state_dict(), amp.state_dict()])
    amp.get_session().close()
    return outcome


WRONG = st.sampled_from([10**400, 1e39, float("nan"), "x", [1], b"abc", -1, {"a": 1}])


@pytest.mark.parametrize(
    "masters",
    [
        "kahan",
        pytest.param("FP32", marks=pytest.mark.slow),
        pytest.param("none", marks=pytest.mark.slow),
    ],
)
def test_what_fails_leaves_no_trace_in_a_run(masters: str) -> None:
    @fuzz(12)
    @given(st.lists(st.tuples(st.sampled_from(ACTIONS), WRONG), min_size=3, max_size=12))
    def check(actions: list[Any]) -> None:
        with_bad = run(actions, masters, with_bad=True)
        assert with_bad == run(actions, masters, with_bad=False)

    check()
