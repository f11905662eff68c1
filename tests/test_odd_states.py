"""Training at each level is what it always is, in whatever state a script has put torch."""

import copy
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp
from tests.covering import covering
from tests.levels import FP8
from tests.levels import LEVELS as NOT_IN_FP8
from tests.models import run_backward, step_on
from tests.processes import ROOT, run_python
from tests.states import assert_same

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
    model: Any = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
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
            run_backward(nn.functional.cross_entropy(model(x), targets), optimizers)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        saved = [tensor.clone() for tensor in model.state_dict().values()]
        amp.get_session(fused).close()
    return saved


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@pytest.mark.parametrize(("state", "level"), covering(STATES, LEVELS, strength=1))
def test_training_is_what_it_always_is(level: str, state: str) -> None:
    plain = train(level, _as_it_is)
    assert all(bool(tensor.isfinite().all()) for tensor in plain)
    for found, expected in zip(train(level, STATES[state]), plain, strict=True):
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize("level", LEVELS)
def test_inference_mode_between_steps_changes_nothing(level: str) -> None:
    plain = train(level, _as_it_is)
    assert_same(train(level, _as_it_is, evaluates=True), plain)


def train_in_default_dtype(level: str | None) -> tuple[list[Tensor], list[str]]:
    """Return the weights of a model that is made in it, and what `initialize` warned of."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if level is not None:
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for _ in range(4):
        loss = nn.functional.cross_entropy(model(torch.randn(16, 16)), torch.arange(16) % 4)
        run_backward(loss, None if level is None else optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters()), [str(each.message) for each in caught]


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_that_is_made_in_float64_trains_in_it_and_initialize_says_so(level: str) -> None:
    with STATES["default float64"]():
        plain, _ = train_in_default_dtype(None)
        found, warned = train_in_default_dtype(level)
    assert all(map(torch.equal, found, plain))
    assert plain[0].dtype is torch.float64
    says_so = [message for message in warned if "float64, the default dtype. No level" in message]
    assert len(says_so) == (level != "O0")
    assert all("model.float()" in message for message in says_so)


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_that_is_made_in_bfloat16_is_refused_by_its_cause(level: str) -> None:
    with STATES["default bfloat16"]():
        model = nn.Linear(4, 4)
        before = model.weight.detach().clone()
        with pytest.raises(amp.AmpError, match=r"out torch.set_default_dtype\(torch.bfloat16\), "):
            amp.initialize(model, opt_level=level, verbosity=0)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("level", LEVELS)
def test_initialize_is_refused_in_inference_mode(level: str) -> None:
    model: Any = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.inference_mode():
        session = amp.Session(level, verbosity=0)
        with pytest.raises(RuntimeError, match=r"inference_mode is on.* before the block"):
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        with pytest.raises(RuntimeError, match=r"inference_mode is on"):
            session.initialize(None, optimizer)
        amp.initialize(model, optimizer, enabled=False)
    assert all(map(torch.equal, model.parameters(), weights))
    session.initialize(model, optimizer)
    for _ in range(2):
        step_on(model(torch.ones(2, 32)).float().mean(), optimizer)


@pytest.mark.parametrize("level", NOT_IN_FP8)
def test_a_model_that_was_made_in_inference_mode_is_refused(level: str) -> None:
    with torch.inference_mode():
        weights, buffers = nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)
    for model, name in ((weights, "parameter 'weight'"), (buffers, "buffer 'running_mean'")):
        with pytest.raises(RuntimeError, match=f"{name} was made in torch.inference_mode"):
            amp.initialize(model, opt_level=level, verbosity=0)
        amp.initialize(copy.deepcopy(model), opt_level=level, verbosity=0)
    assert weights.weight.dtype is torch.float32


def _sums(levels: list[str]) -> list[float]:
    weights = [train(level, _as_it_is) for level in levels]
    return [sum(float(tensor.double().abs().sum()) for tensor in each) for each in weights]


SCRIPT = """
import sys, torch, warnings
from tests.test_odd_states import _sums
torch.set_num_threads(1)
warnings.simplefilter("error")  # nothing warns that is not a user's business
print(sys.version.split()[0], *_sums(sys.argv[1:]))
"""


@pytest.mark.slow
def test_warnings_as_errors() -> None:
    ended = run_python("-c", SCRIPT, *LEVELS)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split()[1:] == list(map(str, _sums(LEVELS)))


@pytest.mark.slow
def test_without_assertions() -> None:
    """`python -O`: nothing that is needed is in an assert."""
    levels = ["O1", "O7"]
    command = [sys.executable, "-O", "-c", SCRIPT, *levels]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.split()[1:] == list(map(str, _sums(levels)))


def _python(version: str) -> str:
    """Return a Python of a version that can import torch, from the PATH; skip the test without one."""
    if sys.version.startswith(f"{version}."):
        pytest.skip("is the Python that runs all tests")
    for folder in os.get_exec_path():
        python = Path(folder, f"python{version}")
        ready = [str(python), "-c", "import torch, yaml, pytest"]
        if python.is_file() and not subprocess.run(ready, capture_output=True).returncode:
            return str(python)
    pytest.skip(f"no python{version} on the PATH has torch, pyyaml and pytest")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_each_python_trains_at_each_level(version: str) -> None:
    command = [_python(version), "-W", "error", "-c", SCRIPT, *LEVELS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    of, *sums = ended.stdout.split()
    assert of.startswith(f"{version}.")
    assert list(map(float, sums)) == pytest.approx(_sums(LEVELS), rel=1e-4)
