"""NovoGrad: Adam with a second moment for each tensor instead of for each element.

    d = v / sqrt(1 - beta2^t) + eps                   v: the running norm of the tensor's gradients
    m = beta1 * m + fresh * g                         fresh: 1 - beta1, or 1 without averaging
    p = p - lr * (m / (1 - beta1^t) / d + decay * p)

or, with the regularization inside the moment,

    m = beta1 * m + fresh * (g / d + decay * p)
    p = p - lr * m / (1 - beta1^t)

Shapes, dtypes, launches, memory traffic: see `amp.kernels.stepping`; v is passed as `of_tensor`.
Source: Ginsburg et al. 2019; NVIDIA apex's FusedNovoGrad, which has both forms.
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


def _numbers(group: Mapping[str, Any]) -> Numbers:
    beta1, beta2 = map(in_double, group["betas"])
    fresh = 1 - beta1 if group["grad_averaging"] else 1.0
    flags = float(group["bias_correction"]), float(group["reg_inside_moment"])
    logs = log_of(beta1), log_of(beta2)
    return group["lr"], beta1, fresh, *logs, group["eps"], group["weight_decay"], *flags


@jit
def _prepare(numbers, t, of_tensor, n):
    lr, beta1, fresh, log_beta1, log_beta2, eps, decay, corrects_bias, is_inside = numbers
    inside = is_inside != 0.0
    correction1 = bias_correction(t, log_beta1, corrects_bias)
    correction2 = bias_correction(t, log_beta2, corrects_bias)
    factor = tl.div_rn(1.0, tl.div_rn(tl.load(of_tensor), tl.sqrt_rn(correction2)) + eps)
    size = tl.div_rn(lr, correction1)
    return (
        tl.where(inside, factor, 1.0),
        tl.where(inside, decay, 0.0),
        beta1,
        fresh,
        tl.where(inside, size, size * factor),
        tl.where(inside, 1.0, 1.0 - lr * decay),
    )


def _at(numbers: list[float], t: float, of_tensor: float | None) -> Prepared:
    assert of_tensor is not None
    lr, beta1, fresh, log_beta1, log_beta2, eps, decay, corrects_bias, inside = numbers
    correction1, correction2 = corrections_at(t, log_beta1, log_beta2) if corrects_bias else (1.0, 1.0)
    factor = 1 / (of_tensor / correction2**0.5 + eps)
    size = lr / correction1
    if inside:
        return factor, decay, beta1, fresh, size, 1.0
    return 1.0, 0.0, beta1, fresh, size * factor, 1 - lr * decay


@jit
def _update(p, g, moments, prepared, sqrt, divide, plus):
    (m,) = moments
    factor, decay, beta1, fresh, size, keep = prepared
    m = beta1 * m + fresh * plus(g * factor, decay, p)
    return p * keep - size * m, (m,)


NOVOGRAD = UpdateRule((Moment("exp_avg"),), _numbers, _prepare, _at, _update)
"""NovoGrad: its moment is the running mean of gradients, divided by their norm or not."""
