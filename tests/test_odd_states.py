"""Training at each level is what it always is, in whatever state a script has put torch."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp
from tests.levels import FP8
from tests.levels import LEVELS as NOT_IN_FP8
from tests.processes import run_python

LEVELS = [*NOT_IN_FP8, *FP8]


@contextmanager
def _set(setter: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


STATES: dict[str, Callable[[], Any]] = {
    "flush denormal": lambda: _set(torch.set_flush_denormal, True, False),
    "deterministic": lambda: _set(torch.use_deterministic_algorithms, True, False),
    "default float64": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
    "default bfloat16": lambda: _set(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "default device meta": lambda: _set(torch.set_default_device, "meta", None),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "no multithreading": lambda: torch.autograd.set_multithreading_enabled(False),
}


def train(level: str, around: Callable[[], Any], evaluates: bool = False) -> list[Tensor]:
    """Return the weights after some steps of two optimizers, all but the models made in `around`."""
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(16, 32, generator=generator) for _ in range(4)]
    targets = torch.arange(16) % 4
    model: Any = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    fused: Any = amp.optimizers.FusedAdam(model[:2].parameters(), lr=1e-3)
    optimizers: Any = [fused, torch.optim.SGD(model[2:].parameters(), lr=1e-2, momentum=0.9)]
    with around():
        model, optimizers = amp.initialize(model, optimizers, opt_level=level, verbosity=0)
        for x in data:
            if evaluates:
                model.eval()
                with torch.inference_mode():
                    model(x)
                    model.state_dict()
                model.train()
            loss = nn.functional.cross_entropy(model(x), targets)
            with amp.scale_loss(loss, optimizers) as scaled_loss:
                scaled_loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        saved = [tensor.clone() for tensor in model.state_dict().values()]
        amp.get_session(fused).close()
    return saved


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("level", LEVELS)
def test_training_is_what_it_always_is(level: str, state: str) -> None:
    plain = train(level, _as_it_is)
    assert all(bool(tensor.isfinite().all()) for tensor in plain)
    for found, expected in zip(train(level, STATES[state]), plain, strict=True):
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize("level", LEVELS)
def test_inference_mode_between_steps_changes_nothing(level: str) -> None:
    plain = train(level, _as_it_is)
    for found, expected in zip(train(level, _as_it_is, evaluates=True), plain, strict=True):
        assert torch.equal(found, expected)


def _sums(levels: list[str]) -> list[float]:
    weights = [train(level, _as_it_is) for level in levels]
    return [sum(float(tensor.double().abs().sum()) for tensor in each) for each in weights]


@pytest.mark.slow
def test_warnings_as_errors() -> None:
    """`python -W error`: nothing warns that is not a user's business."""
    script = (
        "import sys, warnings, torch; from tests.test_odd_states import _sums\n"
        "torch.set_num_threads(1)\n"
        "warnings.simplefilter('error')\n"
        "print(_sums(sys.argv[1:]))\n"
    )
    ended = run_python("-c", script, *LEVELS)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == str(_sums(LEVELS))


@pytest.mark.slow
def test_without_assertions() -> None:
    """`python -O`: nothing that is needed is in an assert."""
    script = (
        "import sys, torch; from tests.test_odd_states import _sums\n"
        "torch.set_num_threads(1)\n"
        "print(_sums(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-O", "-c", script, *LEVELS]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == str(_sums(LEVELS))
