"""Faults that are planted in a small transformer, and what must be said of each."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amp
from amp.diagnosis.findings import CAUSES, Report
from tests.diagnosis.faults import EpsNorm, Net, SquaringNorm, T, batch

pytestmark = pytest.mark.filterwarnings("ignore:the argument")

ALL_LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5", "O6", "O7")


def mean_square(y: Tensor) -> Tensor:
    return y.float().square().mean()


def diagnosed(
    model: nn.Module,
    level: str,
    *inputs: Tensor,
    scale: Any = 1.0,
    loss: Callable[[Tensor], Tensor] = mean_square,
    wrap: Callable[[nn.Module], Any] = lambda model: model,
) -> Report:
    """Run a step at a level inside of `amp.diagnose`, and return its report."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    overrides = {} if scale is None else {"loss_scale": scale}
    with amp.Session(level, verbosity=0, **overrides) as session:
        model, optimizer = session.initialize(model, optimizer)
        model = wrap(model)
        with amp.diagnose(model, optimizer) as report:
            with session.scale_loss(loss(model(*(inputs or (batch(),)))), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
    return report


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def first(report: Report) -> tuple[str, str, str, str]:
    finding = report.findings[0]
    return finding.cause, finding.phase, finding.op.rpartition(".")[2], finding.module


# Nothing is wrong.


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5", "O6", "O7"])
def test_a_healthy_net_says_nothing_and_trains_on_the_same_bits(level: str) -> None:
    ends = []
    for watched in (False, True):
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=1e-3)
        with amp.Session(level, verbosity=0, loss_scale=256.0) as session:
            model, optimizer = session.initialize(model, optimizer)
            losses = []
            for i in range(3):
                block: Any = amp.diagnose(model, optimizer) if watched and i == 1 else None
                report = block.__enter__() if block else Report()
                loss = mean_square(model(batch()))
                with session.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if block:
                    block.__exit__(None, None, None)
                assert not report.findings, str(report)
                losses.append(loss.detach())
            ends.append([*losses, *(p.detach().clone() for p in model.parameters())])
        assert not model._forward_hooks
        assert not model._forward_pre_hooks or level in ("O2", "O3", "O5", "O7")
    assert all(map(torch.equal, *ends))


def test_what_is_said_of_a_healthy_step() -> None:
    report = diagnosed(net(blocks=3), "O2", scale=1024.0)
    assert report.cause is None
    assert str(report) == f"healthy: nothing found in {report.ops} ops"
    assert report.ops > 200
    assert json.loads(json.dumps(report.to_json())) == {
        "healthy": True,
        "ops": report.ops,
        "findings": [],
    }


# The forward.


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_scores_that_are_too_large(level: str) -> None:
    report = diagnosed(net(blocks=3, gain=500.0), level)
    assert first(report) == ("range", "forward", "matmul", "blocks.1.attn")
    finding = report.findings[0]
    assert finding.value == pytest.approx(2.415e6, rel=1e-3)
    assert finding.limit == 65504.0
    assert finding.takes == ("float16", "float16")
    assert finding.gives == "float16"
    assert finding.file.endswith("faults.py")
    assert "matmul(q, k" in Path(finding.file).read_text().splitlines()[finding.line - 1]
    assert len(finding.reached) == 32
    assert "rules: [{module: blocks.1.attn, cast: float32}]" in finding.advice
    assert [finding.cause for finding in report.findings] == ["range"]


def test_an_exponential() -> None:
    assert first(diagnosed(net(head="exp"), "O2")) == ("range", "forward", "exp", "head")


def test_squares_whose_overflow_nothing_shows() -> None:
    report = diagnosed(net(norm=SquaringNorm(), lift=800.0), "O2")
    assert first(report) == ("absorbed range", "forward", "mul", "blocks.1.norm")
    assert report.findings[0].reached == ()
    assert diagnosed(net(norm=SquaringNorm(), lift=800.0), "O5").is_healthy


def test_an_eps_that_is_0() -> None:
    report = diagnosed(net(norm=EpsNorm(), lift=0.0), "O3")
    assert first(report) == ("eps", "forward", "div", "blocks.1.norm")
    assert "1e-08 is 0 in float16" in report.findings[0].what


