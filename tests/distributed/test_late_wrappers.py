"""What would train nothing is refused: models that are wrapped too late, masters in ZeRO."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import amp
from tests.distributed.models import (
    WRAPS,
    backward,
    batches,
    data_rank,
    initialize,
    loss_of,
    make,
    make_optimizer,
    mesh,
    sgd,
)
from tests.distributed.world import ranks
from tests.levels import LEVELS, WITH_MASTERS

WRAPS_OF_TWO = ["fsdp2", "tp"]


def local(model: Any) -> list[Tensor]:
    return [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]


def take_step(model: Any, optimizer: Any, kind: str) -> None:
    (x, y), *_ = batches(*data_rank(kind))
    backward(loss_of(model, x, y), optimizer)
    model(x)  # FSDP2 shows other parameters after it
    optimizer.step()
    optimizer.zero_grad()


@ranks(2)
@pytest.mark.parametrize("optimizer", ["sgd", "fused"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("wrap", WRAPS_OF_TWO)
def test_a_model_that_was_wrapped_in_time_trains_also_if_it_is_called_before_the_step(
    rank: int, wrap: str, level: str, optimizer: str
) -> None:
    model = WRAPS[wrap](make())
    model, made = initialize(model, make_optimizer(optimizer, model), level)
    before = local(model)
    for _ in range(2):
        take_step(model, made, wrap)
    assert all(not torch.equal(old, new) for old, new in zip(before, local(model), strict=True))


@ranks(2)
@pytest.mark.parametrize("optimizer", ["sgd", "fused"])
@pytest.mark.parametrize(
    ("wrap", "level"), [*((wrap, level) for wrap in WRAPS_OF_TWO for level in LEVELS), ("part", "O1")]
)
def test_a_step_that_would_train_nothing_or_not_all_says_so_again_and_again(
    rank: int, wrap: str, level: str, optimizer: str
) -> None:
    model = make()
    model, made = initialize(model, make_optimizer(optimizer, model), level)
    if wrap == "part":  # the head stays with the optimizer
        fully_shard(model.layers[0], mesh=mesh("data"))
    else:
        WRAPS[wrap](model)
    (x, y), *_ = batches(*data_rank(wrap))
    backward(loss_of(model, x, y), made)
    refusal = r"would not train .*'layers\.0\..* Wrap the model first"
    for _ in range(2):
        with pytest.raises(amp.AmpError, match=refusal):
            made.step()


@ranks(2)
def test_an_optimizer_that_was_made_before_the_model_was_wrapped_is_refused(rank: int) -> None:
    model = make()
    optimizer = sgd(model)
    WRAPS["fsdp2"](model)
    with pytest.raises(amp.AmpError, match="no parameter of the optimizers belongs to the models"):
        initialize(model, optimizer, "O1")


@ranks(2)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("wrap", WRAPS_OF_TWO)
def test_so_is_one_that_was_made_before_a_part_of_the_model_was_wrapped(
    rank: int, wrap: str, level: str
) -> None:
    model = make()
    optimizer = sgd(model)
    cut = WRAPS[wrap](make())
    model.layers[0] = cut.layers[0]
    before = [(p, p.dtype, p.detach().clone()) for p in model.parameters()]
    with pytest.raises(amp.AmpError, match="is a shard, and the optimizer holds a whole tensor"):
        initialize(model, optimizer, level)
    for parameter, dtype, values in before:
        assert parameter.dtype is dtype
        assert torch.equal(
            getattr(parameter, "_local_tensor", parameter), getattr(values, "_local_tensor", values)
        )


@ranks(2)
def test_so_is_one_that_was_made_of_what_a_forward_has_gathered(rank: int) -> None:
    model = WRAPS["fsdp2"](make())
    model(torch.ones(2, 8))
    with pytest.raises(amp.AmpError, match=r"or after model.reshard\(\)"):
        initialize(model, sgd(model), "O1")
    model.reshard()
    initialize(model, sgd(model), "O1")


@ranks(2)
@pytest.mark.parametrize("level", LEVELS)
def test_zero_redundancy_optimizers_take_no_masters(rank: int, level: str) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which uses torch.jit, and warns

    model = make()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    if level in WITH_MASTERS:
        with pytest.raises(amp.AmpError, match="ZeroRedundancyOptimizer, .* cannot have master"):
            initialize(model, optimizer, level)
        assert model.head.weight.dtype is torch.float32
        return
    initialize(model, optimizer, level)
    before = local(model)
    take_step(model, optimizer, "sp")  # of the same data on both ranks
    assert all(not torch.equal(old, new) for old, new in zip(before, local(model), strict=True))
