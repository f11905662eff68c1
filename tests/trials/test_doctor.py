"""`amp.doctor`: cures that are tried out, and a step that is never taken."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import amp
from amp.trials.cures import Prescription
from tests.covering import covering
from tests.diagnosis.faults import EpsNorm, Net, SquaringNorm, T, batch

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "FusedAdam": lambda p: amp.optimizers.FusedAdam(p, 1e-3),
}

pytestmark = pytest.mark.filterwarnings("ignore:the argument")


def mean_square(y: Tensor) -> Tensor:
    return y.float().square().mean()


def prescribed(
    level: str,
    *inputs: Tensor,
    loss: Callable[[Tensor], Tensor] = mean_square,
    optimizer: str = "SGD",
    model: nn.Module | None = None,
    overrides: dict[str, Any] | None = None,
    **options: Any,
) -> Prescription:
    torch.manual_seed(0)
    net: Any = model or Net(**options)
    given: dict[str, Any] = overrides or {}
    with amp.Session(level, verbosity=0, **given) as session:
        net, one = session.initialize(net, OPTIMIZERS[optimizer](net.parameters()))

        def step() -> None:
            one.zero_grad()
            with amp.scale_loss(loss(net(*(inputs or (batch(),)))), one) as scaled_loss:
                scaled_loss.backward()
            one.step()

        return amp.doctor(step, net, one)


@pytest.mark.parametrize(("level", "is_small"), [("O7", True), ("O9", True), ("O5", False)])
def test_layers_too_small_to_gain_are_a_remark_on_a_healthy_step(level: str, is_small: bool) -> None:
    found = prescribed(level)
    assert found.report.is_healthy
    assert bool(found.remark) is is_small
    assert (f"too small to be faster in FP{8 if level == 'O7' else 4}" in str(found)) is is_small


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_a_healthy_step(level: str) -> None:
    overrides = {"loss_scale": {"init": 1024}} if level in ("O1", "O2") else {}
    found = prescribed(level, overrides=overrides)
    assert found.report.is_healthy
    assert found.cure is None
    assert str(found).startswith("healthy: ")


@pytest.mark.parametrize(("level", "optimizer"), covering(["O1", "O2"], OPTIMIZERS, strength=1))
def test_a_module_in_fp32(level: str, optimizer: str) -> None:
    found = prescribed(level, gain=500.0, optimizer=optimizer)
    assert found.report.cause == "range"
    assert found.cure is not None
    assert found.cure.modules == ("blocks.1.attn",)
    assert found.cure.scale is found.cure.level is None
    assert found.cure.yaml == "rules:\n  - {module: blocks.1.attn, cast: float32}"
    assert f"verified in {found.cure.runs} replays:\nrules:" in str(found)


def test_what_is_printed_for_two_models_can_be_pasted_and_helps(tmp_path: Path) -> None:
    x = torch.ones(4, 8)

    def trained(level: Any, loud: float) -> tuple[Any, Any, Callable[[], None]]:
        torch.manual_seed(0)
        generator = nn.Sequential(nn.Linear(8, 8))
        first = nn.Linear(8, 8)
        discriminator = nn.Sequential(nn.Identity(), first, nn.LayerNorm(8), nn.Linear(8, 1))
        nn.init.constant_(first.weight, loud)
        nets = [generator, discriminator]
        ones = [torch.optim.SGD(net.parameters(), 1e-3) for net in nets]
        amp.initialize(nets, ones, opt_level=level, verbosity=0)

        def step() -> None:
            with amp.scale_loss(mean_square(discriminator(generator(x))), ones) as scaled_loss:
                scaled_loss.backward()

        return nets, ones, step

    nets, ones, step = trained("O2", 2e5)
    with amp.diagnose(nets, ones) as report:
        step()
    assert report.findings[0].module == "model 1: 1"
    found = amp.doctor(step, nets, ones)
    assert found.cure is not None
    rules = [line for line in report.findings[0].advice.splitlines() if line.startswith("rules")]
    for i, pasted in enumerate((rules[0], found.cure.yaml)):
        file = tmp_path / f"{i}.yaml"
        file.write_text(f"extends: O2\n{pasted}\n")
        assert "1" in {rule.pattern for rule in amp.load_profile(file).rules}
    *_, again = trained(tmp_path / "1.yaml", 2e5)
    again()
    assert not any(row.overflow for row in amp.history())


def test_a_model_as_a_whole_has_no_rule() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((8, 8), 1e5))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    found = prescribed("O2", torch.ones(4, 8), model=Root())
    assert "rules" not in str(found.report)
    assert "O5" in str(found.report)


@pytest.mark.parametrize(
    ("level", "options", "cause", "modules"),
    [
        ("O2", {"norm": SquaringNorm(), "lift": 800.0}, "absorbed range", ("blocks.1.norm",)),
        ("O3", {"norm": EpsNorm(), "lift": 0.0}, "eps", ("blocks.1.norm",)),
        pytest.param("O1", {"head": "bias"}, "range", ("head.proj",), marks=pytest.mark.slow),
    ],
)
def test_the_yaml_cures_a_run_that_has_it(
    level: str, options: Any, cause: str, modules: tuple[str, ...], tmp_path: Any
) -> None:
    found = prescribed(level, **options)
    assert found.report.cause == cause
    assert found.cure is not None
    assert found.cure.modules == modules
    profile = tmp_path / "cured.yaml"
    profile.write_text(f"extends: {level}\n{found.cure.yaml}\n")
    assert prescribed(str(profile), **options).report.is_healthy


@pytest.mark.parametrize("level", [pytest.param("O1", marks=pytest.mark.slow), "O2"])
def test_a_lower_scale(level: str) -> None:
    found = prescribed(level, loss=lambda y: y.float().square().sum())
    assert found.report.cause == "loss scale"
    assert found.cure is not None
    assert found.cure.modules == ()
    scale = found.cure.scale
    assert found.cure.yaml == f"loss_scale: {{init: {scale:g}}}"
    again = {"loss_scale": {"init": scale}}
    assert prescribed(level, loss=lambda y: y.float().square().sum(), overrides=again).report.is_healthy


@pytest.mark.parametrize(
    ("level", "better"), [pytest.param("O1", "O4", marks=pytest.mark.slow), ("O2", "O5")]
)
def test_another_level(level: str, better: str) -> None:
    found = prescribed(level, loss=lambda y: 3e6 * mean_square(y), blocks=3)
    assert found.report.cause in ("range", "loss scale")
    assert found.cure is not None
    assert found.cure.level == better
    assert found.cure.yaml == f"extends: {better}"
    assert prescribed(better, loss=lambda y: 3e6 * mean_square(y)).report.is_healthy


def test_what_no_precision_cures() -> None:
    found = prescribed("O2", head="log", blocks=3)
    assert found.cure is None
    assert "no precision cures the cause, mathematics" in found.why_not
    x = batch()
    x[0, 0, 0] = torch.nan
    assert "no precision cures the cause, data" in prescribed("O1", x).why_not
    mask = torch.zeros(8, 1, T)
    mask[3] = -1e9
    found = prescribed("O2", batch(), mask)  # which is finite in bfloat16
    assert found.report.cause == "cast"
    assert found.cure is not None
    assert found.cure.level == "O5"
    assert prescribed("O5", batch(), mask).report.is_healthy


class Noisy(nn.Module):
    """Draws random numbers of all kinds, and counts in a buffer."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.net, self.norm = Net(gain=gain), nn.BatchNorm1d(T)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + random.random() + float(numpy.random.rand())
        return self.net(self.drop(self.norm(x)))


