"""Adagrad.

    g = g + l2 * p                                    l2: weight decay
    s = s + g * g
    p = p - rate * (g / (sqrt(s) + eps) + decay * p)  rate = lr / (1 + (t - 1) * lr_decay)

`decay` is the decoupled weight decay of apex's `adagrad_w_mode`.

Shapes, dtypes, launches, memory traffic: see `amp.kernels.stepping`. Source: Duchi et al. 2011,
`torch.optim.Adagrad`; decoupled weight decay: NVIDIA apex `FusedAdagrad`.
"""

from collections.abc import Mapping
from typing import Any

from amp.kernels.language import jit, tl
from amp.kernels.rule import Moment, Numbers, Prepared, UpdateRule


def _numbers(group: Mapping[str, Any]) -> Numbers:
    l2, decay = group["weight_decay"], 0.0
    if group["adagrad_w_mode"]:
        l2, decay = decay, l2
    return group["lr"], group["lr_decay"], group["eps"], l2, decay


@jit
def _prepare(numbers, t, of_tensor, n):
    lr, lr_decay, eps, l2, decay = numbers
    return tl.div_rn(lr, 1.0 + (t - 1.0) * lr_decay), eps, l2, decay


@jit
def _update(p, g, moments, prepared, sqrt, divide, plus):
    (total,) = moments
    rate, eps, l2, decay = prepared
    g = plus(g, l2, p)
    total = total + g * g
    return p - rate * plus(divide(g, sqrt(total) + eps), decay, p), (total,)


def _at(numbers: list[float], t: float, of_tensor: float | None) -> Prepared:
    lr, lr_decay, eps, l2, decay = numbers
    return lr / (1.0 + (t - 1.0) * lr_decay), eps, l2, decay


ADAGRAD = UpdateRule((Moment("sum", is_signed=False),), _numbers, _prepare, _at, _update)
"""Adagrad: its moment is the sum of squared gradients."""
