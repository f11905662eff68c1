"""What a loss scaler did lately, and the step that is watched after a streak of overflows."""

from __future__ import annotations

import logging
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import amp
from tests.diagnosis.faults import Net, batch

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), 1e-3),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), 1e-3, fused=True),
    "FusedAdam": lambda model: amp.optimizers.FusedAdam(model.parameters(), 1e-3),
}

LOW = {"init": 256.0}


def step(model: Any, optimizer: Any, factor: float = 1.0, loss_id: int = 0) -> None:
    loss = model(batch()).float().square().mean() * factor
    with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_history_of_a_run(level: str, name: str) -> None:
    torch.manual_seed(0)
    model: Any = Net()
    scaling = {"init": 512.0, "growth_interval": 2}
    overrides: dict[str, Any] = {"loss_scale": scaling} if level in ("O1", "O2") else {}
    model, optimizer = amp.initialize(
        model, OPTIMIZERS[name](model), opt_level=level, verbosity=0, **overrides
    )
    assert amp.history() == []
    for factor in (1.0, math.inf, 1.0, 1.0, 1.0):
        step(model, optimizer, factor)
    rows = amp.history()
    assert [row.step for row in rows] == [0, 1, 2, 3, 4]
    assert [row.overflow for row in rows] == [False, True, False, False, False]
    assert [row.in_a_row for row in rows] == [0, 1, 0, 0, 0]
    if overrides:
        assert [row.scale for row in rows] == [512.0, 512.0, 256.0, 256.0, 512.0]
        assert [row.next_scale for row in rows] == [512.0, 256.0, 256.0, 512.0, 512.0]
    else:
        assert {row.scale for row in rows} == {1.0}
    assert sorted(rows[1].bad) == sorted(n for n, _ in model.named_parameters())
    assert not any(row.bad for row in rows if row.step != 1)
    assert amp.history() == rows


def test_only_what_was_bad_is_named() -> None:
    model: Any = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=LOW, verbosity=0)
    x = torch.ones(1, 2)
    for factor in (math.inf, 1.0):
        with amp.scale_loss((model["a"](x) + model["b"](x).float() * factor).sum(), optimizer) as loss:
            loss.backward()
        optimizer.step()
    assert amp.history()[0].bad == ("b.weight", "b.bias")


def test_names_of_two_models_do_not_collide() -> None:
    models: Any = [nn.Linear(2, 2) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    amp.initialize(models, optimizers, opt_level="O2", loss_scale=LOW, verbosity=0)
    x = torch.ones(1, 2)
    with amp.scale_loss((models[0](x) + models[1](x) * math.inf).sum(), optimizers) as loss:
        loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert amp.history()[0].bad == ("model 1: weight", "model 1: bias")


def test_each_loss_has_its_history_of_256() -> None:
    model: Any = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", num_losses=2, verbosity=0)
    for i in range(300):
        with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer, loss_id=i % 20 == 0) as loss:
            loss.backward()
        optimizer.step()
    rows = amp.history()
    assert [len([r for r in rows if r.loss_id == i]) for i in (0, 1)] == [256, 15]
    assert rows[255].step == 284
    assert rows[0].step == 29


def test_clipping_leaves_its_norm() -> None:
    model: Any = nn.Linear(4, 4)
    optimizer = amp.optimizers.FusedAdam(model.parameters(), max_grad_norm=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=LOW, verbosity=0)
    with amp.scale_loss(model(torch.ones(1, 4)).sum(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    assert amp.history()[0].norm == pytest.approx(math.sqrt(20))


def test_set_and_loaded_scales_are_known() -> None:
    model: Any = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    state = amp.state_dict()
    state["loss_scaler0"]["loss_scale"] = 64.0
    amp.load_state_dict(state)
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as loss:
        loss.backward()
    assert amp.history()[0].scale == 64.0


# Armed.


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_after_a_streak_the_next_step_is_watched(level: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model: Any = Net(gain=500.0 if level != "O5" else 1.0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaling = {
        "overflow_patience": 3,
        **({"mode": "static", "init": 1, "check": True} if level == "O5" else {"init": 4}),
    }
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=scaling, diagnose="on_overflow"
    )
    session = amp.get_session()
    factor = math.nan if level == "O5" else 1.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert session.last_report is None
            step(model, optimizer, factor)
    assert len(caught) == 1
    with torch.no_grad():
        model(batch())  # no training step
    with caplog.at_level(logging.WARNING, logger="amp"):
        step(model, optimizer, factor)
    report = session.last_report
    assert report is not None
    assert report.findings[0].reached
    if level != "O5":
        assert report.cause == "range"
        assert report.findings[0].module == "blocks.1.attn"
        assert "range: forward torch.matmul, in blocks.1.attn" in caplog.text
    session.last_report = None
    for _ in range(3):
        step(model, optimizer, factor)
    assert session.last_report is None  # once for a streak


def test_a_watched_loop_trains_on_the_same_bits() -> None:
    ends = []
    for diagnose in (None, "on_overflow"):
        torch.manual_seed(0)
        model: Any = Net()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        with amp.Session(
            "O2", loss_scale={"init": 1024.0, "overflow_patience": 2}, verbosity=0, diagnose=diagnose
        ) as session:
            model, optimizer = session.initialize(model, optimizer)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for factor in (1.0, math.inf, math.inf, 1.0, 1.0):
                    step(model, optimizer, factor)
            assert (session.last_report is not None) == (diagnose is not None)
            ends.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *ends))


def test_a_session_that_closes_in_a_watched_step_leaves_nothing() -> None:
    model: Any = Net(gain=500.0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    session = amp.Session(
        "O2", loss_scale={"overflow_patience": 1}, verbosity=0, diagnose="on_overflow"
    )
    model, optimizer = session.initialize(model, optimizer)
    with pytest.warns(amp.AmpWarning, match="1 overflows in a row"):
        step(model, optimizer)
    model(batch())
    session.close()
    assert not _get_current_dispatch_mode_stack()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
