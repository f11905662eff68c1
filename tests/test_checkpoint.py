"""A run that was saved, killed and resumed is the run that never stopped."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F

import amp
from amp.casting import strategies
from amp.casting.strategy import Strategy
from tests.covering import covering
from tests.models import (
    DYNAMIC_LEVELS,
    LEVELS,
    batch,
    conv_net,
    initialize,
    linear,
    run_backward,
    sgd,
    started,
    step_on,
)
from tests.processes import run_python
from tests.resume import CASES, HALF, WHOLE, checkpoint, make, outcome, scaling, train
from tests.states import assert_same, through_a_file


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save every case halfway, and let another process go on from there."""
    folder = tmp_path_factory.mktemp("resume")
    for level, name in CASES:
        model, optimizer = initialize(*make(name, level), level, **scaling(level))
        train(model, optimizer, level, range(HALF))
        torch.save(checkpoint(model, optimizer), folder / f"{level}-{name}.pt")
        amp.get_session().close()
    finished = run_python("-m", "tests.resume", folder)
    assert finished.returncode == 0, finished.stderr
    return folder


@pytest.mark.parametrize(
    ("case", "loaded"), covering(["-".join(case) for case in CASES], ["before", "after"], strength=1)
)
def test_resume_is_exact(resumed: Path, case: str, loaded: str) -> None:
    level, name = case.split("-")
    model, optimizer = initialize(*make(name, level), level, **scaling(level))
    train(model, optimizer, level, range(WHOLE))
    if level in DYNAMIC_LEVELS:
        scales = amp.state_dict()["loss_scaler0"]
        assert scales["loss_scale"] != 1024.0
    theirs = torch.load(resumed / f"{level}-{name}-{loaded}.pt", weights_only=True)
    assert_same(theirs, outcome(model, optimizer))
    assert list(theirs["model"]) == list(model.state_dict())
    assert all(value.isfinite().all() for value in model.state_dict().values())


@pytest.mark.parametrize("level", LEVELS)
def test_a_checkpoint_holds_plain_values_and_fp32_tensors(level: str) -> None:
    model, optimizer = initialize(*make("AdamW", level), level)
    train(model, optimizer, level, range(2))
    saved = through_a_file(checkpoint(model, optimizer))
    for name, value in saved["model"].items():
        assert not value.is_floating_point() or value.dtype is torch.float32, name
    assert_same(saved["amp"], amp.state_dict())


def test_the_format_is_apexs() -> None:
    model = linear()
    amp.initialize(model, sgd(model), opt_level="O2", num_losses=2)
    state = amp.state_dict()
    assert isinstance(state, OrderedDict)
    assert list(state)[:2] == ["loss_scaler0", "loss_scaler1"]
    for i in range(2):
        assert state[f"loss_scaler{i}"]["loss_scale"] == 65536.0
        assert type(state[f"loss_scaler{i}"]["loss_scale"]) is float
        assert type(state[f"loss_scaler{i}"]["unskipped"]) is int
    destination = {"mine": 1}
    assert amp.state_dict(destination) is destination
    assert destination["mine"] == 1
    assert "loss_scaler1" in destination


def apex_state(*scales: tuple[float, int]) -> dict[str, Any]:
    return OrderedDict(
        (f"loss_scaler{i}", {"loss_scale": scale, "unskipped": unskipped})
        for i, (scale, unskipped) in enumerate(scales)
    )


def test_apexs_own_files_load_by_the_numbers_of_their_entries() -> None:
    model = linear()
    amp.initialize(model, sgd(model), opt_level="O2", num_losses=2)
    state = apex_state((4096.0, 17), (8.0, 3))
    for each in (state, dict(reversed(state.items()))):
        amp.load_state_dict(each)
        assert [amp.loss_scale(i) for i in range(2)] == [4096.0, 8.0]
        assert amp.state_dict()["loss_scaler0"]["unskipped"] == 17


def test_a_scale_of_0_from_apex_is_brought_to_the_floor() -> None:
    amp.initialize(linear(), opt_level="O2", min_loss_scale=1.0)
    amp.load_state_dict(apex_state((0.0, 0)))
    assert amp.loss_scale() == 1.0


def test_unskipped_beyond_the_interval_still_grows() -> None:
    model, optimizer = started(linear(), sgd, "O2", loss_scale={"init": 4, "growth_interval": 10})
    amp.load_state_dict(apex_state((4.0, 1999)))
    run_backward(model(torch.ones(1, 4)).sum(), optimizer)
    assert amp.loss_scale() == 8.0


