"""Autocast, GradScaler and amp in the wrong order: what `amp.watch` says, and of what nothing."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp
from tests.diagnosis.users_scripts import X, Y, here, net, steps

F16, BF16 = torch.float16, torch.bfloat16


def autocast(is_in: bool, **options: Any) -> Any:
    return torch.autocast("cpu", BF16, **options) if is_in else contextlib.nullcontext()


@pytest.mark.parametrize("kind", ["outside", "each step", "no cache"])
def test_a_loop_inside_of_autocast_goes_on_with_old_weights(kind: str) -> None:
    """Autocast keeps the casts of weights until its block ends."""
    torch.manual_seed(2)
    model = nn.Linear(16, 4)
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-1)
        called_at, losses = 0, []
        with autocast(kind != "each step", cache_enabled=kind != "no cache"):
            for _ in range(3):
                optimizer.zero_grad()
                with autocast(kind == "each step"):
                    y = model(X)
                    called_at = here(1)
                    with torch.autocast("cpu", enabled=False):
                        loss = F.cross_entropy(y.float(), Y)
                        loss.backward()
                    losses.append(loss.item())
                    optimizer.step()
    assert (losses[0] == losses[2]) is (kind == "outside")  # it learns nothing
    found = [(x.cause, x.line, x.phase) for x in watch.report.findings]
    assert found == [("order", called_at, "forward")] * (kind == "outside")


@pytest.mark.parametrize("size", [8.0, 2.0**16])
def test_a_scale_of_a_gradient_scaler_that_is_too_small(size: float) -> None:
    model = net()
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=size)
        with torch.autocast("cpu", F16):
            y = model(X)
        scaler.scale(F.cross_entropy(y.float(), Y) * 1e-6).backward()
        scaler.step(optimizer)
        scaler.update()
    causes = [x.cause for x in watch.report.findings]
    assert causes == (["underflow"] if size == 8 else [])
    if size == 8:
        assert "GradScaler(init_scale=65536)" in watch.report.findings[0].advice


class Bins(nn.Module):
    """Its loss is a method, and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("bins", torch.linspace(-3, 3, 7))

    def loss(self, x: Tensor) -> Tensor:
        y = self.net(x).float().mean(1, keepdim=True)
        return (y - self.get_buffer("bins").float()).square().mean()


def test_a_rounded_buffer_around_the_model_that_is_called() -> None:
    """The optimizer has copies of the weights, so that only calls tell what is trained."""
    with amp.watch(at=[1]) as watch:
        model = Bins()
        model.get_buffer("bins").add_(0.001)
        model.bfloat16()
        masters = [p.detach().float().requires_grad_() for p in model.parameters()]
        optimizer = torch.optim.SGD(masters, 1e-2)
        for _ in steps(optimizer, 1):
            model.loss(X.bfloat16()).backward()
            for master, p in zip(masters, model.parameters(), strict=True):
                assert p.grad is not None
                master.grad = p.grad.float()
    assert "the buffer 'bins' of Bins" in str(watch.report)


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("level", ["O0", "O5"])
def test_coordinates_that_a_level_casts_are_excepted(level: str, at: int) -> None:
    """Also in a window that begins as the model is called."""

    class Trip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 1)

        def forward(self, start: Tensor, end: Tensor) -> Tensor:
            return self.net((end - start) * 100)

    model, optimizer = Trip(), None
    start = torch.tensor([37.7749, -122.4194]) + 0.05 * X[:, :2]
    with amp.watch(at=[at]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for _ in steps(optimizer, 3):
            with amp.scale_loss(model(start, start + 0.02).float().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
    lost = [x for x in watch.report.findings if x.cause in ("cancellation", "rounding")]
    assert bool(lost) is (level == "O5")
    assert all("cast_model_inputs: {except: [" in x.advice for x in lost)


def test_what_a_level_casts_back_is_computed_without_casts() -> None:
    class Prototypes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.points = net(), nn.Parameter(torch.randn(5, 4) * 0.1 + 8)

        def forward(self, x: Tensor) -> Tensor:
            y, z = self.net(x).float() * 0.1 + 8, self.points
            return 2 * y @ z.t() - (y**2).sum(1, keepdim=True) - (z**2).sum(1)

    model, optimizer = Prototypes(), None
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
        for _ in steps(optimizer, 1):
            loss = F.cross_entropy(model(X).float(), Y)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
    (found,) = watch.report.findings
    assert found.cause in ("cancellation", "rounding")
    assert "amp.disable_casts() and x.float()" in found.advice


@pytest.mark.parametrize("scales", [True, False])
def test_a_block_of_scale_loss_that_is_left_out(scales: bool) -> None:
    """Numbers in float32 do not stand still by themselves then."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 1))
    with amp.watch(at=[1]) as watch, pytest.warns() if not scales else contextlib.nullcontext():
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        for _ in steps(optimizer):
            loss = F.mse_loss(model(X).float() * 1e-3, X[:, :1] * 1e-3)
            if scales:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
    found = [(x.cause, "amp.scale_loss(loss, optimizer)" in x.advice) for x in watch.report.findings]
    assert found == ([] if scales else [("underflow", True)])


def test_a_wrong_call_is_named_before_the_overflow_that_follows() -> None:
    model = net()
    with amp.watch(at=[2]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e2)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", F16):
                y = model(X)
            scaler.scale(F.cross_entropy(y.float(), Y)).backward()
            optimizer.step()  # and no scaler.step
    causes = [x.cause for x in watch.report.findings]
    assert causes[0] == "order"
    assert len(causes) > 1
