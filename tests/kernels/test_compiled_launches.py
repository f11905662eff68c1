"""Layers in FP8 under torch.compile start few kernels on a GPU; see `inductor_launches`."""

from __future__ import annotations

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


def started(recipe: str | None, by_operators: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many kernels a forward and a backward of `Net` start on a GPU."""
    from tests.kernels.inductor_launches import launches

    way: Any = torch.compiler.assume_constant_result(lambda *_: "native")
    monkeypatch.setattr(scaled_mm, "way_of", way)
    monkeypatch.setattr(quantize_operators, "uses_triton", lambda device: by_operators)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fp8: Any = {} if recipe is None else {"fp8": {"recipe": recipe, "skip": []}}
    with amp.Session("O7" if fp8 else "O5", verbosity=0, **fp8) as session:
        session.initialize(model, optimizer)
        found = launches(model, torch.randn(256, WIDTH))
    assert found.count("quantize") == (8 if by_operators else 0)
    # The amax of a weight is measured first, in a forward with `current`.
    return len(found) + (2 if by_operators and recipe == "current" else 0)


@pytest.mark.parametrize(("recipe", "most", "of_formulas"), [("current", 14, 19), ("block", 8, 19)])
def test_two_compiled_layers_start_few_kernels_more_than_in_bfloat16(
    recipe: str, most: int, of_formulas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/fp8.md has these numbers for one layer, with three products."""
    in_bfloat16 = started(None, False, monkeypatch)
    assert started(recipe, True, monkeypatch) - in_bfloat16 <= most
    assert started(recipe, False, monkeypatch) - in_bfloat16 >= of_formulas


def test_compiled_layers_start_a_kernel_for_each_operand_with_delayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert started("delayed", True, monkeypatch) - started(None, False, monkeypatch) <= 10
