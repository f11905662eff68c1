"""Which levels the quick tests of a framework run: the others are slow."""

from __future__ import annotations

from typing import Any

import pytest

from tests.levels import LEVELS


def levels(*quick: str) -> list[Any]:
    """Return all levels, of which those that are not named are marked slow."""
    return [each if each in quick else pytest.param(each, marks=pytest.mark.slow) for each in LEVELS]
