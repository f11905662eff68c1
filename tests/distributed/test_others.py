"""What else of torch's people train with on many processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F

import amp
from tests.distributed.models import (
    OPTIMIZERS,
    assert_equal_on_ranks,
    backward,
    batches,
    make,
    mesh,
    train,
    weights_of,
)
from tests.distributed.world import ranks
from tests.levels import DYNAMIC, LEVELS


@ranks(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_pipeline_scales_its_loss_inside_the_schedule(rank: int, level: str, schedule: str) -> None:
    """Two stages, whose schedule calls backward itself, do what one process does."""
    # The schedule divides by the number of micro-batches at its end: until then sums are larger.
    scaling: dict[str, Any] = {"loss_scale": {"init": 256.0}} if level in DYNAMIC else {}
    expected = make()
    _, made = amp.initialize(
        expected, OPTIMIZERS["sgd"](expected.parameters()), opt_level=level, verbosity=0, **scaling
    )
    train(expected, made, batches())
    weights, start = weights_of(expected), weights_of(make())
    amp.get_session().close()

    whole = make()
    part = nn.Sequential(whole.layers) if rank == 0 else nn.Sequential(whole.head)
    optimizer = OPTIMIZERS["sgd"](part.parameters())
    group: Any = distributed.group.WORLD
    part, optimizer = amp.initialize(
        part, optimizer, opt_level=level, verbosity=0, process_group=group, **scaling
    )
    stage = PipelineStage(part, rank, 2, torch.get_default_device())
    factor: list[Tensor] = []
    kinds: Any = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
    run = kinds[schedule](stage, 4, loss_fn=lambda y, target: F.mse_loss(y.float(), target) * factor[0])
    for x, y in batches():
        optimizer.zero_grad()
        with amp.scale_loss(torch.ones(()), optimizer) as scale:
            factor[:] = [scale]
            run.step(x) if rank == 0 else run.step(target=y)
        optimizer.step()
    assert_equal_on_ranks([torch.tensor(amp.loss_scale())])
    names = {id(p): name for name, p in whole.named_parameters()}
    moved = error = torch.zeros(())
    for parameter, master in zip(part.parameters(), amp.master_params(optimizer), strict=True):
        name = names[id(parameter)]
        error = error + (master.detach().float() - weights[name]).square().sum()
        moved = moved + (weights[name] - start[name]).square().sum()
    assert error.sqrt() < (1e-4 if level == "O0" else 0.1) * moved.sqrt(), (error, moved)


@ranks(2)
@pytest.mark.parametrize("level", LEVELS)
def test_loss_parallel_trains(rank: int, level: str) -> None:
    """Logits that are cut along the classes, and a loss that leaves them so."""

    def trained(wrap: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))
        if wrap:
            plan: Any = {"2": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
            parallelize_module(model, mesh("tensor"), plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            x = torch.randn(8, 8, generator=generator, device="cpu").to(torch.get_default_device())
            y = torch.randint(6, (8,), generator=generator, device="cpu").to(torch.get_default_device())
            optimizer.zero_grad()
            with loss_parallel():
                backward(F.cross_entropy(model(x), y), optimizer)
            optimizer.step()
        weights = weights_of(model)
        amp.get_session().close()
        return weights

    expected, weights = trained(wrap=False), trained(wrap=True)
    for name, value in expected.items():
        assert (weights[name] - value).norm() < (1e-5 if level == "O0" else 0.02) * value.norm(), name
    assert_equal_on_ranks(weights.values())