def test_a_bias_that_does_not_fit() -> None:
    report = diagnosed(net(head="bias"), "O1")
    assert first(report) == ("range", "forward", "linear", "head.proj")
    assert report.findings[0].value == pytest.approx(66246.4, rel=1e-4)


def test_a_mask_that_is_cast() -> None:
    mask = torch.zeros(8, 1, T)
    mask[3] = -1e9
    report = diagnosed(net(), "O2", batch(), mask)
    assert [finding.cause for finding in report.findings] == ["cast"]
    assert "argument 'mask' was cast to float16, and -1e+09 became -inf" in report.findings[0].what
    assert "rules:" not in str(report)


def test_a_logarithm_of_0() -> None:
    report = diagnosed(net(head="log", blocks=3), "O2")
    assert first(report) == ("mathematics", "forward", "log", "head")
    assert "No precision cures it" in report.findings[0].advice


def test_a_batch_with_a_nan() -> None:
    x = batch()
    x[5, 3, 7] = math.nan
    report = diagnosed(net(), "O2", x)
    assert report.cause == "data"
    assert report.findings[0].what == "argument 'x' is not finite at [5, 3, 7]"


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_a_batch_with_a_nan_where_nothing_is_checked(level: str) -> None:
    x = batch()
    x[5, 3, 7] = math.nan
    scale = {"mode": "static", "init": 1, "check": False}
    report = diagnosed(net(), level, x, scale=scale)
    assert [finding.cause for finding in report.findings] == ["data"]


def test_a_target_with_an_inf_is_data_too() -> None:
    target = torch.zeros(8, T, 32)
    target[1, 0, 0] = math.inf
    report = diagnosed(net(), "O1", loss=lambda y: (y.float() - target).square().mean())
    assert report.cause == "data"
    assert "[1, 0, 0]" in report.findings[0].what
    assert report.findings[0].file == __file__


def test_a_weight_and_a_buffer_that_are_not_finite() -> None:
    model = net(blocks=3)
    with torch.no_grad():
        model.blocks[2].mlp[0].weight[3, 4] = math.inf  # type: ignore[index, union-attr]
    report = diagnosed(model, "O2")
    assert report.cause == "weights"
    assert "the weight blocks.2.mlp.0.weight is not finite at [" in report.findings[0].what
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    norm[1].running_var[2] = math.nan  # type: ignore[index]
    report = diagnosed(norm.eval(), "O2", torch.ones(3, 4))
    assert report.cause == "weights"
    assert "the buffer 1.running_var is not finite at [2]" in report.findings[0].what


def test_a_weight_that_the_cast_made_infinite() -> None:
    model = net(blocks=3)
    with torch.no_grad():
        model.blocks[2].mlp[0].weight[3, 4] = 1e5  # type: ignore[index, union-attr]
    report = diagnosed(model, "O2")
    assert first(report)[0] == "range"
    what = report.findings[0].what
    assert what == "the weight blocks.2.mlp.0.weight is 100000 in FP32; float16 ends at 65504"
    assert "rules: [{module: blocks.2.mlp.0, cast: float32}]" in report.findings[0].advice


class Rope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(2, 2)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.proj(torch.stack([x * torch.cos(positions), x * torch.sin(positions)], -1))


@pytest.mark.parametrize(("level", "largest"), [("O5", 257), ("O5", 512), ("O2", 4096)])
def test_positions_that_are_rounded(level: str, largest: int) -> None:
    positions = torch.arange(largest + 1.0)
    report = diagnosed(Rope(), level, torch.randn(4, largest + 1), positions)
    assert report.cause == "cast"
    assert f"argument 'positions' holds integers up to {largest}, which" in report.findings[0].what


def test_positions_that_are_exact_are_not_pointed_out() -> None:
    assert diagnosed(Rope(), "O5", torch.randn(4, 256), torch.arange(256.0)).is_healthy


# The backward.


def test_a_gradient_that_no_scale_brings_into_range() -> None:
    report = diagnosed(net(head="sqrt"), "O2")
    assert first(report) == ("range", "backward", "mul", "head")
    report = diagnosed(net(), "O2", loss=lambda y: 3e6 * mean_square(y))
    assert first(report) == ("range", "backward", "linear", "head.proj")
    assert "Make the loss or its scale smaller" in report.findings[0].advice


