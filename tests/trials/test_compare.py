"""`amp.compare`: planted faults are found, healthy levels are not blamed, and scripts need no edit."""

from __future__ import annotations

import json
import math
import random
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import amp
from amp.cli import main
from amp.observers import observing
from amp.trials import comparing, script_commands, script_process
from amp.trials.activation_memory import Activations
from amp.trials.comparing import compare_runs
from amp.trials.judging import (
    error_of,
    gaps_of,
    outstanding,
    problems_of,
    recommend,
    vanishing_modules,
)
from amp.trials.observing import Record, RunObserver, Trial
from amp.trials.results import Comparison, LevelResult, ModuleError, Problem, page
from amp.trials.scripts import Script
from tests.browsers import chromium
from tests.diagnosis.faults import Net, SquaringNorm, batch
from tests.processes import run_python

Build = Callable[[], tuple[Any, Any]]
Step = Callable[[Any, Any, int], None]


def build(model: Callable[[], nn.Module] = Net, lr: float = 1e-3) -> Build:
    def built() -> tuple[Any, Any]:
        net = model()
        return net, torch.optim.AdamW(net.parameters(), lr)

    return built


def step(model: nn.Module, optimizer: Any, i: int, gain: float = 1.0) -> None:
    """One iteration, on data that follow the seed."""
    x = torch.randn(4, 16, 32)
    optimizer.zero_grad()
    loss = gain * F.mse_loss(model(x).float(), x.roll(1, 1).float())
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


def causes(found: Comparison) -> dict[str, list[str]]:
    return {level.level: [problem.cause for problem in level.problems] for level in found.levels}


# What is found.


@pytest.fixture(scope="module")
def healthy() -> Comparison:
    return amp.compare(build(), step, ["O1", "O2", "O4", "O5", "O7"], steps=6)


def test_a_healthy_net_is_healthy_at_every_level(healthy: Comparison) -> None:
    assert causes(healthy) == {level: [] for level in ("O0", "O1", "O2", "O4", "O5", "O7")}
    assert healthy.is_healthy
    assert healthy.reference == "FP64"
    assert healthy.notes == ()
    seconds = {level.level: level.seconds or 0 for level in healthy.levels}
    assert seconds[healthy.recommended or ""] == min(seconds.values())
    assert not any(module.stands_out for level in healthy.levels for module in level.modules)


def test_layers_too_small_to_gain_in_fp8_are_a_remark(healthy: Comparison) -> None:
    remarks = {level.level: [each.cause for each in level.remarks] for level in healthy.levels}
    assert {level: causes for level, causes in remarks.items() if causes} == {"O7": ["small_layers"]}
    assert "too small to be faster in FP8" in str(healthy)


def test_errors_are_of_the_size_of_each_format(healthy: Comparison) -> None:
    errors = {level.level: level.gradient_error or 0.0 for level in healthy.levels}
    assert 0 < errors["O0"] < 1e-6
    assert 1e-4 < errors["O1"] < 2e-3
    assert 1e-4 < errors["O2"] < 2e-3
    assert 1e-3 < errors["O4"] < 2e-2
    assert 1e-3 < errors["O5"] < 2e-2
    assert 2e-2 < errors["O7"] < 0.15
    for level in healthy.levels:
        assert {module.module for module in level.modules} >= {"blocks.1.attn.qkv", "head.proj"}


def test_each_level_starts_from_the_same_weights_and_data(healthy: Comparison) -> None:
    exact = healthy.reference_losses["loss"]
    for level in healthy.levels:
        assert level.losses["loss"] == pytest.approx(exact, rel=2e-2)
        assert level.losses["loss"][0] == pytest.approx(exact[0], rel=2e-3)
        assert len(level.losses["loss"]) == healthy.steps == 6


