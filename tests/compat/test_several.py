"""Several models and losses behind one optimizer: what is stepped by what, and what is skipped."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from amp.optimizers import FusedSGD
from tests.covering import covering

X = torch.ones(2)


class Model(nn.Module):
    """Two weights, one of them half before `initialize`, as some scripts have it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.wide = nn.Parameter(seed + torch.arange(2.0))
        self.narrow = nn.Parameter(seed + torch.arange(1.0, 3.0).half())

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.wide.float() * self.narrow.float()).sum()


def losses(models: list[Model]) -> list[Tensor]:
    """Two losses; a third model is in both of them."""
    return [torch.stack([part(X) for part in (model, *models[2:])]).sum() for model in models[:2]]


def optimizer_of(kind: Any, models: list[Model], **options: Any) -> Any:
    groups = [
        {"params": model.parameters(), "lr": lr}
        for model, lr in zip(models, (0.25, 0.5, 0.125), strict=False)
    ]
    return kind(groups, momentum=0.125, **options)


def parameters(models: list[Model]) -> list[Tensor]:
    return [p.detach().clone() for model in models for p in model.parameters()]


def expected(count: int) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Return the gradients of two steps without amp, and the parameters after them."""
    models = [Model(i + 1) for i in range(count)]
    optimizer = optimizer_of(torch.optim.SGD, models)
    grads = []
    for _ in range(2):
        optimizer.zero_grad()
        torch.stack(losses(models)).sum().backward()
        grads.append([p.grad.clone() for model in models for p in model.parameters()])
        optimizer.step()
    return grads, parameters(models)


class Inf(NamedTuple):
    """An inf in the gradient of a weight, in the backward of one loss of one iteration."""

    iteration: int
    loss: int
    model: int
    weight: str


def infs(level: str, count: int) -> list[Inf | None]:
    if level not in ("O1", "O2"):
        return [None]
    return [None] + [
        Inf(iteration, loss, model, weight)
        for iteration in range(2)
        for loss in range(2)
        for model in ((loss, 2) if count == 3 else (loss,))
        for weight in ("wide", "narrow")
    ]


OPTIMIZERS = {"SGD": (torch.optim.SGD, {}), "FusedSGD": (FusedSGD, {"materialize_master_grads": False})}


@pytest.mark.parametrize(
    ("count", "level", "zero", "num_losses", "optimizer"),
    covering(
        *([2, 3], ["O0", "O1", "O2", "O3"], ["gradients", "models", "optimizer"], [1, 2], OPTIMIZERS),
        strength=1,
        slow_strength=2,
    ),
)
def test_losses_and_their_scales(
    amp: Any, count: int, level: str, zero: str, num_losses: int, optimizer: Any
) -> None:
    kind, options = OPTIMIZERS[optimizer]
    grads, after = expected(count)
    state = amp._amp_state
    for inf in infs(level, count):
        models = [Model(i + 1) for i in range(count)]
        optimizer = optimizer_of(kind, models, **options)
        state.allow_incoming_model_not_fp32 = True
        models, optimizer = amp.initialize(
            *(models, optimizer),
            opt_level=level,
            cast_model_type=False,
            num_losses=num_losses,
            verbosity=0,
        )
        state.allow_incoming_model_not_fp32 = False
        for scaler, scale in zip(state.loss_scalers, (4.0, 16.0), strict=False):
            scaler._loss_scale = scale
        good = 0
        for iteration in range(2 if inf is None else 3):
            clear(zero, models, optimizer)
            for i, loss in enumerate(losses(models)):
                with amp.scale_loss(loss, optimizer, loss_id=min(i, num_losses - 1)) as scaled_loss:
                    scaled_loss.backward()
                    if inf is not None and (inf.iteration, inf.loss) == (iteration, i):
                        getattr(models[inf.model], inf.weight).grad[0] = torch.inf
            if inf is None or inf.iteration != iteration:
                for parameter, grad in zip(amp.master_params(optimizer), grads[good], strict=True):
                    torch.testing.assert_close(parameter.grad, grad, check_dtype=False)
                good += 1
            optimizer.step()
        stepped = zip(amp.master_params(optimizer), parameters(models), after, strict=True)
        for master, parameter, reference in stepped:
            torch.testing.assert_close(parameter, reference)
            torch.testing.assert_close(master.to(parameter.dtype), parameter)
        if level == "O1":
            state.handle._deactivate()


def clear(how: str, models: list[Model], optimizer: Any) -> None:
    if how == "optimizer":
        optimizer.zero_grad()
    for model in models:
        if how == "models":
            model.zero_grad()
        elif how == "gradients":
            for parameter in model.parameters():
                parameter.grad = None
