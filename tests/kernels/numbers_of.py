"""The hyper-parameters that rules are tested with."""

from __future__ import annotations

from typing import Any

from amp.kernels.rule import Numbers, UpdateRule
from amp.selftest import of_steps

GROUP: dict[str, Any] = {**of_steps.GROUP, "betas": (0.9, 0.999), "nesterov": False}
"""What any rule asks of a group."""


def numbers_of(rule: UpdateRule, **changes: Any) -> Numbers:
    """Return a rule's numbers for these hyper-parameters, some of them changed."""
    return rule.numbers({**GROUP, **changes})
