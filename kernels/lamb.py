"""LAMB, and NVIDIA's variant of it.

    g = g + l2 * p                                    l2: Adam's weight decay
    m = beta1 * m + fresh * g                         fresh: 1 - beta1, or 1 without averaging
    v = beta2 * v + (1 - beta2) * g * g
    u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + decay * p
    p = p - lr * |p| / |u| * u                        |.| over the tensor; 1 where either is 0

Without weight decay the ratio of norms is taken as 1; NVLAMB always uses it.

Shapes, dtypes, launches, memory traffic: see `amp.kernels.stepping`, for a rule with a
direction. Source: You et al. 2020, algorithm 2, with bias correction; NVIDIA apex's FusedLAMB.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from amp.kernels.adam import MOMENTS, adam_numbers
from amp.kernels.foreach import TensorGroup, norms_of
from amp.kernels.language import jit, plain, tl
from amp.kernels.rule import Numbers, Prepared, UpdateRule, bias_correction, corrections_at


def _numbers(group: Mapping[str, Any]) -> Numbers:
    of_adam = adam_numbers({**group, "decoupled_weight_decay": group["adam_w_mode"]})
    lr, beta1, beta2, new1, *others = of_adam
    fresh = new1 if group["grad_averaging"] else 1.0
    return lr, beta1, beta2, fresh, *others, float(group["use_nvlamb"])


@jit
def _prepare(numbers, t, of_tensor, n):
    lr, beta1, beta2, new1, new2, log1, log2, eps, decay, l2, corrects_bias, always_adapts = numbers
    correction1 = bias_correction(t, log1, corrects_bias)
    correction2 = bias_correction(t, log2, corrects_bias)
    size = lr
    if of_tensor is not None:
        of_param, of_direction = tl.load(of_tensor), tl.load(of_tensor + n)
        adapts = (decay != 0.0) | (l2 != 0.0) | (always_adapts != 0.0)
        adapts &= (of_param != 0.0) & (of_direction != 0.0)
        size *= tl.where(adapts, of_param / tl.where(adapts, of_direction, 1.0), 1.0)
    mean, root = tl.div_rn(1.0, correction1), tl.div_rn(1.0, tl.sqrt_rn(correction2))
    return size, l2, decay, beta1, new1, beta2, new2, mean, root, eps


def _at(numbers: list[float], t: float, norms: tuple[float, float] | None) -> Prepared:
    lr, beta1, beta2, new1, new2, log1, log2, eps, decay, l2, corrects_bias, always_adapts = numbers
    correction1, correction2 = corrections_at(t, log1, log2) if corrects_bias else (1.0, 1.0)
    adapts = bool(decay or l2 or always_adapts)
    mean, root = 1 / correction1, 1 / correction2**0.5
    if norms is not None:
        of_param, of_direction = norms
        lr *= of_param / of_direction if adapts and of_param and of_direction else 1.0
        adapts = False
    return lr, l2, decay, beta1, new1, beta2, new2, mean, root, eps, adapts


@jit
def _direction(p, g, moments, prepared, sqrt, divide, plus):
    m, v = moments
    _, l2, decay, beta1, new1, beta2, new2, mean, root, eps = prepared
    g = plus(g, l2, p)
    m = beta1 * m + new1 * g
    v = beta2 * v + new2 * g * g
    return plus(divide(mean * m, sqrt(v) * root + eps), decay, p), (m, v)


@jit
def _update(p, g, moments, prepared, sqrt, divide, plus):
    direction, moments = _direction(p, g, moments, prepared, sqrt, divide, plus)
    return p - prepared[0] * direction, moments


def _plain_update(
    p: Tensor | TensorGroup, g: Any, moments: Any, prepared: Any, *functions: Any
) -> tuple[Any, Any]:
    *prepared, adapts = prepared
    direction, moments = plain(_direction)(p, g, moments, prepared, *functions)
    size = prepared[0]
    if adapts:
        of_param, of_direction = norms_of(p), norms_of(direction)
        adapts = (of_param != 0) & (of_direction != 0)
        size = size * torch.where(adapts, of_param / of_direction, 1.0)
        if isinstance(p, TensorGroup):
            size = size.tolist()
    return p - size * direction, moments


LAMB = UpdateRule(MOMENTS, _numbers, _prepare, _at, _update, _direction, _plain_update, packs=True)
"""LAMB: its moments are the running means of gradients and of their squares."""
