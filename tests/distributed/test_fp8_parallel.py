"""FP8 under tensor parallelism: ranks quantize parts by the scales of whole tensors.

Scales are exact quotients here, not powers of 2: FP8 values hardly change if a scale moves by a power
of 2, so with those a rank that took the amax of its own part would pass.
"""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import amp
from amp.errors import AmpRuntimeError
from amp.profiles.fp8_recipe import FP4
from tests.distributed import models
from tests.distributed.models import assert_equal_on_ranks, whole
from tests.distributed.world import ranks
from tests.fp8_models import RECIPE_NAMES, factors_of, history, initialize

RANKS = 2
WIDTH = 256
EXACT: dict[str, dict[str, Any]] = {
    name: {"recipe": name, "power_of_2_scales": False, "skip": []}
    for name in ("current", "delayed", "rowwise", "rowwise_gw_hp", "block")
}
EXACT["mxfp8"] = {"recipe": "mxfp8", "skip": []}
STYLES: dict[str, Any] = {
    "colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}
STEPS = 3


def lone_layer() -> Any:
    """Return a model whose weights are the same in bfloat16: masters begin with these on some ranks."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    model[0].weight.data = uneven(WIDTH, WIDTH).div(16).bfloat16().float()
    model[0].bias.data = model[0].bias.data.bfloat16().float()
    return model


def uneven(*size: int) -> Tensor:
    """Return values of which the second half of both dimensions is larger, so that parts differ."""
    x = torch.randn(*size)
    x[size[0] // 2 :, size[1] // 2 :] *= 3
    return x


def results(model: Any, level: str, fp8: Any) -> list[dict[str, Tensor]]:
    """Return output and gradients of each step of a model with one layer."""
    torch.manual_seed(1)
    model, optimizer = initialize(model, level, fp8, torch.optim.SGD(model.parameters(), lr=0.01))
    found = []
    for i in range(STEPS):
        x = (uneven(32, WIDTH) * (1 + i)).requires_grad_()
        wanted = uneven(32, WIDTH)
        optimizer.zero_grad()
        output = model(x)
        models.backward((output.float() * wanted).sum(), optimizer)
        tensors = {"output": output, "x": x.grad, "weight": model[0].weight.grad}
        tensors["bias"] = model[0].bias.grad
        found.append({name: whole(each).detach().clone() for name, each in tensors.items()})
        optimizer.step()
    if history() is not None:
        found.append({"amaxes": history().amaxes.clone()})
    amp.get_session().close()
    return found


@ranks(RANKS)
@pytest.mark.parametrize("recipe", EXACT)
def test_a_layer_has_the_bits_of_one_process(rank: int, recipe: str) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    levels = itertools.islice(itertools.cycle(("O2", "O4", "O5")), [*EXACT].index(recipe), None)
    for (name, style), level in zip(STYLES.items(), levels, strict=False):  # each pair in two recipes
        expected = results(lone_layer(), level, EXACT[recipe])
        model = parallelize_module(lone_layer(), mesh, {"0": style()})
        found = results(model, level, EXACT[recipe])
        # The one sum that is cut: of the output over columns, of the input's gradient over rows.
        summed = "output" if name == "rowwise" else "x"
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            for what, value in ours.items():
                if what == summed:
                    error = (value.float() - theirs[what].float()).norm() / theirs[what].float().norm()
                    assert error < 2**-8, (level, name, step, what, error)
                else:
                    assert torch.equal(value, theirs[what]), (level, name, step, what)


def wide() -> Any:
    """Return a network whose layers FP8 takes, with the same weights in bfloat16."""
    torch.manual_seed(0)
    model = models.Network(128)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


def trained(kind: str | None, level: str, fp8: Any) -> dict[str, Tensor]:
    """Train, on the same data on every rank, and return the weights."""
    model = models.WRAPS[kind](wide()) if kind in models.WRAPS else wide()
    model, optimizer = initialize(model, level, fp8, models.sgd(model))
    torch.manual_seed(1)
    data = [(torch.randn(4, 4, 128), torch.randn(4, 4, 3)) for _ in range(STEPS)]
    models.train(DistributedDataParallel(model) if kind == "ddp" else model, optimizer, data)
    found = models.weights_of(model)
    amp.get_session().close()
    return found


WHOLE = [("fsdp2", "O5", "current"), ("fsdp2", "O4", "delayed"), ("ddp", "O5", "block")]
CUT = [("sp", "O5", "current"), ("sp", "O5", "delayed")]
SLOW = [
    *(set(itertools.product(("ddp", "fsdp2"), ("O4", "O5"), RECIPE_NAMES)) - set(WHOLE)),
    *(("tp", "O4", "mxfp8"), ("fsdp2+tp", "O5", "current"), ("fsdp2+tp", "O4", "delayed")),
    ("fsdp2+sp", "O5", "rowwise"),
]


@ranks(models.SIZES)
@pytest.mark.parametrize(
    ("kind", "level", "recipe"),
    [*WHOLE, *CUT, *(pytest.param(*case, marks=pytest.mark.slow) for case in sorted(SLOW))],
)
def test_a_network_trains_as_in_one_process(rank: int, kind: str, level: str, recipe: str) -> None:
    # Ranks draw different bits, so that the noise of their gradients is independent.
    fp8 = {"recipe": recipe, **({"stochastic_rounding": False} if recipe in FP4 else {})}
    start = models.weights_of(wide())
    expected, found = trained(None, level, fp8), trained(kind, level, fp8)
    # Where a cut sum is rounded to BF16 in another place, an FP8 code of the next layer may flip: that
    # makes up to 0.13, and 0.04 without FP8. A sum that is left out makes 0.5 and more.
    tolerance = 0.02 if kind in ("ddp", "fsdp2") else 0.25
    for name, value in found.items():
        moved = (expected[name] - start[name]).norm()
        assert moved > 0
        error = ((value - expected[name]).norm() / moved).item()
        assert error <= tolerance, (name, error)
    assert_equal_on_ranks(found.values())


@ranks(RANKS)
def test_delayed_reduces_once_a_step_as_soon_as_amaxes_are_known(rank: int) -> None:
    """Count the reductions of each step, with a layer that no optimizer has, and one that it has."""
    mesh = init_device_mesh("cpu", (RANKS,))
    model = nn.Sequential(*lone_layer(), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    parallelize_module(model, mesh, {"0": ColwiseParallel(output_layouts=Replicate())})
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.01)
    model, optimizer = initialize(model, "O4", EXACT["delayed"], optimizer)
    counts = []
    for _ in range(18):
        with models.all_reduces(distributed.ReduceOp.MAX) as sizes:
            optimizer.zero_grad()
            models.backward(model(torch.randn(16, WIDTH)).square().mean(), optimizer)
            optimizer.step()
        counts.append(len(sizes))
    # What is cut of the first layer is its weight and its gradient, until their amaxes are known.
    assert counts == [3] * 16 + [1] * 2
    assert_equal_on_ranks([history().amaxes, factors_of(history())])
    assert (history().amaxes[1] > 0).all()


@ranks(RANKS)
def test_copies_recomputation_evaluation_and_closing(rank: int) -> None:
    """Evaluate, recompute, copy, and close."""
    mesh = init_device_mesh("cpu", (RANKS,))
    model = parallelize_module(lone_layer(), mesh, {"0": STYLES["colwise"]()})
    x = uneven(32, WIDTH).requires_grad_()
    plain = model(x)
    model, _ = initialize(model, "O4", EXACT["current"])
    output = model(x)
    assert not torch.equal(output, plain)
    output.float().square().sum().backward()
    grad = model[0].weight.grad.full_tensor()
    for again in (copy.deepcopy(model), functools.partial(checkpoint, model, use_reentrant=False)):
        model.zero_grad()
        assert torch.equal(again(x), output)
    again(x).float().square().sum().backward()
    assert torch.equal(model[0].weight.grad.full_tensor(), grad)
    with torch.inference_mode():
        assert torch.equal(model.eval()(x), output)
    amp.get_session().close()
    assert torch.equal(model(x), plain)


@ranks(RANKS)
def test_what_is_not_supported_is_refused_by_name(rank: int) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    style: Any = {"0": ColwiseParallel()}
    spread = nn.Sequential(nn.Linear(WIDTH, 144))
    whole_copies: Any = {"0": SequenceParallel()}
    cases = [
        (lone_layer(), style, "nvfp4", "the weight of '0' is a DTensor .* FP4 does not support"),
        (lone_layer(), whole_copies, "current", "placements .*Replicate"),
        (nn.Sequential(nn.Linear(WIDTH, 128)), style, "block", "needs parts .* multiples of 128"),
        (nn.Sequential(nn.Linear(WIDTH, 32 * 3)), style, "mxfp8", "96 among 2 ranks.* of 32"),
        (spread, style, "current", "144 among 2 ranks.* of 16.*'skip': \\['0'\\]"),
    ]
    for model, plan, recipe, message in cases:
        parallelize_module(model, mesh, plan)
        with pytest.raises(AmpRuntimeError, match=message):
            initialize(model, "O5", {"recipe": recipe, "skip": []})
        assert type(model[0]) is nn.Linear
        assert model[0].weight.dtype is torch.float32
    model, _ = initialize(lone_layer(), "O4", EXACT["block"])
    parallelize_module(model, mesh, {"0": ColwiseParallel(output_layouts=Replicate())})
    assert model(torch.randn(16, WIDTH)).shape == (16, WIDTH)  # cut after initialize
    amp.get_session().close()
    wide_enough = nn.Sequential(nn.Linear(WIDTH, 128))
    model, _ = initialize(wide_enough, "O4", EXACT["block"])
    parallelize_module(model, mesh, style)
    with pytest.raises(AmpRuntimeError, match="needs parts .* multiples of 128"):
        model(torch.randn(16, WIDTH))
