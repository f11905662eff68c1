"""Lion: the sign of a running mean.

    p = p - lr * decay * p
    p = p - lr * signum(beta1 * m + (1 - beta1) * g)  signum(0) = 0
    m = beta2 * m + (1 - beta2) * g

Shapes, dtypes, launches, memory traffic: see `amp.kernels.stepping`. Source: Chen et al. 2023,
"Symbolic Discovery of Optimization Algorithms", algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from amp.kernels.language import jit, tl
from amp.kernels.plainstep import Numbers
from amp.kernels.stepping import Rule, in_double


class LionNumbers(NamedTuple):
    """What the kernel reads, in its order; 1 - beta comes from the host, in FP64."""

    lr: float | Tensor
    beta1: float | Tensor
    beta2: float | Tensor
    one_minus_beta1: float | Tensor
    one_minus_beta2: float | Tensor
    decay: float | Tensor


def lion_numbers(
    lr: float | Tensor,
    betas: tuple[float | Tensor, float | Tensor],
    weight_decay: float | Tensor,
) -> LionNumbers:
    """Return the numbers of `LION`. The host does not wait for the device.

    Args:
        lr: a number, or a tensor of one element, as are the next two.
        betas: how much of the mean is kept, for the step and after it.
        weight_decay: decoupled, as in AdamW.
    """
    beta1, beta2 = map(in_double, betas)
    return LionNumbers(lr, beta1, beta2, 1 - beta1, 1 - beta2, weight_decay)


@jit
def _prepare(numbers, t, of_tensor, n):
    lr = tl.load(numbers)
    return (
        lr,
        1.0 - lr * tl.load(numbers + 5),
        tl.load(numbers + 1),
        tl.load(numbers + 3),
        tl.load(numbers + 2),
        tl.load(numbers + 4),
    )


@jit
def _update(p, g, m, v, prepared):
    lr, keep, beta1, new1, beta2, new2 = prepared
    direction = beta1 * m + new1 * g
    p = p * keep - lr * ((direction > 0.0).to(tl.float32) - (direction < 0.0).to(tl.float32))
    m = beta2 * m + new2 * g
    return p, m, v


def _at(numbers: list[float], t: float, of_tensor: float | None) -> Numbers:
    lr, beta1, beta2, new1, new2, decay = numbers
    return lr, 1 - lr * decay, beta1, new1, beta2, new2


def _formula(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    lr, keep, beta1, new1, beta2, new2 = numbers
    return p * keep - lr * (beta1 * m + new1 * g).sign(), beta2 * m + new2 * g, v


LION = Rule(1, _prepare, _update, _at, _formula)
"""Lion: its moment is the running mean of gradients."""