@pytest.mark.parametrize(
    ("level", "optimizer", "gain"),
    [
        *covering(["O1", "O2", "O5"], list(OPTIMIZERS), [1.0, 500.0], strength=1),
        pytest.param("O7", "SGD", 500.0, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_changed(level: str, optimizer: str, gain: float) -> None:
    """A run with a doctor's visit ends with the bits of one without."""
    ends = []
    overrides: dict[str, Any] = {"loss_scale": {"init": 256, "growth_interval": 2}}
    overrides = overrides if level in ("O1", "O2") else {}
    if level == "O7":
        overrides["fp8"] = "delayed"
    for visit in (False, True):
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(0)
        model: Any = Noisy(gain)
        with amp.Session(level, verbosity=0, **overrides) as session:
            model, one = session.initialize(model, OPTIMIZERS[optimizer](model.parameters()))

            def step(model: Any = model, one: Any = one) -> None:
                with amp.scale_loss(mean_square(model(batch())), one) as scaled_loss:
                    scaled_loss.backward()
                one.step()
                one.zero_grad()

            for i in range(4):
                step()
                if visit and i == 1:
                    amp.doctor(step, model, one)
            state = session.state_dict()
            numbers = [torch.rand(1).item(), random.random(), float(numpy.random.rand())]
            ends.append((model.state_dict(), one.state_dict(), state, numbers))
    plain, visited = map(tree_leaves, ends)
    assert len(plain) == len(visited)
    for one, other in zip(plain, visited, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_a_step_that_raises_leaves_all_as_it_was() -> None:
    model: Any = Net(gain=500.0)
    with amp.Session("O2", verbosity=0) as session:
        model, one = session.initialize(model, OPTIMIZERS["SGD"](model.parameters()))
        before = {name: value.clone() for name, value in model.state_dict().items()}

        def step() -> None:
            model(batch())
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            amp.doctor(step, model, one)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        with session.scale_loss(mean_square(model(batch())), one) as scaled_loss:
            scaled_loss.backward()
        one.step()


def test_misuse_is_named() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(amp.AmpError, match="did not come out of amp.initialize"):
        amp.doctor(lambda: None, model, torch.optim.SGD(model.parameters(), 0.1))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head((self.first(x).float() + mask).softmax(-1))


@pytest.mark.parametrize(
    ("cast_inputs", "names"), [(True, "mask"), ({"except": ["first"]}, "first, mask")]
)
def test_an_argument_is_left_alone_besides_those_that_are(cast_inputs: Any, names: str) -> None:
    inputs, overrides = (torch.ones(4, 8), torch.full((8,), -7e4)), {"cast_model_inputs": cast_inputs}
    found = prescribed("O2", *inputs, model=Masked(), overrides=overrides)
    assert found.cure is not None, str(found)
    assert found.cure.yaml == f"cast_model_inputs: {{except: [{names}]}}"
