"""Accelerate keeps its configuration for the process: each test gets a new one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from tests.integrations import importing  # noqa: F401  # before the frameworks


def _reset() -> None:
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()


@pytest.fixture(autouse=True)
def accelerate_is_new() -> Iterator[None]:
    _reset()
    yield
    _reset()
