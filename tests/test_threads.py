"""Two threads may train two models of two sessions at once: each ends as if it had trained alone."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import amp
from amp import active
from tests.covering import covering
from tests.states import assert_same

STEPS = int(os.environ.get("AMP_THREAD_STEPS", "4"))
PAIRS = [("O1", "O4"), ("O1", "O0"), ("O2", "O5"), ("O4", "O6")]


class Net(nn.Module):
    """A weight that is used twice, with a meeting in between, and ops of all kinds of rules.

    Args:
        seed: of the weights.
        checkpoints: None, or whether what is computed again in the backward is that by a backward of
            its own.
    """

    def __init__(self, seed: int, checkpoints: bool | None = None) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        generator = torch.Generator().manual_seed(seed)
        self.linear, self.norm, self.rnn = nn.Linear(16, 16), nn.LayerNorm(16), nn.GRU(16, 16)
        self.head = nn.Linear(16, 16)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 4
        self.meet: Callable[[], object] = int

    def forward(self, x: Tensor) -> Tensor:
        """Return `[N, 16]`."""
        if self.checkpoints is None:
            x = self.body(x)
        else:
            x = checkpoint(self.body, x, use_reentrant=self.checkpoints, preserve_rng_state=False)
        x = x + F.softmax(self.rnn(x[None])[0][0], -1).exp() * torch.cat([x, x])[: len(x)]
        return self.head(x)

    def body(self, x: Tensor) -> Tensor:
        """Return `[N, 16]`."""
        x = F.gelu(self.linear(x))
        self.meet()
        x = self.norm(self.linear(x) @ self.linear.weight)
        self.meet()
        return x


class Training:
    """A model and its session, trained for some steps, with a meeting after each part of one."""

    def __init__(self, level: str, seed: int, checkpoints: bool | None = None) -> None:
        self.level, self.net = level, Net(seed, checkpoints)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.5)
        generator = torch.Generator().manual_seed(seed + 10)
        self.inputs = torch.randn(STEPS, 8, 16, generator=generator)
        self.inputs.requires_grad_()  # or reentrant checkpoints have nothing to do
        self.session: Any = None
        self.losses: list[Tensor] = []
        self.outside: list[torch.dtype] = []

    def open(self) -> None:
        """Open the session."""
        self.session = amp.Session(self.level, verbosity=0)
        self.session.initialize(self.net, self.optimizer)

    def step(self, x: Tensor, meet: Callable[[], object] = int) -> None:
        """Train on one batch, with a loss that multiplies matrices outside of the forward."""
        output = self.net(x)
        meet()
        product = output.t() @ output
        self.outside.append(product.dtype)
        loss = F.mse_loss(output, x) + (product.float() / 64).tanh().mean()
        meet()
        with self.session.scale_loss(loss, self.optimizer) as scaled_loss:
            meet()
            scaled_loss.backward()
            meet()
        meet()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def run(self, meet: Callable[[], object] = int) -> None:
        """Open the session, where that has not been done, and train."""
        if self.session is None:
            self.open()
        self.net.meet = meet
        for x in self.inputs:
            self.step(x, meet)

    def result(self) -> dict[str, Any]:
        """Return what two trainings have in common if they are equal in every bit."""
        scale = torch.tensor(self.session.loss_scale())
        return {
            **{name: value.clone() for name, value in self.net.state_dict().items()},
            "losses": torch.stack(self.losses),
            "scale": scale,
        }


@functools.cache
def alone(
    level: str, seed: int, checkpoints: bool | None = None
) -> tuple[dict[str, Any], list[torch.dtype]]:
    """Return what a training gives that has the process for itself."""
    training = Training(level, seed, checkpoints)
    before = training.net.linear.weight.detach().clone()
    training.run()
    training.session.close()
    result = training.result()
    assert result["losses"].isfinite().all()
    assert not torch.equal(before, result["linear.weight"])
    return result, training.outside


def in_threads(*functions: Callable[[], object]) -> None:
    """Run functions at once, each in a thread, and raise what one of them raises."""
    errors: list[BaseException] = []

    def run(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[function], daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive() or errors, "a thread waits for ever"
    if errors:
        raise errors[0]


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    """Let threads take turns often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(
    ("opened", "levels"), covering(["before", "reversed", "in the threads"], PAIRS, strength=1)
)
def test_two_threads_train_as_each_does_alone(levels: tuple[str, str], opened: str) -> None:
    """`AMP_THREAD_STEPS=200 pytest tests/test_threads.py` trains longer."""
    expected = [alone(level, seed) for seed, level in enumerate(levels)]
    trainings = [Training(level, seed) for seed, level in enumerate(levels)]
    if opened != "in the threads":
        for training in trainings[:: -1 if opened == "reversed" else 1]:
            training.open()
    barrier = threading.Barrier(2, timeout=30)
    in_threads(*(functools.partial(training.run, barrier.wait) for training in trainings))
    for training, (result, outside) in zip(trainings, expected, strict=True):
        assert training.outside == outside
        training.session.close()
        assert_same(training.result(), result)


