"""An observer is told of a session's events, in their order, and torch is left as it is."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp
from amp.observers import Observer, observing, watch_forwards
from tests.models import LEVELS, linear, run_backward, sgd, started, train_on

EVENTS = [name for name, _ in inspect.getmembers(Observer, inspect.isfunction)]


class Log(Observer):
    """Writes down which events it is told of, and answers as `Observer` does."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        own = super().__getattribute__(name)
        if name not in EVENTS:
            return own

        def tell(*args: Any, **kwargs: Any) -> Any:
            self.told.append(name)
            return own(*args, **kwargs)

        return tell


STEP = ["block_entered", "must_know", "verdicts", "block_left", "step_begins", "step_ends"]


def without_verdicts(told: list[str]) -> list[str]:
    return [name for name in told if name not in ("must_know", "verdicts")]


def step(model: nn.Module, optimizer: Any, scale: float = 1e-2) -> None:
    train_on(model(torch.ones(2, 4)).float().sum() * scale, optimizer)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.filterwarnings("ignore:fp8")
def test_the_events_of_a_session_come_in_their_order(level: str) -> None:
    log = Log()
    with observing(log):
        model, optimizer = started(linear(), sgd, level)
        assert log.told == ["session_begins", "initialize_begins", "initialize_ends"]
        log.told.clear()
        stop = watch_forwards(log, amp.get_session(optimizer), [model])
        step(model, optimizer)
        forward, own = ["forward_begins"], without_verdicts(STEP)
        assert without_verdicts(log.told) == [*forward, *own]
        if "must_know" in log.told:  # where gradients are checked
            assert log.told.index("must_know") > log.told.index("block_entered")
        log.told.clear()
        stop()
        step(model, optimizer)
        assert without_verdicts(log.told) == own
        log.told.clear()
        amp.get_session(optimizer).close()
        assert without_verdicts(log.told) == ["session_ends"]
    log.told.clear()
    started(linear(), sgd, level)
    assert not log.told


def test_an_overflow_is_told_once_and_the_step_ends() -> None:
    told: list[list[Any]] = []

    class Verdicts(Observer):
        def must_know(self, scaler: Any) -> int:
            return int(scaler.updates)

        def verdicts(self, session: Any, scaler: Any, rows: Any) -> None:
            told.extend([row.step, row.overflow] for row in rows)

    model, optimizer = started(linear(), sgd, "O2")
    with observing(Verdicts()):
        step(model, optimizer)
        step(model, optimizer, scale=float("inf"))
        step(model, optimizer)
    assert told == [[0, False], [1, True], [2, False]]


def test_a_step_is_called_with_the_closure_that_an_observer_returns() -> None:
    class Replaces(Observer):
        def step_begins(self, attached: Any, closure: Callable[[], Any] | None) -> Any:
            assert closure is not None
            return lambda: closure() + 1

    model, optimizer = started(linear(), sgd, "O1")

    def closure() -> Any:
        optimizer.zero_grad()
        return run_backward(model(torch.ones(2, 4)).sum() * 0, optimizer).item()

    with observing(Replaces()):
        assert optimizer.step(closure) == 1


def test_what_an_event_raises_comes_out_and_leaves_no_block_open() -> None:
    class Raises(Observer):
        def block_entered(self, session: Any, block: Any, loss: Tensor, attached: Any) -> None:
            raise ValueError("not this one")

    model, optimizer = started(linear(), sgd, "O2")
    with observing(Raises()), pytest.raises(ValueError, match="not this one"):
        step(model, optimizer)
    step(model, optimizer)  # whose block is not refused as one inside of another


def test_forwards_of_a_copy_are_not_told() -> None:
    (model, optimizer), log = started(linear(), sgd, "O2"), Log()
    stop = watch_forwards(log, amp.get_session(optimizer), [model])
    copy.deepcopy(model)(torch.ones(2, 4))
    assert not log.told
    model(torch.ones(2, 4))
    stop()
    assert log.told == ["forward_begins"]
