"""Two threads may train two models of two sessions at once: each ends as if it had trained alone."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amp

STEPS = int(os.environ.get("AMP_THREAD_STEPS", "4"))
PAIRS = [("O1", "O4"), ("O1", "O0"), ("O1", "O2"), ("O2", "O5"), ("O4", "O6"), ("O4", "O0")]


class Net(nn.Module):
    """A weight that is used twice, with a meeting in between, and ops of all kinds of rules."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.linear, self.norm, self.rnn = nn.Linear(16, 16), nn.LayerNorm(16), nn.GRU(16, 16)
        self.head = nn.Linear(16, 16)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 4
        self.meet: Callable[[], object] = int

    def forward(self, x: Tensor) -> Tensor:
        """Return `[N, 16]`."""
        x = F.gelu(self.linear(x))
        self.meet()
        x = self.norm(self.linear(x) @ self.linear.weight)
        self.meet()
        x = x + F.softmax(self.rnn(x[None])[0][0], -1).exp() * torch.cat([x, x])[: len(x)]
        return self.head(x)


class Training:
    """A model and its session, trained for some steps, with a meeting after each part of one."""

    def __init__(self, level: str, seed: int) -> None:
        self.level, self.net = level, Net(seed)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(seed + 10)
        self.inputs = torch.randn(STEPS, 8, 16, generator=generator)
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
        loss = F.mse_loss(output, x) + product.float().square().mean()
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


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


@functools.cache
def alone(level: str, seed: int) -> tuple[dict[str, Any], list[torch.dtype]]:
    """Return what a training gives that has the process for itself."""
    training = Training(level, seed)
    training.run()
    training.session.close()
    return training.result(), training.outside


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


@pytest.mark.parametrize("opened", ["before", "reversed", "in the threads"])
@pytest.mark.parametrize("levels", PAIRS, ids="-".join)
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
        assert_equal(training.result(), result)
