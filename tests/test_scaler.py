"""The loss scale: its arithmetic, what a user is told, and when he is warned."""

from __future__ import annotations

import copy
import logging
import math
import pickle
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import amp
from amp.kernels.unscale import unscale
from amp.optimizers import FusedAdam
from amp.profiles.loss_scaling import LossScaling
from amp.training.recorder import HostCopies
from amp.training.scaler import LossScaler
from tests.gradient_oracle import Scale
from tests.levels import DYNAMIC
from tests.models import LEVELS, initialize, linear, run_backward, sgd, started


def drive(config: LossScaling, overflows: str) -> list[float]:
    """Return the scale after each update; `x` is an overflow, `.` is none."""
    scaler = LossScaler(config)
    trace = []
    for symbol in overflows:
        found = scaler.found_inf
        assert found is not None
        found.fill_(float(symbol == "x"))
        scaler.update()
        trace.append(scaler.loss_scale())
    return trace


def simulate(config: LossScaling, overflows: str) -> list[float]:
    """The same in plain Python."""
    scale, trace = Scale(config), []
    for symbol in overflows:
        scale.found_inf = symbol == "x"
        scale.update()
        trace.append(scale.value)
    return trace


CONFIGS = [
    LossScaling(),
    LossScaling(init=8, growth_interval=3, max=64),
    LossScaling(init=8, growth_interval=3, hysteresis=2, min=2),
    LossScaling(init=8, growth_interval=2, hysteresis=3, consecutive_hysteresis=True),
    LossScaling(init=1000, growth_factor=1.5, backoff_factor=0.8, growth_interval=2),
    LossScaling(init=4, growth_interval=1, min=16, max=32),
    LossScaling(init=2.0**40, max=2.0**30, growth_interval=4),
    LossScaling(growth_factor=1.0, growth_interval=1),
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("seed", range(4))
def test_the_state_machine(config: LossScaling, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rate = (0.1, 0.3, 0.5, 0.9)[seed]
    overflows = "".join("x" if torch.rand((), generator=generator) < rate else "." for _ in range(80))
    expected = simulate(config, overflows)
    for ours, theirs in zip(drive(config, overflows), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_the_examples_of_apex() -> None:
    config = LossScaling(growth_interval=3)
    assert drive(config, "x..") == [2.0**15] * 3
    assert drive(config, "...") == [2.0**16, 2.0**16, 2.0**17]
    assert drive(config, "..x...") == [2.0**16] * 2 + [2.0**15] * 3 + [2.0**16]
    assert drive(replace(config, growth_interval=1), "." * 12)[-1] == 2.0**24


def test_a_scale_never_becomes_zero_inf_or_denormal() -> None:
    smallest = torch.finfo(torch.float32).tiny
    low = drive(LossScaling(), "x" * 300)
    assert low[-1] == smallest
    high = drive(LossScaling(growth_interval=1, max=2.0**126), "." * 300)
    assert high[-1] == 2.0**126
    assert 1 / high[-1] == smallest
    scaler = LossScaler(LossScaling(init=smallest))
    assert torch.isfinite(scaler.scale_now().inv_scale).all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"growth_factor": 0.5},
        {"backoff_factor": 2.0},
        {"backoff_factor": 0.0},
        {"init": math.inf},
        {"init": 0},
        {"max": math.nan},
        {"min": 8.0, "max": 4.0},
        {"growth_interval": 0},
        {"growth_interval": 1.5},
        {"hysteresis": True},
        {"mode": "sometimes"},
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(wrong)))):
        LossScaling(**wrong)


# As the user sees it.


def take_step(model: nn.Module, optimizer: Any, factor: float = math.inf) -> Any:
    """Run a block, which overflows unless it has a factor, and step."""
    overflow(model, optimizer, factor)
    return optimizer.step()


def overflow(model: nn.Module, optimizer: Any, factor: float = math.inf, **kwargs: Any) -> None:
    run_backward(model(torch.ones(1, 4)).sum() * factor, optimizer, **kwargs)


def test_an_overflow_that_a_good_block_follows_is_reported_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, optimizer = started(linear(), sgd, "O2", verbosity=1)
    overflow(model, optimizer)
    take_step(model, optimizer, factor=1.0)
    assert [record.getMessage().rsplit(" ", 1)[1] for record in caplog.records] == ["512.0"]


