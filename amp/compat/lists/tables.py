"""The tables of this library in the categories of apex's lists."""

from __future__ import annotations

import torch

from amp.casting.policy import OpRule, load_policy

_CATEGORIES = {
    "native": "FP16_FUNCS",
    "half": "FP16_FUNCS",
    "float": "FP32_FUNCS",
    "calls": "FP32_FUNCS",
    "promote": "CASTS",
    "sequence": "SEQUENCE_CASTS",
    "banned": "BANNED_FUNCS",
}


def rules_of(place: str, name: str) -> list[OpRule]:
    """Return the rules for the functions of `place` that are in apex's list `name`."""
    return [
        rule
        for rule in load_policy(torch.float16).rules
        if rule.place == place and _CATEGORIES.get(rule.category) == name
    ]


def functions_of(place: str, name: str) -> list[str]:
    """Return the names of the functions of `place` that are in apex's list `name`."""
    return [rule.name for rule in rules_of(place, name)]
