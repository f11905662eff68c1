"""Layers in FP8 under torch.compile start few kernels on a GPU; see `inductor_launches`."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import amp
from amp.kernels import quantize_operators, scaled_mm

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

WIDTH = 512


class Net(nn.Module):
    """A norm, a layer, an activation, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.gelu(self.first(self.norm(x))))


def launched(level: str, **fp8: Any) -> list[str]:
    """Return what a forward and a backward of `Net` start on a GPU."""
    from tests.kernels.inductor_launches import launches

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with amp.Session(level, verbosity=0, **fp8) as session:
        session.initialize(model, optimizer)
        return launches(model, torch.randn(256, WIDTH))


in_bfloat16 = functools.cache(functools.partial(launched, "O5"))


def started(recipe: str, by_operators: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many kernels more than in BF16 they are."""
    way: Any = torch.compiler.assume_constant_result(lambda *_: "native")
    monkeypatch.setattr(scaled_mm, "way_of", way)
    monkeypatch.setattr(quantize_operators, "uses_triton", lambda device: by_operators)
    found = launched("O7", fp8={"recipe": recipe, "skip": []})
    assert found.count("quantize") == (8 if by_operators else 0)
    # The amax of a weight is measured first, in a forward with `current`.
    measured = 2 if by_operators and recipe == "current" else 0
    return len(found) + measured - len(in_bfloat16())


@pytest.mark.parametrize(("recipe", "most", "of_formulas"), [("current", 14, 19), ("block", 8, 19)])
def test_two_compiled_layers_start_few_kernels_more_than_in_bfloat16(
    recipe: str, most: int, of_formulas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/fp8.md has these numbers for one layer, with three products."""
    assert started(recipe, True, monkeypatch) <= most
    assert started(recipe, False, monkeypatch) >= of_formulas


def test_compiled_layers_start_a_kernel_for_each_operand_with_delayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert started("delayed", True, monkeypatch) <= 10
