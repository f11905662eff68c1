"""Ctrl-C at any line of a step or a block leaves all as before it, or as after it, never between."""

import functools
import gc
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp
from amp.kernels.interrupts import Changes
from tests.interrupting import Interrupter, every_nth_line, interrupt
from tests.models import run_backward, started
from tests.tried import TRIED


class Training:
    """Two groups, a norm that stays FP32, and everything of it that can be compared."""

    def __init__(self, level: str, optimizer: Callable[..., Any], **options: Any) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 1)]
        self.model: Any = nn.Sequential(*layers)
        momentum = {"momentum": 0.9} if "SGD" in optimizer.__name__ else {}
        groups = [
            {"params": [p for layer in layers[:3] for p in layer.parameters()]},
            {"params": list(layers[3].parameters()), "weight_decay": 0.1},
        ]
        made = optimizer(groups, lr=1e-2, **momentum)
        self.model, self.optimizer = amp.initialize(
            self.model, made, opt_level=level, verbosity=0, **options
        )
        self.x = torch.randn(16, 16)
        for _ in range(2):
            self.block()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def block(self) -> None:
        run_backward(self.model(self.x).float().square().mean(), self.optimizer)

    def weights(self) -> dict[str, Tensor]:
        """Return copies of the masters, the model's own weights, and the optimizer's state."""
        found = {f"saved {name}": t.clone() for name, t in self.model.state_dict().items()}
        found |= {f"model {name}": t.detach().clone() for name, t in self.model.named_parameters()}
        for i, (_, entries) in enumerate(self.optimizer.state_dict()["state"].items()):
            found |= {f"{i} {key}": t.clone() for key, t in entries.items() if isinstance(t, Tensor)}
        for key, value in amp.get_session(self.optimizer).state_dict().items():
            if isinstance(value, dict) and "loss_scale" in value:
                found[key] = torch.tensor([value["loss_scale"], value["unskipped"]])
        return found

    def gradients(self) -> dict[str, Tensor]:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1e9)  # finds what masters are still to get
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        return {f"grad {i}": p.grad.clone() for i, p in enumerate(params) if p.grad is not None}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    names = sorted(a.keys() | b.keys())
    return [k for k in names if k not in a or k not in b or not torch.equal(a[k], b[k])]


FUSED = amp.optimizers
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "O1 SGD": ("O1", torch.optim.SGD, {}),
    "O2 SGD": ("O2", torch.optim.SGD, {}),
    "O2 Adam": ("O2", torch.optim.Adam, {}),
    "O3 SGD": ("O3", torch.optim.SGD, {"loss_scale": 128.0}),
    "O5 Adam": ("O5", torch.optim.Adam, {}),
    "O5 split16 Adam": ("O5", torch.optim.Adam, {"master_weights": "split16"}),
    "O1 FusedAdam": ("O1", FUSED.FusedAdam, {}),
    "O2 FusedSGD": ("O2", FUSED.FusedSGD, {}),
    "O2 FusedAdam": ("O2", FUSED.FusedAdam, {}),
    "O2 FusedLAMB": ("O2", FUSED.FusedLAMB, {}),
    "O2 FusedNovoGrad": ("O2", FUSED.FusedNovoGrad, {}),
    "O5 kahan FusedAdam": ("O5", FUSED.FusedAdam, {"master_weights": "kahan"}),
    "O6 FusedLion": ("O6", FUSED.FusedLion, {}),
    "O6 delayed SGD": ("O6", torch.optim.SGD, {"fp8": "delayed"}),
}


QUICK = {"O2 SGD", "O5 split16 Adam", "O2 FusedNovoGrad", "O5 kahan FusedAdam", "O6 delayed SGD"}


def some_quick(cases: Iterable[str]) -> list[Any]:
    return [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in cases]


def interrupted(case: str, unit: str, every: int, blocks: int) -> Iterator[tuple[Training, str]]:
    """Yield trainings that were interrupted in a unit of work, after some blocks, and where."""

    def make() -> Training:
        level, optimizer, options = CASES[case]
        training = Training(level, optimizer, **options)
        for _ in range(blocks):
            training.block()
        return training

    training = make()
    counted = interrupt(-1, functools.partial(run, training, unit))
    amp.get_session(training.optimizer).close()
    assert counted.lines > 50
    for line in range(0, counted.lines, every):
        training = make()
        interrupter = interrupt(line, functools.partial(run, training, unit))
        yield training, interrupter.place
        amp.get_session(training.optimizer).close()


def run(training: Training, unit: str) -> None:
    training.block() if unit == "block" else training.optimizer.step()