def test_a_scale_that_is_too_large() -> None:
    report = diagnosed(net(), "O2", scale=2.0**16, loss=lambda y: y.float().square().sum())
    assert report.cause == "loss scale"
    assert "has to be at most 512" in report.findings[0].advice
    assert diagnosed(net(), "O2", scale=512.0, loss=lambda y: y.float().square().sum()).is_healthy
    assert not diagnosed(net(), "O2", scale=1024.0, loss=lambda y: y.float().square().sum()).is_healthy


def test_gradients_that_vanish() -> None:
    report = diagnosed(net(), "O2", loss=lambda y: 1e-6 * mean_square(y))
    assert report.cause == "underflow"
    assert "loss_scale='dynamic'" in report.findings[0].advice


def test_a_step_that_ruins_the_weights() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)  # whose eps is 0 in float16
    with amp.Session("O3", verbosity=0) as session:
        model, optimizer = session.initialize(model, optimizer)
        with amp.diagnose(model, optimizer) as report:
            with session.scale_loss(1e-4 * mean_square(model(batch())), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
    assert report.cause == "eps"
    assert "1e-08 is 0 in float16" in report.findings[0].what
    assert "addcdiv_" in report.findings[0].op


# Order.


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clipping_before_unscaling(inside: bool, level: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with amp.Session(level, verbosity=0, loss_scale=128.0) as session:
        model, optimizer = session.initialize(model, optimizer)
        with amp.diagnose(model, [optimizer]) as report:
            with session.scale_loss(mean_square(model(batch())), optimizer) as scaled_loss:
                scaled_loss.backward()
                if inside:
                    with pytest.warns(amp.AmpWarning, match="Call it after the block"):
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
            optimizer.step()
    assert report.cause == ("order" if inside else None)


@pytest.mark.parametrize("clips", ["before", "after", "never"])
@pytest.mark.parametrize(
    ("scaler", "optimizer"),
    [
        (torch.amp.GradScaler, torch.optim.SGD),
        (amp.GradScaler, torch.optim.SGD),
        (amp.GradScaler, amp.optimizers.FusedSGD),
    ],
)
def test_clipping_before_unscaling_with_a_grad_scaler(scaler: Any, optimizer: Any, clips: str) -> None:
    model = net()
    one, scaling = optimizer(model.parameters(), 1e-3), scaler("cpu", init_scale=128.0)
    with amp.diagnose(model, one) as report:
        scaling.scale(mean_square(model(batch()))).backward()
        if clips == "after":
            scaling.unscale_(one)
        if clips != "never":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaling.step(one)
        scaling.update()
    assert report.cause == ("order" if clips == "before" else None), str(report)
    if clips == "before":
        assert report.findings[0].file.endswith("test_diagnose.py")
        assert "after scaler.unscale_(optimizer)" in report.findings[0].advice


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, amp.GradScaler])
def test_a_grad_scaler_whose_scale_is_too_large(scaler: Any) -> None:
    model = net()
    optimizer, scaling = torch.optim.SGD(model.parameters(), 1e-3), scaler("cpu", init_scale=2.0**17)
    with amp.diagnose(model, optimizer) as report:
        with torch.autocast("cpu", torch.float16):
            loss = model(batch()).float().square().sum()
        scaling.scale(loss).backward()
        scaling.step(optimizer)
    assert report.cause == "loss scale"
    assert "by the loss scale of 131072" in report.findings[0].what


@pytest.mark.parametrize("bad", [0, 1])
def test_each_loss_has_its_own_scale(bad: int) -> None:
    models = [net(), net()]
    optimizers = [torch.optim.SGD(model.parameters(), 1e-3) for model in models]
    with amp.Session("O2", verbosity=0, num_losses=2) as session:
        session.initialize(models, optimizers)
        for i, scaler in enumerate(session.scalers):
            scaler.set_scale(2.0**16 if i == bad else 2.0**4)
        with amp.diagnose(models, optimizers) as report:
            for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                loss = model(batch()).float().square().sum()
                with session.scale_loss(loss, optimizer, i) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
    assert report.cause == "loss scale"
    assert "by the loss scale of 65536" in report.findings[0].what
    assert report.findings[0].module.startswith(f"model {bad}: ")


