"""The lab in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from amp.numerics import lab
from tests.browsers import Page, chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lab.write(tmp_path_factory.mktemp("lab") / "lab.html")


@pytest.fixture
def page(browser: Any, file: Path) -> Iterator[Page]:
    shown = Page(browser, file.as_uri())
    yield shown
    shown.close()
