"""Adam and AdamW.

    p = p - lr * decay * p                            decoupled weight decay (AdamW)
    g = g + l2 * p                                    l2: Adam's weight decay
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    p = p - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

Shapes, dtypes, launches, memory traffic: see `amp.kernels.stepping`. Source: Kingma and Ba 2015,
Loshchilov and Hutter 2019; the order of the operations is that of `torch.optim.Adam`.
"""

from collections.abc import Mapping
from typing import Any

from amp.kernels.language import jit, tl
from amp.kernels.rule import (
    Moment,
    Numbers,
    Prepared,
    UpdateRule,
    bias_correction,
    corrections_at,
    in_double,
    log_of,
)


def adam_numbers(group: Mapping[str, Any]) -> Numbers:
    """Return the numbers that `ADAM` takes, from a group's hyper-parameters."""
    # 1 - beta and log(beta) are computed in FP64: from a beta in FP32 they would have few correct
    # digits.
    beta1, beta2 = map(in_double, group["betas"])
    of_betas = beta1, beta2, 1 - beta1, 1 - beta2, log_of(beta1), log_of(beta2)
    decay, l2 = group["weight_decay"], 0.0
    if not group["decoupled_weight_decay"]:
        decay, l2 = l2, decay
    return group["lr"], *of_betas, group["eps"], decay, l2, float(group["bias_correction"])


@jit
def _prepare(numbers, t, of_tensor, n):
    lr, beta1, beta2, new1, new2, log_beta1, log_beta2, eps, decay, l2, corrects_bias = numbers
    correction1 = bias_correction(t, log_beta1, corrects_bias)
    correction2 = bias_correction(t, log_beta2, corrects_bias)
    size, root = tl.div_rn(lr, correction1), tl.div_rn(1.0, tl.sqrt_rn(correction2))
    return 1.0 - lr * decay, l2, beta1, new1, beta2, new2, size, root, eps


def _at(numbers: list[float], t: float, of_tensor: float | None) -> Prepared:
    lr, beta1, beta2, new1, new2, log1, log2, eps, decay, l2, corrects_bias = numbers
    correction1, correction2 = corrections_at(t, log1, log2) if corrects_bias else (1.0, 1.0)
    size, root = lr / correction1, 1 / correction2**0.5
    return 1 - lr * decay, l2, beta1, new1, beta2, new2, size, root, eps


@jit
def _update(p, g, moments, prepared, sqrt, divide, plus):
    m, v = moments
    keep, l2, beta1, new1, beta2, new2, size, root, eps = prepared
    p = p * keep
    g = plus(g, l2, p)
    m = beta1 * m + new1 * g
    v = beta2 * v + new2 * g * g
    return p - divide(size * m, sqrt(v) * root + eps), (m, v)


@jit
def _update_decoupled(p, g, moments, prepared, sqrt, divide, plus):
    m, v = moments
    keep, _, beta1, new1, beta2, new2, size, root, eps = prepared
    m = beta1 * m + new1 * g
    v = beta2 * v + new2 * g * g
    return p * keep - divide(size * m, sqrt(v) * root + eps), (m, v)


MOMENTS = Moment("exp_avg"), Moment("exp_avg_sq", is_signed=False)
ADAM = UpdateRule(MOMENTS, adam_numbers, _prepare, _at, _update, packs=True)
"""Adam: its moments are the running means of gradients and of their squares."""

ADAMW = ADAM._replace(update=_update_decoupled)
"""The same without `l2`, for groups whose weight decay is decoupled."""
