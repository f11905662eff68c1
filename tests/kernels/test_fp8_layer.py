"""A linear layer in FP8 on the kernels, against plain torch: see test_operations for the backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp

pytestmark = pytest.mark.triton

Write = Callable[[Tensor], object]
WRITES: dict[str, Write] = {
    "none": lambda weight: None,
    "through .data": lambda weight: weight.data.mul_(3.0),
    "in place": lambda weight: weight.detach().mul_(0.25),
    "of one element": lambda weight: weight.data[0, 0].fill_(40.0),
    "of all to zero": lambda weight: weight.data.zero_(),
    "of NaN": lambda weight: weight.data[3, 5].fill_(torch.nan),
    "of numbers again": lambda weight: weight.data.fill_(1.5),
}
"""What a script may do to a weight between two micro-batches, whether torch counts it or not."""


def results(fp8: Any, device: torch.device) -> list[Tensor]:
    """Return outputs and gradients of micro-batches, between which the weight is written to."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 32)).to(device)
    session = amp.Session("O5", fp8=fp8, verbosity=0)
    model, _ = session.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    layer, found = model[0], []
    if session.fp8.history is not None:
        session.fp8.history._new_until = 0
        session.fp8.history.is_new = False  # as after many iterations
    for write in WRITES.values():
        write(layer.weight)
        x = torch.randn(16, 64).bfloat16().to(device).requires_grad_()
        y = layer(x)
        y.backward(torch.randn(16, 32).bfloat16().to(device))
        found += [y.detach(), x.grad, layer.weight.grad]
        layer.weight.grad = None
        if session.fp8.history is not None:
            session.fp8.history.end()
            found.append(session.fp8.history.amaxes.clone())
    session.close()
    return [x.float().cpu() for x in found if x is not None]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_no_stale_weight_is_multiplied(
    recipe: str, keep: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The factor that a weight had last is only a guess, and that of `delayed` may be unknown."""
    fp8 = {"recipe": recipe, "skip": [], "keep_weights": keep}
    found = results(fp8, device)
    monkeypatch.setenv("AMP_KERNELS", "reference")
    expected = results({**fp8, "keep_weights": False}, device)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
