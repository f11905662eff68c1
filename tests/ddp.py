"""Two ranks over gloo, as a script: `python -m tests.ddp FILE`; see test_distributed.py."""

from __future__ import annotations

import copy
import itertools
import math
import multiprocessing
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import amp
import amp.distributed
from amp.compat import parallel
from amp.frontend import _Default
from amp.kernels.l2norm import l2norm
from amp.optimizers import FusedSGD
from tests.levels import DYNAMIC
from tests.models import LEVELS, initialize, run_backward, step_on


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))


def largest_difference(model: nn.Module) -> float:
    """Return how far the ranks' weights, masters where there are any, are apart."""
    flat = torch.cat([value.float().flatten() for value in model.state_dict().values()])
    other = flat.clone()
    dist.broadcast(other, src=0)
    difference = (flat - other).abs().max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    return difference.item()


def mean_of_ranks(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


def train_from_different_seeds(rank: int, level: str) -> None:
    """The ranks start apart; DDP broadcasts rank 0's weights after `initialize`."""
    torch.manual_seed(rank)
    model = net()
    model, optimizer = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level)
    ddp = DistributedDataParallel(model)
    for step in range(3):
        torch.manual_seed(10 * rank + step)
        optimizer.zero_grad()
        step_on(ddp(torch.randn(8, 4)).float().square().mean(), optimizer)
    assert largest_difference(model) == 0, level


def accumulate(rank: int, level: str, view: bool, no_sync: bool) -> None:
    """The sum over blocks is that of a plain FP32 model on both ranks' data."""
    torch.manual_seed(0)
    model = net()
    reference = copy.deepcopy(model)
    model, optimizer = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=view)
    torch.manual_seed(100 + rank)
    batches = [torch.randn(8, 4) for _ in range(3)]
    for _ in range(2):
        optimizer.zero_grad()
        reference.zero_grad()
        for i, x in enumerate(batches):
            delay = no_sync and i < 2
            ddp.require_backward_grad_sync = not delay  # what no_sync() sets
            run_backward(ddp(x).float().square().mean(), optimizer, delay_unscale=delay)
            reference(x).square().mean().backward()
        for p, q in zip(amp.master_params(optimizer), reference.parameters(), strict=True):
            assert q.grad is not None
            expected = mean_of_ranks(q.grad)
            error = torch.dist(p.grad.float(), expected) / torch.linalg.vector_norm(expected)
            assert error < (3e-2 if level in ("O4", "O5") else 1e-2), (level, view, no_sync, error)


def average_and_replay(rank: int, level: str) -> None:
    """Averages, and replays of which one rank makes more, leave a reduction where it is."""
    torch.manual_seed(0)
    model = net()
    model, optimizer = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level)
    ddp = DistributedDataParallel(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def backward(x: Tensor) -> None:
        run_backward(ddp(x).float().square().mean(), optimizer)

    torch.manual_seed(100 + rank)
    for step in range(3):
        if step == 1:
            x = torch.full((8, 4), 3e4 if rank else 1.0)
            amp.doctor(lambda x=x: backward(x), ddp, optimizer)  # type: ignore[misc]
        backward(torch.randn(8, 4))
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(ddp if step else model)
    assert largest_difference(model) == 0, level
    assert largest_difference(average) == 0, level


def overflow_on_one_rank(rank: int, level: str) -> None:
    """DDP reduces before the check, so both ranks skip, and their scales stay the same."""
    torch.manual_seed(0)
    model = net()
    model, optimizer = initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), level, verbosity=0
    )
    ddp = DistributedDataParallel(model)
    step_on(ddp(torch.ones(2, 4)).float().sum() * (math.inf if rank == 1 else 1.0), optimizer)
    assert amp.step_was_skipped(optimizer)
    assert amp.loss_scale() == 512.0


def overflow_on_one_rank_without_ddp(rank: int, level: str, fused: bool) -> None:
    """Ranks that hold different gradients skip together if they were told of each other."""
    torch.manual_seed(rank)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    model, optimizer = initialize(model, optimizer, level, verbosity=0, process_group=dist.group.WORLD)
    for factor, skipped in ((1.0, False), (math.inf, True), (1.0, False)):
        before = model[0].weight.detach().clone()
        step_on(model(torch.ones(2, 4)).float().sum() * (factor if rank == 1 else 1.0), optimizer)
        assert amp.step_was_skipped(optimizer) == skipped, (level, rank)
        assert torch.equal(before, model[0].weight) == skipped, (level, rank)
        optimizer.zero_grad()
    assert amp.loss_scale() == 512.0


def overflow_in_one_shard(rank: int) -> None:
    """A DTensor's gradient is checked shard by shard, and its ranks know each other without help."""
    mesh = init_device_mesh("cpu", (2,))
    for sharded, make in itertools.product((True, False), (torch.optim.SGD, FusedSGD)):
        placements = [Shard(0)] if sharded else [Replicate()]
        weight = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, placements))
        optimizer: Any = make([weight], lr=0.5)
        model = nn.Module()
        model.register_parameter("weight", weight)
        model, optimizer = initialize(model, optimizer, "O1", verbosity=0)
        for bad, expected in ((1.0, 0.5), (math.inf, 0.5), (1.0, 0.0)):
            optimizer.zero_grad()
            factor = torch.ones(4, 3)
            factor[3, 2] = bad  # in rank 1's shard
            factor = distribute_tensor(factor, mesh, placements)
            loss: Any = (weight * factor).sum()
            step_on(loss.full_tensor(), optimizer)
            assert amp.step_was_skipped(optimizer) == (bad != 1.0), (rank, sharded, bad)
            local = DTensor.to_local(weight)  # type: ignore[arg-type]
            assert torch.equal(local, torch.full_like(local, expected)), (rank, sharded, local)
        assert amp.loss_scale() == 512.0
        amp.get_session().close()


