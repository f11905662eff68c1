"""Ranks that start apart, replay apart or overflow apart; apex's ways to reduce; norms of shards."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import amp
import amp.distributed
from amp.compat import parallel
from amp.kernels.l2norm import l2norm
from tests.distributed.models import assert_equal_on_ranks
from tests.distributed.world import ranks
from tests.levels import DYNAMIC
from tests.models import run_backward, sgd, started, step_on


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))


@ranks(2)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_ranks_that_start_apart_and_replay_apart_train_alike(rank: int, level: str) -> None:
    """DDP sends rank 0's weights after `initialize`, and one rank makes more replays of a doctor."""
    torch.manual_seed(rank)
    model, optimizer = started(net(), sgd, level)
    ddp = DistributedDataParallel(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def backward(x: torch.Tensor) -> None:
        run_backward(ddp(x).float().square().mean(), optimizer)

    torch.manual_seed(100 + rank)
    for step in range(3):
        if step == 1:
            amp.doctor(lambda: backward(torch.full((8, 4), 3e4 if rank else 1.0)), ddp, optimizer)
        backward(torch.randn(8, 4))
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(ddp if step else model)
    assert_equal_on_ranks(model.state_dict().values())
    assert_equal_on_ranks(average.state_dict().values())


@ranks(2)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("level", DYNAMIC)
def test_ranks_with_other_gradients_skip_together_if_they_were_told_of_each_other(
    rank: int, level: str, fused: bool
) -> None:
    torch.manual_seed(rank)
    group = {"process_group": distributed.group.WORLD}
    model, optimizer = started(net(), lambda p: sgd(p, fused=fused), level, **group)
    for factor, skipped in ((1.0, False), (math.inf, True), (1.0, False)):
        before = model[0].weight.detach().clone()
        step_on(model(torch.ones(2, 4)).float().sum() * (factor if rank == 1 else 1.0), optimizer)
        assert amp.step_was_skipped(optimizer) == skipped
        assert torch.equal(before, model[0].weight) == skipped
        optimizer.zero_grad()
    assert amp.loss_scale() == 512.0


@ranks(2)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 1.5),
        ({"gradient_average": False}, 3.0),
        ({"allreduce_always_fp32": True}, 1.5),
        ({"gradient_predivide_factor": 2.0}, 1.5),
        ({"gradient_predivide_factor": 2.0, "gradient_average": False}, 1.5),
        ({"gradient_predivide_factor": 2.0**17, "allreduce_always_fp32": True}, 1.5),
        ({"allreduce_always_fp32": True, "gradient_average": False, "delay_allreduce": True}, 3.0),
    ],
)
def test_apexs_options_of_ddp(rank: int, options: dict[str, Any], expected: float) -> None:
    model = nn.Linear(2, 1, bias=False).half()
    ddp = parallel.DistributedDataParallel(model, **options)
    ddp(torch.full((1, 2), rank + 1.0).half()).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype is torch.float16
    assert torch.equal(model.weight.grad.float(), torch.full((1, 2), expected))


@ranks(2)
def test_apexs_other_ways_to_reduce(rank: int) -> None:
    unused = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    unused.forward = lambda x: unused["used"](x)  # type: ignore[method-assign]
    ddp = parallel.DistributedDataParallel(unused, delay_allreduce=True)
    for _ in range(3):
        ddp(torch.ones(1, 2)).sum().backward()
    for size, expected in ((1, 1), (2, 2)):
        assert distributed.get_world_size(parallel.create_syncbn_process_group(size)) == expected
    assert parallel.create_syncbn_process_group(0) is None
    with pytest.raises(ValueError, match="group_size=3 does not divide the 2 ranks"):
        parallel.create_syncbn_process_group(3)
    torch.manual_seed(rank)
    model = nn.Linear(2, 1, bias=False)
    reducer = parallel.Reducer(model)
    torch.manual_seed(0)
    assert torch.equal(model.weight, nn.Linear(2, 1, bias=False).weight)
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    reducer.reduce()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.full((1, 2), 1.5))
    grads = [torch.full((3,), float(rank))]
    parallel.Reducer(grads).reduce()
    assert torch.equal(grads[0], torch.full((3,), 0.5))


@ranks(2)
def test_norms_of_shards(rank: int) -> None:
    cut = amp.distributed.Cut(None, 1, (distributed.group.WORLD,))  # type: ignore[arg-type]
    whole = torch.arange(12.0).reshape(4, 3) * 1e17
    mine = l2norm([whole[2 * rank : 2 * rank + 2]]).total
    expected = torch.linalg.vector_norm(whole.double()).float().reshape(1)
    torch.testing.assert_close(amp.distributed.reduce_norm(mine, cut), expected)
    assert amp.distributed.reduce_norm(torch.zeros(1), cut).item() == 0
    for bad in (math.inf, math.nan):
        for bad_rank in range(2):
            norm = torch.tensor([bad if rank == bad_rank else 3.0])
            assert amp.distributed.reduce_norm(norm, cut).item() == math.inf
    assert torch.equal(amp.distributed.reduce_norm(mine, amp.distributed.WHOLE), mine)


@ranks(2)
def test_what_is_no_process_group_is_refused(rank: int) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"torch.distributed.ProcessGroup or a list of them, and got s"):
        amp.initialize(model, opt_level="O2", process_group="all")  # type: ignore[arg-type]
    assert model.weight.dtype is torch.float32
