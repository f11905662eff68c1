"""The hyper-parameters that rules are tested with."""

from __future__ import annotations

from typing import Any

from amp.kernels.rule import Numbers, Rule

GROUP: dict[str, Any] = {
    "lr": 1e-2,
    "lr_decay": 0.01,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "momentum": 0.9,
    "dampening": 0.0,
    "nesterov": False,
    "bias_correction": True,
    "decoupled_weight_decay": True,
    "adam_w_mode": True,
    "adagrad_w_mode": False,
    "wd_after_momentum": False,
    "grad_averaging": True,
    "reg_inside_moment": False,
    "use_nvlamb": False,
}
"""What any rule asks of a group."""


def numbers_of(rule: Rule, **changes: Any) -> Numbers:
    """Return a rule's numbers for these hyper-parameters, some of them changed."""
    return rule.numbers({**GROUP, **changes})
