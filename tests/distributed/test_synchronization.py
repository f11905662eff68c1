"""Gradients that a wrapper has not reduced are not unscaled, and what would part the ranks raises."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import FullyShardedDataParallel

import amp
from tests.distributed import models
from tests.distributed.models import (
    SIZES,
    assert_equal_on_ranks,
    backward,
    batches,
    data_rank,
    loss_of,
    make,
    whole,
)
from tests.distributed.world import ranks
from tests.levels import DYNAMIC, LEVELS, WITH_MASTERS

FSDP1_LEVELS = [level for level in LEVELS if level in ("O0", "O1", "O4")]


@contextmanager
def not_synced(model: Any) -> Any:
    """FSDP2's way of not reducing gradients, as a context."""
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def prepared(wrap: str, level: str, **options: Any) -> tuple[Any, Any, Any]:
    return models.prepared(
        wrap, level, lambda model: torch.optim.SGD(model.parameters(), lr=1.0), **options
    )


def without_sync(wrapped: Any) -> AbstractContextManager[Any]:
    return wrapped.no_sync() if hasattr(wrapped, "no_sync") else not_synced(wrapped)


@ranks({**SIZES, "ddp views": 2, "ddp static": 2})
@pytest.mark.parametrize(
    ("wrap", "level"),
    [
        *itertools.product(["ddp", "ddp views", "ddp static", "fsdp2", "hsdp"], LEVELS),
        *(("fsdp1", level) for level in FSDP1_LEVELS),
    ],
)
def test_micro_batches_that_are_not_reduced_add_up_without_delay_unscale(
    rank: int, wrap: str, level: str
) -> None:
    """One step of size 1 on the sum of all batches moves the weights by minus that sum."""
    scaling = {"loss_scale": {"init": 64.0, "growth_interval": 1}} if level in DYNAMIC else {}
    model, wrapped, optimizer = prepared(wrap, level, **scaling)
    expected = make()
    data = list(zip(batches(*data_rank(wrap)), batches(), strict=True))
    if wrap == "ddp static":  # its first backward has to reduce
        backward(loss_of(wrapped, *data[0][0]), optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        expected.zero_grad()
        before = {name: whole(value).float().clone() for name, value in model.state_dict().items()}
        for i, (own, all_ranks) in enumerate(data):
            with without_sync(wrapped) if i < len(data) - 1 else nullcontext():
                backward(loss_of(wrapped, *own), optimizer)
            loss_of(expected, *all_ranks).backward()
        optimizer.step()
        weights = {name: whole(value).float() for name, value in model.state_dict().items()}
        if wrap == "fsdp1":
            with FullyShardedDataParallel.summon_full_params(model, with_grads=False):
                assert_equal_on_ranks(model.parameters())
        for name, parameter in expected.named_parameters():
            moved = before[name] - weights[name]
            error = (moved - parameter.grad).norm() / parameter.grad.norm()
            assert error < (0.05 if level != "O0" else 1e-4), (name, error)
        with torch.no_grad():
            for name, parameter in expected.named_parameters():
                parameter.copy_(weights[name])
    assert_equal_on_ranks(weights.values())
    if level in DYNAMIC:
        assert amp.loss_scale() == (512.0 if wrap == "ddp static" else 256.0)


@ranks(2)
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
@pytest.mark.parametrize("level", DYNAMIC)
def test_a_block_of_another_scale_between_them_is_refused(rank: int, wrap: str, level: str) -> None:
    """Before anything is touched: the accumulated gradients can still be stepped on."""
    model, wrapped, optimizer = prepared(wrap, level, num_losses=2)
    (x, y), *_ = batches(*data_rank(wrap))
    with without_sync(wrapped):
        backward(loss_of(wrapped, x, y), optimizer)
    loss = loss_of(wrapped, x, y)
    with (
        pytest.raises(amp.AmpError, match="not reduced over the ranks.* one loss_id"),
        amp.scale_loss(loss, optimizer, loss_id=1),
    ):
        raise NotImplementedError
    backward(loss, optimizer)
    optimizer.step()
    assert_equal_on_ranks(whole(value) for value in model.state_dict().values())


@ranks(2)
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_a_step_on_gradients_that_were_never_reduced_warns(rank: int, wrap: str) -> None:
    _, wrapped, optimizer = prepared(wrap, "O1")
    (x, y), *_ = batches(*data_rank(wrap))
    with without_sync(wrapped):
        backward(loss_of(wrapped, x, y), optimizer)
    with pytest.warns(amp.AmpWarning, match="not reduced over the ranks"):
        optimizer.step()


@ranks(2)
@pytest.mark.parametrize("level", LEVELS)
def test_join_is_refused_where_ranks_would_part(rank: int, level: str) -> None:
    _, wrapped, optimizer = prepared("ddp", level)
    allowed = level not in WITH_MASTERS and level not in DYNAMIC
    raises = nullcontext() if allowed else pytest.raises(amp.AmpError, match="join.*drop_last=True")
    with wrapped.join(enable=True, throw_on_early_termination=False):
        for x, y in list(batches(*data_rank("ddp")))[: 2 + 2 * rank * allowed]:
            with raises:
                backward(loss_of(wrapped, x, y), optimizer)
                optimizer.step()
        if not allowed:
            wrapped._join_config = wrapped._join_config._replace(enable=False)
            distributed.barrier()
