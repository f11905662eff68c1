"""A fault on one rank is named on all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.nn.parallel import DistributedDataParallel

import amp
from tests.diagnosis.faults import Net, batch
from tests.distributed.world import ranks

RANKS = 2


class IntoZeros(DefaultReduceScatter):
    """Receives into zeros, where FSDP takes memory as it is, in which an inf may be already."""

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(*args, **kwargs)


def wrapped(wrap: str, **overrides: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = Net()
    if wrap == "fsdp2":
        fully_shard(model).set_custom_reduce_scatter(IntoZeros())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, **overrides)
    return (DistributedDataParallel(model) if wrap == "ddp" else model), optimizer


def data(bad: bool) -> Tensor:
    x = batch()
    if bad and distributed.get_rank() == 1:
        x[2, 3, 4] = math.nan
    return x


def step(model: Any, optimizer: Any, x: Tensor) -> None:
    with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@ranks(RANKS)
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_a_fault_on_rank_1(rank: int, wrap: str) -> None:
    model, optimizer = wrapped(wrap, loss_scale={"init": 256})
    for bad in (False, True):
        x = data(bad)
        with amp.diagnose(model, optimizer) as report:
            step(model, optimizer, x)
        if not bad:
            assert report.is_healthy, str(report)
            continue
        assert [(finding.rank, finding.cause) for finding in report.findings] == [(1, "data")]
        assert "argument 'x' is not finite at [2, 3, 4]" in report.findings[0].what, str(report)
        assert str(report).startswith("rank 1: data")
        assert report.ranks == RANKS


@ranks(RANKS)
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_all_ranks_are_armed(rank: int, wrap: str) -> None:
    scaling = {"init": 256, "overflow_patience": 2}
    model, optimizer = wrapped(wrap, loss_scale=scaling, diagnose="on_overflow")
    session = amp.get_session()
    step(model, optimizer, data(bad=True))
    with pytest.warns(amp.AmpWarning, match="2 overflows in a row"):
        step(model, optimizer, data(bad=True))
    assert session.last_report is None
    step(model, optimizer, data(bad=True))
    assert session.last_report is not None
    assert "rank 1: data" in str(session.last_report)
