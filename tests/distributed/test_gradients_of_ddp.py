"""Scripts that use gradients around DDP's forward and backward train as they do in FP32."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import amp
from amp.optimizers import FusedSGD
from tests.covering import covering
from tests.distributed.models import (
    assert_equal_on_ranks,
    batches,
    data_rank,
    initialize,
    make,
    weights_of,
)
from tests.distributed.world import ranks

LEVELS: dict[str, dict[str, Any]] = {"O1": {"loss_scale": 128.0}, "O2": {"loss_scale": 128.0}, "O5": {}}


class Training:
    """A network under DDP and an optimizer, at a level or in FP32 without amp."""

    def __init__(self, level: str | None, fused: bool, views: bool) -> None:
        self.level = level
        model: Any = make()
        is_fused = fused and level is not None
        self.optimizer: Any = (FusedSGD if is_fused else torch.optim.SGD)(model.parameters(), 0.05, 0.9)
        if level is not None:
            model, self.optimizer = initialize(model, self.optimizer, level, **LEVELS[level])
        self.model = model
        self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=views)
        self.start = weights_of(model)
        self.batches = iter(batches(*data_rank("ddp")))

    def loss(self) -> Tensor:
        x, y = next(self.batches)
        loss: Tensor = (self.ddp(x).float() - y).square().mean()
        return loss

    def backward(self, loss: Tensor) -> None:
        if self.level is None:
            loss.backward()  # type: ignore[no-untyped-call]
            return
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()

    def step(self) -> None:
        self.optimizer.step()

    @property
    def parameters(self) -> list[Any]:
        return list(self.model.parameters())


def zero_grad_after_the_forward(t: Training) -> None:
    for _ in range(3):
        loss = t.loss()
        t.ddp.zero_grad()
        t.backward(loss)
        t.step()


def never_zeroed(t: Training) -> None:
    for _ in range(3):
        t.backward(t.loss())
        t.step()


def two_forwards(t: Training) -> None:
    for _ in range(2):
        loss = t.loss() + t.loss()
        t.optimizer.zero_grad()
        t.backward(loss)
        t.step()


def clipped_after_the_next_forward(t: Training) -> None:
    t.backward(t.loss())
    t.loss()
    torch.nn.utils.clip_grad_norm_(t.model.parameters(), 0.01)
    t.step()


def assigned_after_the_next_forward(t: Training) -> None:
    t.backward(t.loss())
    saved = [p.grad.clone() for p in t.parameters]
    t.loss()
    for p, grad in zip(t.parameters, saved, strict=True):
        p.grad = grad * 0.1
    t.step()


def accumulated_without_communication(t: Training) -> None:
    for _ in range(2):
        t.model.zero_grad()
        with t.ddp.no_sync():
            t.backward(t.loss())
        t.backward(t.loss())
        torch.nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)
        t.step()


def a_backward_outside_of_a_block(t: Training, zeroes: bool = False) -> None:
    """It adds to the gradients of the step before, in DDP's buckets, unless these are zeroed."""
    t.backward(t.loss())
    t.step()
    if zeroes:
        t.optimizer.zero_grad()
    t.loss().backward()  # type: ignore[no-untyped-call]
    t.step()


SCRIPTS: dict[str, Callable[[Training], None]] = {
    script.__name__: script
    for script in (
        *(zero_grad_after_the_forward, never_zeroed, two_forwards, clipped_after_the_next_forward),
        *(assigned_after_the_next_forward, accumulated_without_communication),
        a_backward_outside_of_a_block,
    )
}
SCRIPTS["a_backward_outside_after_zero_grad"] = partial(a_backward_outside_of_a_block, zeroes=True)


@cache
def moved(script: str, level: str | None, fused: bool, views: bool) -> Tensor:
    """Return how far a script has moved the weights."""
    training = Training(level, fused, views)
    SCRIPTS[script](training)
    now = weights_of(training.model)
    assert_equal_on_ranks(now.values())
    pairs = zip(now.values(), training.start.values(), strict=True)
    return torch.cat([(after.float() - before.float()).flatten() for after, before in pairs])


@ranks(2)
@pytest.mark.parametrize(("script", "level", "fused"), covering(SCRIPTS, LEVELS, [False, True]))
def test_a_script_trains_as_in_fp32(rank: int, script: str, level: str, fused: bool) -> None:
    for views in (False, True):
        expected, found = moved(script, None, False, views), moved(script, level, fused, views)
        assert expected.norm() > 1e-4
        assert (found - expected).norm() < 0.03 * expected.norm()
