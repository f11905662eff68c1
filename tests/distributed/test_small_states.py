"""Packed moments and 24-bit masters have the same bits on every mesh, where gradients have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import amp
from amp import dcp
from amp.kernels.tensor_lists import local
from amp.optimizers import FusedAdam
from tests.distributed.models import both, initialize, mesh, shard, whole
from tests.distributed.world import ranks, world

KINDS: dict[str, dict[str, Any]] = {
    "small": {"master_weights": "split24", "state_dtype": "packed16"},
    "bfloat16": {"master_weights": "split16", "state_dtype": "bfloat16"},
}


class Uneven(nn.Sequential):
    """No dimension is a multiple of the ranks. Masters of DDP begin with what bfloat16 holds."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(9, 37), nn.Linear(37, 7))
        self.bfloat16().float()


def tensor_parallel(model: Any, on: Any = None) -> Any:
    plan: dict[str, Any] = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    return parallelize_module(model, on or mesh("tensor"), plan)


WRAPS: dict[str, Any] = {
    "ddp": DistributedDataParallel,
    "fsdp2": shard,
    "hsdp": lambda model: shard(model, mesh("copies", "data")),
    "tp": tensor_parallel,
    "fsdp2+tp": both(tensor_parallel),
}


def start(kind: str, wrap: str | None = None) -> tuple[Any, Any]:
    model = Uneven() if wrap is None or wrap == "ddp" else WRAPS[wrap](Uneven())
    optimizer = FusedAdam(model.parameters(), lr=0.02)
    model, optimizer = initialize(model, optimizer, "O5", **KINDS[kind])
    return (DistributedDataParallel(model) if wrap == "ddp" else model), optimizer


def as_of(values: Tensor, like: Any) -> Tensor:
    """Return values divided as a parameter is."""
    if not isinstance(like, DTensor):
        return values
    on = like.device_mesh, like.placements
    sizes, offsets = compute_local_shape_and_global_offset(like.shape, *on)
    part = values[tuple([slice(a, a + n) for a, n in zip(offsets, sizes, strict=True)])]
    return DTensor.from_local(part.contiguous(), *on, shape=like.shape, stride=like.stride())


def take_steps(model: Any, optimizer: Any, steps: range) -> None:
    """Step with the same gradients on every mesh."""
    for i in steps:
        generator = torch.Generator().manual_seed(i)
        for parameter in model.parameters():
            grad = torch.randn(parameter.shape, generator=generator, device="cpu")
            grad = grad.to(torch.get_default_device(), parameter.dtype)
            parameter.grad = as_of(grad, parameter)
        optimizer.step()


def kept(optimizer: Any) -> list[Tensor]:
    """Return the weights, low halves and moments, whole, as they are kept."""
    masters = optimizer.param_groups[0]["params"]
    of = amp.get_session(optimizer).masters
    weights, lows = [of.model(x) for x in masters], of.low_halves(masters)
    moments = [x for master in masters for x in optimizer.state[master].values() if x.dim()]
    wide = [
        x.detach().to(torch.float32) for x in (*weights, *(lows or ()), *moments)
    ]  # gloo gathers no int16
    return [whole(x).clone() for x in wide]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} differ"


def check_same_bits(rank: int, wrap: str, kind: str) -> None:
    model, optimizer = start(kind, wrap)
    take_steps(model, optimizer, range(4))
    found = kept(optimizer)
    amp.get_session(optimizer).close()
    model, optimizer = start(kind)
    take_steps(model, optimizer, range(4))
    assert_same(found, kept(optimizer))


def check_saves(rank: int, folder: str) -> None:
    model, optimizer = start("small", "fsdp2")
    take_steps(model, optimizer, range(3))
    weights, states = dcp.get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": states}, checkpoint_id=folder)


def check_loads(rank: int, folder: str) -> None:
    model, optimizer = start("small", "fsdp2")
    weights, states = dcp.get_state_dict(model, optimizer)
    checkpoint.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    dcp.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    take_steps(model, optimizer, range(3, 6))
    found = kept(optimizer)
    amp.get_session(optimizer).close()
    model, optimizer = start("small")
    take_steps(model, optimizer, range(6))
    assert_same(found, kept(optimizer))


@ranks(4)
def test_what_is_cut_in_two_inner_dimensions_is_refused(rank: int) -> None:
    """A tensor that is cut in two inner dimensions cannot tell the places of its elements."""
    on = mesh("one", "other")
    weight = nn.Parameter(distribute_tensor(torch.ones(2, 4, 4), on, [Shard(1), Shard(2)]))
    optimizer = FusedAdam([weight], state_dtype="packed16")
    weight.grad = distribute_tensor(torch.ones(2, 4, 4), on, [Shard(1), Shard(2)])
    with pytest.raises(amp.AmpError, match=r"is cut in its dimensions \[1, 2\]"):
        optimizer.step()
    assert bool((local(weight) == 1).all())
    whole_weight = nn.Parameter(distribute_tensor(torch.ones(2, 4, 4), on, [Replicate(), Shard(2)]))
    whole_weight.grad = distribute_tensor(torch.ones(2, 4, 4), on, [Replicate(), Shard(2)])
    FusedAdam([whole_weight], state_dtype="packed16").step()


@ranks(2)
@pytest.mark.parametrize("kind", [*KINDS, None])
def test_a_whole_moment_of_a_part_is_refused(rank: int, kind: str | None) -> None:
    """A moment that is whole on each rank is refused, and not taken for this rank's part."""
    model = shard(Uneven())
    optimizer: Any = (FusedAdam if kind else torch.optim.AdamW)(model.parameters(), lr=0.02)
    model, optimizer = initialize(model, optimizer, "O5", **KINDS.get(kind or "", {}))
    take_steps(model, optimizer, range(1))
    before, state = kept(optimizer) if kind else [], optimizer.state_dict()
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].full_tensor()
    with pytest.raises(amp.AmpError, match=r"'exp_avg'.* part on this rank has \(\d+, 9\): amp.set"):
        optimizer.load_state_dict(state)
    assert_same(kept(optimizer) if kind else [], before)
    if kind == "bfloat16":
        parameter = optimizer.param_groups[0]["params"][0]
        optimizer.state[parameter]["exp_avg"] = optimizer.state[parameter]["exp_avg"].full_tensor()
        with pytest.raises(amp.AmpError, match="no usable 'exp_avg'"):
            take_steps(model, optimizer, range(1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("wrap", "ranks"), [("ddp", 2), ("fsdp2", 2), ("fsdp2", 4), ("hsdp", 4), ("tp", 2), ("fsdp2+tp", 4)]
)
def test_every_mesh_has_the_bits_of_one_process(wrap: str, ranks: int, kind: str) -> None:
    world(ranks).run(check_same_bits, wrap, kind)


@pytest.mark.slow
def test_a_checkpoint_of_four_ranks_goes_on_bit_for_bit_on_two(tmp_path: Path) -> None:
    world(4).run(check_saves, str(tmp_path))
    world(2).run(check_loads, str(tmp_path))