def grad_scaler_with_shards(rank: int) -> None:
    """An overflow in one rank's shard skips the step on both."""
    mesh = init_device_mesh("cpu", (2,))
    for make in (torch.optim.SGD, FusedSGD):
        weight = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
        optimizer: Any = make([weight], lr=0.5)
        scaler = amp.GradScaler("cpu", init_scale=1024.0)
        for bad, expected in ((1.0, 0.5), (math.inf, 0.5), (1.0, 0.0)):
            optimizer.zero_grad()
            factor = torch.ones(4, 3)
            factor[3, 2] = bad  # in rank 1's shard
            loss: Any = (weight * distribute_tensor(factor, mesh, [Shard(0)])).sum()
            scaler.scale(loss.full_tensor()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.step_was_skipped(optimizer) == (bad != 1.0), (rank, bad)
            local = DTensor.to_local(weight)  # type: ignore[arg-type]
            assert torch.equal(local, torch.full_like(local, expected)), (rank, local)
        assert scaler.get_scale() == 512.0


def ways_of_apex_to_reduce(rank: int) -> None:
    """Averages, sums, float32 on the way, and a Reducer, of gradients that differ by rank."""
    ways: list[tuple[dict[str, Any], float]] = [
        ({}, 1.5),
        ({"gradient_average": False}, 3.0),
        ({"allreduce_always_fp32": True}, 1.5),
        ({"gradient_predivide_factor": 2.0}, 1.5),
        ({"gradient_predivide_factor": 2.0, "gradient_average": False}, 1.5),
        ({"gradient_predivide_factor": 2.0**17, "allreduce_always_fp32": True}, 1.5),
        ({"allreduce_always_fp32": True, "gradient_average": False, "delay_allreduce": True}, 3.0),
    ]
    for options, expected in ways:
        model = nn.Linear(2, 1, bias=False).half()
        ddp = parallel.DistributedDataParallel(model, **options)
        ddp(torch.full((1, 2), rank + 1.0).half()).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.dtype is torch.float16
        assert torch.equal(model.weight.grad.float(), torch.full((1, 2), expected)), options
    unused = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    unused.forward = lambda x: unused["used"](x)  # type: ignore[method-assign]
    ddp = parallel.DistributedDataParallel(unused, delay_allreduce=True)
    for _ in range(3):
        ddp(torch.ones(1, 2)).sum().backward()
    group = parallel.create_syncbn_process_group(1)
    assert dist.get_world_size(group) == 1
    assert dist.get_world_size(parallel.create_syncbn_process_group(2)) == 2
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


def norms_of_shards(rank: int) -> None:
    world = dist.group.WORLD
    assert world is not None
    cut = amp.distributed.Cut(None, 1, (world,))
    whole = torch.arange(12.0).reshape(4, 3) * 1e17
    mine = l2norm([whole[2 * rank : 2 * rank + 2]]).total
    total = amp.distributed.reduce_norm(mine, cut)
    expected = torch.linalg.vector_norm(whole.double()).float().reshape(1)
    torch.testing.assert_close(total, expected)
    zero = amp.distributed.reduce_norm(torch.zeros(1), cut)
    assert zero.item() == 0
    infinite = torch.tensor([math.inf if rank else 1.0])
    assert amp.distributed.reduce_norm(infinite, cut).item() == math.inf
    for bad_rank in range(2):
        bad = torch.tensor([math.nan if rank == bad_rank else 3.0])
        assert amp.distributed.reduce_norm(bad, cut).item() == math.inf
    assert torch.equal(amp.distributed.reduce_norm(mine, amp.distributed.WHOLE), mine)


def wrong_process_group() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"torch.distributed.ProcessGroup or a list of them, and got s"):
        amp.initialize(model, opt_level="O2", process_group="all")  # type: ignore[arg-type]
    assert model.weight.dtype is torch.float32


def main(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    for level in LEVELS:
        train_from_different_seeds(rank, level)
        average_and_replay(rank, level)
        for view in (False, True):
            for no_sync in (False, True):
                accumulate(rank, level, view, no_sync)
        if level in DYNAMIC:
            overflow_on_one_rank(rank, level)
            amp.get_session().close()
            for fused in (False, True):
                overflow_on_one_rank_without_ddp(rank, level, fused)
                amp.get_session().close()
        amp.get_session().close()
        _Default.session = None
    overflow_in_one_shard(rank)
    grad_scaler_with_shards(rank)
    ways_of_apex_to_reduce(rank)
    norms_of_shards(rank)
    wrong_process_group()
    dist.barrier()  # or gloo's threads may let go of a tensor after Python: pytorch/pytorch#179291
    dist.destroy_process_group()
    sys.stdout.write("passed\n")  # in one piece, whatever the other rank writes


if __name__ == "__main__":
    processes = multiprocessing.get_context("fork")
    ranks = [processes.Process(target=main, args=(rank, sys.argv[1])) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
        process.kill()
    sys.exit(any(process.exitcode != 0 for process in ranks))
