"""Conversion of this library's op tables to apex's lists."""

from typing import Any

import torch

from amp.casting.policy import load_policy

_CATEGORIES = (("native", "half"), ("float", "calls"), ("promote",), ("sequence",), ("banned",))
"""The categories of the functions in FP16_FUNCS, FP32_FUNCS, CASTS, SEQUENCE_CASTS and BANNED_FUNCS."""


def lists_of(place: str) -> list[list[Any]]:
    """Return apex's lists for the functions of `place`: names, or pairs of name and note if banned."""
    rules = [rule for rule in load_policy(torch.float16).rules if rule.place == place]
    *lists, banned = [[rule for rule in rules if rule.category in each] for each in _CATEGORIES]
    names = [[rule.name for rule in each] for each in lists]
    return [*names, [(rule.name, rule.note) for rule in banned]]
