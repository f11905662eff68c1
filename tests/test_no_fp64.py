"""No FP64 on a device that has none, as MPS: nothing that a training loop does makes such a tensor.

The CPU stands in: the library is told that it has no FP64, and a dispatch mode refuses each operation
that takes or returns a float64 tensor, of any size. Python's floats, with which torch's operations
compute on any device, are none.
"""

from __future__ import annotations

import io
import itertools
import math
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import amp
from amp import kernels
from amp.kernels import backend, update_scale
from amp.optimizers import FusedAdam
from tests import training
from tests.covering import covering
from tests.levels import DYNAMIC, WITH_MASTERS
from tests.models import batch, conv_net, run_backward, started

LIBRARY = (*amp.__path__, *kernels.__path__)
SCALING: dict[str, Any] = {"init": 2.0**12, "growth_interval": 2, "hysteresis": 2}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **training.OPTIMIZERS,
    "FusedAdam, lr a tensor": lambda params: FusedAdam(params, lr=torch.tensor(0.01)),
    "FusedAdam, clipping": lambda params: FusedAdam(params, lr=0.01, max_grad_norm=1.0),
}
SOME = ("AdamW", "FusedAdam, clipping")


def is_of_torchs_grad_scaler(frame: FrameType | None) -> bool:
    """Whether torch's own GradScaler asks, which does without FP64 on MPS, by the device's name."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name == torch.amp.grad_scaler.__file__ or name.startswith(LIBRARY):
            return name == torch.amp.grad_scaler.__file__
        frame = frame.f_back
    return False


class NoFloat64(TorchDispatchMode):
    """Refuses float64 as MPS does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            if not isinstance(value, Tensor) or value.dtype not in (torch.float64, torch.complex128):
                continue
            if not is_of_torchs_grad_scaler(sys._getframe()):
                raise TypeError(f"{func} takes or makes {value.dtype}, which the device does not have")
        return result


@pytest.fixture(autouse=True)
def the_scale_is_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_scale, "is_on_host", lambda tensor: False)


@pytest.fixture
def device_without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_scale, "has_float64", lambda device: False)


def train(model: nn.Module, optimizer: Any, iterations: int = 6) -> None:
    """Train as scripts do: two losses, accumulation, a delay, clipping, and overflows that are seen."""
    for i in range(iterations):
        images, labels = batch(i)
        optimizer.zero_grad(set_to_none=bool(i % 2))
        for loss_id in range(1 + i % 2):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            if i in (2, 3) and amp.get_session().properties.loss_scaling.check:
                loss = loss * math.inf
            delay = i == 5 and loss_id == 0
            run_backward(loss, optimizer, loss_id=loss_id, delay_unscale=delay)
        if i in (1, 4):
            clip_grad_norm_(amp.master_params(optimizer), 0.5)
        optimizer.step()
    assert amp.loss_scale() > 0


def run(level: str, name: str, **options: Any) -> None:
    """Train, save, load into new objects, and go on."""
    files = []
    for turn in range(2):
        model, optimizer = started(conv_net(), OPTIMIZERS[name], level, num_losses=2, **options)
        if turn:
            saved, state, scalers = torch.load(io.BytesIO(files[0]), weights_only=True)
            model.load_state_dict(saved)
            optimizer.load_state_dict(state)
            amp.load_state_dict(scalers)
        train(model, optimizer)
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict(), amp.state_dict()], file)
        files.append(file.getvalue())
        amp.get_session().close()


@pytest.mark.usefixtures("device_without_float64")
@pytest.mark.parametrize(
    ("level", "name"),
    [
        *(("O2", name) for name in OPTIMIZERS),
        *(
            pytest.param(level, name, marks=pytest.mark.slow)
            for level, name in zip(itertools.cycle(("O1", "O5", "O5", "O1")), OPTIMIZERS, strict=False)
        ),
    ],
)
def test_a_training_loop_makes_none(level: str, name: str) -> None:
    with NoFloat64():
        run(level, name, loss_scale=SCALING)


@pytest.mark.usefixtures("device_without_float64")
@pytest.mark.parametrize(
    ("level", "options", "name"),
    covering(
        *(WITH_MASTERS, [{}, {"loss_scale": 3.0}, {"master_weights": "split16"}], SOME),
        strength=2,
    ),
)
def test_nor_does_one_with_other_properties(level: str, options: dict[str, Any], name: str) -> None:
    with NoFloat64():
        run(level, name, **options)


@pytest.mark.usefixtures("device_without_float64")
def test_nor_does_one_with_moments_in_bfloat16() -> None:
    with NoFloat64():
        run("O5", "FusedAdam", state_dtype="bfloat16", loss_scale=SCALING)


@pytest.mark.usefixtures("device_without_float64")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nor_does_a_grad_scaler(name: str) -> None:
    with NoFloat64():
        model = conv_net()
        optimizer = OPTIMIZERS[name](model.parameters())
        scaler = amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        for i in range(6):
            images, labels = batch(i)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            scaler.scale(loss * math.inf if i == 2 else loss).backward()
            if i % 2:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update(64.0 if i == 4 else None)
        other = amp.GradScaler("cpu")
        other.load_state_dict(scaler.state_dict())
        assert other.get_scale() == scaler.get_scale()


@pytest.mark.parametrize("level", DYNAMIC)
def test_where_there_is_float64_the_scale_is_computed_in_it_and_that_is_seen(level: str) -> None:
    with NoFloat64(), pytest.raises(TypeError, match="float64"):
        run(level, "FusedAdam", loss_scale=SCALING)


@pytest.mark.usefixtures("device_without_float64")
def test_scales_that_are_powers_of_two_move_the_same_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = [torch.tensor([2.0**12, 2.0**-12, 0.0, 2.0, 0.0, 0.0, 0.0]) for _ in range(2)]
    for i in range(30):
        for state, has in zip(states, (True, False), strict=True):
            monkeypatch.setattr(update_scale, "has_float64", lambda device, has=has: has)
            state[4] = float(i % 7 == 3)
            update_scale.update_scale(
                state,
                growth_factor=2.0,
                backoff_factor=0.5,
                growth_interval=2,
                hysteresis=2,
                reset_each_step=False,
                floor=2.0**-126,
                ceiling=2.0**24,
            )
        assert torch.equal(*states)


def test_which_devices_have_it() -> None:
    assert not backend.has_float64(torch.device("mps"))
    assert all(backend.has_float64(torch.device(name)) for name in ("cpu", "cuda"))
