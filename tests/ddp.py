"""Two ranks over gloo, as a script: `python -m tests.ddp RANK FILE`; see test_distributed.py."""

from __future__ import annotations

import copy
import math
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import amp
from amp.frontend import _Default
from tests.models import LEVELS, initialize


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
        with amp.scale_loss(ddp(torch.randn(8, 4)).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
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
            with amp.scale_loss(
                ddp(x).float().square().mean(), optimizer, delay_unscale=delay
            ) as scaled:
                scaled.backward()
            reference(x).square().mean().backward()
        for p, q in zip(amp.master_params(optimizer), reference.parameters(), strict=True):
            assert q.grad is not None
            expected = mean_of_ranks(q.grad)
            error = torch.dist(p.grad.float(), expected) / torch.linalg.vector_norm(expected)
            assert error < (3e-2 if level in ("O4", "O5") else 1e-2), (level, view, no_sync, error)


def overflow_on_one_rank(rank: int, level: str) -> None:
    """DDP reduces before the check, so both ranks skip, and their scales stay the same."""
    torch.manual_seed(0)
    model = net()
    model, optimizer = initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), level, verbosity=0
    )
    ddp = DistributedDataParallel(model)
    loss = ddp(torch.ones(2, 4)).float().sum() * (math.inf if rank == 1 else 1.0)
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert amp.loss_scale() == 512.0


def main(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    for level in LEVELS:
        train_from_different_seeds(rank, level)
        for view in (False, True):
            for no_sync in (False, True):
                accumulate(rank, level, view, no_sync)
        if level in ("O1", "O2"):
            overflow_on_one_rank(rank, level)
        amp.get_session().close()
        _Default.session = None
    dist.destroy_process_group()
    print("passed")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
