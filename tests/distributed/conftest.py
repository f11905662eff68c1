"""Which of the tests on two and four processes `make test` runs: few, and none on four."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.devices import on_gpu
from tests.distributed.models import SIZES
from tests.distributed.world import Backend

QUICK_LEVELS = ("O1", "O5")
LEVELS_OF = {"ddp": ["O1"], "fsdp2": ["O5"], "sp": ["O2"], "tp": ["O2"]}
"""The levels that `make test` tries under a wrapper; `QUICK_LEVELS` under others."""


def is_long(params: dict[str, Any]) -> bool:
    """Whether a case is left to `make test-all`: rarer levels, most of what takes four processes."""
    wrap, level = params.get("wrap"), params.get("level")
    base = None if level is None else str(level).split()[0].strip(",")
    there, here = params.get("there"), params.get("here")
    if isinstance(there, tuple) and isinstance(here, tuple):  # another number of ranks
        return level != "O5" or 4 in (there[1], here[1])
    if 4 in (SIZES.get(str(wrap)), params.get("size"), params.get("ranks")):
        return True
    if wrap in LEVELS_OF and params.get("optimizer") in ("adamw", "sgd"):
        return True
    return base is not None and base not in LEVELS_OF.get(str(wrap), QUICK_LEVELS)


def is_left_out(params: dict[str, Any]) -> bool:
    """Whether a case is of a rarer level, and of a wrapper or an optimizer that others are tested with.

    Four processes take no rarer levels, and fused optimizers alone.
    """
    wrap, optimizer = params.get("wrap"), params.get("optimizer")
    level = str(params.get("level", "O1")).split()[0].strip(",")
    is_rare, takes_four = level not in ("O1", "O2", "O5"), SIZES.get(str(wrap)) == 4
    if takes_four and (is_rare or optimizer in ("adamw", "sgd")):
        return True
    return is_rare and wrap in SIZES and optimizer in ("adamw", "sgd")


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Mark the long ones, and keep all in one worker, whose processes they use."""
    left_out = set()
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("distributed"))
            if is_long(params) or getattr(item.function, "size", None) == 4:
                item.add_marker(pytest.mark.slow)
            if is_left_out(params):
                left_out.add(item)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True, params=["gloo", *on_gpu("nccl")])
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the processes talk by one backend after the other."""
    Backend.name = request.param
    yield
    Backend.name = "gloo"
