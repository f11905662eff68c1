"""amp.scalars: the numbers of a step, for whatever logs numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import amp
from amp.errors import AmpRuntimeError
from tests.models import (
    adamw,
    batch,
    conv_net,
    initialize,
    run_backward,
    sgd,
    started,
    step_on,
    waiting_is_an_error,
)

OPTIMIZERS: dict[str, Any] = {
    "sgd": sgd,
    "fused": lambda params: adamw(params, fused=True),
    "ours": lambda params: amp.optimizers.FusedAdam(params, max_grad_norm=1.0),
}


def backward(model: Any, optimizer: Any, factor: float = 1.0, loss_id: int = 0) -> None:
    x, y = batch()
    run_backward(F.cross_entropy(model(x), y) * factor, optimizer, loss_id=loss_id)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_overflows_and_skipped_steps_are_counted(level: str, kind: str) -> None:
    model, optimizer = started(conv_net(), OPTIMIZERS[kind], level)
    assert amp.scalars()["amp/loss_scale"] == 1024
    for factors in ((1.0, 1.0), (math.inf, 1.0), (math.inf, math.inf), (1.0, 1.0)):
        for factor in factors:
            backward(model, optimizer, factor)
        optimizer.step()
        optimizer.zero_grad()
        last = amp.scalars(optimizer)
    assert (last["amp/skipped_steps"], last["amp/overflows"]) == (2, 3)
    assert (last["amp/loss_scale"], last["amp/overflows_in_a_row"]) == (128, 0)
    assert all(type(value) is float for value in last.values())


def test_the_norm_that_clipping_has_computed_is_among_them() -> None:
    model, optimizer = started(conv_net(), OPTIMIZERS["ours"], "O2")
    backward(model, optimizer)
    norm = amp.scalars(optimizer, norms=True)["amp/grad_norm"]
    model, optimizer = started(conv_net(), OPTIMIZERS["ours"], "O2")
    backward(model, optimizer)
    optimizer.step()
    # Norms are over the masters, of which the FP32 batch norm has none.
    assert 0 < amp.scalars(optimizer)["amp/grad_norm"] <= norm


def test_a_forgotten_overflow_skips_no_step() -> None:
    model, optimizer = started(conv_net(), sgd, "O2")
    backward(model, optimizer, math.inf)
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    last = amp.scalars(optimizer)
    assert (last["amp/skipped_steps"], last["amp/overflows"]) == (0, 1)


def test_optimizers_of_one_loss_skip_one_step() -> None:
    model = conv_net()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.conv, model.head)]
    model, optimizers = initialize(model, optimizers, "O2")
    for factor in (math.inf, 1.0):
        backward(model, optimizers, factor)
        for optimizer in optimizers:
            optimizer.step()
    assert amp.scalars()["amp/skipped_steps"] == 1


def test_losses_have_names_of_their_own() -> None:
    model, optimizer = started(conv_net(), sgd, "O2", num_losses=2)
    backward(model, optimizer, math.inf, loss_id=1)
    optimizer.step()
    values = amp.scalars()
    assert values["amp/loss_scale/0"] == 1024
    assert values["amp/loss_scale/1"] == 512
    assert [values[f"amp/skipped_steps/{i}"] for i in range(2)] == [0, 1]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, {"master_weights": "split16"}], ids=["whole", "split16"])
def test_norms_are_of_fp32_weights_and_unscaled_gradients(options: Any, kind: str) -> None:
    model = conv_net()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).norm().item()
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    grads = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()  # type: ignore[union-attr]
    model.zero_grad()
    model, optimizer = initialize(model, OPTIMIZERS[kind](model.parameters()), "O2", **options)
    backward(model, optimizer)
    values = amp.scalars(optimizer, norms=True)
    assert values["amp/weight_norm"] == pytest.approx(weights, rel=1e-6)
    assert values["amp/grad_norm"] == pytest.approx(grads, rel=5e-3)
    optimizer.step()
    assert all(each.isfinite().all() for each in model.state_dict().values())


def test_without_a_session() -> None:
    with pytest.raises(AmpRuntimeError, match="before amp.initialize"):
        amp.scalars()
    model = conv_net()
    model, _optimizer = amp.initialize(model, sgd(model), enabled=False)
    assert amp.scalars() == {}


@pytest.mark.gpu
def test_the_host_does_not_wait() -> None:
    device = "cuda"
    model, optimizer = started(conv_net().to(device), lambda p: adamw(p, fused=True), "O2")
    x, y = (each.to(device) for each in batch())
    for i in range(3):
        loss = F.cross_entropy(model(x), y)
        if i == 2:
            with waiting_is_an_error():
                assert amp.scalars(optimizer)["amp/loss_scale"] == 1024
        step_on(loss, optimizer)
