"""Where the tests of operations run, and of what Triton's interpreter may warn there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from amp.kernels.language import INTERPRETED
from tests.devices import on_gpu


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    of_numpy, of_triton = ".*encountered in:RuntimeWarning", "Conversion of an array:DeprecationWarning"
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for warning in (of_numpy, of_triton):
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{warning}"))


@pytest.fixture(params=["cpu", *on_gpu("cuda", "cuda reference")])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    name, _, backend = request.param.partition(" ")
    if backend:
        monkeypatch.setenv("AMP_KERNELS", backend)
    elif not INTERPRETED:
        monkeypatch.delenv("AMP_KERNELS", raising=False)
    return torch.device(name, 0) if name == "cuda" else torch.device(name)
