"""The list kernels of apex, called as scripts called them."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp.optimizers import FusedLAMB

SHAPES = [(3, 4), (7,), (1,)]


@pytest.fixture
def amp_c(apex: Any) -> Any:
    return importlib.import_module("amp_C")


@pytest.fixture
def applier(amp_c: Any) -> Any:
    return importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def flag() -> Tensor:
    return torch.zeros(1, dtype=torch.int32)


def test_scale_and_its_flag(amp_c: Any, applier: Any) -> None:
    assert applier.available
    sources, targets, noop = tensors(0, torch.float16), tensors(1), flag()
    applier(amp_c.multi_tensor_scale, noop, [sources, targets], 0.5)
    assert all(torch.equal(t, s.float() * 0.5) for s, t in zip(sources, targets, strict=True))
    assert noop.item() == 0
    sources[1][3] = torch.inf
    applier(amp_c.multi_tensor_scale, noop, [sources, targets], 0.5)
    applier(amp_c.multi_tensor_scale, noop, [tensors(0), targets], 0.5)
    assert noop.item() == 1  # it is never cleared


@pytest.mark.parametrize(
    ("checked", "bad", "flagged"), [(-1, 0, 1), (-1, 1, 1), (0, 1, 0), (1, 1, 1), (1, 0, 0)]
)
def test_axpby(amp_c: Any, applier: Any, checked: int, bad: int, flagged: int) -> None:
    lists, noop = [tensors(0), tensors(1), tensors(2)], flag()
    applier(amp_c.multi_tensor_axpby, noop, lists, 2.0, -1.0, checked)
    for x, y, out in zip(*lists, strict=True):
        torch.testing.assert_close(out, 2 * x - y)
    assert noop.item() == 0
    lists[bad][0][0, 0] = torch.nan
    applier(amp_c.multi_tensor_axpby, noop, lists, 2.0, -1.0, checked)
    assert noop.item() == flagged


def test_norms(amp_c: Any, applier: Any) -> None:
    some, noop = tensors(0), flag()
    total, each = applier(amp_c.multi_tensor_l2norm, noop, [some], True)
    torch.testing.assert_close(total, torch.cat([t.flatten() for t in some]).norm().reshape(1))
    torch.testing.assert_close(each, torch.stack([t.norm() for t in some]))
    total, each = applier(amp_c.multi_tensor_unscale_l2norm, noop, [some], torch.tensor(0.25))
    torch.testing.assert_close(total, torch.cat([t.flatten() for t in some]).norm().reshape(1) / 4)
    assert each.shape == (0,)


def zeros(value: float = 0.0) -> list[Tensor]:
    return [torch.full(shape, value) for shape in SHAPES]


def check_steps(optimizer_of: Any, ours: list[Tensor], take_step: Any, **tolerances: float) -> None:
    """Step by an optimizer, and on the same parameters by a function of the number and gradients."""
    params = [nn.Parameter(t) for t in tensors(0)]
    optimizer = optimizer_of(params)
    for step in range(1, 4):
        grads = tensors(step)
        for parameter, grad in zip(params, grads, strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
        take_step(step, grads)
    for parameter, our in zip(params, ours, strict=True):
        torch.testing.assert_close(our, parameter.detach(), **tolerances)


@pytest.mark.parametrize("mode", [0, 1])
def test_adam(amp_c: Any, applier: Any, mode: int) -> None:
    kind, ours, m, v = torch.optim.AdamW if mode else torch.optim.Adam, tensors(0), zeros(), zeros()

    def take_step(step: int, grads: list[Tensor]) -> None:
        arguments = (0.1, 0.9, 0.999, 1e-8, step, mode, 1, 0.1)
        for noop in (flag(), flag() + 1):  # the second skips
            applier(amp_c.multi_tensor_adam, noop, [grads, ours, m, v], *arguments)

    check_steps(lambda ps: kind(ps, lr=0.1, weight_decay=0.1), ours, take_step)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_with_16_bit_weights(amp_c: Any, applier: Any, nesterov: bool) -> None:
    momenta = zeros(torch.nan)  # as new memory may be
    ours, halves = tensors(0), tensors(5, torch.float16)

    def take_step(step: int, grads: list[Tensor]) -> None:
        lists = [[8 * grad for grad in grads], ours, momenta, halves]
        arguments = (0.01, 0.9, 0.0, 0.1, nesterov, step == 1, False, 1 / 8)
        applier(amp_c.multi_tensor_sgd, flag(), lists, *arguments)

    options: Any = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": nesterov}
    check_steps(lambda ps: torch.optim.SGD(ps, **options), ours, take_step)
    assert all(torch.equal(half, our.half()) for half, our in zip(halves, ours, strict=True))


def test_lamb_is_the_optimizers(amp_c: Any, applier: Any) -> None:
    ours, m, v = tensors(0), zeros(), zeros()

    def take_step(step: int, grads: list[Tensor]) -> None:
        norm, _ = applier(amp_c.multi_tensor_l2norm, flag(), [grads])
        arguments = (0.1, 0.9, 0.999, 1e-6, step, 1, 0.1, 1, 1, norm, 1.0, False)
        applier(amp_c.multi_tensor_lamb, flag(), [grads, ours, m, v], *arguments)

    options: Any = {"lr": 0.1, "weight_decay": 0.1, "max_grad_norm": 1.0}
    check_steps(lambda ps: FusedLAMB(ps, **options), ours, take_step, rtol=1e-4, atol=1e-6)


def test_the_scale_with_hysteresis(amp_c: Any) -> None:
    scale, growth = torch.tensor([16.0]), torch.tensor([0], dtype=torch.int32)
    left = torch.tensor([2], dtype=torch.int32)
    trace = []
    for found in (0.0, 1.0, 1.0, 0.0, 0.0, 1.0):
        amp_c.update_scale_hysteresis(scale, growth, left, torch.tensor([found]), 2.0, 0.5, 2, 2)
        trace.append((scale.item(), growth.item(), left.item()))
    assert trace == [(16, 1, 2), (16, 0, 1), (8, 0, 0), (8, 1, 2), (16, 0, 2), (16, 0, 1)]


@pytest.mark.parametrize(("found", "start", "end"), [(1.0, 2.0**-125, 0.0), (0.0, 2.0**126, 2.0**127)])
def test_the_scale_at_the_ends_of_float32(amp_c: Any, found: float, start: float, end: float) -> None:
    scale, growth = torch.tensor([start]), torch.tensor([0], dtype=torch.int32)
    left = torch.tensor([1], dtype=torch.int32)
    for _ in range(3):
        amp_c.update_scale_hysteresis(scale, growth, left, torch.tensor([found]), 2.0, 0.5, 1, 1)
    assert scale.item() == end
