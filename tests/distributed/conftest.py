"""Which of the tests on several processes `make test` runs, and which are for `make test-all`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.devices import on_gpu
from tests.distributed.models import SIZES
from tests.distributed.world import Backend

QUICK_LEVELS = ("O1", "O2", "O5")


def is_long(params: dict[str, Any]) -> bool:
    """Whether a case is left to `make test-all`: rarer levels, most of what takes four processes."""
    wrap, level = params.get("wrap"), params.get("level")
    if isinstance(params.get("there"), tuple):  # another number of ranks
        return level != "O5"
    if SIZES.get(str(wrap)) == 4:
        return level not in (None, "O5") or params.get("optimizer") not in (None, "fused", "LAMB")
    if params.get("optimizer") == "adamw" and wrap != "fsdp2":
        return True
    return level is not None and str(level).split()[0].strip(",") not in QUICK_LEVELS


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Mark the long ones."""
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path.parent == Path(__file__).parent and is_long(params):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, params=["gloo", *on_gpu("nccl")])
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the processes talk by one backend after the other."""
    Backend.name = request.param
    yield
    Backend.name = "gloo"
