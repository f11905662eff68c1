"""Weights of FSDP2 that travel in FP8: the bits of gathering first and quantizing then."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, distributed
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import amp
from amp.casting.fp8_history import WEIGHT
from amp.casting.fp8_linear import Layer
from amp.casting.sharded import params_of_fsdp2
from amp.errors import AmpRuntimeError
from tests.distributed import models
from tests.distributed.test_dcp import load, state_of
from tests.distributed.test_fp8 import net, step
from tests.distributed.world import ranks, world
from tests.fp8_models import batches, initialize


def sharded(**options: Any) -> Any:
    """Return a model in FSDP2 whose second half has larger weights, so that shards differ."""
    model = net()
    for layer in (model.first, model.second, model.third):
        layer.weight.data[len(layer.weight) // 2 :] *= 3
        fully_shard(layer, **options)
    return fully_shard(model, **options)


class Traffic(NamedTuple):
    """How many bytes are gathered, what is reduced, and how often weights are quantized by row."""

    gathered: int
    reduced: list[int]
    quantized: int


def trained(level: str, fp8: Any, **options: Any) -> tuple[list[Tensor], Traffic]:
    """Return the outputs and the weights after some steps, and what went over the wires."""
    model = sharded(**options)
    optimizer = models.make_optimizer("fused" if level == "O5" else "sgd", model)
    model, optimizer = initialize(model, level, fp8, optimizer)
    found, weights, quantize = [], [], Layer.quantize

    def quantized(layer: Any, x: Tensor, entry: int, **kwargs: Any) -> Any:
        if entry == WEIGHT and kwargs["by_row"]:
            weights.append(x)
        return quantize(layer, x, entry, **kwargs)

    maxima = models.all_reduces(distributed.ReduceOp.MAX)
    with pytest.MonkeyPatch.context() as monkeypatch, maxima as reduced:
        monkeypatch.setattr(Layer, "quantize", quantized)
        for x, y in itertools.islice(batches(), 3):
            step(model, optimizer, x, y)
            found.append(model(x).detach().float())
    found += models.weights_of(model).values()
    of_weights = [params_of_fsdp2(model)[layer, "weight"] for layer in (model.first, model.third)]
    gathered = sum(x.numel() * x.itemsize for each in of_weights for x in each.all_gather_outputs)
    amp.get_session().close()
    if level == "O4":
        found.append(model(x).detach())  # FSDP2 gathers as before
    return found, Traffic(gathered, reduced, len(weights))


def check_bits(_: int) -> None:
    for level, exact in itertools.product(("O4", "O5"), (False, True)):
        fp8 = {"recipe": "current", "power_of_2_scales": not exact}
        expected, before = trained(level, fp8)
        found, after = trained(level, fp8 | {"all_gather": True})
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(one, other), (level, exact, i)
        assert after.gathered == before.gathered // (4 if level == "O4" else 2)
        assert before.quantized
        assert not after.quantized
        # One reduction for the three weights when they are new, and after each of three steps.
        assert after.reduced.count(3) == 4, after.reduced


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_weights_travel_in_fp8_with_the_bits_of_quantizing_then(size: int) -> None:
    world(size).run(check_bits)  # shards of 3 ranks are uneven


@ranks(4)
def test_hybrid_shards_travel_in_fp8(rank: int) -> None:
    """Two shards, and two copies of each: scales are of the shards."""
    mesh = models.mesh("copies", "data")
    fp8 = {"recipe": "current", "power_of_2_scales": False}
    expected, before = trained("O5", fp8, mesh=mesh)
    found, after = trained("O5", fp8 | {"all_gather": True}, mesh=mesh)
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), i
    assert after.gathered == before.gathered // 2


def check_checkpoint(_: int, path: str) -> None:
    """A run that is saved in the middle goes on bit for bit, gathered in FP8 or not."""
    data = list(itertools.islice(batches(), 4))

    def run(all_gather: bool, goes_on: bool) -> list[Tensor]:
        model = sharded()
        optimizer = models.make_optimizer("fused", model)
        fp8 = {"recipe": "current", "power_of_2_scales": False, "all_gather": all_gather}
        model, optimizer = initialize(model, "O5", fp8, optimizer)
        if goes_on:
            load(path, model, optimizer)
        for i, (x, y) in enumerate(data[2 * goes_on :]):
            if i == 2:
                dcp.save(state_of(model, optimizer), checkpoint_id=path)
            step(model, optimizer, x, y)
        amp.get_session().close()
        return list(models.weights_of(model).values())

    expected = run(True, goes_on=False)
    for all_gather in (True, False):
        found = run(all_gather, goes_on=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), all_gather


def test_a_checkpoint_of_weights_that_travel_goes_on_bit_for_bit(tmp_path: Path) -> None:
    world(2).run(check_checkpoint, str(tmp_path))


@ranks(2)
@pytest.mark.slow
def test_a_compiled_layer_takes_the_weight_that_travelled(rank: int) -> None:
    """A layer that is compiled gets what FSDP2 has gathered, step by step."""
    found = []
    for all_gather in (False, True):
        torch._dynamo.reset()
        model = sharded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        initialize(model, "O4", {"recipe": "current", "all_gather": all_gather}, optimizer)
        model.second.compile()
        found.append([])
        for x, y in itertools.islice(batches(), 3):
            step(model, optimizer, x, y)
            found[-1].append(model(x).detach())
        amp.get_session().close()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@ranks(2)
def test_what_cannot_travel_is_refused_by_name(rank: int) -> None:
    fp8 = {"recipe": "current", "all_gather": True}
    cases = [
        (sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)), "'first' .* kept on the CPU"),
        (sharded(shard_placement_fn=lambda _: Shard(0 if _.ndim == 1 else 1)), "in another dimension"),
    ]
    for model, message in cases:
        with pytest.raises(AmpRuntimeError, match=message):
            initialize(model, "O4", fp8)
        assert not hasattr(model.first.weight._local_tensor, "fsdp_pre_all_gather")
    with pytest.warns(UserWarning, match="fully_shard has sharded no layer"):
        initialize(net(), "O4", fp8)


@ranks(4)
def test_what_needs_four_ranks_and_cannot_travel_is_refused_by_name(rank: int) -> None:
    mesh = models.mesh("data", "model")
    cut: Any = parallelize_module(
        net(), mesh["model"], {"first": ColwiseParallel(), "second": RowwiseParallel()}
    )
    for layer in (cut.first, cut.second, cut.third):
        fully_shard(layer, mesh=mesh["data"])
    cases = [
        (sharded(reshard_after_forward=2), "'first' .* reshard_after_forward is a number"),
        (fully_shard(cut, mesh=mesh["data"]), "'first' .* tensor parallelism has cut it too"),
    ]
    for model, message in cases:
        with pytest.raises(AmpRuntimeError, match=message):
            initialize(model, "O4", {"recipe": "current", "all_gather": True})


@ranks(2)
def test_sessions_and_checkpoints_of_weights_that_travel(rank: int) -> None:
    """Second sessions, state dicts, weights that are loaded, and frozen ones."""
    x, _y = next(batches())
    model = sharded()
    plain = model(x).detach()
    fp8 = {"recipe": "current", "all_gather": True, "power_of_2_scales": False}
    for _ in range(2):
        model.reshard()  # the last forward has gathered what the optimizer takes
        initialize(model, "O4", fp8)
        first = model(x).detach()
        assert not torch.equal(first, plain)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        assert all(type(value) is type(model.first.weight.data) for value in state.values())
        with torch.no_grad():
            model.first.weight.mul_(3)
        assert not torch.equal(model(x), first)
        model.load_state_dict(state)
        assert torch.equal(model(x), first)
        model.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)
        assert torch.equal(model(x), first)
        with torch.no_grad():
            model.third.weight.fill_(torch.inf)
        assert model(x).isnan().all()
        model.load_state_dict(state)
        amp.get_session().close()
        assert torch.equal(model(x), plain)