@pytest.mark.parametrize(
    ("checkpoints", "levels"),
    covering([None, False, True], [("O1", "O4"), ("O4", "O1"), ("O4", "O0")], strength=1),
)
def test_a_forward_goes_on_as_it_began_while_another_thread_trains(
    levels: tuple[str, str], checkpoints: bool | None
) -> None:
    """torch has one cache of casts for all threads, and empties it when any of them ends a forward."""
    expected = [alone(level, seed, checkpoints) for seed, level in enumerate(levels)]
    first, second = (Training(level, seed, checkpoints) for seed, level in enumerate(levels))
    first.open()
    second.open()
    rest = iter(second.inputs)

    def train_the_other() -> None:
        for x in rest:
            in_threads(lambda x=x: second.step(x))  # type: ignore[misc]
            break

    first.run(train_the_other)
    assert not list(rest)
    for training, (result, outside) in zip((first, second), expected, strict=True):
        assert training.outside == outside
        training.session.close()
        assert_same(training.result(), result)


def test_a_thread_casts_as_the_session_whose_model_it_called_last() -> None:
    eye = torch.eye(2)
    seen: list[torch.dtype] = []

    def look() -> None:
        seen.append((eye @ eye).dtype)

    sessions = [amp.Session(level, verbosity=0) for level in ("O1", "O4", "O0")]
    half, brain, single = models = [nn.Linear(2, 2) for _ in sessions]
    for session, model in zip(sessions, models, strict=True):
        session.initialize(model)
    look()
    for model in (half, brain, single, half):
        assert model(eye).dtype is (torch.float32 if model is single else (eye @ eye).dtype)
        look()
    in_threads(look)
    sessions[0].close()
    look()
    expected = ["bfloat16", "float16", "bfloat16", "float32", "float16", "bfloat16", "bfloat16"]
    assert [str(dtype).partition(".")[2] for dtype in seen] == expected


class Deep(torch.autograd.Function):
    """A backward in a backward, so often that autograd takes another thread for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, seen: dict[int, torch.dtype]) -> Tensor:
        """Return `x`."""
        ctx.depth, ctx.seen = depth, seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Go deeper."""
        ctx.seen[threading.get_ident()] = (torch.eye(2) @ torch.eye(2)).dtype
        if ctx.depth:
            with torch.enable_grad():
                Deep.apply(torch.ones(1, requires_grad=True), ctx.depth - 1, ctx.seen).backward()
        return *grads, None, None


@pytest.mark.parametrize("last", ["O1", "O4", "O0"])
def test_threads_of_autograd_cast_as_the_one_that_called_backward(last: str) -> None:
    sessions = {level: amp.Session(level, verbosity=0) for level in ("O1", "O0", "O4")}
    models = {level: session.initialize(nn.Linear(2, 2)) for level, session in sessions.items()}
    models[last](torch.eye(2))
    seen: dict[int, torch.dtype] = {}
    Deep.apply(torch.ones(1, requires_grad=True), 70, seen).backward()
    assert len(seen) > 1
    dtype = {"O1": torch.float16, "O4": torch.bfloat16, "O0": torch.float32}[last]
    assert set(seen.values()) == {dtype}


def test_a_scripts_own_functions_cast_as_their_thread_does() -> None:
    @amp.half_function
    def product(x: Tensor) -> torch.dtype:
        return x.dtype

    sessions = [amp.Session(level, verbosity=0) for level in ("O1", "O4")]
    half, brain = (session.initialize(nn.Linear(2, 2)) for session in sessions)
    seen = {}
    for model in (half, brain):
        model(torch.eye(2))
        seen[model] = product(torch.eye(2))
    assert seen == {half: torch.float16, brain: torch.bfloat16}


