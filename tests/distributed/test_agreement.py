"""Ranks decide together: how often they talk, what happens when one does not, and what is random."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as CutAlong
from torch.nn.parallel import DistributedDataParallel

import amp
from amp.optimizers import FusedAdam, FusedSGD
from tests.devices import on_gpu
from tests.distributed.models import (
    SIZES,
    WRAPS,
    all_reduces,
    assert_equal_on_ranks,
    backward,
    batches,
    data_rank,
    loss_of,
    make,
    mesh,
    train,
    weights_of,
)
from tests.distributed.world import ranks
from tests.levels import CHECKED, LEVELS


@ranks(SIZES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_step_has_one_collective_of_one_number(rank: int, wrap: str, level: str) -> None:
    """One of one number for a step, whatever the mesh; none where nothing can overflow."""
    model = WRAPS[wrap](make())
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x, y = next(batches(*data_rank(wrap)))
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        with all_reduces() as sizes:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
                sizes.clear()  # those of a wrapper
            optimizer.step()
        assert sizes == ([1] if level in CHECKED else [])


@ranks(2)
@pytest.mark.parametrize("backend", ["gloo"], indirect=True)  # NCCL's watchdog ends the process
def test_a_rank_that_raises_leaves_the_others_with_an_error_that_names_the_collective(
    rank: int,
) -> None:
    """The others are told which collective they have waited for, and in vain."""
    group: Any = distributed.new_group(timeout=timedelta(seconds=2))
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0, process_group=group)
    x, y = next(batches(*data_rank("fsdp2")))
    loss = loss_of(model, x, y)
    if rank == 1:
        with pytest.raises(ValueError, match="no data"), amp.scale_loss(loss, optimizer):
            raise ValueError("no data")
        distributed.barrier()
        return
    before = weights_of(model)
    with pytest.raises(amp.AmpError, match=r"rank 0 could not agree with ranks \[0, 1\] on found_inf"):
        backward(loss, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in weights_of(model).items())
    distributed.barrier()


@ranks(2)
def test_ranks_that_are_seeded_apart_round_alike(rank: int) -> None:
    """Ranks that are seeded apart, as for dropout, round the moments of their copies alike."""
    torch.manual_seed(100 + rank)
    model = make()
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O5", verbosity=0, state_dtype="bfloat16"
    )
    train(DistributedDataParallel(model), optimizer, batches(*data_rank("fsdp2")))
    assert_equal_on_ranks(weights_of(model).values())
    assert_equal_on_ranks(state["exp_avg_sq"] for state in optimizer.state.values())


@ranks(SIZES)
@pytest.mark.parametrize("wrap", ["fsdp2", "hsdp"])
def test_shards_round_apart_and_copies_alike(rank: int, wrap: str) -> None:
    """Equal numbers in two shards are rounded apart, and those in two copies alike."""
    on = mesh("copies", "data") if wrap == "hsdp" else mesh("data")
    size = on.size(on.ndim - 1)
    placements: Any = [CutAlong(0)] if on.ndim == 1 else [Replicate(), CutAlong(0)]
    weight = nn.Parameter(distribute_tensor(torch.ones(64 * size), on, placements))
    optimizer = FusedAdam([weight], lr=0.01, state_dtype=torch.bfloat16)
    for step in range(3):
        grad = torch.linspace(0.1, 0.2 + step, 64).repeat(size)
        weight.grad = distribute_tensor(grad, on, placements)
        optimizer.step()
    moment = optimizer.state[weight]["exp_avg_sq"]
    assert isinstance(moment, DTensor)
    first, second, *_ = moment.full_tensor().chunk(size)
    assert not torch.equal(first, second)
    assert_equal_on_ranks([moment.full_tensor()])


@ranks(2)
@pytest.mark.parametrize("hook", ["fp16_compress_hook", *on_gpu("bf16_compress_hook")])
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_may_be_sent_in_16_bits(rank: int, level: str, hook: str) -> None:
    if hook == "bf16_compress_hook" and distributed.get_backend() != "nccl":
        return  # torch has it for NCCL alone
    model = make()
    optimizer = FusedSGD(model.parameters(), lr=0.2, momentum=0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, getattr(default_hooks, hook))
    start = weights_of(model)
    train(ddp, optimizer, batches(*data_rank("fsdp2")))
    weights = weights_of(model)
    assert_equal_on_ranks(weights.values())
    amp.get_session().close()
    plain = make()
    _, optimizer = amp.initialize(
        plain, FusedSGD(plain.parameters(), lr=0.2, momentum=0.5), opt_level="O0", verbosity=0
    )
    train(plain, optimizer, batches())
    for name, value in weights_of(plain).items():
        assert (weights[name] - value).norm() < 0.1 * (value - start[name]).norm()
