"""Steps of infinite, NaN, subnormal and very large numbers, on every backend at hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp.kernels import cpu_loop
from amp.kernels.lamb import LAMB
from amp.kernels.language import INTERPRETED
from amp.kernels.novograd import NOVOGRAD
from amp.optimizers import FusedNovoGrad
from tests.devices import GPU
from tests.kernels.formulas import CASES, Case, made

INF, NAN, LARGEST, SUBNORMAL = math.inf, math.nan, torch.finfo(torch.float32).max, 2.0**-140
VALUES = (0.0, -0.0, INF, -INF, NAN, SUBNORMAL, LARGEST, -LARGEST, 1.0, -0.5)
FEW = (0.0, -INF, NAN, LARGEST, -0.5)
BY_TENSOR = LAMB, NOVOGRAD
"""For which each element is to be a tensor of its own, whose norm the step uses."""
TRIED = (
    *("sgd", "momentum", "nesterov", "decay after", "adagrad", "adagrad decoupled", "adam", "adamw"),
    *("lamb", "lion", "novograd"),
)

SLOW = () if INTERPRETED or GPU else ("sgd", "adagrad", "adagrad decoupled", "novograd")
"""What is compiled for these alone: loops in C++ of operations that the others have too."""
BACKENDS = (None,) if INTERPRETED else (None, "reference")


def combined(*axes: tuple[float, ...]) -> list[Tensor]:
    return list(torch.cartesian_prod(*map(torch.tensor, axes)).view(-1, len(axes)).unbind(1))


def stepped(
    kind: Any, case: Case, group: dict[str, Any], t: int, tensors: list[Tensor]
) -> list[Tensor]:
    """Return the parameter and the moments after step t of an optimizer."""
    by_tensor = case.rule in BY_TENSOR
    parts = [list(x.clone().unbind()) if by_tensor else [x.clone()] for x in tensors]
    params = list(map(nn.Parameter, parts[0]))
    optimizer = made(kind, params, group)
    names = [moment.name for moment in case.rule.moments]
    for parameter, grad, *moments in zip(params, *parts[1:], strict=True):
        parameter.grad = grad
        state = {"step": torch.tensor(t - 1.0), **dict(zip(names, moments, strict=True))}
        if isinstance(optimizer, FusedNovoGrad):  # the norm stays that of this gradient
            state["exp_avg_sq"] = torch.tensor(0.0) if t == 1 else grad.abs()
        if t > 1 or "momentum_buffer" not in state:  # of which torch's first step makes a copy
            optimizer.state[parameter] = state
    optimizer.step()
    states = [optimizer.state[parameter] for parameter in params]
    found = [[p.detach() for p in params], *([state[name] for state in states] for name in names)]
    return [torch.stack(x) if by_tensor else x[0] for x in found]


def check(ours: Tensor, right: Tensor, given: list[Tensor], what: Any, rtol: float = 1e-5) -> None:
    """Check that numbers are near each other, infinities alike, and NaN at the same places."""
    bad = ~torch.isclose(ours, right, rtol=rtol, atol=1e-44, equal_nan=True)
    rows = torch.stack([*given, ours, right], 1)[bad]
    assert not bad.any(), f"{what}: of {rows[0, :-2].tolist()} came {rows[0, -2]}, not {rows[0, -1]}"


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(name, backend, marks=pytest.mark.slow if backend is None and name in SLOW else ())
        for name in TRIED
        for backend in BACKENDS
    ],
)
def test_special_values_step_as_the_formula_and_torch_say(
    device: torch.device, name: str, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_loop, "WORTH_COMPILING", 0)
    if backend:
        monkeypatch.setenv("AMP_KERNELS", backend)
    case = CASES[name]
    by_tensor, moments = case.rule in BY_TENSOR, case.rule.moments
    decays = (0.0, 0.1) if INTERPRETED and by_tensor else (0.0, 0.1, torch.tensor(0.0))
    for decay, t in itertools.product(decays, (1, 2)):
        values = FEW if by_tensor else VALUES
        if by_tensor and decay:  # squares of which the norm is the root
            values = tuple(x for x in values if abs(x) != LARGEST)
        axes = [(0.0,) if t == 1 else (0.0, -0.5) if by_tensor else FEW for _ in moments]
        given = combined(values, values, *axes)
        if moments and not moments[-1].is_signed:
            given[-1] = given[-1].abs()
        tensors = [x.to(device) for x in given]
        group = {**case.group(lr=0.1, betas=(0.9, 0.99), lr_decay=0.0), "max_grad_norm": None}
        results = stepped(case.fused, case, {**group, "weight_decay": decay}, t, tensors)
        group["weight_decay"] = float(decay)
        exact = case.formula(group, t, Tensor.abs, *given)
        for ours, right in zip(results, exact, strict=True):
            check(ours.cpu(), right, given, (decay, t))
        interpolates = name in ("adam", "adamw") and t == 2  # and makes NaN of an infinite moment
        if case.torchs is None or isinstance(decay, Tensor) or interpolates:
            continue
        right = stepped(case.torchs, case, group, t, given)[0]
        if name == "nesterov":  # torch adds both terms first, to more than the largest number
            right = torch.where(given[1].abs() == LARGEST, results[0].cpu(), right)
        # torch rounds more: Adagrad lr * g, which is subnormal.
        check(results[0].cpu(), right, given, ("torch", decay, t), rtol=3e-2)