def test_memory_is_that_of_the_level(healthy: Comparison) -> None:
    weights = 4 * sum(p.numel() for p in Net().parameters())
    o0, o2 = healthy["O0"].memory, healthy["O2"].memory
    assert (o0["weights"], o0["gradients"]) == (weights, weights)
    assert (o2["weights"], o2["gradients"]) == (weights * 3 // 2, weights)
    assert 2 * weights <= o2["optimizer_state"] < 2.1 * weights
    assert 0.4 * o0["activations"] < o2["activations"] < 0.8 * o0["activations"]
    assert o0["total"] == sum(size for part, size in o0.items() if part != "total")
    assert healthy["O0"].seconds is not None


def test_an_absorbed_overflow_is_found_though_nothing_is_nan() -> None:
    faulty = build(lambda: Net(norm=SquaringNorm(), lift=800.0))
    found = amp.compare(faulty, step, ["O1", "O2", "O5"], steps=6)
    assert {level: bool(list_) for level, list_ in causes(found).items()} == {
        "O0": False,
        "O1": False,
        "O2": True,
        "O5": False,
    }
    assert "gradient_error" in causes(found)["O2"]
    assert all(math.isfinite(loss) for loss in found["O2"].losses["loss"])
    worst = found["O2"].worst_module
    assert worst is not None
    assert worst.module in ("blocks.1.norm", "blocks.1.mlp.0")
    assert worst.stands_out
    assert any(worst.module in problem.what for problem in found["O2"].problems)


def test_updates_that_are_rounded_away_are_found(tmp_path: Path) -> None:
    profile = tmp_path / "no_masters.yaml"
    profile.write_text("extends: O5\nmaster_weights: false\n")
    found = amp.compare(build(lr=1e-5), step, ["O5", str(profile)], steps=4)
    assert causes(found) == {"O0": [], "O5": [], str(profile): ["weights_stand_still"]}
    assert (found[str(profile)].still or 0) > 0.5
    assert (found["O5"].still or 0) < 1e-3


@pytest.mark.parametrize("kind", ["split16", "kahan"])
def test_masters_in_16_bits_do_not_stand_still(kind: str, tmp_path: Path) -> None:
    profile = tmp_path / "lean.yaml"
    profile.write_text(f"extends: O5\nmaster_weights: {kind}\n")
    found = amp.compare(build(lr=1e-4), step, [str(profile)], steps=2)
    assert found.is_healthy
    assert (found[str(profile)].still or 0) < 0.05


class Exploding(nn.Linear):
    """`exp(12)` is more than float16 holds."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1e-6 * torch.exp(12 + 0 * input)


def test_a_loss_that_is_not_finite_is_found() -> None:
    found = amp.compare(build(lambda: Exploding(32, 32)), step, ["O1", "O2", "O4"], steps=3)
    assert causes(found)["O2"] == ["loss_not_finite", "steps_skipped"]
    assert causes(found)["O1"] == causes(found)["O4"] == []
    assert "O2: the loss is inf, first at step 0" in str(found)
    assert found.to_json()["levels"][2]["losses"]["loss"] == ["inf"] * 3


def test_a_loss_that_is_behind_is_found() -> None:
    """A level that learns nothing has the right gradients, and the wrong losses."""

    def frozen(model: nn.Module, optimizer: Any, i: int) -> None:
        if model.head.proj.weight.dtype is torch.bfloat16:  # type: ignore[union-attr]
            optimizer.param_groups[0]["lr"] = 0.0
        step(model, optimizer, i)

    found = amp.compare(build(lr=3e-3), frozen, ["O2", "O5"], steps=12)
    assert causes(found)["O2"] == []
    assert "loss_gap" in causes(found)["O5"]


def test_the_search_for_the_loss_scale_is_not_what_is_compared() -> None:
    def large(model: nn.Module, optimizer: Any, i: int) -> None:
        step(model, optimizer, i, gain=3000.0)

    found = amp.compare(build(), large, ["O2"], steps=4)
    assert found["O2"].scale_search > 4  # more than one run had
    assert found["O2"].skipped == 0
    assert found.is_healthy
    assert (found["O2"].gradient_error or 1) < 2e-3


class BeforeNorm(nn.Module):
    """The bias of `shift` has a gradient of 0, but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.shift = nn.Linear(32, 32), nn.BatchNorm1d(16), Shift()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.shift(self.linear(x)))


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def test_a_gradient_that_is_nothing_but_rounding_does_not_stand_out() -> None:
    found = amp.compare(build(BeforeNorm), step, ["O2", "O5"], steps=3)
    assert found.is_healthy
    assert not [module for level in found.levels for module in level.modules if module.stands_out]