def test_what_a_device_decides_is_reported_when_it_has_arrived(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the host asks, does not wait, and asks again in the next block."""
    arrived, waited = False, 0
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    class Event:
        def query(self) -> bool:
            return arrived

        def synchronize(self) -> None:
            nonlocal waited
            waited += 1

    send = HostCopies.send

    def late(copies: HostCopies, tensor: torch.Tensor, number: int = 0) -> None:
        send(copies, tensor, number)
        _, copy, _ = copies.underway.pop()
        copies.underway.append((number, copy, Event()))  # type: ignore[arg-type]

    monkeypatch.setattr(HostCopies, "send", late)
    model, optimizer = started(linear(), lambda p: torch.optim.AdamW(p, fused=True), "O2", verbosity=1)
    for factor in (1.0, math.inf, math.inf):
        take_step(model, optimizer, factor)
    assert not caplog.records
    arrived = True
    with amp.scale_loss(model(torch.ones(1, 4)).sum(), optimizer):
        assert [r.getMessage().rsplit(" ", 1)[1] for r in caplog.records] == ["512.0", "256.0"]
    caplog.clear()
    arrived = False
    take_step(model, optimizer)
    assert not caplog.records
    assert not waited
    amp.get_session().close()
    assert [r.getMessage().rsplit(" ", 1)[1] for r in caplog.records] == ["128.0"]
    assert waited


@pytest.mark.parametrize("level", LEVELS)
def test_a_graph_made_inside_a_block_outlives_it(level: str) -> None:
    """As gradient alignment, WGAN-GP and MAML need it: the scale has moved when its graph is used."""
    scaling: Any = {"loss_scale": {"init": 16, "growth_interval": 1}} if level in DYNAMIC else {}
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, verbosity=0, **scaling)
    params = list(model.parameters())

    def loss() -> torch.Tensor:
        return model(torch.ones(2, 4)).float().square().sum()

    scale = amp.loss_scale()
    with amp.scale_loss(loss(), optimizer) as first:
        grads = torch.autograd.grad((first / 8).square(), params, create_graph=True)
        first.backward(retain_graph=True)
    optimizer.zero_grad()
    second = first / scale + sum((g.float() * (8 / scale) ** 2).square().sum() for g in grads)
    run_backward(second, optimizer)
    found = [parameter.grad.float() for parameter in amp.master_params(optimizer)]
    amp.get_session().close()
    model.float()
    grads = torch.autograd.grad(loss().square(), params, create_graph=True)
    second = loss() + sum(g.square().sum() for g in grads)
    expected = list(torch.autograd.grad(second, params))
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("level", DYNAMIC)
def test_an_overflow_skips_the_step_once_and_says_so(
    level: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = started(linear(), sgd, level, verbosity=1)
    start = model.weight.detach().clone()
    overflow(model, optimizer)
    assert not caplog.records
    assert optimizer.step() is None
    assert [record.getMessage() for record in caplog.records] == [
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 512.0"
    ]
    assert caplog.records[0].name == "amp"
    assert amp.step_was_skipped(optimizer)
    assert torch.equal(model.weight, start)
    assert not optimizer.state
    optimizer.zero_grad()
    take_step(model, optimizer, 1.0)
    assert not amp.step_was_skipped(optimizer)
    assert not torch.equal(model.weight, start)
    assert len(caplog.records) == 1
    assert amp.loss_scale() == 512.0


def test_verbosity_0_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = started(linear(), sgd, "O2", verbosity=0)
    take_step(model, optimizer)
    assert amp.step_was_skipped(optimizer)
    assert not caplog.records


def test_other_ranks_are_silent(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model, optimizer = started(linear(), sgd, "O2", verbosity=1)
    take_step(model, optimizer)
    assert not caplog.records


def test_an_overflow_skips_only_the_optimizers_of_its_loss(caplog: pytest.LogCaptureFixture) -> None:
    models = [linear(seed) for seed in range(3)]
    optimizers = [sgd(model) for model in models]
    models, optimizers = initialize(models, optimizers, "O2", num_losses=2)
    overflow(models[0], optimizers[:2], loss_id=1)
    overflow(models[2], optimizers[2], 1.0, loss_id=0)
    for optimizer in optimizers:
        optimizer.step()
    assert [amp.step_was_skipped(optimizer) for optimizer in optimizers] == [True, True, False]
    assert [amp.loss_scale(i) for i in range(2)] == [1024.0, 512.0]
    assert all("loss scaler 1" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("level", "scaling", "scale"),
    [
        *((level, 2.0, 2.0) for level in LEVELS),
        ("O5", 1.0, 1.0),
        ("O5", {"mode": "static", "init": 1, "check": False}, 1.0),
    ],
)
def test_a_static_scale_checks_nothing_as_in_apex(level: str, scaling: Any, scale: float) -> None:
    model, optimizer = started(linear(), sgd, level, loss_scale=scaling)
    take_step(model, optimizer)
    assert not amp.step_was_skipped(optimizer)
    assert not torch.isfinite(model.weight).all()
    assert amp.loss_scale() == scale


@pytest.mark.parametrize(
    ("scaling", "first_warning"),
    [
        ({"init": 2.0, "min": 1.0}, 20),
        ({"init": 8.0, "min": 8.0, "overflow_patience": 3}, 3),
        ({"init": 1.0, "overflow_patience": 3}, 3),
        ({"init": 65536.0}, 20),
        ({"init": 4.0}, 6),  # at 4, 2, 1, and the third below that
        ({"init": 65536.0, "overflow_patience": 200, "min": 2.0}, None),
        ({"mode": "static", "init": 8, "check": True, "overflow_patience": 3}, 3),
    ],
)
def test_overflows_without_end_are_pointed_out_once(
    scaling: dict[str, Any], first_warning: int | None
) -> None:
    model, optimizer = started(linear(), sgd, "O2", loss_scale=scaling)
    warned_at = []
    for step in range(1, 121):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            take_step(model, optimizer)
        if caught:
            assert issubclass(caught[0].category, amp.AmpWarning)
            assert "amp.diagnose(model, optimizer)" in str(caught[0].message)
            assert "The gradients of weight, bias were inf or NaN" in str(caught[0].message)
            assert "detect_anomaly" not in str(caught[0].message)  # which names the wrong op here
            warned_at.append(step)
    assert warned_at == ([] if first_warning is None else [first_warning])


def test_a_good_step_resets_the_patience() -> None:
    model, optimizer = started(linear(), sgd, "O2", loss_scale={"init": 1.0, "overflow_patience": 3})
    for factor in (math.inf, math.inf, 1.0) * 4:  # a warning would be an error here
        optimizer.zero_grad()
        take_step(model, optimizer, factor)


@pytest.mark.filterwarnings("ignore:the loss is in float16", "ignore:an amp.scale_loss block has ended")
def test_loss_dtypes() -> None:
    _model, optimizer = started(linear(), sgd, "O2")
    for dtype, expected in (
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        with amp.scale_loss(torch.ones((), dtype=dtype), optimizer) as scaled_loss:
            assert scaled_loss.dtype is expected
            assert scaled_loss.item() == 1024.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_default_dtype_is_not_the_scalers(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        scaler = LossScaler(LossScaling(init=4, growth_interval=300))
        for _ in range(600):
            scaler.update()
        assert scaler.loss_scale() == 16.0
        assert LossScaler(LossScaling()).loss_scale() == 65536.0
        grad, found_inf = torch.tensor([2.0]), scaler.found_inf
        unscale([grad], [grad], scaler.scale_now().inv_scale, found_inf)
        assert grad.item() == 2 / 16
        at_one = LossScaler(LossScaling(init=1.0, mode="static")).scale_now()
        assert [x.dtype for x in at_one[2:]] == [torch.float32] * 2
        assert [x.tolist() for x in at_one[2:]] == [1.0, [1.0]]
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_warning_that_is_an_error_does_not_keep_a_session_open() -> None:
    model, optimizer = started(linear(), sgd, "O1", loss_scale={"init": 1, "overflow_patience": 1})
    original = torch.nn.functional.linear.__wrapped__
    overflow(model, optimizer)
    with pytest.raises(amp.AmpWarning, match="1 overflows in a row"):
        amp.get_session().close()
    assert torch.nn.functional.linear is original
    assert "step" not in vars(optimizer)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_copy_goes_on_by_itself(copied: Any) -> None:
    scaler = LossScaler(LossScaling(init=8.0, growth_interval=2))
    other = copied(scaler)
    for _ in range(2):
        other.update()
    assert (scaler.loss_scale(), other.loss_scale()) == (8.0, 16.0)
    assert other.scale(torch.ones(())) == 16.0
    assert other.scale_now().inv_scale == 1 / 16
    found = other.found_inf
    assert found is not None
    found.fill_(1.0)
    other.update()
    assert other.loss_scale() == 8.0


@pytest.mark.parametrize("name", ["scale", "loss_scale", "update"])
def test_a_scale_that_is_assigned_says_what_to_call(name: str) -> None:
    scaler = LossScaler(LossScaling(init=4.0))
    with pytest.raises(amp.AmpError, match=rf"scaler\.{name} is a method; scaler\.set_scale"):
        setattr(scaler, name, 1024.0)
    assert scaler.scale(torch.ones(())) == 4.0
    scaler.set_scale(1024.0)
    assert scaler.loss_scale() == 1024.0


def test_reports_that_nobody_reads_do_not_grow_memory() -> None:
    """As with apex's own LossScaler, which logs nothing."""
    copies = HostCopies()
    for i in range(1000):
        copies.send(torch.tensor([float(i)]), i)
    arrived = copies.arrived()
    assert len(arrived) < 1000
    assert arrived[-1] == (999, [999.0])


class Copies(TorchDispatchMode):
    """Counts copies of tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name == "aten::clone"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("level", "expected"), [("O1", 3), ("O2", 3), ("O4", 1), ("O5", 1)])
@pytest.mark.usefixtures("the_cpu_is_a_device")
def test_on_a_device_a_block_copies_scale_inverse_and_then_the_state_to_the_host(
    level: str, expected: int
) -> None:
    """A scale that never moves is not copied; what a check has found is copied in passing."""
    model = linear()
    model, optimizer = initialize(model, FusedAdam(model.parameters(), lr=0.1), level)
    for _ in range(2):
        loss = model(torch.ones(2, 4)).float().sum()
        with Copies() as copies:
            run_backward(loss, optimizer)
            optimizer.step()
        assert copies.count == expected
        optimizer.zero_grad()


@pytest.mark.usefixtures("the_cpu_is_a_device")
def test_on_a_device_each_step_goes_by_the_check_of_its_own_block() -> None:
    """Which the update of the scale has kept: in its own state the flag is 0 again by then."""
    model = linear()
    model, optimizer = initialize(model, FusedAdam(model.parameters(), lr=0.1), "O2")
    session, moved = amp.get_session(optimizer), []
    for factor in (1.0, math.inf, 1.0, math.inf):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        run_backward(model(torch.ones(2, 4)).float().sum() * factor, optimizer)
        optimizer.step()
        moved.append(not torch.equal(before, model.weight))
    assert moved == [True, False, True, False]
    assert [row.overflow for row in session.history()] == [False, True, False, True]


# Checks without a scale: O4 to O7, and `check: true`.


def test_a_bad_batch_does_not_reach_the_weights(caplog: pytest.LogCaptureFixture) -> None:
    assert amp.load_profile("O7").loss_scaling == amp.load_profile("O4").loss_scaling
    for level in ("O4", "O5"):
        for make in (
            sgd,
            lambda model: torch.optim.AdamW(model.parameters(), fused=True),
            lambda model: amp.optimizers.FusedAdam(model.parameters()),
        ):
            model = linear()
            optimizer: Any = make(model)
            model, optimizer = amp.initialize(model, optimizer, opt_level=level)
            before = model.weight.clone()
            for bad in (True, False):
                loss = model(torch.full((1, 4), math.nan if bad else 1.0)).sum()
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    assert scaled_loss.item() == loss.item() or bad
                    scaled_loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                assert amp.step_was_skipped(optimizer) is bad
                assert torch.equal(model.weight, before) is bad
            assert amp.loss_scale() == 1.0
            amp.get_session().close()
            assert "Skipping step, loss scaler 0 stays at 1.0" in caplog.text
            caplog.clear()


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("protect", [True, False])
def test_running_statistics_outlive_an_overflow(level: str, protect: bool) -> None:
    made = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    loaded = {**made.state_dict(), "1.running_mean": torch.arange(4.0)}
    model, optimizer = started(made, sgd, level, protect_buffers=protect)
    model.load_state_dict(loaded)
    copied = copy.deepcopy(model)
    for i in range(4):
        x = torch.randn(8, 4)
        if i in (0, 2):
            x[3] = math.inf
        run_backward(model(x).sum(), optimizer)
        if i == 0 and protect:
            assert torch.equal(model[1].running_mean.float(), torch.arange(4.0))
        optimizer.step()
        optimizer.zero_grad()
    statistics = [model[1].running_mean, model[1].running_var]
    assert all(bool(x.isfinite().all()) for x in statistics) is protect
    assert bool(model.eval()(torch.ones(2, 4)).isfinite().all()) is protect
    copied.load_state_dict(loaded)
    pickle.dumps(copied)


def test_repaired_statistics_do_not_touch_a_graph() -> None:
    model, optimizer = started(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), sgd, "O4")
    model[1].eval()
    loss = model(torch.ones(2, 4)).sum()
    for _ in range(2):
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward(retain_graph=True)
