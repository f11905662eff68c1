"""apex as scripts find it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from amp import compat


@pytest.fixture
def apex() -> Iterator[Any]:
    compat.install()
    yield importlib.import_module("apex")
    compat.uninstall()


@pytest.fixture
def amp(apex: Any) -> Any:
    return importlib.import_module("apex.amp")
