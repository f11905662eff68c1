"""Models that `torch.distributed` wraps, before amp and after it, in one process of a gloo group."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module

import amp
from amp.optimizers import FusedSGD
from tests.levels import LEVELS, WITH_MASTERS

Wrap = Callable[[nn.Module], Any]

OPTIMIZERS: tuple[Callable[..., Any], ...] = (torch.optim.SGD, FusedSGD)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def backward(model: nn.Module, optimizer: Any) -> None:
    loss = model(torch.ones(3, 4)).float().square().mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()


def local(model: nn.Module) -> list[Tensor]:
    return [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]


def check_wrapped_before(wrap: Wrap, level: str, make: Callable[..., Any]) -> None:
    """A model that was wrapped in time trains, also one that is looked at in between."""
    model = network()
    wrap(model)
    optimizer = make(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = local(model)
    for _ in range(2):
        backward(model, optimizer)
        model(torch.ones(3, 4))  # FSDP2 shows other parameters after it
        optimizer.step()
        optimizer.zero_grad()
    assert all(not torch.equal(old, new) for old, new in zip(before, local(model), strict=True))
    amp.get_session().close()


def check_wrapped_after(wrap: Wrap, level: str, make: Callable[..., Any]) -> None:
    """A step that would train nothing, or not all, says so, and may be tried again in vain."""
    model = network()
    optimizer = make(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    wrap(model)
    backward(model, optimizer)
    for _ in range(2):
        with pytest.raises(amp.AmpError, match=r"would not train .*'0\.weight'.* Wrap the model first"):
            optimizer.step()
    amp.get_session().close()


def check_optimizer_made_too_early(wrap: Wrap) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrap(model)
    with pytest.raises(amp.AmpError, match="no parameter of the optimizers belongs to the models"):
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0)


def check_zero_redundancy() -> None:
    for level in LEVELS:
        model = network()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        if level in WITH_MASTERS:
            with pytest.raises(amp.AmpError, match="ZeroRedundancyOptimizer, .* cannot have master"):
                amp.initialize(model, optimizer, opt_level=level, verbosity=0)
            assert model[0].weight.dtype is torch.float32  # type: ignore[index]
            continue
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        before = local(model)
        backward(model, optimizer)
        optimizer.step()
        assert all(not torch.equal(old, new) for old, new in zip(before, local(model), strict=True))
        amp.get_session().close()


def main() -> None:
    """Check all of it."""
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    plan: dict[str, ParallelStyle] = {"0": ColwiseParallel(), "2": ColwiseParallel()}

    def shard(model: nn.Module) -> None:
        fully_shard(model, mesh=mesh)

    def shard_first(model: Any) -> None:
        fully_shard(model[0], mesh=mesh)  # the last layer stays with the optimizer

    def parallelize(model: nn.Module) -> None:
        parallelize_module(model, mesh, plan)

    for wrap in (shard, parallelize):
        for make in OPTIMIZERS:
            for level in LEVELS:
                check_wrapped_before(wrap, level, make)
                check_wrapped_after(wrap, level, make)
        check_optimizer_made_too_early(wrap)
    for make in OPTIMIZERS:
        check_wrapped_after(shard_first, "O1", make)
    check_zero_redundancy()
    distributed.destroy_process_group()
    print("passed")


if __name__ == "__main__":
    main()
