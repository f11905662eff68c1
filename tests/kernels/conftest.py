"""Where the tests of operations run, and of what Triton's interpreter may warn there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from amp.kernels import host_lists
from amp.kernels.language import INTERPRETED
from tests.compiling import lists_in_cpp
from tests.devices import on_gpu


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    of_numpy, of_triton = ".*encountered in:RuntimeWarning", "Conversion of an array:DeprecationWarning"
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for warning in (of_numpy, of_triton):
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{warning}"))


IN_CPP = "cpu in C++"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run operations that C++ may do on the CPU there, and in plain torch; all others in one way."""
    if "device" in metafunc.fixturenames:
        has_both = metafunc.module.__name__.endswith((".test_operations", ".test_merge"))
        on_cpu = [*([IN_CPP] if has_both and not INTERPRETED else []), "cpu"]
        metafunc.parametrize("device", [*on_cpu, *on_gpu("cuda", "cuda reference")], indirect=True)


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    name, _, backend = request.param.partition(" ")
    if name == "cpu" and not INTERPRETED:
        chosen = lists_in_cpp() if request.param == IN_CPP else host_lists.InPython
        monkeypatch.setattr(host_lists, "lists", chosen)
    if backend and request.param != IN_CPP:
        monkeypatch.setenv("AMP_KERNELS", backend)
    elif not INTERPRETED:
        monkeypatch.delenv("AMP_KERNELS", raising=False)
    return torch.device(name, 0) if name == "cuda" else torch.device(name)
