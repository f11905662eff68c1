"""Sessions, steps and evaluations leave nothing behind: no thread, file, hook, patch or tensor.

`AMP_LEAKS=1000 pytest tests/test_leaks.py` makes 1,000 sessions, 10,000 steps and 1,000 evaluations at
five levels.
"""

from __future__ import annotations

import copy
import gc
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.modules.module as of_modules
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import amp
from amp.training import verdicts
from amp.training.attached_optimizer import AttachedOptimizer
from tests.compiling import wait_for_compilers
from tests.models import run_backward, started, step_on, train_on

QUICK = ("O1", "O2", "O7")
SLOW = ("O5", "O9")
SOME_QUICK = [*QUICK, *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW)]
CYCLES = int(os.environ.get("AMP_LEAKS", "4"))
LONG = 30
RUNS = [pytest.param(x, CYCLES, marks=() if x in QUICK else pytest.mark.slow) for x in QUICK + SLOW]
if CYCLES < LONG:
    RUNS.append(pytest.param("O7", LONG, marks=pytest.mark.slow))
SESSIONS_MAY_TAKE, STEPS_MAY_TAKE = 900, 2500
"""Blocks of memory, however many there are: what torch caches, and a scaler's last 256 transitions."""


def things(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Count what there is, once what nobody refers to is gone, and what compiles has ended."""
    wait_for_compilers()
    gc.collect()
    objects = gc.get_objects()
    tasks = Path("/proc/self/task")
    return {
        "tensors": sum(issubclass(type(x), Tensor) for x in objects),
        "modules": sum(issubclass(type(x), nn.Module) for x in objects),
        "threads": len(list(tasks.iterdir())) if tasks.exists() else threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")) if tasks.exists() else 0,  # noqa: PTH208
        "hooks": [hooks_of(part) for part in (*model.modules(), optimizer, of_modules)],
        "classes": {type(x) for x in (*model.modules(), optimizer)},
        "dtypes": {parameter.dtype for parameter in model.parameters()},
        "attributes": [sorted(vars(x)) for x in (*model.modules(), optimizer)],
    }


def hooks_of(part: Any) -> dict[str, int]:
    """Return how many hooks a module has, or an optimizer, or torch for all modules."""
    return {k: len(v) for k, v in vars(part).items() if "hook" in k and isinstance(v, dict)}


def check_that_nothing_grows(
    repeat: Callable[[], object], times: int, may_take: int, model: nn.Module, optimizer: Any
) -> None:
    for _ in range(3):  # caches
        repeat()
    before, blocks = things(model, optimizer), sys.getallocatedblocks()
    for _ in range(times):
        repeat()
    assert things(model, optimizer) == before
    gc.collect()
    assert sys.getallocatedblocks() - blocks < may_take


def build() -> tuple[Any, Any]:
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32))
    return model, amp.optimizers.FusedAdam(model.parameters(), lr=1e-3)


def step(model: Any, optimizer: Any) -> None:
    train_on(model(torch.ones(32, 32)).square().mean(), optimizer)


@pytest.mark.parametrize(("level", "cycles"), RUNS)
def test_sessions_leave_nothing(level: str, cycles: int) -> None:
    model, optimizer = build()

    def cycle() -> None:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        step(model, optimizer)
        amp.state_dict()
        amp.get_session().close()

    check_that_nothing_grows(cycle, cycles, SESSIONS_MAY_TAKE, model, optimizer)


@pytest.mark.parametrize(("level", "cycles"), RUNS)
def test_sessions_that_are_dropped_leave_nothing(level: str, cycles: int) -> None:
    others: Any = build()

    def cycle() -> None:
        model, optimizer = build()
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        step(model, optimizer)

    check_that_nothing_grows(cycle, cycles, SESSIONS_MAY_TAKE, *others)


OPTIMIZERS = [amp.optimizers.FusedAdam, torch.optim.AdamW]


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("level", SOME_QUICK)
def test_a_step_leaves_no_object(level: str, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even an empty list; a scaler's transitions, of which it keeps the last ones, aside."""
    monkeypatch.setattr("amp.training.recorder.KEPT", 8)
    model, optimizer = started(build()[0], lambda p: make(p, lr=1e-3), level)
    for _ in range(15):
        step(model, optimizer)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(50):
        step(model, optimizer)
    gc.collect()
    assert len(gc.get_objects()) - before < 25


@pytest.mark.parametrize("level", QUICK)
def test_moments_that_a_script_replaces_are_freed(level: str) -> None:
    model, optimizer = started(build()[0], amp.optimizers.FusedAdam, level)
    for _ in range(3):
        step(model, optimizer)
    for state in optimizer.state.values():
        freed = weakref.ref(state["exp_avg"])
        state["exp_avg"] = state["exp_avg"].clone()
        assert freed() is None


@pytest.mark.parametrize(("level", "cycles"), RUNS)
def test_sessions_of_their_own_that_are_dropped_leave_nothing(level: str, cycles: int) -> None:
    others: Any = build()

    def cycle() -> None:
        model, optimizer = build()
        amp.Session(level, verbosity=0).initialize(model, optimizer)
        del model, optimizer
        gc.collect()

    check_that_nothing_grows(cycle, cycles, SESSIONS_MAY_TAKE, *others)
    assert (torch.eye(2) @ torch.eye(2)).dtype is torch.float32
    give_back()


def give_back() -> None:
    """Give torch back what sessions that were dropped have patched."""
    gc.collect()
    with amp.Session("O1", verbosity=0) as session:
        session.initialize(nn.Linear(2, 2))


@pytest.mark.parametrize("kept", ["model", "copy", "optimizer"])
def test_functions_cast_while_the_session_its_model_or_its_optimizer_is_there(kept: str) -> None:
    model, optimizer = build()
    amp.Session("O4", verbosity=0).initialize(model, optimizer)
    left: list[Any] = [{"model": model, "copy": copy.deepcopy(model), "optimizer": optimizer}[kept]]
    del model, optimizer
    gc.collect()
    assert (torch.eye(2) @ torch.eye(2)).dtype is torch.bfloat16
    left.clear()
    gc.collect()
    assert (torch.eye(2) @ torch.eye(2)).dtype is torch.float32
    give_back()


@pytest.mark.parametrize(("level", "cycles"), RUNS)
def test_steps_and_evaluations_leave_nothing(level: str, cycles: int) -> None:
    model, optimizer = build()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            model(torch.ones(32, 32))
        model.train()

    for repeat, times in ((lambda: step(model, optimizer), 10 * cycles), (evaluate, cycles)):
        check_that_nothing_grows(repeat, times, STEPS_MAY_TAKE, model, optimizer)


def test_a_session_may_be_collected_while_torch_calls_the_hooks_of_a_step() -> None:
    amp.initialize(*build(), opt_level="O5", verbosity=0)

    def collect(*_: object) -> None:
        gc.collect()

    hook = register_optimizer_step_pre_hook(collect)
    others = build()  # of no session, and nothing refers to the session that has just been made
    try:
        amp.Session("O5", verbosity=0).initialize(*build())
        others[1].step()
        others[1].step()
    finally:
        hook.remove()


@pytest.mark.parametrize("cls", [torch.optim.Adam, amp.optimizers.FusedAdam])
@pytest.mark.parametrize("options", [{}, {"master_weights": "kahan"}], ids=["whole", "kahan"])
def test_sessions_that_nobody_closes_go_with_their_models(cls: Any, options: Any) -> None:
    before = torch.lerp, torch.nn.utils.clip_grad_norm_, vars(nn.Module).get("__deepcopy__")
    for _ in range(3):
        model = nn.Linear(4, 4)
        optimizer = cls(model.parameters())
        session = amp.Session(opt_level="O2", verbosity=0, **options)
        model, optimizer = session.initialize(model, optimizer)
        step_on(model(torch.ones(2, 4)).sum(), optimizer)
        gone = weakref.ref(session)
        del model, optimizer, session
        gc.collect()
        assert gone() is None
    assert before == (torch.lerp, torch.nn.utils.clip_grad_norm_, vars(nn.Module).get("__deepcopy__"))


@pytest.mark.parametrize("overflows_at", [None, 3])
def test_what_checks_have_found_does_not_pile_up(
    monkeypatch: pytest.MonkeyPatch, overflows_at: int | None
) -> None:
    monkeypatch.setattr(verdicts, "MOST_VERDICTS", 8)
    model, optimizer = started(nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1), "O1")
    before = model.weight.detach().clone()
    attached = AttachedOptimizer.of(optimizer)
    assert attached is not None
    for i in range(20):
        loss = model(torch.ones(1, 2)).sum() * (math.inf if i == overflows_at else 1e-3)
        run_backward(loss, optimizer)
        assert len(attached.gradients.verdicts.found) <= 8
    optimizer.step()
    assert amp.step_was_skipped(optimizer) is (overflows_at is not None)
    assert amp.scalars(optimizer)["amp/skipped_steps"] == (overflows_at is not None)
    assert torch.equal(model.weight, before) is (overflows_at is not None)
