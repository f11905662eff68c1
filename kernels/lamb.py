"""LAMB, and NVIDIA's variant of it.

    g = g + l2 * p                                    l2: Adam's weight decay
    m = beta1 * m + fresh * g                         fresh: 1 - beta1, or 1 without averaging
    v = beta2 * v + (1 - beta2) * g * g
    u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + decay * p
    p = p - lr * |p| / |u| * u                        |.| over the tensor; 1 where either is 0

Without a weight decay the ratio of norms is 1 for every tensor; not so in NVLAMB.

Shapes, dtypes, launches, memory traffic: see `amp.kernels.stepping`; it goes by the norms of its own
direction. Source: You et al. 2020, algorithm 2, with bias correction; NVIDIA apex's FusedLAMB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp.kernels.adam import adam_numbers
from amp.kernels.language import jit, tl
from amp.kernels.plainstep import Numbers
from amp.kernels.stepping import Rule, bias_correction


class LambNumbers(NamedTuple):
    """What the kernel reads, in its order; see `AdamNumbers`."""

    lr: float | Tensor
    beta1: float | Tensor
    beta2: float | Tensor
    fresh: float | Tensor
    one_minus_beta2: float | Tensor
    log_beta1: float | Tensor
    log_beta2: float | Tensor
    eps: float | Tensor
    decay: float | Tensor
    l2: float | Tensor
    corrects_bias: float
    always_adapts: float


def lamb_numbers(
    lr: float | Tensor,
    betas: tuple[float | Tensor, float | Tensor],
    eps: float | Tensor,
    weight_decay: float | Tensor,
    *,
    decoupled: bool,
    bias_correction: bool,
    averages: bool,
    always_adapts: bool,
) -> LambNumbers:
    """Return the numbers of `LAMB`. The host does not wait for the device.

    Args:
        lr: a number, or a tensor of one element, as are all of these.
        betas: how much of the two moments is kept.
        eps: added to the root.
        weight_decay: added to the direction, or to the gradient.
        decoupled: whether it is added to the direction.
        bias_correction: whether the moments are corrected for having started at 0.
        averages: whether the first moment is a mean of gradients, or a sum.
        always_adapts: whether norms count without a weight decay too (NVLAMB).
    """
    numbers = adam_numbers(
        lr, betas, eps, weight_decay, decoupled=decoupled, bias_correction=bias_correction
    )
    fresh = numbers.one_minus_beta1 if averages else 1.0
    return LambNumbers(*numbers._replace(one_minus_beta1=fresh), float(always_adapts))


@jit
def _prepare(numbers, t, of_tensor, n):
    lr = tl.load(numbers)
    decay = tl.load(numbers + 8)
    l2 = tl.load(numbers + 9)
    corrects_bias = tl.load(numbers + 10)
    correction1 = bias_correction(t, tl.load(numbers + 5), corrects_bias)
    correction2 = bias_correction(t, tl.load(numbers + 6), corrects_bias)
    size = lr
    if of_tensor is not None:
        of_param, of_direction = tl.load(of_tensor), tl.load(of_tensor + n)
        adapts = (decay != 0.0) | (l2 != 0.0) | (tl.load(numbers + 11) != 0.0)
        adapts &= (of_param != 0.0) & (of_direction != 0.0)
        size *= tl.where(adapts, of_param / tl.where(adapts, of_direction, 1.0), 1.0)
    return (
        size,
        l2,
        decay,
        tl.load(numbers + 1),
        tl.load(numbers + 3),
        tl.load(numbers + 2),
        tl.load(numbers + 4),
        tl.div_rn(1.0, correction1),
        1.0 / tl.sqrt_rn(correction2),
        tl.load(numbers + 7),
    )


@jit
def _direction(p, g, m, v, prepared):
    _, l2, decay, beta1, new1, beta2, new2, correction1, correction2, eps = prepared
    g += l2 * p
    m = beta1 * m + new1 * g
    v = beta2 * v + new2 * g * g
    return correction1 * m / (tl.sqrt_rn(v) * correction2 + eps) + decay * p, m, v


@jit
def _update(p, g, m, v, prepared):
    size, _, _, _, _, _, _, _, _, _ = prepared
    direction, m, v = _direction(p, g, m, v, prepared)
    return p - size * direction, m, v


def _at(numbers: list[float], t: float, of_tensor: float | None) -> Numbers:
    lr, beta1, beta2, fresh, new2, _, _, eps, decay, l2, corrects_bias, always_adapts = numbers
    correction1, correction2 = [1 - beta**t if corrects_bias else 1.0 for beta in (beta1, beta2)]
    adapts = float(bool(decay or l2 or always_adapts))
    root = 1 / math.sqrt(correction2)
    return lr, l2, decay, beta1, fresh, beta2, new2, 1 / correction1, root, eps, adapts


def _formula(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    lr, l2, decay, beta1, new1, beta2, new2, correction1, correction2, eps, adapts = numbers
    g = g + l2 * p
    m = beta1 * m + new1 * g
    v = beta2 * v + new2 * g * g
    direction = correction1 * m / (v.sqrt() * correction2 + eps) + decay * p
    of_param, of_direction = p.norm(), direction.norm()
    adapts = (of_param != 0) & (of_direction != 0) & bool(adapts)
    return p - lr * torch.where(adapts, of_param / of_direction, 1.0) * direction, m, v


LAMB = Rule(2, _prepare, _update, _at, _formula, _direction)
"""LAMB: its moments are the running means of gradients and of their squares."""
