"""Each level trains under each wrapper as it does in one process or under DDP, and skips together."""

from __future__ import annotations

import functools
import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

import amp
from tests.distributed.models import (
    FSDP1,
    OPTIMIZERS,
    SIZES,
    WRAPS,
    assert_equal_on_ranks,
    batches,
    data_rank,
    initialize,
    loss_of,
    make,
    make_optimizer,
    mesh,
    train,
    weights_of,
)
from tests.distributed.world import ranks, world
from tests.levels import DYNAMIC, LEVELS


def on_worlds(wrap: str) -> Any:
    return world(SIZES[wrap])


LEAN: dict[str, tuple[str, dict[str, Any]]] = {
    "O5 split16": ("O5", {"master_weights": "split16"}),
    "O2 kahan": ("O2", {"master_weights": "kahan"}),
    "O5 split16, moments in bfloat16": ("O5", {"master_weights": "split16", "state_dtype": "bfloat16"}),
    "O5, moments in bfloat16": ("O5", {"state_dtype": "bfloat16"}),
}
"""Levels with fewer bytes a parameter, by names for them."""


def prepared(wrap: str | None, kind: str, level: str, optimizer: str) -> Any:
    """Return a model and its optimizer: wrapped, or for None bare."""
    model = make(kind)
    if wrap is not None:
        model = WRAPS[wrap](model)
    made = make_optimizer(optimizer, model)
    options: dict[str, Any]
    opt_level, options = LEAN.get(level, (level, {}))
    return amp.initialize(model, made, opt_level=opt_level, verbosity=0, **options)


@functools.cache
def reference(wrap: str, kind: str, level: str, optimizer: str) -> dict[str, Tensor]:
    """Return the weights that DDP, or one process, makes of the same data."""
    model, made = prepared(None, kind, level, optimizer)
    part, of = data_rank(wrap)
    group = mesh("data", "tensor")["data"].get_group() if wrap.startswith("fsdp2+") else None
    train(
        DistributedDataParallel(model, process_group=group) if of > 1 else model,
        made,
        batches(part, of),
    )
    amp.get_session().close()
    return weights_of(model)


def check_trains(rank: int, wrap: str, kind: str, level: str, optimizer: str) -> None:
    """It comes as near to FP32 as DDP or one process does at that level."""
    exact, near = [reference(wrap, kind, each, optimizer) for each in ("O0", level)]
    model, made = prepared(wrap, kind, level, optimizer)
    train(model, made, batches(*data_rank(wrap)))
    weights, start = weights_of(model), weights_of(make(kind))
    names = [name for name, _ in model.named_parameters()]

    def distance(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
        return torch.cat([(some[name] - others[name]).flatten() for name in names]).norm().item()

    moved, error, usual = distance(exact, start), distance(weights, exact), distance(near, exact)
    assert error < 2 * usual + 1e-4 * moved, (error, usual, moved)
    assert_equal_on_ranks(weights[name] for name in names)


def check_overflow(wrap: str, optimizer: str, level: str | None) -> None:
    """An inf in the gradients of one rank, in its own shard where it has one.

    At a level, or without one in torch's own loop, with this library's scaler.
    """
    model = (WRAPS | FSDP1)[wrap](make())
    made = make_optimizer(optimizer, model)
    scaler: Any = None
    if level is None:
        device = torch.get_default_device().type
        scaler = amp.GradScaler(device, init_scale=1024.0, growth_interval=2)
    else:
        scaling = {"init": 1024.0, "growth_interval": 2}
        model, made = initialize(model, made, level, loss_scale=scaling)
    is_bad_rank = distributed.get_rank() == distributed.get_world_size() - 1
    scales = []
    for step, (x, y) in enumerate(batches(*data_rank(wrap))):
        before = weights_of(model)
        made.zero_grad()
        loss = loss_of(model, x, y)
        block = amp.scale_loss(loss, made) if scaler is None else nullcontext(scaler.scale(loss))
        with block as scaled_loss:
            scaled_loss.backward()
            if is_bad_rank and step == 1:
                grads = [p.grad for p in (model.layers[0].up.weight, *model.parameters())]
                local = [getattr(grad, "_local_tensor", grad) for grad in grads if grad is not None]
                next(grad for grad in local if grad.numel()).view(-1)[0] = torch.inf
        if scaler is None:
            made.step()
        else:
            if step == 2:
                scaler.unscale_(made)
            scaler.step(made)
            scaler.update()
        assert (scaler or amp).step_was_skipped(made) == (step == 1)
        after = weights_of(model)
        assert all(torch.equal(before[n], after[n]) for n in after) == (step == 1)
        scales.append(amp.loss_scale() if scaler is None else scaler.get_scale())
    assert scales == [1024, 512, 512, 1024], scales
    assert_equal_on_ranks([*after.values(), torch.tensor(scales)])


@ranks(SIZES)
@pytest.mark.parametrize(
    ("wrap", "level", "optimizer"),
    [*itertools.product(WRAPS, DYNAMIC, OPTIMIZERS), *((wrap, "O1", "fused") for wrap in FSDP1)],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    rank: int, wrap: str, level: str, optimizer: str
) -> None:
    check_overflow(wrap, optimizer, level)


@ranks(SIZES)
@pytest.mark.parametrize("optimizer", ["sgd", "fused"])
@pytest.mark.parametrize("wrap", ["fsdp2", "hsdp", "sp", "fsdp2+sp", "fsdp1"])
def test_grad_scaler_agrees_over_the_ranks(rank: int, wrap: str, optimizer: str) -> None:
    check_overflow(wrap, optimizer, None)


@pytest.mark.parametrize(
    ("level", "optimizer"),
    # Adam's second moments are 0 in float16, whatever the wrapper.
    [case for case in itertools.product(LEVELS, OPTIMIZERS) if case != ("O3", "adamw")],
)
@pytest.mark.parametrize("wrap", WRAPS)
def test_trains_as_ddp_does(wrap: str, level: str, optimizer: str) -> None:
    on_worlds(wrap).run(check_trains, wrap, "network", level, optimizer)


@pytest.mark.parametrize(
    ("level", "optimizer"),
    [*itertools.product(LEAN, ["fused"]), ("O5 split16", "sgd"), ("O2 kahan", "adamw")],
)
@pytest.mark.parametrize("wrap", WRAPS)
def test_lean_masters_of_shards_train_too(wrap: str, level: str, optimizer: str) -> None:
    on_worlds(wrap).run(check_trains, wrap, "network", level, optimizer)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("wrap", ["fsdp2", "hsdp"])
def test_norms_that_stay_fp32_train_in_one_unit_with_the_others(wrap: str, level: str) -> None:
    on_worlds(wrap).run(check_trains, wrap, "pictures", level, "sgd")
