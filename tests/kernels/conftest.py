"""Where the tests of operations run."""

from __future__ import annotations

import pytest
import torch

from amp.kernels.language import INTERPRETED


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param("cuda reference", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    name, _, backend = request.param.partition(" ")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if backend:
        monkeypatch.setenv("AMP_KERNELS", backend)
    elif not INTERPRETED:
        monkeypatch.delenv("AMP_KERNELS", raising=False)
    return torch.device(name, 0) if name == "cuda" else torch.device(name)
