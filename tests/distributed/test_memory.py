"""What each rank keeps is what `footprint` says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

import amp
from amp.numerics.memory import footprint
from amp.optimizers import FusedAdam
from tests.distributed.models import backward, mesh
from tests.distributed.world import ranks
from tests.levels import DYNAMIC

WIDTH = 32


def kept(tensors: Any) -> int:
    """Return the bytes of memory behind tensors, each piece once; of DTensors those of this rank."""
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors if tensor is not None]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local if t.numel()
    }
    return sum(storages.values())


def network() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])


@ranks({2: 2, 4: 4})
@pytest.mark.parametrize(
    ("level", "optimizer", "options"),
    [
        *(("O0", "adamw", {}), ("O1", "adamw", {}), ("O2", "adamw", {}), ("O3", "fusedadam", {})),
        *(("O5", "adamw", {}), ("O5", "fusedadam", {})),
        ("O5", "fusedadam", {"state_dtype": "bfloat16"}),
    ],
)
@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_keeps_what_footprint_says(
    rank: int, size: int, level: str, optimizer: str, options: dict[str, Any]
) -> None:
    model: Any = network()
    for layer in model:
        fully_shard(layer, mesh=mesh("data"))
    fully_shard(model, mesh=mesh("data"))
    kinds: dict[str, Any] = {"adamw": torch.optim.AdamW, "fusedadam": FusedAdam}
    made = kinds[optimizer](model.parameters())
    scaling: dict[str, Any] = {"loss_scale": {"init": 8.0}} if level in DYNAMIC else {}
    model, made = amp.initialize(model, made, opt_level=level, verbosity=0, **scaling, **options)
    for _ in range(2):
        made.zero_grad()
        backward(model(torch.randn(4, WIDTH)).square().mean(), made)
        before: dict[str, list[Tensor]] = {
            "weights": list(model.parameters()),
            "gradients": [parameter.grad for parameter in model.parameters()],
            "state": [t for state in made.state.values() for t in state.values()],
        }
        counted = {name: kept(tensors) for name, tensors in before.items()}
        made.step()
    ranks = distributed.get_world_size()
    said = footprint(network(), level, optimizer, world_size=ranks, sharding="fsdp2", **options)
    parameters = sum(parameter.numel() for parameter in network().parameters())
    steps = 4 * len(before["weights"])  # a number for each parameter, which is not cut
    assert counted["weights"] == said.weights
    assert counted["gradients"] == said.gradients
    assert abs(counted["state"] - said.optimizer_state) <= steps
    assert said.masters == 0
    if level in ("O2", "O5") and not options:
        after_zero_grad = counted["weights"] + counted["state"]
        assert abs(after_zero_grad - 12 * parameters / ranks) <= steps


def trained(moves: bool) -> list[Tensor]:
    """Train three steps; before the last one shards may move, and what they leave is overwritten."""
    torch.manual_seed(0)
    plan: dict[str, ParallelStyle] = {
        str(i): RowwiseParallel() if i % 2 else ColwiseParallel() for i in range(4)
    }
    model: Any = parallelize_module(network(), mesh("tensor"), plan)
    optimizer: Any = FusedAdam(model.parameters(), lr=1e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    weights: list[Any] = list(model.parameters())
    masters: list[Any] = list(amp.master_params(optimizer))
    left = []
    for step in range(3):
        backward(model(torch.ones(2, WIDTH)).square().mean(), optimizer)
        for tensor in (*weights, *masters) if moves and step == 2 else ():
            old = tensor._local_tensor.detach()
            tensor._local_tensor = old.clone()
            left.append(old.fill_(7))
        optimizer.step()
        optimizer.zero_grad()
    assert all((old == 7).all() for old in left), "something was written where a shard was"
    result = [each._local_tensor.detach().clone() for each in (*weights, *masters)]
    amp.get_session(optimizer).close()
    assert weights[0] is not masters[0]
    return result


@ranks(2)
def test_shards_that_have_moved_are_stepped_where_they_are(rank: int) -> None:
    assert all(map(torch.equal, trained(moves=True), trained(moves=False)))
