"""Adagrad.

    g = g + l2 * p                                    l2: weight decay
    s = s + g * g
    p = p - rate * (g / (sqrt(s) + eps) + decay * p)  rate = lr / (1 + (t - 1) * lr_decay)

`decay` is the decoupled weight decay of apex's `adagrad_w_mode`.

Shapes, dtypes, launches, memory traffic: see `amp.kernels.stepping`. Source: Duchi et al. 2011,
`torch.optim.Adagrad`; decoupled weight decay: NVIDIA apex `FusedAdagrad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from amp.kernels.language import jit, tl
from amp.kernels.plainstep import Numbers
from amp.kernels.stepping import Rule


class AdagradNumbers(NamedTuple):
    """What the kernel reads, in its order."""

    lr: float | Tensor
    lr_decay: float | Tensor
    eps: float | Tensor
    l2: float | Tensor
    decay: float | Tensor


def adagrad_numbers(
    lr: float | Tensor,
    lr_decay: float | Tensor,
    eps: float | Tensor,
    weight_decay: float | Tensor,
    *,
    decoupled: bool,
) -> AdagradNumbers:
    """Return the numbers of `ADAGRAD`. The host does not wait for the device.

    Args:
        lr: a number, or a tensor of one element, as are the next three.
        lr_decay: how fast the rate falls with the steps.
        eps: added to the root.
        weight_decay: the weight decay.
        decoupled: whether it stays out of the sum of squares.
    """
    return AdagradNumbers(
        lr,
        lr_decay,
        eps,
        0.0 if decoupled else weight_decay,
        weight_decay if decoupled else 0.0,
    )


@jit
def _prepare(numbers, t, of_tensor, n):
    return (
        tl.load(numbers) / (1.0 + (t - 1.0) * tl.load(numbers + 1)),
        tl.load(numbers + 2),
        tl.load(numbers + 3),
        tl.load(numbers + 4),
    )


@jit
def _update(p, g, m, v, prepared):
    rate, eps, l2, decay = prepared
    g += l2 * p
    m += g * g
    p -= rate * (g / (tl.sqrt_rn(m) + eps) + decay * p)
    return p, m, v


def _at(numbers: list[float], t: float, of_tensor: float | None) -> Numbers:
    lr, lr_decay, eps, l2, decay = numbers
    return lr / (1 + (t - 1) * lr_decay), eps, l2, decay


def _formula(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    rate, eps, l2, decay = numbers
    g = g + l2 * p
    m = m + g * g
    return p - rate * (g / (m.sqrt() + eps) + decay * p), m, v


ADAGRAD = Rule(1, _prepare, _update, _at, _formula)
"""Adagrad: its moment is the sum of squared gradients."""
