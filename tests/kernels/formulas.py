"""The formulas of the optimizers in plain torch, by papers, torch and apex: what steps must agree with.

A term whose factor is 0 is left out, as in `torch.optim`: without weight decay -inf stays -inf.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp.kernels.adagrad import ADAGRAD
from amp.kernels.adam import ADAM
from amp.kernels.lamb import LAMB
from amp.kernels.lion import LION
from amp.kernels.novograd import NOVOGRAD
from amp.kernels.rule import UpdateRule
from amp.kernels.sgd import MOMENTUM_SGD, SGD
from amp.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedLion, FusedNovoGrad, FusedSGD
from tests.kernels.numbers_of import GROUP

Group = Mapping[str, Any]
Norm = Callable[[Tensor], Any]
"""Returns the norm of a tensor."""


def added(x: Tensor, factor: float, y: Tensor) -> Tensor:
    return x + factor * y if factor else x


def sgd(
    group: Group, t: int, norm: Norm, p: Tensor, g: Tensor, m: Tensor | None = None
) -> tuple[Tensor, ...]:
    lr, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
    if group["wd_after_momentum"]:
        p = p * (1 - lr * decay)
    else:
        g = added(g, decay, p)
    if m is None:
        return (p - lr * g,)
    new = g if t == 1 else momentum * m + (1 - group["dampening"]) * g
    return p - lr * g - lr * momentum * new if group["nesterov"] else p - lr * new, new


def adagrad(group: Group, t: int, norm: Norm, p: Tensor, g: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    lr, decay = group["lr"] / (1 + (t - 1) * group["lr_decay"]), group["weight_decay"]
    before, after = (0.0, decay) if group["adagrad_w_mode"] else (decay, 0.0)
    g = added(g, before, p)
    s = s + g * g
    return p - lr * added(g / (s.sqrt() + group["eps"]), after, p), s


def moments_and_root(
    group: Group, t: int, g: Tensor, m: Tensor, v: Tensor, fresh: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Adam's new moments, and what to divide by."""
    beta1, beta2 = group["betas"]
    m, v = beta1 * m + fresh * g, beta2 * v + (1 - beta2) * g * g
    return m, v, v.sqrt() / (1 - beta2**t) ** 0.5 + group["eps"]


def adam(
    group: Group, t: int, norm: Norm, p: Tensor, g: Tensor, m: Tensor, v: Tensor
) -> tuple[Tensor, ...]:
    lr, decay, beta1 = group["lr"], group["weight_decay"], group["betas"][0]
    if group["decoupled_weight_decay"]:
        p = p * (1 - lr * decay)
    else:
        g = added(g, decay, p)
    m, v, root = moments_and_root(group, t, g, m, v, 1 - beta1)
    return p - lr / (1 - beta1**t) * m / root, m, v


def lamb(
    group: Group, t: int, norm: Norm, p: Tensor, g: Tensor, m: Tensor, v: Tensor
) -> tuple[Tensor, ...]:
    """Algorithm 2 of the paper with bias correction."""
    decay, beta1 = group["weight_decay"], group["betas"][0]
    before, after = (0.0, decay) if group["adam_w_mode"] else (decay, 0.0)
    fresh = 1 - beta1 if group["grad_averaging"] else 1.0
    m, v, root = moments_and_root(group, t, added(g, before, p), m, v, fresh)
    u = added(m / (1 - beta1**t) / root, after, p)
    ratio = torch.where((norm(p) != 0) & (norm(u) != 0), norm(p) / norm(u), 1.0)
    return p - group["lr"] * (ratio if decay or group["use_nvlamb"] else 1.0) * u, m, v


