"""Where the tests of operations run."""

from __future__ import annotations

import pytest
import torch

from amp.kernels.language import INTERPRETED
from tests.devices import on_gpu


@pytest.fixture(params=["cpu", *on_gpu("cuda", "cuda reference")])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    name, _, backend = request.param.partition(" ")
    if backend:
        monkeypatch.setenv("AMP_KERNELS", backend)
    elif not INTERPRETED:
        monkeypatch.delenv("AMP_KERNELS", raising=False)
    return torch.device(name, 0) if name == "cuda" else torch.device(name)
