"""Stochastic gradient descent, with momentum or without.

    g = g + before * p                                before: weight decay
    m = g                                             at t = 1
    m = momentum * m + (1 - dampening) * g            later
    d = g + momentum * m with nesterov, else m        without momentum: d = g
    p = p - lr * (d + after * p)                      after: weight decay after momentum

Shapes, dtypes, launches, memory traffic: see `amp.kernels.stepping`. Source: `torch.optim.SGD`; weight
decay after momentum: NVIDIA apex `FusedSGD`.
"""

from collections.abc import Mapping
from typing import Any

from amp.kernels.language import jit, tl
from amp.kernels.rule import Moment, Numbers, Prepared, UpdateRule


def _numbers(group: Mapping[str, Any]) -> Numbers:
    before, after = group["weight_decay"], 0.0
    if group["wd_after_momentum"]:
        before, after = after, before
    fresh = 1 - group["dampening"]
    return group["lr"], before, after, group["momentum"], fresh, float(group["nesterov"])


@jit
def _prepare(numbers, t, of_tensor, n):
    lr, before, after, momentum, fresh, nesterov = numbers
    keep = tl.where(t == 1.0, 0.0, momentum)
    along_g = tl.where(nesterov != 0.0, -lr, 0.0)
    along_m = tl.where(nesterov != 0.0, lr * momentum, lr)
    return before, keep, tl.where(t == 1.0, 1.0, fresh), 1.0 - lr * after, along_g, along_m


def _at(numbers: list[float], t: float, of_tensor: float | None) -> Prepared:
    lr, before, after, momentum, fresh, nesterov = numbers
    keep, fresh = (0.0, 1.0) if t == 1 else (momentum, fresh)
    along_g, along_m = (-lr, lr * momentum) if nesterov else (0.0, lr)
    return before, keep, fresh, 1 - lr * after, along_g, along_m


@jit
def _update(p, g, moments, prepared, sqrt, divide, plus):
    (m,) = moments
    before, momentum, fresh, keep, along_g, along_m = prepared
    g = plus(g, before, p)
    m = plus(fresh * g, momentum, m)
    return plus(p * keep, along_g, g) - along_m * m, (m,)


@jit
def _prepare_without_momentum(numbers, t, of_tensor, n):
    lr, before, after, _, _, _ = numbers
    return lr, before + after


@jit
def _update_without_momentum(p, g, moments, prepared, sqrt, divide, plus):
    lr, decay = prepared
    return p - lr * plus(g, decay, p), moments


SGD = UpdateRule((), _numbers, _prepare_without_momentum, None, _update_without_momentum)
"""SGD without momentum."""

MOMENTUM_SGD = UpdateRule((Moment("momentum_buffer"),), _numbers, _prepare, _at, _update)
"""SGD with momentum, which is its moment."""
