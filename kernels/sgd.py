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

from typing import NamedTuple

import torch
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


def _reference(
    params: list[Tensor],
    grads: list[Tensor],
    moments: list[list[Tensor]],
    steps: list[float],
    numbers: list[float],
    of_tensor: list[float],
) -> None:
    lr, before, after, momentum, fresh, nesterov = numbers
    if before:
        torch._foreach_add_(grads, params, alpha=before)
    for buffers in moments:
        torch._foreach_mul_(buffers, [0.0 if t == 1 else momentum for t in steps])
        weighted = torch._foreach_mul(grads, [1.0 if t == 1 else fresh for t in steps])
        torch._foreach_add_(buffers, weighted)
        if nesterov:
            torch._foreach_add_(grads, buffers, alpha=momentum)
        else:
            grads = [buffer.clone() for buffer in buffers] if after else buffers
    if after:
        torch._foreach_add_(grads, params, alpha=after)
    torch._foreach_add_(params, grads, alpha=-lr)


SGD = Rule(0, _prepare, _update_without_momentum, _reference)
"""SGD without momentum."""

MOMENTUM_SGD = Rule(1, _prepare, _update, _reference)
"""SGD whose moment is the momentum."""
