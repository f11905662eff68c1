"""Small models and batches that several test files train."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amp
from amp.dtypes import LOW_PRECISION
from tests import levels

PROFILES = {level: amp.load_profile(level) for level in levels.LEVELS}
LEVELS = tuple(PROFILES)
CAST_LEVELS = tuple(level for level, p in PROFILES.items() if p.cast_model_type in LOW_PRECISION)
DYNAMIC_LEVELS = tuple(level for level, p in PROFILES.items() if p.loss_scaling.dynamic)
MASTER_LEVELS = tuple(level for level, p in PROFILES.items() if p.master_weights)

MODEL_DTYPE: dict[str, Any] = {
    level: p.cast_model_type or torch.float32 for level, p in PROFILES.items()
}
BY_OP_DTYPE: dict[str, Any] = {
    level: p.patch_torch_functions_type for level, p in PROFILES.items() if p.patch_torch_functions
}
BY_OP_LEVELS = tuple(BY_OP_DTYPE)
HALF_DTYPE: dict[str, Any] = BY_OP_DTYPE | {level: MODEL_DTYPE[level] for level in CAST_LEVELS}
"""The dtype of matrix products, at the levels where that is not float32."""


TOLERANCE = {"O0": 1e-6, "O1": 5e-3, "O2": 5e-3, "O3": 2e-2, "O4": 4e-2, "O5": 4e-2}
"""How far weights after a few steps, and gradients, may be from those of FP32."""


def initialize(models: Any, optimizers: Any, level: str, **kwargs: Any) -> Any:
    """`amp.initialize`, with a dynamic scale at which a gradient of 1 does not overflow float16."""
    if level in DYNAMIC_LEVELS:
        kwargs.setdefault("loss_scale", {"init": 1024})
    return amp.initialize(models, optimizers, opt_level=level, **kwargs)


def started(model: nn.Module, make: Callable[[Any], Any], level: str, **options: Any) -> Any:
    """Return a model and an optimizer that is made of its parameters, initialized as above, quietly."""
    options.setdefault("verbosity", 0)
    return initialize(model, make(model.parameters()), level, **options)


def run_backward(loss: Tensor, optimizer: Any, **options: Any) -> Tensor:
    """Run the backward of a loss in a block, or without one where there is no optimizer; return it."""
    if optimizer is None:
        loss.backward()
    else:
        with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
            scaled_loss.backward()
    return loss


def step_on(loss: Tensor, optimizer: Any, **options: Any) -> Tensor:
    """Step with the gradients of a loss, besides those that are there, and return it."""
    run_backward(loss, optimizer, **options)
    optimizer.step()
    return loss


def train_on(loss: Tensor, optimizer: Any, **options: Any) -> Tensor:
    """Step with the gradients of a loss, clear them, and return the loss."""
    step_on(loss, optimizer, **options)
    optimizer.zero_grad()
    return loss


def note_of(call: Callable[[], object], error: Any = RuntimeError) -> str:
    """Return the notes of the error that a call raises."""
    with pytest.raises(error) as caught:
        call()
    return "".join(getattr(caught.value, "__notes__", []))


@contextmanager
def casting(level: str, **options: Any) -> Iterator[None]:
    """Let functions cast as at a level, outside of models."""
    with amp.Session(level, **options) as session:
        session.initialize(None)
        yield


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Make the CUDA driver refuse to let the host wait for the device."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class ConvNet(nn.Module):
    """Images `[B, 1, 6, 6]` to logits `[B, 3]`, with batch norm and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(64, 3)
        self.register_buffer("offset", torch.full((3,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).flatten(1)) + self.offset


class Wrapper(nn.Module):
    """As DDP and DataParallel: the wrapped model is `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)  # type: ignore[no-any-return]


def conv_net(seed: int = 0) -> ConvNet:
    torch.manual_seed(seed)
    return ConvNet()


def linear(seed: int = 0, d: int = 4) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(d, d)


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    images = torch.randn(8, 1, 6, 6, generator=generator)
    return images, torch.randint(0, 3, (8,), generator=generator)


def sgd(of: Any, **kwargs: Any) -> torch.optim.SGD:
    """Return an optimizer of a model, or of parameters."""
    return torch.optim.SGD(_parameters(of), **{"lr": 0.1, "momentum": 0.9, **kwargs})


def adamw(of: Any, **kwargs: Any) -> torch.optim.AdamW:
    """Return an optimizer of a model, or of parameters."""
    return torch.optim.AdamW(_parameters(of), **{"lr": 1e-2, **kwargs})


def _parameters(of: Any) -> Any:
    return of.parameters() if isinstance(of, nn.Module) else of
