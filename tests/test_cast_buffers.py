"""Buffers that a level casts: what is warned of, and what the tools that watch a training say."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp
from amp.diagnosis.findings import Finding
from amp.errors import AmpWarning
from tests.models import run_backward, train_on

FREQUENCIES = 10000.0 ** -(torch.arange(8) / 8)
POSITIONS = torch.arange(3000.0, 3064)


class Waves(nn.Module):
    positions: Tensor
    frequencies: Tensor

    def __init__(self, positions: Tensor) -> None:
        super().__init__()
        self.register_buffer("positions", positions.clone())
        self.register_buffer("frequencies", FREQUENCIES.clone())

    def forward(self) -> Tensor:
        angles = self.positions.float()[:, None] * self.frequencies.float()
        return torch.cat([angles.sin(), angles.cos()], 1)


class Net(nn.Module):
    def __init__(self, positions: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.waves, self.head = Waves(positions), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([0.1 * x, self.waves().to(x.dtype)], 1))


IN_FP32: list[Any] = [{"module": "waves", "cast": "float32"}]
X, Y = torch.randn(64, 8), torch.arange(64) % 4

RUINED = [
    ("O2", POSITIONS, "integers up to 3063, and float16 rounds those above 2048"),
    ("O5", POSITIONS, "integers up to 3063, and bfloat16 rounds those above 256"),
    ("O2", torch.full((64,), -1e9), "-1e\\+09, which becomes -inf"),
]
KEPT = [
    ("O5", torch.arange(64.0), None),
    ("O2", torch.arange(64) + 3000, None),
    ("O2", torch.full((64,), -torch.inf), None),
    ("O2", torch.rand(64), None),
    ("O1", POSITIONS, None),
    ("O0", POSITIONS, None),
    ("O2", POSITIONS, IN_FP32),
]


@pytest.mark.parametrize(("level", "positions", "said"), RUINED)
def test_initialize_warns_of_a_buffer_that_the_cast_ruins(
    level: str, positions: Tensor, said: str
) -> None:
    text = f"the buffer 'waves.positions' is cast to .*{said}.*module: waves, cast: float32"
    with pytest.warns(AmpWarning, match=text):
        amp.initialize(Net(positions), opt_level=level, verbosity=0)


@pytest.mark.parametrize(("level", "positions", "rules"), KEPT)
def test_it_says_nothing_of_a_buffer_that_keeps_its_meaning(
    level: str, positions: Tensor, rules: Any
) -> None:
    overrides = {} if rules is None else {"rules": rules}
    amp.initialize(Net(positions), opt_level=level, verbosity=0, **overrides)


def test_a_warning_that_is_an_error_leaves_the_model_as_it_was() -> None:
    model = Net(POSITIONS)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(AmpWarning, match=r"waves\.positions"):
        amp.initialize(model, opt_level="O2", verbosity=0)
    for name, x in model.state_dict().items():
        assert x.dtype is before[name].dtype
        assert torch.equal(x, before[name])


@pytest.mark.parametrize(("level", "positions", "said"), RUINED)
def test_a_check_says_so_once(level: str, positions: Tensor, said: str) -> None:
    found = amp.check(Net(positions), X, opt_level=level).findings
    assert [(x.cause, x.module) for x in found] == [("cast", "waves")]
    assert "rules: [{module: waves, cast: float32}]" in found[0].advice


def watched(level: str, positions: Tensor, **overrides: Any) -> list[Finding]:
    """Return what `amp.watch` finds in two steps of a training whose first steps are watched."""
    with amp.watch(at=[1, 2]) as watch:
        model = Net(positions)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AmpWarning)
            session = amp.Session(level, verbosity=0, **overrides)
            model, optimizer = session.initialize(model, optimizer)
        with session:
            for _ in range(2):
                train_on(F.cross_entropy(model(X), Y), optimizer)
    return watch.report.findings


@pytest.mark.parametrize("is_in_fp32", [False, True])
def test_a_diagnosis_compares_buffers_with_what_they_were(is_in_fp32: bool) -> None:
    model = Net(POSITIONS + 0.3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with amp.Session("O5", verbosity=0, rules=IN_FP32 if is_in_fp32 else []) as session:
        model, optimizer = session.initialize(model, optimizer)

        def step() -> None:
            run_backward(F.cross_entropy(model(X), Y), optimizer)

        with amp.diagnose(model, optimizer) as report:
            step()
        assert report.is_healthy == is_in_fp32
        if not is_in_fp32:
            assert "the buffer waves.positions was cast" in report.findings[0].what
            found = amp.doctor(step, model, optimizer)
            assert found.cure is not None
            assert found.cure.modules == ("waves",)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_watch_names_integers_that_initialize_has_rounded(level: str) -> None:
    (found,) = watched(level, POSITIONS)
    assert (found.cause, found.module) == ("cast", "waves")
    assert not watched(level, POSITIONS, rules=IN_FP32)


def test_a_watch_names_a_buffer_whose_lost_digits_matter() -> None:
    (found,) = watched("O5", POSITIONS + 0.3)
    assert found.cause == "rounding"
    assert "the buffer waves.positions was cast, and 30" in found.what
    assert "rules: [{module: waves, cast: float32}]" in found.advice
    assert not watched("O5", POSITIONS + 0.3, rules=IN_FP32)
    assert not watched("O5", torch.rand(64))


def test_a_buffer_that_training_has_written_to_is_not_compared_with_its_first_values() -> None:
    class Follows(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.tensor(1000.3))
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(x - self.mean)
            self.mean.copy_(x.mean())
            return y

    with amp.watch(at=[3]) as watch:
        model = Follows()
        model.bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), 10.0)
        for _ in range(3):
            F.cross_entropy(model(X.bfloat16()).float(), Y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [x for x in watch.report.findings if x.cause not in ("still", "buffer")] == []
    assert "buffer" not in [x.cause for x in watch.report.findings]
