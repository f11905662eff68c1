"""A forked process has a session of its own: it trains on or loads data; its parent sees none of it."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp
from tests.models import run_backward, started, step_on
from tests.processes import run_python

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


class Run:
    """A model with one of torch's optimizers and a fused one."""

    def __init__(self, level: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(
            nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16)
        )
        self.optimizers: Any = [
            amp.optimizers.FusedAdam(self.model[:2].parameters(), lr=1e-3),
            torch.optim.SGD(self.model[2:].parameters(), lr=1e-2, momentum=0.9),
        ]
        amp.initialize(self.model, self.optimizers, opt_level=level, verbosity=0, **options)
        self.session = amp.get_session()

    def train(self, steps: int, generator: torch.Generator) -> Any:
        """Return what there is to compare after some steps."""
        for _ in range(steps):
            self.step(torch.randn(16, 32, generator=generator))
        state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        return state, amp.state_dict()

    def step(self, x: Tensor) -> None:
        run_backward(self.model(x).square().mean(), self.optimizers)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def in_fork(function: Callable[[], Any]) -> Any:
    """Return what a function returns in a forked process, which it is to do within 20 seconds."""
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork where there are threads
        pid = os.fork()
    if not pid:
        try:
            signal.alarm(20)
            memory = io.BytesIO()
            torch.save(function(), memory)
            with open(theirs, "wb") as file:  # noqa: PTH123
                file.write(memory.getvalue())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as file:  # noqa: PTH123
        content = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, signal.Signals(-status).name
    assert content, "it has failed: see its stderr"
    return torch.load(io.BytesIO(content), weights_only=True)


def alone(function: Callable[..., None], *arguments: str) -> None:
    """Call a function of this module in a process of its own.

    torch refuses a backward in a fork of a process that has autograd's threads, as an earlier test may
    have started here.
    """
    code = f"import sys; from tests import test_fork; test_fork.{function.__name__}(*sys.argv[1:])"
    ended = run_python("-c", code, *arguments)
    assert ended.returncode == 0, ended.stderr


def same(one: Any, other: Any) -> bool:
    (weights, state), (other_weights, other_state) = one, other
    assert weights.keys() == other_weights.keys()
    return state == other_state and all(torch.equal(weights[k], other_weights[k]) for k in weights)


@pytest.mark.parametrize("level", ["O1", "O5", "O6"])
def test_a_fork_trains_on_as_its_parent_does(level: str) -> None:
    alone(train_on_in_a_fork, level)


def train_on_in_a_fork(level: str) -> None:
    generator = torch.Generator().manual_seed(0)
    run = Run(level)
    run.train(3, generator)

    def train_and_close() -> Any:
        result = run.train(3, generator)
        run.session.close()
        return result

    in_child = in_fork(train_and_close)
    assert same(in_child, run.train(3, generator))
    assert same(in_fork(lambda: run.train(0, generator)), run.train(0, generator))


def test_a_fork_may_train_while_another_thread_of_its_parent_steps() -> None:
    alone(fork_while_another_thread_steps)


def fork_while_another_thread_steps() -> None:
    """That thread holds a lock, which nobody releases in the fork."""

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if threading.current_thread() is thread:
                is_in_step.set()
                may_end.wait(25)
            return super().step(closure)

    is_in_step, may_end = threading.Event(), threading.Event()
    model, optimizer = started(nn.Linear(4, 4), lambda p: Slow(p, lr=0.1), "O5")

    def step() -> None:
        step_on(model(torch.ones(2, 4)).float().sum(), optimizer)

    def train() -> list[Tensor]:
        model.zero_grad()
        step()
        return [tensor.clone() for tensor in model.state_dict().values()]

    thread = threading.Thread(target=step)
    thread.start()
    try:
        assert is_in_step.wait(25)
        in_child = in_fork(train)
    finally:
        may_end.set()
        thread.join()
    assert all(bool(tensor.isfinite().all()) for tensor in in_child)


class Rows(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Tensor:
        return torch.arange(32.0).roll(i) @ torch.eye(32)


@pytest.mark.parametrize("level", ["O1", "O6"])
def test_workers_that_are_forked_in_training_change_nothing(level: str) -> None:
    found = []
    for workers in (0, 2):
        run = Run(level)
        for _ in range(2):
            context = "fork" if workers else None
            for batch in torch.utils.data.DataLoader(
                Rows(), 16, num_workers=workers, multiprocessing_context=context
            ):
                run.step(batch.float())
        found.append(run.train(0, torch.Generator()))
        run.session.close()
    assert same(*found)


def product() -> Tensor:
    """Return what is inf where it is cast to float16."""
    return torch.eye(3) * 1e5 @ torch.ones(3)


@pytest.mark.parametrize(("level", "dtype"), [("O1", torch.float16), ("O4", torch.bfloat16)])
def test_a_fork_casts_nothing_until_it_calls_the_model(level: str, dtype: torch.dtype) -> None:
    """It may load data, and then nothing is cast; or train, and then the loss is, too."""
    model: Any = nn.Linear(3, 3)
    output: list[Tensor] = []
    model.register_forward_hook(lambda module, args, y: output.append(y))
    amp.initialize(model, opt_level=level, verbosity=0)

    def work() -> list[Tensor]:
        before = product()
        model(torch.ones(2, 3))
        return [before, *output, product()]

    before, inside, after = in_fork(work)
    assert before.dtype is torch.float32
    assert (before == 1e5).all()
    assert inside.dtype is after.dtype is dtype
    assert product().dtype is dtype  # in the parent


def test_a_session_that_a_fork_opens_casts_as_ever() -> None:
    amp.initialize(nn.Linear(3, 3), opt_level="O1", verbosity=0)

    def work() -> list[Tensor]:
        amp.initialize(nn.Linear(3, 3), opt_level="O4", verbosity=0)
        return [product()]

    assert in_fork(work)[0].dtype is torch.bfloat16


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_process_with_threads_may_fork_one_that_multiplies(level: str) -> None:
    """torch's 16-bit products wait for ever in such a process: for threads that were not forked."""
    alone(fork_where_there_are_threads, level)


def fork_where_there_are_threads(level: str) -> None:
    torch.set_num_threads(2)
    amp.initialize(nn.Linear(3, 3), opt_level=level, verbosity=0)
    assert product().dtype is not torch.float32  # by two threads
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=lambda: queue.put(product().tolist()), daemon=True)
    process.start()
    try:
        assert queue.get(timeout=20) == [1e5] * 3
    finally:
        process.kill()
