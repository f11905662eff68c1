"""Stochastic gradient descent, with momentum or without.

    g = g + before * p                                before: weight decay
    m = g                                             at t = 1
    m = momentum * m + (1 - dampening) * g            later
    d = g + momentum * m with nesterov, else m        without momentum: d = g
    p = p - lr * (d + after * p)                      after: weight decay after momentum

Shapes, dtypes, launches, memory traffic: see `amp.kernels.stepping`. Source: `torch.optim.SGD`; weight
decay after momentum: NVIDIA apex `FusedSGD`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from amp.kernels.language import jit, tl
from amp.kernels.stepping import Rule


class SGDNumbers(NamedTuple):
    """What the kernel reads, in its order."""

    lr: float | Tensor
    before: float | Tensor
    after: float | Tensor
    momentum: float | Tensor
    fresh: float | Tensor
    nesterov: float


def sgd_numbers(
    lr: float | Tensor,
    momentum: float | Tensor,
    dampening: float | Tensor,
    weight_decay: float | Tensor,
    *,
    nesterov: bool,
    after_momentum: bool,
) -> SGDNumbers:
    """Return the numbers of `SGD` and `MOMENTUM_SGD`. The host does not wait for the device.

    Args:
        lr: a number, or a tensor of one element, as are the next three.
        momentum: how much of the momentum is kept.
        dampening: how much of a gradient does not enter it.
        weight_decay: how much of the parameter is added to the gradient.
        nesterov: whether to look ahead.
        after_momentum: whether the weight decay stays out of the momentum.
    """
    return SGDNumbers(
        lr,
        0.0 if after_momentum else weight_decay,
        weight_decay if after_momentum else 0.0,
        momentum,
        1 - dampening,
        float(nesterov),
    )


@jit
def _prepare(numbers, t, of_tensor, n):
    momentum = tl.load(numbers + 3)
    return (
        tl.load(numbers),
        tl.load(numbers + 1),
        tl.load(numbers + 2),
        tl.where(t == 1.0, 0.0, momentum),
        tl.where(t == 1.0, 1.0, tl.load(numbers + 4)),
        # d = along_g * g + along_m * m
        tl.where(tl.load(numbers + 5) != 0.0, 1.0, 0.0),
        tl.where(tl.load(numbers + 5) != 0.0, momentum, 1.0),
    )


@jit
def _update(p, g, m, v, prepared):
    lr, before, after, keep, fresh, along_g, along_m = prepared
    g += before * p
    m = keep * m + fresh * g
    p -= lr * (along_g * g + along_m * m + after * p)
    return p, m, v


@jit
def _update_without_momentum(p, g, m, v, prepared):
    lr, before, after, _, _, _, _ = prepared
    p -= lr * (g + (before + after) * p)
    return p, m, v


def _at(numbers: list[float], t: float, of_tensor: float | None) -> tuple[float, ...]:
    lr, before, after, momentum, fresh, nesterov = numbers
    keep, fresh = (0.0, 1.0) if t == 1 else (momentum, fresh)
    along_g, along_m = (1.0, momentum) if nesterov else (0.0, 1.0)
    return lr, before, after, keep, fresh, along_g, along_m


def _formula(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    lr, before, after, keep, fresh, along_g, along_m = numbers
    g = g + before * p
    m = keep * m + fresh * g
    return p - lr * (along_g * g + along_m * m + after * p), m, v


def _formula_without_momentum(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    lr, before, after, _, _, _, _ = numbers
    return p - lr * (g + (before + after) * p), m, v


SGD = Rule(0, _prepare, _update_without_momentum, _at, _formula_without_momentum)
"""SGD without momentum."""

MOMENTUM_SGD = Rule(1, _prepare, _update, _at, _formula)
"""SGD whose moment is the momentum."""
