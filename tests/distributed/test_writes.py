"""Weights that a script writes without a trace, on several ranks: by `.data`, and by a collective.

torch counts no write of a collective at all, with `.data` or without.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import amp
from tests.distributed.models import (
    assert_equal_on_ranks,
    backward,
    batches,
    data_rank,
    initialize,
    loss_of,
    make,
    make_optimizer,
    parallelize,
    shard,
    weights_of,
)
from tests.distributed.world import ranks

FACTOR = 0.75


def through_data(model: Any, traced: bool) -> None:
    for p in model.parameters():
        (p.detach() if traced else p.data).mul_(FACTOR)


def shard_through_data(model: Any, traced: bool) -> None:
    for p in model.parameters():
        local_of(p.detach() if traced else p.data).mul_(FACTOR)


def send(tensor: Any, data: Any, traced: bool) -> None:
    """Send the first rank's part of a tensor to all, where the parts are equal, through `data`."""
    local, is_first = local_of(data), distributed.get_rank() == 0
    if isinstance(data, DTensor) and local.numel() * distributed.get_world_size() != data.numel():
        return
    sent = FACTOR * local if is_first else torch.empty_like(local)
    if traced:
        distributed.broadcast(sent, 0)
        local_of(tensor.detach()).copy_(sent)
        return
    if is_first:
        local.data.copy_(sent)
    distributed.broadcast(local, 0)


def broadcast(model: Any, traced: bool) -> None:
    for p in model.parameters():
        send(p, p.data, traced)


def broadcast_entries(model: Any, traced: bool) -> None:
    """Those of the state dict, which are the masters; written between block and step alone."""
    for entry in model.state_dict().values():
        send(entry, entry, traced)


WRITES: dict[str, Callable[[Any, bool], None]] = {
    write.__name__: write for write in (through_data, shard_through_data, broadcast, broadcast_entries)
}
WRAPS: dict[str, Callable[[Any], Any]] = {"fsdp2": shard, "tp": parallelize, "ddp": lambda model: model}


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def trained(kind: str, level: str | None, optimizer: str, write: Any, traced: bool) -> Tensor:
    """Train a model that is written after each step, and return what its state dicts had."""
    model = WRAPS[kind](make())
    opt = make_optimizer(optimizer, model)
    if level is not None:
        options = {"loss_scale": 128.0} if level == "O2" else {}
        model, opt = initialize(model, opt, level, **options)
    called = DistributedDataParallel(model) if kind == "ddp" else model
    seen = []
    for i, (x, y) in enumerate(batches(*data_rank(kind))):
        opt.zero_grad()
        loss = loss_of(called, x, y)
        loss.backward() if level is None else backward(loss, opt)
        is_between = i % 2 or write is broadcast_entries
        if is_between:
            write(model, traced)
        opt.step()
        if not is_between:
            write(model, traced)
        if i == 2:
            seen += weights_of(model).values()
    seen += weights_of(model).values()
    assert_equal_on_ranks(seen)
    if level is not None:
        amp.get_session().close()
    return torch.cat([value.flatten() for value in seen])


@functools.cache
def never_written(kind: str, optimizer: str) -> Tensor:
    return trained(kind, None, optimizer, lambda *_: None, traced=False)


@ranks(2)
@pytest.mark.parametrize(
    ("kind", "write"),
    [
        (kind, write)
        for kind in WRAPS
        for write in WRITES
        if kind == "tp" or write != "shard_through_data"  # elsewhere it is the same
    ],
)
@pytest.mark.parametrize(
    ("level", "optimizer"), [("O5", "fused"), pytest.param("O2", "adamw", marks=pytest.mark.slow)]
)
def test_weights_that_are_written_without_a_trace_are_trained_from_there(
    rank: int, kind: str, level: str, optimizer: str, write: str
) -> None:
    in_fp32 = trained(kind, None, optimizer, WRITES[write], traced=False)
    without = never_written(kind, optimizer)
    assert (without - in_fp32).norm() > 0.1 * in_fp32.norm()
    found = trained(kind, level, optimizer, WRITES[write], traced=False)
    off = float((found - in_fp32).norm() / in_fp32.norm())
    assert off < 0.02, f"off by {off:.3f}"
    assert torch.equal(found, trained(kind, level, optimizer, WRITES[write], traced=True))
