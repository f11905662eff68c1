"""Lion: the sign of a running mean.

    p = p - lr * decay * p
    p = p - lr * signum(beta1 * m + (1 - beta1) * g)  signum(0) = 0
    m = beta2 * m + (1 - beta2) * g

Shapes, dtypes, launches, memory traffic: see `amp.kernels.stepping`. Source: Chen et al. 2023,
"Symbolic Discovery of Optimization Algorithms", algorithm 2.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from amp.kernels.language import jit, tl
from amp.kernels.rule import Moment, Numbers, UpdateRule, in_double


def _numbers(group: Mapping[str, Any]) -> Numbers:
    beta1, beta2 = map(in_double, group["betas"])
    return group["lr"], beta1, beta2, 1 - beta1, 1 - beta2, group["weight_decay"]


@jit
def _prepare(numbers, t, of_tensor, n):
    lr, beta1, beta2, new1, new2, decay = numbers
    return lr, 1.0 - lr * decay, beta1, new1, beta2, new2


@jit
def _update(p, g, moments, prepared, sqrt, divide, plus):
    (m,) = moments
    lr, keep, beta1, new1, beta2, new2 = prepared
    direction = beta1 * m + new1 * g
    sign = (direction > 0.0).to(tl.float32) - (direction < 0.0).to(tl.float32)
    return p * keep - lr * sign, (beta2 * m + new2 * g,)


def _plain_update(p: Tensor, g: Tensor, moments: Any, prepared: Any, *functions: Any) -> Any:
    (m,) = moments
    lr, keep, beta1, new1, beta2, new2 = prepared
    return p * keep - lr * (beta1 * m + new1 * g).sign(), (beta2 * m + new2 * g,)


LION = UpdateRule((Moment("exp_avg"),), _numbers, _prepare, None, _update, plain_update=_plain_update)
"""Lion: its moment is the running mean of gradients."""
