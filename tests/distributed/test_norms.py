"""Clipping and norm-based optimizers on shards do what one process does, up to the order of sums."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

import amp
from amp.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from tests.distributed.models import (
    SIZES,
    WRAPS,
    assert_equal_on_ranks,
    backward,
    batches,
    loss_of,
    make,
    weights_of,
)
from tests.distributed.world import ranks

MADE: dict[str, Any] = {
    "LAMB": lambda params: FusedLAMB(params, lr=0.05, weight_decay=0.1, max_grad_norm=0.1),
    "NVLAMB": lambda params: FusedLAMB(params, lr=0.05, weight_decay=0.0, use_nvlamb=True),
    "NovoGrad": lambda params: FusedNovoGrad(params, lr=0.05, weight_decay=0.1),
    "NovoGrad largest": lambda params: FusedNovoGrad(params, lr=0.05, norm_type=0, max_grad_norm=0.1),
    "Adam": lambda params: FusedAdam(params, lr=0.05, eps=1e-3, max_grad_norm=0.1),
    "SGD clipped": lambda params: FusedSGD(params, lr=0.5),
}


def trained(model: Any, optimizer: str, level: str, steps: int) -> dict[str, Tensor]:
    """Train on the whole batch on every rank, so that all wrappers have the same gradients."""
    made = MADE[optimizer](model.parameters())
    model, made = amp.initialize(model, made, opt_level=level, verbosity=0)
    for _, (x, y) in zip(range(steps), batches(), strict=False):
        made.zero_grad()
        backward(loss_of(model, x, y), made)
        if "clipped" in optimizer:
            masters = list(amp.master_params(made))
            clip_grad_norm_(masters, 0.1)
        made.step()
    weights = weights_of(model)
    amp.get_session().close()
    return weights


@ranks(SIZES)
@pytest.mark.parametrize(
    ("wrap", "level", "optimizer"),
    [
        (wrap, level, optimizer)
        for wrap, level in (
            *(("fsdp2", "O0"), ("fsdp2", "O2"), ("tp", "O0"), ("hsdp", "O0"), ("sp", "O2")),
            ("fsdp2+tp", "O0"),
        )
        for optimizer in MADE
        # torch cannot add up norms of DTensors and others, or of several meshes
        if optimizer != "SGD clipped" or "tp" not in wrap
    ],
)
def test_norms_are_those_of_whole_tensors(rank: int, wrap: str, level: str, optimizer: str) -> None:
    start, expected = weights_of(make()), trained(make(), optimizer, level, 3)
    weights = trained(WRAPS[wrap](make()), optimizer, level, 3)
    for name in start:
        moved = (expected[name] - start[name]).norm()
        assert moved > 0
        error = ((weights[name] - expected[name]).norm() / moved).item()
        assert error < (1e-4 if level == "O0" else 0.1), (name, error)
    assert_equal_on_ranks(weights.values())