@pytest.mark.parametrize("case", some_quick(CASES))
@every_nth_line(997, 331)
def test_an_interrupted_step_was_taken_or_not_begun(case: str, every: int) -> None:
    level, optimizer, options = CASES[case]
    expected = Training(level, optimizer, **options)
    expected.block()
    before = expected.weights()
    expected.optimizer.step()
    after = expected.weights()
    expected.optimizer.zero_grad()
    expected.block()
    expected.optimizer.step()
    next_one = expected.weights()
    for training, place in interrupted(case, "step", every, blocks=1):
        found = training.weights()
        if case == "O5 split16 Adam":  # group by group: torch's own step comes between two of them
            assert not set(differing(found, before)) & set(differing(found, after)), place
        elif differing(found, before):
            assert not differing(found, after), place
        else:
            training.optimizer.step()
            assert not differing(training.weights(), after), place
        if differing(training.weights(), after):
            continue
        training.optimizer.zero_grad()
        training.block()
        training.optimizer.step()
        assert not differing(training.weights(), next_one), place


@pytest.mark.parametrize("optimizer", [functools.partial(torch.optim.SGD, fused=True), FUSED.FusedAdam])
@every_nth_line(23, 3)
def test_an_interrupted_step_leaves_nothing_on_the_optimizer(optimizer: Any, every: int) -> None:
    """What a check has found would keep it from stepping for ever, once the session is closed."""
    torch.manual_seed(0)
    model, made = started(nn.Linear(4, 2), lambda p: optimizer(p, lr=0.1), "O2")

    def step(at: int) -> Interrupter:
        run_backward(model(torch.ones(2, 4)).float().mean(), made)
        interrupter = interrupt(at, made.step)
        made.zero_grad()
        return interrupter

    for _ in range(3):  # until each step runs through the same lines
        step(-1)
    before, counted = set(vars(made)), step(-1)
    for line in counted.first[::every]:
        interrupter = step(line)
        assert set(vars(made)) == before, interrupter.place
        step(-1)


@pytest.mark.parametrize("case", some_quick(CASES))
@every_nth_line(1999, 727)
def test_an_interrupted_block_has_added_its_gradients_or_none(case: str, every: int) -> None:
    level, optimizer, options = CASES[case]
    expected = Training(level, optimizer, **options)
    expected.block()
    one = expected.gradients()
    expected.block()
    two = expected.gradients()
    for training, place in interrupted(case, "block", every, blocks=1):
        found = training.gradients()
        if (
            found and level == "O6"
        ):  # a line in a layer's backward: what it had come to is added, as without amp
            kept, added = set(differing(found, two)), set(differing(found, one))
            assert not kept & added, place
        else:  # those of the block are dropped, or all if it was being left
            assert not found or not differing(found, one) or not differing(found, two), place


SIGNALS = int(os.environ.get("AMP_SIGNALS", "0"))
"""`AMP_SIGNALS=1000 pytest tests/test_interrupted_steps.py -k signal` sends each case that many."""


def test_a_change_that_was_made_as_the_interrupt_came_is_not_worked_out_again() -> None:
    x, signals = torch.zeros(3), [KeyboardInterrupt]

    def work_out() -> Callable[[], None]:
        value = x + 1

        def change() -> None:
            x.copy_(value)
            if signals:
                raise signals.pop()

        return change

    changes = Changes()
    changes.add_later(work_out)
    changes.add_later(work_out)
    with pytest.raises(KeyboardInterrupt):
        changes.make()
    assert x.tolist() == [2.0] * 3


def run_with_signal(function: Callable[[], None], seconds: float) -> None:
    """Call a function, and raise KeyboardInterrupt after some time, wherever it is by then."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # what an interrupt meets in a finalizer is swallowed
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
            function()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGALRM, before)
        gc.enable()


@pytest.mark.parametrize("case", ["O2 FusedAdam", "O5 kahan FusedAdam", "O1 FusedAdam", "O2 SGD"])
@pytest.mark.parametrize("unit", ["block", "step"])
@pytest.mark.parametrize("signals", [SIGNALS or 1, pytest.param(5, marks=pytest.mark.slow)])
def test_a_signal_at_any_moment_finds_a_step_or_a_block_whole(
    case: str, unit: str, signals: int
) -> None:
    if (case, unit) == ("O2 SGD", "step"):
        pytest.skip("torch's own step may be interrupted between two tensors")
    level, optimizer, options = CASES[case]

    def look(training: Training) -> dict[str, Tensor]:
        return training.weights() if unit == "step" else training.gradients()

    expected = Training(level, optimizer, **options)
    expected.block()
    before, start = look(expected), time.perf_counter()
    run(expected, unit)
    took, after = time.perf_counter() - start, look(expected)
    for seed in range(signals):
        training = Training(level, optimizer, **options)
        training.block()
        seconds = random.Random(seed).uniform(0, took)
        run_with_signal(functools.partial(run, training, unit), seconds)
        found = look(training)
        if unit == "step" or found:  # an interrupt in leaving a block drops all gradients
            assert not differing(found, before) or not differing(found, after), f"seed {seed}"
        if unit == "step" and not differing(found, before):
            training.optimizer.step()
            assert not differing(look(training), after), f"seed {seed}"
        TRIED["signals"] += 1
        amp.get_session(training.optimizer).close()
