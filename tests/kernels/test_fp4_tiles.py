"""FP4 on every backend at hand against plain torch; see test_operations.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from amp.kernels import cpu_passes, fp4_tiles
from amp.kernels.fp8 import dequantize
from amp.kernels.language import INTERPRETED
from amp.kernels.quantize_fp4 import quantize_fp4
from tests.covering import covering
from tests.kernels.operands import INPUTS, SOURCES, assert_same_bits, assert_same_operands, both_of
from tests.kernels.test_quantize_fp4 import GRANULARITIES, draw_of


@pytest.fixture(autouse=True)
def with_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, in C++ at any size."""
    monkeypatch.setattr(cpu_passes, "WORTH_COMPILING", 0)


DRAW = draw_of(calls=2**33 + 5, seed=2**41 + 3, name=2**31 + 9, rank=3)


def both(x: Tensor, device: torch.device, granularity: Any, **options: Any) -> tuple[Any, Any]:
    """Return what the device's backend and plain torch on the CPU make of a matrix."""
    is_in_cpp = device.type == "cpu" and not INTERPRETED
    assert not is_in_cpp or cpu_passes.take(x)
    assert not cpu_passes.take(x, backend="reference")
    draw = options.pop("draw", None)
    there = draw and draw._replace(calls=draw.calls.to(device))
    found = quantize_fp4(x.to(device), granularity, draw=there, **options)
    plain = quantize_fp4(x, granularity, draw=draw, backend="reference", **options)
    return found, plain


@pytest.mark.parametrize(
    ("name", "granularity", "source", "hadamard", "draws"),
    covering(list(INPUTS), GRANULARITIES, SOURCES, [False, True], [False, True]),
)
def test_every_backend_gives_the_bytes_of_plain_torch(
    name: str,
    granularity: Any,
    source: torch.dtype,
    hadamard: bool,
    draws: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = INPUTS[name].to(source)[: 96 if granularity == "16x16" else 83]
    options = {"hadamard": hadamard and granularity != "16x16", "draw": DRAW if draws else None}
    for alone in ({"by_column": False}, {"by_row": False}):
        assert_same_operands(*both(x, device, granularity, **options, **alone))
    found, plain = both(x, device, granularity, **options)
    assert_same_operands(found, plain)
    numbers = list(map(dequantize, both_of(found)))
    monkeypatch.setenv("AMP_KERNELS", "reference")  # products have no argument for it
    for one, other in zip(numbers, map(dequantize, both_of(plain)), strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (17, 160), (65, 32), (40, 48)])
@pytest.mark.parametrize("granularity", ["1x16", "1x32"])
def test_tiles_may_end_within_a_matrix(
    rows: int, columns: int, granularity: Any, device: torch.device
) -> None:
    x = torch.randn(rows, columns)
    by_row = columns % 32 == 0
    assert_same_operands(*both(x, device, granularity, by_row=by_row, hadamard=True, draw=DRAW))


def test_other_tensors_are_quantized_in_plain_torch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's programs move 128 bits at a time, from addresses that are multiples of that."""
    monkeypatch.setattr(fp4_tiles, "run", lambda *_: pytest.fail("an address is odd"))
    x = torch.randn(32 * 64 + 1)[1:].view(32, 64)
    found = quantize_fp4(torch.cat([x.new_zeros(1), x.flatten()]).to(device)[1:].view(32, 64), "1x16")
    assert_same_operands(found, quantize_fp4(x, "1x16", backend="reference"))