def lion(group: Group, t: int, norm: Norm, p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    """Algorithm 2 of the paper."""
    beta1, beta2 = group["betas"]
    direction = (beta1 * m + (1 - beta1) * g).sign()
    return p * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * direction, (
        beta2 * m + (1 - beta2) * g
    )


def novograd(group: Group, t: int, norm: Norm, p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
    root = norm(g) / (1 - beta2**t) ** 0.5 + group["eps"]
    fresh = 1 - beta1 if group["grad_averaging"] else 1.0
    if group["reg_inside_moment"]:
        m = beta1 * m + fresh * added(g / root, decay, p)
        return p - lr * m / (1 - beta1**t), m
    m = beta1 * m + fresh * g
    return p * (1 - lr * decay) - lr * m / (1 - beta1**t) / root, m


class Case(NamedTuple):
    """An optimizer with some hyper-parameters, and what it must agree with.

    Attributes:
        rule: of the kernels.
        fused: the optimizer's class.
        formula: takes the hyper-parameters of a group, the number of the step, a function that returns
            the norm of a tensor, and a parameter, its gradient and moments. Returns the new parameter
            and moments.
        torchs: the class of torch; None where it has no such optimizer.
        changes: hyper-parameters that are not those of `numbers_of.GROUP`.
    """

    rule: UpdateRule
    fused: Any
    formula: Callable[..., tuple[Tensor, ...]]
    torchs: Any
    changes: dict[str, Any]

    def group(self, **changes: Any) -> dict[str, Any]:
        """Return the hyper-parameters, some of them changed."""
        return {**GROUP, **self.changes, **changes}


def made(kind: Any, params: list[Any], group: Group) -> Any:
    """Return an optimizer of a class, with those hyper-parameters that it takes."""
    taken = inspect.signature(kind).parameters
    return kind(params, **{name: value for name, value in group.items() if name in taken})


_MOMENTUM: Any = (MOMENTUM_SGD, FusedSGD, sgd)
_ADAGRAD: Any = (ADAGRAD, FusedAdagrad, adagrad)
_ADAM: Any = (ADAM, FusedAdam, adam)
_LAMB: Any = (LAMB, FusedLAMB, lamb, None)
_NOVOGRAD: Any = (NOVOGRAD, FusedNovoGrad, novograd, None)
_L2 = {"decoupled_weight_decay": False, "adam_w_mode": False}
CASES = {
    "sgd": Case(SGD, FusedSGD, sgd, torch.optim.SGD, {"momentum": 0.0}),
    "momentum": Case(*_MOMENTUM, torch.optim.SGD, {}),
    "nesterov": Case(*_MOMENTUM, torch.optim.SGD, {"nesterov": True}),
    "dampening": Case(*_MOMENTUM, torch.optim.SGD, {"dampening": 0.5, "maximize": True}),
    "decay after": Case(*_MOMENTUM, None, {"wd_after_momentum": True}),
    "lion": Case(LION, FusedLion, lion, None, {"betas": (0.9, 0.99)}),
    "adagrad": Case(*_ADAGRAD, torch.optim.Adagrad, {"eps": 1e-10}),
    "adagrad decoupled": Case(*_ADAGRAD, None, {"eps": 1e-10, "adagrad_w_mode": True}),
    "adamw": Case(*_ADAM, torch.optim.AdamW, {}),
    "adamw, maximize": Case(*_ADAM, torch.optim.AdamW, {"maximize": True}),
    "adam": Case(*_ADAM, torch.optim.Adam, _L2),
    "lamb": Case(*_LAMB, {"eps": 1e-6}),
    "lamb without decay": Case(*_LAMB, {"eps": 1e-6, "weight_decay": 0.0}),
    "nvlamb": Case(*_LAMB, {"eps": 1e-6, "weight_decay": 0.0, "use_nvlamb": True}),
    "lamb, sums": Case(*_LAMB, {"eps": 1e-6, "grad_averaging": False}),
    "lamb, l2": Case(*_LAMB, {"eps": 1e-6, **_L2}),
    "novograd": Case(*_NOVOGRAD, {}),
    "novograd, sums": Case(*_NOVOGRAD, {"grad_averaging": False}),
    "novograd, inside": Case(*_NOVOGRAD, {"reg_inside_moment": True}),
    "novograd, both": Case(*_NOVOGRAD, {"reg_inside_moment": True, "grad_averaging": False}),
}
