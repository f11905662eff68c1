"""FP8 on several ranks: scales that ranks share, and shards that are gathered."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import amp
from amp.casting import fp8_linear
from tests import fp8_models
from tests.distributed.models import all_reduces, assert_equal_on_ranks, backward, weights_of
from tests.distributed.world import ranks
from tests.fp8_models import batches, factors_of, history, initialize

RANKS = 2


def net() -> Any:
    """Return a model whose weights are the same in bfloat16: DDP's masters begin with these."""
    model = fp8_models.net()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float(), y)


def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    backward(loss_of(model, x, y), optimizer)
    optimizer.step()


def wrapped(wrap: str, level: str, fp8: Any, **more: Any) -> tuple[Any, Any]:
    model = net()
    if wrap == "fsdp2":
        for layer in (model.first, model.second, model.third):
            fully_shard(layer)
        fully_shard(model)
    model, optimizer = initialize(
        model, level, fp8, torch.optim.SGD(model.parameters(), lr=0.05), **more
    )
    return (DistributedDataParallel(model) if wrap == "ddp" else model), optimizer


@ranks(RANKS)
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_a_resumed_run_in_fp4_is_the_uninterrupted_one(rank: int, wrap: str) -> None:
    found = []
    for resumes in (False, True):
        model, optimizer = wrapped(wrap, "O5", "nvfp4")
        for i, (x, y) in enumerate(itertools.islice(batches(seed=rank), 4)):
            if resumes and i == 2:
                state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), amp.state_dict()))
                amp.get_session().close()
                model, optimizer = wrapped(wrap, "O5", "nvfp4")
                model.load_state_dict(state[0])
                optimizer.load_state_dict(state[1])
                amp.load_state_dict(state[2])
            step(model, optimizer, x, y)
        found.append(weights_of(model))
        amp.get_session().close()
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name
    assert_equal_on_ranks(list(found[0].values()))
    # The same gradient on both ranks is rounded by different bits.
    model, _ = initialize(net(), "O5", "nvfp4")
    grad = torch.randn(32, fp8_models.WIDTH, generator=torch.Generator().manual_seed(0))
    layer = vars(model.third)["_amp_fp8"]
    ours = layer.quantize(grad, fp8_linear.GRADIENT, by_row=True, by_column=False).by_row.values
    theirs = [torch.empty_like(ours) for _ in range(RANKS)]
    distributed.all_gather(theirs, ours)
    assert not torch.equal(*theirs)


@ranks(RANKS)
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
@pytest.mark.parametrize("level", ["O2", "O4"])
@pytest.mark.parametrize("shares", [True, False])
def test_scales_are_equal_on_all_ranks_by_one_collective(
    rank: int, wrap: str, level: str, shares: bool
) -> None:
    fp8 = {"recipe": "delayed", "reduce_amax": shares}
    model, optimizer = wrapped(wrap, level, fp8)
    seen = []
    with all_reduces(distributed.ReduceOp.MAX) as calls:
        for x, y in itertools.islice(batches(seed=rank), 3):
            step(model, optimizer, x * (1 + 3 * rank), y)
            seen.append(history().amaxes.clone())
    ours = seen[-1][1:4]
    theirs = [torch.empty_like(ours) for _ in range(RANKS)]
    distributed.all_gather(theirs, ours)
    assert torch.equal(*theirs) is shares
    assert (ours[:, 0] > 0).all()
    # One collective for each step: what was seen, and found_inf with it.
    per_step = [history().seen.numel() + 1] if shares else [1] * (wrap == "fsdp2")
    assert calls == 3 * per_step


@ranks(RANKS)
def test_a_bare_step_shares_too(rank: int) -> None:
    model, optimizer = wrapped("ddp", "O4", "delayed")
    for x, y in itertools.islice(batches(seed=rank), 2):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    assert_equal_on_ranks([history().amaxes, factors_of(history())])
    assert history().amaxes[2].all()


@ranks(RANKS)
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_an_overflow_on_one_rank_skips_on_all(rank: int, recipe: str) -> None:
    model, optimizer = wrapped("ddp", "O2", recipe)
    x, y = next(batches(seed=rank))
    x = x.detach()
    if rank == 1:
        x[0, 0] = torch.inf
    before = weights_of(model)
    step(model, optimizer, x, y)
    assert amp.step_was_skipped(optimizer)
    for name, value in weights_of(model).items():
        assert torch.equal(value, before[name])
    if history() is not None:
        assert history().amaxes.isfinite().all()
        assert_equal_on_ranks([history().amaxes])
