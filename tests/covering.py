"""Fewer combinations of parameters for `make test` than for `make test-all`."""

from __future__ import annotations

import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import pytest


def covering(*axes: Iterable[Any], strength: int = 2, slow_strength: int = 2) -> list[Any]:
    """Return combinations of some parameters' values, most of them marked slow.

    Those that are not are a covering array: any values of `strength` different parameters are together
    in one of them, which is each pair of values for a strength of 2, and each value alone for 1. With
    the others it is so for `slow_strength`; of two axes a sixth of all pairs is there. Of those that
    are marked slow conftest.py leaves out every other one. With `AMP_COVERING=all` there are all
    combinations.
    """
    values = [list(axis) for axis in axes]
    sizes = [len(axis) for axis in values]
    fast = _covering_array(sizes, strength)
    if os.environ.get("AMP_COVERING") == "all":
        chosen = set(itertools.product(*map(range, sizes)))
    elif len(sizes) == 2:
        chosen = fast | {c for c in itertools.product(*map(range, sizes)) if sum(c) % 6 == 0}
    else:
        chosen = fast | _covering_array(sizes, min(slow_strength, len(sizes)))
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(values, c, strict=True)),
            marks=() if c in fast else pytest.mark.slow,
        )
        for c in sorted(chosen)
    ]


def _covering_array(sizes: list[int], strength: int) -> set[tuple[int, ...]]:
    combinations = list(itertools.product(*map(range, sizes)))
    if strength == len(sizes):
        return set(combinations)
    seen_in = {c: set(itertools.combinations(enumerate(c), strength)) for c in combinations}
    are_in = defaultdict[Any, list[tuple[int, ...]]](list)
    for combination, seen in seen_in.items():
        for each in seen:
            are_in[each].append(combination)
    unseen_in = {combination: len(seen) for combination, seen in seen_in.items()}
    chosen = set()
    uses: Counter[tuple[int, int]] = Counter()  # of each value: none is to be there all the time
    while are_in:
        most = max(unseen_in.values())
        best = min(
            (combination for combination, number in unseen_in.items() if number == most),
            key=lambda c: sum(uses[value] for value in enumerate(c)),
        )
        chosen.add(best)
        uses.update(enumerate(best))
        for each in seen_in[best] & are_in.keys():
            for combination in are_in.pop(each):
                unseen_in[combination] -= 1
    return chosen