# The same said of other ways to run.


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return checkpoint(self.inner, x, mask, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"gain": 500.0}, ("range", "forward", "matmul", "blocks.1.inner.attn")),
        ({"head": "sqrt"}, ("range", "backward", "mul", "head")),
        ({}, None),
    ],
)
def test_checkpointed(reentrant: bool, options: dict[str, Any], expected: Any) -> None:
    model = net(**options)
    model.blocks[1] = Checkpointed(model.blocks[1], reentrant)
    report = diagnosed(model, "O2")
    assert (first(report) if report.findings else None) == expected


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(backend: str) -> None:
    def wrap(model: nn.Module) -> Any:
        return torch.compile(model, backend=backend)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        report = diagnosed(net(gain=500.0), "O2", wrap=wrap)
        assert first(report) == ("range", "forward", "matmul", "blocks.1.attn")
        assert diagnosed(net(), "O1", wrap=wrap).is_healthy


def test_accumulated() -> None:
    model = net(gain=500.0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with amp.Session("O2", verbosity=0, loss_scale=1.0) as session:
        model, optimizer = session.initialize(model, optimizer)
        with amp.diagnose(model, optimizer) as report:
            for i in range(2):
                loss = mean_square(model(batch() * (0.01 if i == 0 else 1.0)))
                with session.scale_loss(loss, optimizer, delay_unscale=i == 0) as scaled_loss:
                    scaled_loss.backward()
            optimizer.step()
    assert first(report) == ("range", "forward", "matmul", "blocks.1.attn")


# The report and its errors.


def test_a_step_that_raises_is_diagnosed_up_to_there() -> None:
    model = net(head="exp")
    with (
        amp.Session("O2", verbosity=0) as session,
        pytest.raises(ZeroDivisionError),
        amp.diagnose(session.initialize(model)) as report,
    ):
        model(batch())
        raise ZeroDivisionError
    assert first(report) == ("absorbed range", "forward", "exp", "head")
    assert not model._forward_hooks


def test_a_whole_model_of_several_is_named_by_its_number() -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with amp.Session("O3", verbosity=0) as session:
        models = session.initialize(models)
        with amp.diagnose(models) as report:
            models[1](torch.full((1, 2), 7e4))
    assert ", in model 1, " in str(report.findings[0])


def test_names_of_causes_are_stable() -> None:
    report = diagnosed(net(gain=500.0), "O2")
    (finding,) = json.loads(json.dumps(report.to_json()))["findings"]
    assert finding["cause"] in CAUSES
    assert finding["module"] == "blocks.1.attn"
    assert str(report).startswith("range: forward torch.matmul, in blocks.1.attn, ")


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"needs a torch.nn.Module or a list of them, and got list"):
        amp.diagnose([[nn.Linear(1, 1)]]).__enter__()  # type: ignore[list-item]
    with pytest.raises(TypeError, match="amp.diagnose needs a .* list of them, and got an empty list"):
        amp.diagnose([]).__enter__()


def test_weights_that_stand_still_without_masters_are_named() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    with amp.Session("O3", verbosity=0) as session:
        model, optimizer = session.initialize(model, optimizer)
        with amp.diagnose(model, optimizer) as report:
            loss = model(torch.ones(4, 8)).float().sum()
            with session.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
    assert report.cause == "still"
    assert "weight" in report.findings[0].what
    assert "master_weights: true" in report.findings[0].advice


@pytest.mark.parametrize(("rate", "cause"), [(1e-5, "still"), (0.5, None)])
def test_a_step_by_hand_is_watched_too(rate: float, cause: str | None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8).bfloat16()
    with amp.diagnose(model) as report:
        model(torch.ones(4, 8).bfloat16()).float().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= rate * parameter.grad  # the line
    assert report.cause == cause
    source = Path(__file__).read_text().splitlines()
    assert all(source[x.line - 1].endswith("# the line") for x in report.findings)
