"""Gradient penalties under a loss scale: those of scaled gradients are named, and others are not."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import amp

SCALE = 1024.0
Penalty = Callable[[Tensor, Tensor, nn.Module], Tensor]
"""Takes the loss, scaled or not, the input and the model."""


def of_norms(loss: Tensor, x: Tensor, model: nn.Module) -> Tensor:
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return (grad.norm(dim=1) - 1).square().mean()


def of_squares(loss: Tensor, x: Tensor, model: nn.Module) -> Tensor:
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return (grad * grad).mean()


def of_one_vector(loss: Tensor, x: Tensor, model: nn.Module) -> Tensor:
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return torch.cat([grad.flatten() for grad in grads]).norm() ** 2


def unscaled_first(loss: Tensor, x: Tensor, model: nn.Module) -> Tensor:
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return sum((grad * (1 / SCALE)).square().sum() for grad in grads)  # type: ignore[return-value]


def unscaled_last(loss: Tensor, x: Tensor, model: nn.Module) -> Tensor:
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    squares: Tensor = sum(grad.pow(2).sum() for grad in grads)  # type: ignore[assignment]
    return squares.sqrt() / SCALE


def of_a_direction(loss: Tensor, x: Tensor, model: nn.Module) -> Tensor:
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return (grad / grad.norm()).square().mean()


def of_an_inner_step(loss: Tensor, x: Tensor, model: nn.Module) -> Tensor:
    return _of_an_inner_step(loss, x, model, 0.01)


def of_an_unscaled_inner_step(loss: Tensor, x: Tensor, model: nn.Module) -> Tensor:
    return _of_an_inner_step(loss, x, model, 0.01 / SCALE)


def _of_an_inner_step(loss: Tensor, x: Tensor, model: nn.Module, rate: float) -> Tensor:
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()), create_graph=True)
    moved = {name: p - rate * grad for (name, p), grad in zip(named.items(), grads, strict=True)}
    return torch.func.functional_call(model, moved, (x,)).square().mean()


def of_the_sharpest_point(loss: Tensor, x: Tensor, model: nn.Module) -> Tensor:
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()), retain_graph=True)
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    by = 0.05 / (norm + 1e-12)
    moved = {name: p + grad * by for (name, p), grad in zip(named.items(), grads, strict=True)}
    return torch.func.functional_call(model, moved, (x,)).square().mean()


def scripts_line(penalty: Penalty) -> range:
    lines, first = inspect.getsourcelines(_HELPERS.get(penalty, penalty))
    return range(first + 2, first + len(lines))


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    return model, optimizer, torch.randn(64, 16, requires_grad=True), torch.randn(64, 1)


_HELPERS: dict[Penalty, Callable[..., Tensor]] = {of_an_inner_step: _of_an_inner_step}
WRONG: list[Penalty] = [of_norms, of_squares, of_one_vector, of_an_inner_step]
RIGHT: list[Penalty] = [
    *(unscaled_first, unscaled_last, of_a_direction, of_an_unscaled_inner_step),
    of_the_sharpest_point,
]


@pytest.mark.parametrize("is_scaled", [True, False])
@pytest.mark.parametrize("penalty", [*WRONG, *RIGHT], ids=lambda penalty: penalty.__name__)
def test_a_penalty_under_a_gradient_scaler(penalty: Penalty, is_scaled: bool) -> None:
    with amp.watch(at=[1]) as watch:
        model, optimizer, x, y = parts()
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        for _ in range(2):
            with torch.autocast("cpu", torch.float16):
                loss = (model(x).float() - y).square().mean()
            of = penalty(scaler.scale(loss) if is_scaled else loss, x, model)
            scaler.scale(loss + 0.01 * of).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    found = [x for x in watch.report.findings if x.cause == "order"]
    assert len(found) == (is_scaled and penalty in WRONG)
    for one in found:
        assert one.line in scripts_line(penalty)
        assert "scaled by 1024" in one.what


def causes_at_o2(scale: float, added: Callable[[Tensor, Tensor, nn.Module], Tensor]) -> list[str]:
    """Return the causes that are found where a penalty is added to the scaled loss."""
    model, optimizer, x, y = parts()
    with amp.Session("O2", verbosity=0, loss_scale=scale) as session:
        model, optimizer = session.initialize(model, optimizer)
        with amp.diagnose(model, optimizer) as report:
            loss = (model(x).float() - y).square().mean()
            with session.scale_loss(loss, optimizer) as scaled_loss:
                (scaled_loss + added(scaled_loss, x, model)).backward()
            optimizer.step()
    return [x.cause for x in report.findings]


@pytest.mark.parametrize("penalty", [of_norms, unscaled_first], ids=lambda penalty: penalty.__name__)
def test_a_penalty_inside_of_scale_loss(penalty: Penalty) -> None:
    assert causes_at_o2(SCALE, penalty) == ["order"] * (penalty in WRONG)


def test_an_overflow_that_a_penalty_of_scaled_gradients_makes_is_its_consequence() -> None:
    assert causes_at_o2(2.0**16, lambda *given: 2.0**16 * of_norms(*given)) == ["order"]


def test_a_penalty_that_grows_with_the_scale_may_be_added_to_the_scaled_loss() -> None:
    def grows(loss: Tensor, x: Tensor, model: nn.Module) -> Tensor:
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return 0.1 * grad.norm(dim=1).mean()

    assert "order" not in causes_at_o2(SCALE, grows)


def test_optimizers_that_share_a_gradient_scaler_take_no_penalty() -> None:
    """Of a GAN: its second loss goes through weights whose gradients were unscaled and stepped on."""
    first, one, x, _ = parts()
    second = nn.Linear(16, 16)
    other = torch.optim.SGD(second.parameters(), 1e-2)
    with amp.watch(at=[1, 2]) as watch:
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        for _ in range(2):
            for optimizer, sign in ((one, 1.0), (other, -1.0)):
                with torch.autocast("cpu", torch.float16):
                    loss = sign * first(second(x)).float().mean()
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
            scaler.update()
    assert "order" not in [x.cause for x in watch.report.findings]