@pytest.mark.parametrize(
    ("saved", "here", "text"),
    [
        (3, 1, "contains 3 loss scalers, and num_losses is 1; skipping loss_scaler1, loss_scaler2"),
        (1, 2, "contains 1 loss scalers, and num_losses is 2; loss_scaler1 start anew"),
    ],
)
def test_another_number_of_losses_is_said(saved: int, here: int, text: str) -> None:
    amp.initialize(linear(), opt_level="O2", num_losses=here)
    with pytest.warns(amp.AmpWarning, match=text):
        amp.load_state_dict(apex_state(*[(2.0**i, i) for i in range(1, saved + 1)]))
    assert amp.loss_scale(0) == 2.0
    if here == 2:
        assert amp.loss_scale(1) == 65536.0


@pytest.mark.parametrize(
    ("state", "error", "text"),
    [
        ({"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}, "foo": 1}, RuntimeError, '"foo"'),
        ({"model": {}, "amp": {}}, RuntimeError, r'Unexpected key\(s\).*"model", "amp".*checkpoint'),
        ([1], TypeError, "a dict, and got a list"),
        (
            {"loss_scaler0": 65536.0},
            ValueError,
            "no usable 'loss_scaler0': 65536.0; expected what a loss scaler's",
        ),
        ({"loss_scaler0": {"loss_scale": "big", "unskipped": 1}}, ValueError, "no usable 'loss_scale'"),
        ({"loss_scaler0": {"loss_scale": float("nan"), "unskipped": 1}}, ValueError, "no usable"),
        ({"loss_scaler0": {"loss_scale": 2.0}}, ValueError, "no usable 'unskipped'"),
    ],
)
@pytest.mark.parametrize("initialized", [False, True])
def test_what_is_no_state_dict_is_refused_and_changes_nothing(
    state: Any, error: type[Exception], text: str, initialized: bool
) -> None:
    if initialized:
        amp.initialize(linear(), opt_level="O2")
    with pytest.raises(error, match=text):
        amp.load_state_dict(state)
    if not initialized:
        amp.initialize(linear(), opt_level="O2")
    assert amp.loss_scale() == 65536.0


# Another level.


@pytest.mark.parametrize(("old", "new"), covering(LEVELS, LEVELS[::-1], strength=1))
def test_a_checkpoint_of_one_level_goes_on_at_another(old: str, new: str) -> None:
    def evaluate(model: torch.nn.Module) -> float:
        return sum(F.cross_entropy(model(x).float(), y).item() for x, y in map(batch, range(4)))

    model, optimizer = initialize(*make("SGD", old), old, verbosity=0)
    train(model, optimizer, "O0", range(10))
    saved = checkpoint(model, optimizer)
    before = evaluate(model)
    amp.get_session().close()

    model, optimizer = initialize(*make("SGD", new, seed=3), new, verbosity=0)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if old == new:
        amp.load_state_dict(saved["amp"])
    else:
        with pytest.warns(amp.AmpWarning, match=f"saved at opt_level {old}.*runs at {new}"):
            amp.load_state_dict(saved["amp"])
    assert evaluate(model) == pytest.approx(before, rel=5e-2)
    scale = amp.loss_scale()
    assert scale == (1024.0 if new in DYNAMIC_LEVELS else 1.0)
    for p in amp.master_params(optimizer):
        assert optimizer.state[p]["momentum_buffer"].dtype is p.dtype
    train(model, optimizer, "O0", range(10, 20))
    assert evaluate(model) < before * 1.5


def test_a_static_scale_is_the_configurations_and_not_the_checkpoints() -> None:
    amp.initialize(linear(), opt_level="O2", loss_scale=128.0)
    saved = amp.state_dict()
    amp.initialize(linear(), opt_level="O2", loss_scale=256.0)
    amp.load_state_dict(saved)
    assert amp.loss_scale() == 256.0
    amp.initialize(linear(), opt_level="O2")
    amp.load_state_dict(saved)
    assert amp.loss_scale() == 65536.0


def test_masters_loaded_in_the_middle_of_training_are_the_ones_stepped() -> None:
    model, optimizer = started(conv_net(), lambda p: sgd(p, lr=0.0, momentum=0), "O2")
    train(model, optimizer, "O0", range(2))
    target = {k: v + 1 / 3 if v.is_floating_point() else v for k, v in model.state_dict().items()}
    model.load_state_dict(target)
    train(model, optimizer, "O0", range(2))
    for name, p in model.named_parameters():
        assert torch.equal(model.state_dict()[name], target[name]), name
        assert torch.equal(p, target[name].to(p.dtype)), name


@pytest.mark.parametrize(
    ("script", "scale"),
    [
        ("load, initialize", 32.0),
        ("load, initialize, initialize", 1024.0),
        ("initialize, load, initialize", 32.0),  # a restart within one process
        ("initialize, close, load, initialize", 32.0),
        ("initialize, load, close, initialize", 1024.0),
        ("initialize, load, train, initialize", 1024.0),
        ("initialize, load, initialize, train, initialize", 1024.0),
        ("initialize, close, load, initialize, train, initialize", 1024.0),
    ],
)
def test_a_state_may_come_before_the_next_initialize_and_is_used_once(
    script: str, scale: float
) -> None:
    """It is that of the open session from its first block on, and goes with it."""
    for action in script.split(", "):
        if action == "initialize":
            model, optimizer = started(linear(), sgd, "O2")
        elif action == "close":
            amp.get_session().close()
        elif action == "train":
            run_backward(model(torch.ones(1, 4)).sum(), optimizer)
        else:
            state = apex_state((32.0, 1))
            amp.load_state_dict(state)
            state["loss_scaler0"]["loss_scale"] = -1.0  # what was loaded is not what the caller holds
    assert amp.loss_scale() == scale


def test_a_model_that_had_a_session_before_still_saves_its_masters() -> None:
    import copy

    model = conv_net()
    amp.initialize(model, sgd(model), opt_level="O0")
    for candidate in (model, copy.deepcopy(model)):
        candidate, optimizer = amp.initialize(candidate, sgd(candidate), opt_level="O2")
        for p, master in zip(candidate.named_parameters(), amp.master_params(optimizer), strict=True):
            assert torch.equal(candidate.state_dict()[p[0]], master), p[0]


def test_a_waiting_state_that_does_not_fit_stops_initialize_before_it_changes_anything() -> None:
    amp.load_state_dict({**apex_state((32.0, 1)), "opt_level": "O1"})
    model = linear()
    with pytest.raises(amp.AmpWarning, match="saved at opt_level O1"):  # warnings are errors here
        amp.initialize(model, sgd(model), opt_level="O2")
    assert model.weight.dtype is torch.float32


def test_what_a_strategy_keeps_is_saved_under_its_key_and_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Counting(Strategy):
        state_key = "counting"
        count = 0

        @staticmethod
        def is_asked_for(properties: Any) -> bool:
            return True

        def prepare_model(self, model: Any, undo: Any) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: Any) -> None:
            self.count = state["count"] if state else self.count

    monkeypatch.setattr(strategies, "STRATEGIES", (*strategies.STRATEGIES, Counting))
    first = amp.Session("O2", verbosity=0)
    first.initialize([linear(), linear()])
    saved = first.state_dict()
    assert saved["counting"] == {"count": 2}
    second = amp.Session("O2", verbosity=0)
    second.initialize(linear())
    assert second.state_dict()["counting"] == {"count": 1}
    second.load_state_dict(saved)
    assert second.state_dict()["counting"] == {"count": 2}
    del saved["counting"]
    second.load_state_dict(saved)  # of a profile that did not ask for it
    assert second.state_dict()["counting"] == {"count": 2}
    first.close()
    second.close()


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_torchs_own_functions_for_checkpoints_save_and_load_masters_in_one_process(level: str) -> None:
    def trained(steps: int) -> Any:
        torch.manual_seed(steps)
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for _ in range(steps):
            train_step(model, optimizer)
        return model, optimizer

    def train_step(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        step_on(model(torch.ones(3, 4)).float().square().mean(), optimizer)

    model, optimizer = trained(3)
    weights: Any
    state: Any
    weights, state = get_state_dict(model, optimizer)
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert set(state["state"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    weights, state = copy.deepcopy((weights, state))
    train_step(model, optimizer)
    expected = copy.deepcopy(model.state_dict())

    other, other_optimizer = trained(1)
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=state)
    train_step(other, other_optimizer)
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())
