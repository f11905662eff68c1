"""The tests of frameworks that are installed. Accelerate's configuration is new in each test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.integrations import importing  # noqa: F401  # before the frameworks

_FRAMEWORKS = {
    "accelerate": ["test_accelerate.py"],
    "ignite": ["test_ignite.py"],
    "lightning": ["test_fabric.py", "test_lightning.py"],
    "timm": ["test_timm.py"],
    "transformers": ["test_huggingface.py"],
}
collect_ignore = [
    file for name, files in _FRAMEWORKS.items() if find_spec(name) is None for file in files
]


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
