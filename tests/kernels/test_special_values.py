"""Steps of infinite, NaN, subnormal and very large numbers, on every backend at hand.

A term whose factor is 0 is left out, as in `torch.optim`: without weight decay -inf stays -inf.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from amp.kernels import cpu_loop
from amp.kernels.language import INTERPRETED
from amp.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedLion,
    FusedNovoGrad,
    FusedSGD,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # NumPy interprets
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # triton 3.6
]

INF, NAN, LARGEST, SUBNORMAL = math.inf, math.nan, torch.finfo(torch.float32).max, 2.0**-140
VALUES = (0.0, -0.0, INF, -INF, NAN, SUBNORMAL, LARGEST, -LARGEST, 1.0, -0.5)
FEW = (0.0, -INF, NAN, LARGEST, -0.5)


class Case(NamedTuple):
    """An optimizer and what its step must agree with.

    Attributes:
        make: makes the optimizer, but for its weight decay.
        formula: takes the weight decay, the step's number and tensors: parameter, gradient, moments.
            Returns the new parameter and moments.
        moments: the names of the moments.
        reference: the same as `make`, of torch; None where torch has no such optimizer.
        is_signed: whether the last moment may be negative.
        by_tensor: whether each element is to be a tensor of its own, whose norm the step uses.
    """

    make: Callable[..., Any]
    formula: Callable[..., tuple[Tensor, ...]]
    moments: tuple[str, ...] = ()
    reference: Callable[..., Any] | None = None
    is_signed: bool = True
    by_tensor: bool = False


def added(x: Tensor, factor: float, y: Tensor) -> Tensor:
    return x + factor * y if factor else x


def sgd(decay: float, t: int, p: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    return (p - 0.1 * added(g, decay, p),)


def momentum_sgd(decay: float, t: int, p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    g = added(g, decay, p)
    m = g if t == 1 else 0.9 * m + g
    return p - 0.1 * m, m


def nesterov(decay: float, t: int, p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    g = added(g, decay, p)
    m = g if t == 1 else 0.9 * m + g
    return p - 0.1 * g - 0.09 * m, m


def decay_after_momentum(decay: float, t: int, p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    m = g if t == 1 else 0.9 * m + g
    return p * (1 - 0.1 * decay) - 0.1 * m, m


def adagrad(decay: float, t: int, p: Tensor, g: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    g = added(g, decay, p)
    s = s + g * g
    return p - 0.1 * (g / (s.sqrt() + 1e-10)), s


def decoupled_adagrad(decay: float, t: int, p: Tensor, g: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    s = s + g * g
    return p - 0.1 * added(g / (s.sqrt() + 1e-10), decay, p), s


def adam(
    decay: float, t: int, p: Tensor, g: Tensor, m: Tensor, v: Tensor, keep: float = 1.0
) -> tuple[Tensor, ...]:
    g = added(g, decay, p)
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    root = (v.sqrt() / (1 - 0.99**t) ** 0.5) + 1e-8
    return p * keep - 0.1 / (1 - 0.9**t) * m / root, m, v


def adamw(decay: float, t: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    return adam(0.0, t, *tensors, keep=1 - 0.1 * decay)


def lamb(decay: float, t: int, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    u = m / (1 - 0.9**t) / (v.sqrt() / (1 - 0.99**t) ** 0.5 + 1e-6)
    u = added(u, decay, p)
    ratio = torch.where((p != 0) & (u != 0), p.abs() / u.abs(), 1.0) if decay else 1.0
    return p - 0.1 * ratio * u, m, v


def lion(decay: float, t: int, p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    direction = (0.9 * m + 0.1 * g).sign()
    return p * (1 - 0.1 * decay) - 0.1 * direction, 0.99 * m + 0.01 * g


def novograd(decay: float, t: int, p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    m = 0.9 * m + 0.1 * g
    return p * (1 - 0.1 * decay) - 0.1 / (1 - 0.9**t) / (g.abs() / (1 - 0.99**t) ** 0.5 + 1e-8) * m, m


BETAS = {"lr": 0.1, "betas": (0.9, 0.99)}
CASES = {
    "sgd": Case(
        lambda ps, wd: FusedSGD(ps, lr=0.1, weight_decay=wd),
        sgd,
        (),
        lambda ps, wd: torch.optim.SGD(ps, lr=0.1, weight_decay=wd),
    ),
    "momentum": Case(
        lambda ps, wd: FusedSGD(ps, lr=0.1, momentum=0.9, weight_decay=wd),
        momentum_sgd,
        ("momentum_buffer",),
        lambda ps, wd: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=wd),
    ),
    "nesterov": Case(
        lambda ps, wd: FusedSGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=wd),
        nesterov,
        ("momentum_buffer",),
        lambda ps, wd: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=wd),
    ),
    "decay after": Case(
        lambda ps, wd: FusedSGD(ps, lr=0.1, momentum=0.9, wd_after_momentum=True, weight_decay=wd),
        decay_after_momentum,
        ("momentum_buffer",),
    ),
    "adagrad": Case(
        lambda ps, wd: FusedAdagrad(ps, lr=0.1, weight_decay=wd),
        adagrad,
        ("sum",),
        is_signed=False,
        reference=lambda ps, wd: torch.optim.Adagrad(ps, lr=0.1, weight_decay=wd),
    ),
    "adagrad decoupled": Case(
        lambda ps, wd: FusedAdagrad(ps, lr=0.1, weight_decay=wd, adagrad_w_mode=True),
        decoupled_adagrad,
        ("sum",),
        is_signed=False,
    ),
    "adam": Case(
        lambda ps, wd: FusedAdam(ps, **BETAS, adam_w_mode=False, weight_decay=wd),
        adam,
        ("exp_avg", "exp_avg_sq"),
        is_signed=False,
        reference=lambda ps, wd: torch.optim.Adam(ps, **BETAS, weight_decay=wd),
    ),
    "adamw": Case(
        lambda ps, wd: FusedAdam(ps, **BETAS, weight_decay=wd),
        adamw,
        ("exp_avg", "exp_avg_sq"),
        is_signed=False,
        reference=lambda ps, wd: torch.optim.AdamW(ps, **BETAS, weight_decay=wd),
    ),
    "lamb": Case(
        lambda ps, wd: FusedLAMB(ps, **BETAS, weight_decay=wd, max_grad_norm=None),
        lamb,
        ("exp_avg", "exp_avg_sq"),
        is_signed=False,
        by_tensor=True,
    ),
    "lion": Case(lambda ps, wd: FusedLion(ps, **BETAS, weight_decay=wd), lion, ("exp_avg",)),
    "novograd": Case(
        lambda ps, wd: FusedNovoGrad(ps, **BETAS, weight_decay=wd),
        novograd,
        ("exp_avg",),
        by_tensor=True,
    ),
}


def combined(*axes: tuple[float, ...]) -> list[Tensor]:
    return list(torch.cartesian_prod(*map(torch.tensor, axes)).view(-1, len(axes)).unbind(1))


def stepped(make: Any, case: Case, decay: Any, t: int, tensors: list[Tensor]) -> list[Tensor]:
    """Return the parameter and the moments after step t of an optimizer."""
    parts = [list(x.clone().unbind()) if case.by_tensor else [x.clone()] for x in tensors]
    params = list(map(nn.Parameter, parts[0]))
    optimizer = make(params, decay)
    for parameter, grad, *moments in zip(params, *parts[1:], strict=True):
        parameter.grad = grad
        state = {"step": torch.tensor(t - 1.0), **dict(zip(case.moments, moments, strict=True))}
        if isinstance(optimizer, FusedNovoGrad):  # the norm stays that of this gradient
            state["exp_avg_sq"] = torch.tensor(0.0) if t == 1 else grad.abs()
        if t > 1 or "momentum_buffer" not in state:  # of which torch's first step makes a copy
            optimizer.state[parameter] = state
    optimizer.step()
    states = [optimizer.state[parameter] for parameter in params]
    found = [
        [p.detach() for p in params],
        *([state[name] for state in states] for name in case.moments),
    ]
    return [torch.stack(x) if case.by_tensor else x[0] for x in found]


def check(ours: Tensor, right: Tensor, given: list[Tensor], what: Any, rtol: float = 1e-5) -> None:
    """Check that numbers are near each other, infinities alike, and NaN at the same places."""
    bad = ~torch.isclose(ours, right, rtol=rtol, atol=1e-44, equal_nan=True)
    rows = torch.stack([*given, ours, right], 1)[bad]
    assert not bad.any(), f"{what}: of {rows[0, :-2].tolist()} came {rows[0, -2]}, not {rows[0, -1]}"


@pytest.mark.parametrize("backend", [None, *([] if INTERPRETED else ["reference"])])
@pytest.mark.parametrize("name", CASES)
def test_special_values_step_as_the_formula_and_torch_say(
    device: torch.device, name: str, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_loop, "WORTH_COMPILING", 0)
    if backend:
        monkeypatch.setenv("AMP_KERNELS", backend)
    case = CASES[name]
    for decay, t in itertools.product((0.0, 0.1, torch.tensor(0.0)), (1, 2)):
        values = FEW if case.by_tensor else VALUES
        if case.by_tensor and decay:  # squares of which the norm is the root
            values = tuple(x for x in values if abs(x) != LARGEST)
        axes = [(0.0,) if t == 1 else (0.0, -0.5) if case.by_tensor else FEW for _ in case.moments]
        given = combined(values, values, *axes)
        if case.moments and not case.is_signed:
            given[-1] = given[-1].abs()
        tensors = [x.to(device) for x in given]
        results = stepped(case.make, case, decay, t, tensors)
        exact = case.formula(float(decay), t, *given)
        for ours, right in zip(results, exact, strict=True):
            check(ours.cpu(), right, given, (decay, t))
        if (
            case.reference is None
            or isinstance(decay, Tensor)
            or (name in ("adam", "adamw") and t == 2)
        ):
            continue  # torch interpolates, so it makes NaN of an infinite moment
        right = stepped(case.reference, case, decay, t, given)[0]
        if name == "nesterov":  # torch adds both terms first, to more than the largest number
            right = torch.where(given[1].abs() == LARGEST, results[0].cpu(), right)
        # torch rounds more: Adagrad lr * g, which is subnormal.
        check(results[0].cpu(), right, given, ("torch", decay, t), rtol=3e-2)