def test_threads_may_open_and_close_sessions_at_once() -> None:
    """What is left patched is found after the test."""
    seen: dict[str, set[torch.dtype]] = {"O1": set(), "O4": set()}

    def run(level: str) -> None:
        for _ in range(3):
            with amp.Session(level, verbosity=0) as session:
                model = session.initialize(nn.Sequential(nn.Linear(2, 2), nn.GELU()))
                for _ in range(20):
                    model(torch.eye(2))
                    seen[level].add((torch.eye(2) @ torch.eye(2)).dtype)

    in_threads(*(functools.partial(run, level) for level in seen))
    assert seen == {"O1": {torch.float16}, "O4": {torch.bfloat16}}


def test_a_forward_that_fails_leaves_the_cache_to_others() -> None:
    first, second = Training("O1", 0), Training("O4", 1)
    for training in (first, second):
        training.open()

    def fail() -> None:
        raise ZeroDivisionError

    def run_both() -> None:
        second.net.meet = fail
        with pytest.raises(ZeroDivisionError):
            in_threads(lambda: second.net(second.inputs[0]))
        fail()

    first.net.meet = run_both
    with pytest.raises(ZeroDivisionError):
        first.net(first.inputs[0])
    for seed, training in enumerate((first, second)):
        training.run()
        training.session.close()
        assert_same(training.result(), alone(training.level, seed)[0])


def test_a_model_runs_as_ever_while_another_thread_copies_it() -> None:
    session = amp.Session("O6", verbosity=0)
    model = session.initialize(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval())
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(x)
    is_over = threading.Event()

    def run() -> None:
        try:
            with torch.no_grad():
                for _ in range(300):
                    assert torch.equal(model(x), expected)
        finally:
            is_over.set()

    def copy_it() -> None:
        while not is_over.is_set():
            assert type(copy.deepcopy(model)) is type(model)

    in_threads(run, copy_it)


class BeingOpened:
    """A session that another thread opens, and that has patched no function yet, and its casts."""

    def __init__(self) -> None:
        self.casts = self
        self.dtype, self.live, self.is_inherited = torch.float16, True, False
        self.device_types: set[str] = set()
        self.wrappers: dict[Any, Any] = {}


@pytest.mark.parametrize("line", range(1, 6))
def test_a_thread_keeps_its_casts_while_another_one_opens_a_session(line: int) -> None:
    """The session is opened at each line of what decides whose casts apply."""
    with amp.Session("O1", verbosity=0) as first:  # so that functions ask whose casts apply
        first.initialize(None)
        model = amp.initialize(nn.Linear(2, 2), opt_level="O4", verbosity=0)
    model(torch.eye(2))
    lines, opened = 0, BeingOpened()

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code is not active.caster_here.__code__:
            return None
        if event == "line":
            lines += 1
            if lines == line:
                in_threads(lambda: active.add(opened))
        return trace

    sys.settrace(trace)
    try:
        dtype = (torch.eye(2) @ torch.eye(2)).dtype
    finally:
        sys.settrace(None)
        active.remove(opened)
    assert lines
    assert dtype is torch.bfloat16


TRAIN_IN_THREADS = """
import threading, torch, amp
torch.set_num_threads(1)

def train():
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with amp.scale_loss(model(torch.ones(4, 8)).float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    amp.get_session(optimizer).close()

threads = [threading.Thread(target=train) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""

REMOVES = hasattr(torch._C, "_remove_obj_from_tls")


@pytest.mark.slow
@pytest.mark.skipif(not REMOVES, reason="torch keeps objects of threads")
def test_a_process_that_has_trained_in_threads_ends_well() -> None:
    for _ in range(12):
        command = [sys.executable, "-W", "ignore", "-c", TRAIN_IN_THREADS]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.skipif(not REMOVES, reason="torch keeps objects of threads")
def test_a_thread_leaves_nothing_to_torch_when_it_ends() -> None:
    """torch drops what is left when the interpreter may be ending already, and the process aborts."""
    left, own = list[bool](), threading.local()

    class End:
        def __del__(self) -> None:
            left.append(torch._C._is_key_in_tls(active._CALLED_LAST))  # type: ignore[attr-defined]

    def train() -> None:
        model = amp.initialize(nn.Linear(2, 2), opt_level="O4", verbosity=0)
        model(torch.ones(1, 2))
        assert torch._C._is_key_in_tls(active._CALLED_LAST)  # type: ignore[attr-defined]
        own.end = End()  # which ends after what is older

    in_threads(train)
    assert left == [False]
