"""Adam and AdamW.

    p = p - lr * decay * p                            decoupled weight decay (AdamW)
    g = g + l2 * p                                    l2: Adam's weight decay
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    p = p - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

Shapes, dtypes, launches, memory traffic: see `amp.kernels.stepping`. Source: Kingma and Ba 2015,
Loshchilov and Hutter 2019; the order of the operations is that of `torch.optim.Adam`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from amp.kernels.language import jit, tl
from amp.kernels.plainstep import Numbers
from amp.kernels.stepping import Rule, bias_correction, in_double


class AdamNumbers(NamedTuple):
    """What the kernel reads, in its order.

    1 - beta and log(beta) come from the host, in FP64: beta in FP32 is too coarse to tell how far it is
    from 1.
    """

    lr: float | Tensor
    beta1: float | Tensor
    beta2: float | Tensor
    one_minus_beta1: float | Tensor
    one_minus_beta2: float | Tensor
    log_beta1: float | Tensor
    log_beta2: float | Tensor
    eps: float | Tensor
    decay: float | Tensor
    l2: float | Tensor
    corrects_bias: float


def adam_numbers(
    lr: float | Tensor,
    betas: tuple[float | Tensor, float | Tensor],
    eps: float | Tensor,
    weight_decay: float | Tensor,
    *,
    decoupled: bool,
    bias_correction: bool,
) -> AdamNumbers:
    """Return the numbers of `ADAM`. The host does not wait for the device.

    Args:
        lr: a number, or a tensor of one element, as are all of these.
        betas: how much of the two moments is kept.
        eps: added to the root.
        weight_decay: AdamW's or Adam's.
        decoupled: whether the weight decay is AdamW's.
        bias_correction: whether the moments are corrected for having started at 0.
    """
    beta1, beta2 = map(in_double, betas)
    return AdamNumbers(
        lr,
        beta1,
        beta2,
        1 - beta1,
        1 - beta2,
        log_of(beta1),
        log_of(beta2),
        eps,
        weight_decay if decoupled else 0.0,
        0.0 if decoupled else weight_decay,
        float(bias_correction),
    )


def log_of(beta: float | Tensor) -> float | Tensor:
    """Return the logarithm of a beta, -inf for 0."""
    if isinstance(beta, Tensor):
        return beta.log()
    return math.log(beta) if beta > 0 else -math.inf


@jit
def _prepare(numbers, t, of_tensor, n):
    lr = tl.load(numbers)
    corrects_bias = tl.load(numbers + 10)
    correction1 = bias_correction(t, tl.load(numbers + 5), corrects_bias)
    correction2 = bias_correction(t, tl.load(numbers + 6), corrects_bias)
    return (
        1.0 - lr * tl.load(numbers + 8),
        tl.load(numbers + 9),
        tl.load(numbers + 1),
        tl.load(numbers + 3),
        tl.load(numbers + 2),
        tl.load(numbers + 4),
        lr / correction1,
        1.0 / tl.sqrt_rn(correction2),
        tl.load(numbers + 7),
    )


@jit
def _update(p, g, m, v, prepared):
    keep, l2, beta1, new1, beta2, new2, size, correction2, eps = prepared
    p *= keep
    g += l2 * p
    m = beta1 * m + new1 * g
    v = beta2 * v + new2 * g * g
    p -= size * m / (tl.sqrt_rn(v) * correction2 + eps)  # sqrt would take subnormal squares for 0
    return p, m, v


def _at(numbers: list[float], t: float, of_tensor: float | None) -> Numbers:
    lr, beta1, beta2, new1, new2, _, _, eps, decay, l2, corrects_bias = numbers
    correction1, correction2 = [1 - beta**t if corrects_bias else 1.0 for beta in (beta1, beta2)]
    size, root = lr / correction1, 1 / math.sqrt(correction2)
    return 1 - lr * decay, l2 or None, beta1, new1, beta2, new2, size, root, eps


def _formula(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    keep, l2, beta1, new1, beta2, new2, size, correction2, eps = numbers
    p = p * keep
    if l2 is not None:
        g = g + l2 * p
    m = beta1 * m + new1 * g
    v = beta2 * v + new2 * g * g
    return p - size * m / (v.sqrt() * correction2 + eps), m, v


ADAM = Rule(2, _prepare, _update, _at, _formula)
"""Adam: its moments are the running means of gradients and of their squares."""
