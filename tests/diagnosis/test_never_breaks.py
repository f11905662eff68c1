"""A watch never breaks the run that it watches, and never changes its bits."""

from __future__ import annotations

import inspect
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp
from amp.diagnosis import diagnose, watching
from amp.diagnosis.guard import guarded
from amp.diagnosis.ledger import Ledger
from amp.diagnosis.lost import Lost
from amp.diagnosis.memories import Memories
from amp.diagnosis.places import Places, open_modes
from amp.diagnosis.seen_gradients import SeenGradients
from amp.diagnosis.shadow import Shadow
from amp.diagnosis.watching import TrainingWatch

CLASSES = (Shadow, Memories, Lost, Ledger, SeenGradients, Places, TrainingWatch)
THEIRS = {"__init__", "__enter__", "__exit__", "run", "__torch_function__"}
"""Called by the user, or pass on what the user has called."""


def methods() -> list[tuple[Any, str]]:
    of_classes = [(cls, name, x) for cls in CLASSES for name, x in vars(cls).items()]
    return [(cls, name) for cls, name, x in of_classes if inspect.isfunction(x) and name not in THEIRS]


def planned(*_: object, **__: object) -> None:
    raise LookupError("planned")


def trained(level: str = "O1") -> list[Tensor]:
    """Train a model with an overflow in it, and return its weights."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    session = amp.Session(level, verbosity=0, loss_scale="dynamic")
    model, optimizer = session.initialize(model, optimizer)
    for i in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).float().pow(2).mean() * (math.inf if i == 1 else 1.0)
        with session.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    weights = [p.detach().float().clone() for p in model.parameters()]
    session.close()
    return weights


@pytest.mark.slow
def test_an_error_of_the_watch_is_counted_and_the_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error in each method, in turn."""
    alone, met = trained(), set()
    for cls, name in methods():
        which = f"{cls.__name__}.{name}"

        def fail(*_: object, which: str = which, **__: object) -> None:
            met.add(which)
            raise LookupError("planned")

        with monkeypatch.context() as patch:
            is_guarded = getattr(cls, name).__code__ is guarded(fail).__code__
            patch.setattr(cls, name, guarded(fail) if is_guarded else fail)
            with amp.watch(at=[2]) as watch:
                weights = trained()
            assert all(map(torch.equal, weights, alone)), which
            assert not open_modes(), which
            said = str(watch.report)
            assert ("could not be followed (LookupError: planned)" in said) == (which in met), which
    assert len(met) > 60  # this training has no use for the others


def overflowed(session: amp.Session, model: Any, optimizer: Any) -> None:
    loss = model(torch.ones(2, 4)).float().sum() * math.inf
    with session.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


@pytest.mark.parametrize("by", ["diagnose", "on_overflow", "watch"])
def test_an_error_in_the_search_for_causes(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching if by == "watch" else diagnose, "findings_of", planned)
    model: Any = nn.Linear(4, 2)
    with amp.Session("O1", verbosity=0, diagnose="on_overflow") as session:
        model, optimizer = session.initialize(model, torch.optim.SGD(model.parameters(), 0.1))
        said: Any
        if by == "diagnose":
            with amp.diagnose(model, optimizer) as said:
                overflowed(session, model, optimizer)
        elif by == "watch":
            with amp.watch() as watch:
                overflowed(session, model, optimizer)
            said = watch.report
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the overflows in a row
                for _ in range(30):
                    overflowed(session, model, optimizer)
            said = session.last_report
    assert "could not be followed (LookupError: planned)" in str(said)


def zero_tensors() -> Tensor:
    model = nn.Linear(4, 4)
    y = model(torch.ones(2, 4))
    return (torch.sgn(y) * y).mean()


def forward_derivatives() -> Tensor:
    model = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    warnings.simplefilter("ignore")  # torch scripts its derivatives, which is deprecated
    both: Any = torch.func.jvp(lambda x: torch.sgn(model(x)) + x, (x,), (x,))
    return (sum(both) + model(x)).sum()


def nested() -> Tensor:
    model = nn.Linear(8, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        x = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)])
    return model(x).to_padded_tensor(0.0).mean()


def scripted() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    result: Tensor = model(torch.ones(2, 4)).mean()
    return result


def with_float8() -> Tensor:
    model = nn.Linear(4, 4)
    x = torch.full((2, 4), math.nan).to(torch.float8_e4m3fn)
    return model(x.float()).mean()


@pytest.mark.parametrize("loss_of", [zero_tensors, forward_derivatives, nested, scripted, with_float8])
def test_what_once_ended_the_process_or_raised(loss_of: Any) -> None:
    def run() -> float:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            loss: Tensor = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    expected = run()
    with amp.watch() as watch:
        torch.optim.SGD([nn.Parameter(torch.ones(1))])
        found = run()
    assert found == expected or (math.isnan(found) and math.isnan(expected))
    assert not watch.unfollowed.count, watch.unfollowed
    model = nn.Linear(1, 1)
    with amp.diagnose(model) as report:
        run()
    assert not report.unfollowed.count, report.unfollowed
    assert report.ops


@pytest.mark.parametrize("level", ["O6", "O7", "O8", "O9"])
def test_an_inf_in_the_batch_of_a_model_in_fp8_is_found_at_its_place(level: str) -> None:
    model: Any = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x = torch.randn(32, 32)
    x[17, 9] = math.inf
    with (
        amp.diagnose(model, optimizer) as report,
        amp.scale_loss(model(x).float().pow(2).mean(), optimizer) as scaled_loss,
    ):
        scaled_loss.backward()
    assert report.cause == "data"
    assert "argument 'input' is not finite at [17, 9]" in str(report)