def test_sparse_gradients_are_compared() -> None:
    def words() -> tuple[Any, Any]:
        model = nn.Sequential(nn.Embedding(50, 16, sparse=True), nn.Linear(16, 4))
        return model, torch.optim.SGD(model.parameters(), 0.5)

    def train(model: nn.Module, optimizer: Any, i: int) -> None:
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.arange(i, i + 9)).float().pow(2).mean(), optimizer) as loss:
            loss.backward()
        optimizer.step()

    found = amp.compare(words, train, levels=["O0", "O2", "O5"], steps=4)
    assert causes(found) == {"O0": [], "O2": [], "O5": []}


def test_a_level_that_cannot_be_run_is_a_result() -> None:
    def only_fp32(model: nn.Module, optimizer: Any, i: int) -> None:
        if model.head.proj.weight.dtype is torch.float16:  # type: ignore[union-attr]
            raise ValueError("this step takes FP32\nonly")
        step(model, optimizer, i)

    found = amp.compare(build(), only_fp32, ["O2"], steps=2)
    assert found["O2"].problems == (Problem("not_run", "not run: ValueError: this step takes FP32"),)
    assert "O2: not run: ValueError: this step takes FP32" in str(found)


# The reference.


def test_where_fp64_fails_fp32_is_the_reference() -> None:
    class Fixed(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return F.linear(input.float(), self.weight)  # which is FP64 in the reference

    found = amp.compare(build(lambda: Fixed(32, 32)), step, ["O4"], steps=2)
    assert found.reference == "FP32"
    assert "the run in FP64 failed: RuntimeError: " in found.notes[0]
    assert found["O0"].gradient_error == 0
    assert 0 < (found["O4"].gradient_error or 0) < 0.02


def test_where_fp64_draws_other_numbers_fp32_is_the_reference() -> None:
    class Noisy(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            noise = torch.randn_like(input) * (input.dtype is torch.float64)
            return super().forward(input + noise)

    found = amp.compare(build(lambda: Noisy(32, 32)), step, ["O4"], steps=2)
    assert found.reference == "FP32"
    assert "draws other random numbers" in found.notes[0]


def test_data_that_go_on_from_run_to_run_are_refused() -> None:
    data = iter(range(1000))

    def going_on(model: nn.Module, optimizer: Any, i: int) -> None:
        torch.manual_seed(next(data))
        step(model, optimizer, i)

    with pytest.raises(amp.AmpError, match="two runs at O0 differ: .* Take data by the number"):
        amp.compare(build(), going_on, ["O5"], steps=2)


class Words(nn.Module):
    """Most rows of the table are not used, and have a gradient of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(100, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.table(torch.arange(16)))


def test_weights_without_a_gradient_may_stand_still() -> None:
    def without_decay() -> tuple[Any, Any]:
        net = Words()
        return net, amp.optimizers.FusedAdam(net.parameters(), 1e-3, weight_decay=0.0)

    found = amp.compare(without_decay, step, ["O2"], steps=2)
    assert max(level.still or 0.0 for level in found.levels) < 0.01
    assert (found["O2"].gradient_error or 1) < 2e-3  # held as scaled float16, and shown unscaled


def test_the_seed_is_what_a_run_depends_on() -> None:
    def drawn(seed: int) -> list[float]:
        random.seed()
        torch.seed()
        return amp.compare(build(), step, ["O0"], steps=1, seed=seed)["O0"].losses["loss"]

    assert drawn(1) == drawn(1) != drawn(2)


# What is left alone.


def test_a_comparison_leaves_everything_as_it_was() -> None:
    random.seed(5)
    numpy.random.seed(5)
    torch.manual_seed(5)
    net = nn.Linear(2, 2)
    amp.initialize(net, torch.optim.SGD(net.parameters(), 0.1), opt_level="O2", verbosity=0)
    session = amp.get_session()
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()  # type: ignore[index, union-attr]

    def rude(model: nn.Module, optimizer: Any, i: int) -> None:
        assert amp.get_session() is amp.get_session(optimizer)
        step(model, optimizer, i)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)

    opened: list[amp.Session] = []
    with pytest.MonkeyPatch.context() as patch:
        original = amp.Session.__init__

        def noted(self: amp.Session, *args: Any, **kwargs: Any) -> None:
            opened.append(self)
            original(self, *args, **kwargs)

        patch.setattr(amp.Session, "__init__", noted)
        amp.compare(build(), rude, ["O1"], steps=1)
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() is torch.float32
    assert amp.get_session() is session
    assert not session.closed
    assert len(opened) >= 3
    assert all(each.closed for each in opened)
    after = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


@pytest.mark.parametrize("optimizer", ["AdamW", "FusedAdam", "LBFGS"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_looking_changes_no_bit_of_the_run(level: str, optimizer: str) -> None:
    make: Any = {
        "AdamW": lambda p: torch.optim.AdamW(p, 1e-3),
        "FusedAdam": lambda p: amp.optimizers.FusedAdam(p, 1e-3, max_grad_norm=0.1),
        "LBFGS": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3),
    }[optimizer]

    losses: list[list[float]] = []

    def train() -> list[Tensor]:
        torch.manual_seed(3)
        net: Any = Net()
        with amp.Session(level, verbosity=0) as session:
            net, one = session.initialize(net, make(net.parameters()))
            for _ in range(3):
                x = torch.randn(2, 16, 32)
                losses.append([])

                def closure(x: Tensor = x) -> Tensor:
                    one.zero_grad()
                    loss = net(x).float().square().mean()
                    losses[-1].append(loss.item())
                    with amp.scale_loss(loss, one) as scaled_loss:
                        scaled_loss.backward()
                    return loss

                if optimizer == "LBFGS":
                    one.step(closure)
                else:
                    closure()
                    one.step()
        return [p.detach().float() for p in net.parameters()]

    plain = train()
    with RunObserver(Trial(level, 3)) as observer:
        watched = train()
    record = observer.seen()
    assert all(map(torch.equal, plain, watched))
    assert observer.is_complete
    assert record.losses["loss"] == [of_a_step[0] for of_a_step in losses[3:]]
    assert record.first.keys() >= {"head.proj"}


def test_gradients_that_are_accumulated_are_one_step() -> None:
    def accumulated(model: nn.Module, optimizer: Any, i: int) -> None:
        x = torch.randn(4, 16, 32)
        loss = F.mse_loss(model(x).float(), x)
        with amp.scale_loss(loss / 2, optimizer, delay_unscale=i % 2 == 0) as scaled_loss:
            scaled_loss.backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()

    found = amp.compare(build(), accumulated, ["O2"], steps=2)
    assert found.is_healthy
    assert len(found["O2"].losses["loss"]) == 2
    assert found["O2"].losses["loss"][0] == pytest.approx(1.4, abs=0.5)


def test_several_losses_and_optimizers_are_told_apart() -> None:
    def two() -> tuple[Any, Any]:
        nets = [nn.Linear(32, 32), nn.Linear(32, 32)]
        return nets, [torch.optim.SGD(net.parameters(), 0.1) for net in nets]

    def alternate(nets: Any, optimizers: Any, i: int) -> None:
        x = torch.randn(4, 32)
        for loss_id, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            loss = (loss_id + 1) * net(x).float().square().mean()
            with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()

    found = amp.compare(two, alternate, ["O2"], steps=3, num_losses=2)
    assert {name: len(losses) for name, losses in found["O2"].losses.items()} == {
        "loss 0": 3,
        "loss 1": 3,
    }
    assert [module.module for module in found["O2"].modules] == ["model 0: Linear", "model 1: Linear"]
    assert found.is_healthy


# What is refused.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"levels": ["02"]}, "opt_level='02' is not one of"),
        ({"levels": "O2"}, "levels='O2' is not a list of levels"),
        ({"levels": []}, "is not a list of levels"),
        ({"steps": 0}, "steps=0 must be an integer of at least 1"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(amp.AmpError, match=re.escape(message)):
        amp.compare(build(), step, **arguments)


def test_functions_that_train_nothing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "_PATIENCE", 3)
    with pytest.raises(amp.AmpError, match=r"3 calls of step made no optimizer\.step"):
        amp.compare(build(), lambda model, optimizer, i: None)
    with pytest.raises(amp.AmpError, match=r"build must return \(model, optimizer\), and returned Net"):
        amp.compare(Net, step)  # type: ignore[arg-type]
    with pytest.raises(amp.AmpError, match="made no step after a loss that was scaled"):
        amp.compare(build(), lambda model, optimizer, i: optimizer.step(), steps=1)


def test_casts_that_would_be_in_every_run_are_refused() -> None:
    net = nn.Linear(2, 2)
    amp.initialize(net, torch.optim.SGD(net.parameters(), 0.1), opt_level="O1", verbosity=0)
    with pytest.raises(amp.AmpError, match="a session that casts torch's functions is open"):
        amp.compare(build(), step)


# Which level to take, by planted results.


def result(level: str, seconds: float, *problems: str) -> LevelResult:
    found = tuple(Problem(cause, f"of its {cause}") for cause in problems)
    return LevelResult(level, found, losses={"loss": [1.0]}, seconds=seconds)


@pytest.mark.parametrize(
    ("device", "has_bfloat16", "chosen"),
    [("cuda", True, "O4"), ("cuda", False, "O2"), ("cpu", False, "O1")],
)
def test_the_level_to_take_goes_by_the_hardware(device: str, has_bfloat16: bool, chosen: str) -> None:
    rows = [
        *(result("O0", 1.00), result("O1", 0.97), result("O2", 3.0)),
        *(result("O4", 4.0), result("O5", 0.5, "loss_gap"), result("mine.yaml", 9.0)),
    ]
    level, reason = recommend(rows, device, has_bfloat16)
    assert level == chosen
    assert ("O5 is not: of its loss_gap" in reason) == (chosen in ("O4", "O1"))


def test_a_comparison_on_a_cpu_says_that_a_gpu_differs(healthy: Comparison) -> None:
    text = " ".join(str(healthy).split())
    assert "Time and memory are those of a CPU: on a GPU half precision is usually faster" in text
    assert text.endswith("and O5 is the first healthy level to try there.")
    reasons = [
        recommend([result("O0", 1.0), result("O4", 3.0)], device, True)[1] for device in ("cpu", "cuda")
    ]
    assert ["a GPU half precision is usually faster" in reason for reason in reasons] == [True, False]
    assert "faster, and O4 is the first" in reasons[0]
    _, reason = recommend([result("O0", 1.0), result("O4", 3.0, "loss_gap")], "cpu", True)
    assert reason.endswith("on a GPU half precision is usually faster.")


def test_nothing_is_recommended_where_fp32_fails_too() -> None:
    level, reason = recommend([result("O0", 1.0, "loss_not_finite"), result("O1", 0.5)], "cpu", False)
    assert level is None
    assert "precision is not the cause" in reason
    level, reason = recommend([result("O0", 2.0), result("O1", 1.0, "loss_gap")], "cpu", False)
    assert (level, "fastest healthy level here; O1 is not" in reason) == ("O0", True)


def test_numbers_by_hand() -> None:
    g, r = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])
    assert error_of([g], [r]) == pytest.approx(4 / 3)
    assert error_of([r[:1], r[1:]], [r[:1], r[1:]]) == 0.0
    assert error_of([torch.tensor([math.nan])], [r[:1]]) == math.inf
    assert error_of([torch.zeros(2)], [torch.zeros(2)]) == 0.0
    assert error_of([r], [torch.zeros(2)]) == math.inf
    assert gaps_of([9.0, 9.0, 9.0, 9.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.0, 1.0, 3.0]) == [2.0, 1.0]
    sizes = {"a": [torch.ones(4)], "b": [torch.ones(4)], "c": [torch.full((4,), 1e-9)]}
    assert vanishing_modules(sizes, 1e-6) == {"c"}
    assert vanishing_modules(sizes, 1e-12) == set()


def test_a_gradient_that_is_hard_in_fp32_is_allowed_as_much_more() -> None:
    def errors(*values: float) -> dict[str, float]:
        return dict(zip("abcde", values, strict=False))

    floor = errors(1e-7, 1e-7, 1e-7, 1e-7, 5e-7)
    assert outstanding(errors(1e-3, 1e-3, 1e-3, 1e-3, 0.4), floor, 0.01) == set()
    assert outstanding(errors(1e-3, 1e-3, 1e-3, 1e-3, 0.6), floor, 0.01) == {"e"}
    assert outstanding(errors(1e-3, 1e-3, 1e-3, 0.4, 1e-3), floor, 0.01) == {"d"}
    assert outstanding(errors(1e-3, 1e-3, 1e-3, 0.1, 1e-3), floor, 0.01) == set()
    assert outstanding(errors(0.3, 0.3, 0.3, 0.9, 0.3), floor, 0.5) == {"d"}


def test_a_module_that_stands_out_is_a_problem() -> None:
    modules = (ModuleError("a", 0.4, stands_out=True), ModuleError("b", 1e-3))
    losses = {"loss": [1.0]}
    found = LevelResult("O5", losses=losses, modules=modules, gradient_error=0.01, median_error=1e-3)
    (problem,) = problems_of(found, "FP64", None)
    what = "the gradient of a is off by 40 %; the median is 0.1 %"
    assert (problem.cause, problem.what) == ("module_stands_out", what)


def test_what_autograd_keeps_is_counted_once_and_let_go() -> None:
    weight, x = (torch.ones(10, 10, requires_grad=True) for _ in range(2))
    kept = Activations([weight])
    with saved_tensors_hooks(kept.pack, kept.unpack):
        for _ in range(3):
            y = (x @ weight).exp() * x[0]  # x twice, and the result of exp
            y.sum().backward()
            del y
    assert kept.most == 2 * 400


# The page and JSON.


def test_json_has_these_names(healthy: Comparison) -> None:
    found = json.loads(json.dumps(healthy.to_json()))
    assert sorted(found) == [
        *("device", "healthy", "levels", "notes", "reason", "recommended", "reference"),
        *("reference_losses", "seed", "steps"),
    ]
    assert sorted(found["levels"][0]) == [
        *(
            "gradient_error",
            "healthy",
            "level",
            "loss_gap",
            "loss_gap_allowed",
            "losses",
            "median_error",
            "memory",
            "modules",
            "problems",
        ),
        *("remarks", "scale_search", "seconds", "skipped", "still"),
    ]
    assert sorted(found["levels"][0]["modules"][0]) == ["error", "module", "stands_out"]


def test_the_page_needs_nothing_else(healthy: Comparison, tmp_path: Path) -> None:
    text = healthy.write_html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\"'\s]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=", text)
    assert not re.search(r"/\*(CSS|DATA|JS|VERSION)\*/", text)
    with pytest.raises(amp.AmpError, match="cannot be written"):
        healthy.write_html(tmp_path / "no" / "page.html")


def test_names_cannot_end_the_page(healthy: Comparison) -> None:
    data = healthy.to_json()
    data["levels"][0]["level"] = "</script><b>/*JS*/"
    text = page(data)
    assert text.count("</script>") == 2
    assert text.count("/*JS*/") == 1


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.mark.slow
def test_the_page_in_a_browser(browser: Any, tmp_path: Path) -> None:
    faulty = build(lambda: Net(norm=SquaringNorm(), lift=800.0))
    found = amp.compare(faulty, step, ["O2", "O3", "O5"], steps=6)
    browser.get(found.write_html(tmp_path / "page.html").as_uri())

    def run(script: str) -> Any:
        return browser.execute_script(script)

    def choose(name: str, value: str) -> None:
        run(f"const e = document.getElementById('{name}'); e.value = '{value}';"
            "e.dispatchEvent(new Event('change'))")  # fmt: skip

    def text(name: str) -> str:
        return str(browser.find_element("id", name).text)

    assert "blocks.1.mlp.0" in text("problems")
    rows = text("levels-table").splitlines()
    assert [row.split()[:2] for row in rows[1:4]] == [
        ["O0", "healthy"],
        ["O2", "worse"],
        ["O3", "worse"],
    ]
    marked = run(
        "return [...document.querySelectorAll('td.out')].map(e => e.parentNode.firstChild.textContent)"
    )
    assert marked
    assert set(marked) <= {"blocks.1.mlp.0", "blocks.1.norm"}
    assert run("return document.querySelectorAll('#loss-chart path').length") == 4
    before = run("return document.getElementById('loss-chart').innerHTML")
    choose("loss-kind", "value")
    assert run("return document.getElementById('loss-chart').innerHTML") != before
    browser.find_element("css selector", "#loss-levels input").click()
    assert run("return document.querySelectorAll('#loss-chart path').length") == 3
    before = text("modules-table").splitlines()
    choose("modules-order", "worst")
    assert text("modules-table").splitlines() != before
    assert "weights, KB" in text("cost-table")
    assert text("cost-about").startswith("Measured on cpu. On a GPU they differ")
    assert "on a GPU half precision is usually faster" in text("reason")
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        widths = run(
            "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert widths[0] <= widths[1] == 390
        paper = run("return getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    nameless = (
        "return [...document.querySelectorAll('input, select')].filter(e => !e.labels.length).length"
    )
    assert run(nameless) == 0
    assert browser.get_log("browser") == []


# A script that nobody has edited.

THREE_LINES = """
    import sys
    import torch
    from torch import nn
    {imports}

    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net, optimizer = amp.initialize(net, optimizer, opt_level="O2"{more})
    try:
        for i in range(int(sys.argv[1]) if sys.argv[1:] else 1000):
            x = torch.randn(32, 16)
            loss = nn.functional.cross_entropy(net(x), x[:, :4].argmax(1))
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
    finally:
        open("ended", "a").write(f"{{i}} {{net[0].weight.dtype}} {{__name__}} {{sys.argv[1:]}}\\n")
"""


def write(folder: Path, imports: str = "import amp", more: str = "", text: str = THREE_LINES) -> str:
    script = folder / "train.py"
    script.write_text(textwrap.dedent(text.format(imports=imports, more=more)))
    return str(script)


def run(capsys: Any, *arguments: str, status: int = 0) -> str:
    try:
        found = main(["compare", *arguments])
    except SystemExit as end:
        found = int(end.code or 0)
    out, err = capsys.readouterr()
    assert found == status, err
    if status == 2:
        assert out == ""
        assert err.count("\n") == 1 or err.startswith("Traceback (most recent call last):\n  File ")
    return str(err if status == 2 else out)


@pytest.mark.slow
def test_a_three_line_script_needs_no_edit(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    html = tmp_path / "compare.html"
    options = ["--levels", "O2", "--steps", "3", "--out", str(html), "--json", "--", "7"]
    found = json.loads(run(capsys, write(tmp_path), *options))
    assert [level["level"] for level in found["levels"]] == ["O0", "O2"]
    assert found["healthy"]
    assert found["reference"] == "FP64"
    assert found["steps"] == 3
    assert found["levels"][0]["losses"]["loss"][0] == pytest.approx(
        found["reference_losses"]["loss"][0]
    )
    # It ends in the third step, with its own clean-up, at the level that was asked for.
    lines = Path("ended").read_text().splitlines()
    assert lines == [f"2 torch.{dtype} __main__ ['7']" for dtype in ("float32", "float64", "float16")]
    assert "Levels compared" in html.read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("scripts_in_forks")
def test_a_script_that_imports_apex_needs_no_edit(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = write(tmp_path, "from apex import amp", ", keep_batchnorm_fp32=False, loss_scale=128.0")
    shown = run(capsys, script, "--levels", "O1,O5", "--steps", "9", "--", "2", status=1)
    assert "O1: not run: the script failed: AmpRuntimeError: keep_batchnorm_fp32=False" in shown
    assert re.search(r"^O5 +\S+ +0\.0\d+ .*\d$", shown, re.MULTILINE)
    assert "note: the run ended after 2 of 9 steps" in shown


@pytest.mark.slow
@pytest.mark.usefixtures("scripts_in_forks")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise ValueError('no data\\nhere')", "the script failed: ValueError: no data"),
        ("print(1)", "the script trains nothing: it never called amp.initialize"),
        ("raise SystemExit(3)", "the script failed: it ended with exit status 3"),
        ("import os; os._exit(4)", "the script failed: exit status 4"),
    ],
)
def test_a_script_that_does_not_train_is_one_line(
    capsys: Any, tmp_path: Path, text: str, message: str
) -> None:
    assert message in run(capsys, write(tmp_path, text=text), "--steps", "2", status=2)


@pytest.mark.slow
@pytest.mark.usefixtures("scripts_in_forks")
def test_a_script_with_two_models_and_steps_that_do_not_stop_by_themselves(tmp_path: Path) -> None:
    text = """
        import torch, amp
        from torch import nn
        nets = [nn.Linear(8, 8), nn.Linear(8, 8)]
        optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
        amp.initialize(nets, optimizers, opt_level="O1", num_losses=2)
        def train():
          while True:
            try:
                for i in (0, 1, 1):
                    loss = nets[i](torch.ones(4, 8)).square().mean()
                    with amp.scale_loss(loss, optimizers[i], loss_id=i) as scaled_loss:
                        scaled_loss.backward()
                    optimizers[i].step()
                    optimizers[i].zero_grad()
            except Exception:
                pass
        try:
            train()
        finally:
            raise ValueError("its own clean-up fails")
        """
    record = Script([write(tmp_path, text=text)]).run(Trial("O5", 3))
    assert {name: len(losses) for name, losses in record.losses.items()} == {"loss 0": 3, "loss 1": 3}
    assert record.first.keys() == {"model 0: Linear", "model 1: Linear"}


def test_overrides_of_other_levels_are_nothing_to_o0() -> None:
    with observing(script_process.AtLevel("O0")):
        session = amp.Session("O7", num_losses=2, fp8="current", loss_scale=2.0)
    assert (session.properties.opt_level, len(session.scalers)) == ("O0", 2)
    with observing(script_process.AtLevel("O5")):
        session = amp.Session("O7", num_losses=2, loss_scale=2.0)
    assert (session.properties.opt_level, session.properties.loss_scale) == ("O5", 2.0)
    with observing(script_process.AtLevel("O1")), pytest.raises(amp.AmpError, match="does not fit"):
        amp.Session("O2", keep_batchnorm_fp32=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "there is no file 'nowhere.py'"),
        ([], "give one script.py, or -m package.module"),
        (["x.py", "-m", "y"], "give one script.py, or -m package.module"),
        (["x.py", "--levels", "O99"], "opt_level='O99' is not one of"),
        (["x.py", "--levels", ","], "levels=[] is not a list of levels"),
        (["x.py", "--steps", "0"], "steps=0 must be"),
        (["x.py", "--epochs", "3"], "unrecognized arguments: --epochs 3"),
    ],
)
def test_errors_of_the_command_are_one_line(capsys: Any, arguments: list[str], message: str) -> None:
    assert message in run(capsys, *arguments, status=2)


def planted(trial: Trial) -> Record:
    """A run whose gradients are off at O2."""
    grads = torch.ones(4, dtype=torch.float64) * (3 if trial.level == "O2" else 1)
    first = {name: [grads.clone()] for name in ("a", "b", "c")}
    return Record(losses={"loss": [1.0]}, skipped=[False], first=first, seconds=[0.1], still=[0.0])


@pytest.mark.parametrize(("level", "status"), [("O2", 1), ("O5", 0)])
def test_the_exit_status_says_whether_all_is_well(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, level: str, status: int
) -> None:
    script = SimpleNamespace(notes=[], is_injected=False, run=planted)
    monkeypatch.setattr(script_commands, "Script", lambda what, progress: script)
    shown = run(capsys, "x.py", "--levels", level, "--steps", "1", status=status)
    assert ("O2: the gradient of a is off by 200 %" in shown) == (status == 1)


def test_a_level_that_is_given_twice_is_run_and_counted_once() -> None:
    runs: list[str] = []
    told: list[tuple[int, int]] = []

    def noted(trial: Trial) -> Record:
        runs.append(trial.level)
        return planted(trial)

    compare_runs(noted, ["O5", "O0", "O5"], 1, note_progress=lambda *place: told.append(place))
    assert runs == ["O0", "O0", "O5"]  # FP32, FP64
    assert told == [(1, 3), (2, 3)]


def test_help_has_examples(capsys: Any) -> None:
    assert "examples:\n  reamp compare train.py" in run(capsys, "--help")


def test_import_amp_does_not_load_it() -> None:
    code = "import amp, sys; print('amp.trials.comparing' in sys.modules, callable(amp.compare))"
    done = run_python("-c", code)
    assert done.stdout.split() == ["False", "True"]


def test_the_batch_of_the_doctor_trains_too() -> None:
    """A step that returns its loss, and takes its data from outside, is as good."""

    def fixed(model: nn.Module, optimizer: Any, i: int) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch()[:2]).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        return loss

    assert amp.compare(build(), fixed, ["O4"], steps=2).is_healthy
