"""Matrices in FP8 and FP4: what is quantized in tests, and how two results are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amp.kernels.fp8 import Operand, Quantized, swizzle


def rows_of(found: Quantized) -> Operand:
    """Return the result by row, which is there."""
    assert found.by_row is not None
    return found.by_row


def both_of(found: Quantized) -> tuple[Operand, Operand]:
    """Return the results by row and by column, which are there."""
    assert found.by_column is not None
    return rows_of(found), found.by_column


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    if found.dtype.itemsize == 1:
        found, expected = found.view(torch.uint8), expected.view(torch.uint8)
    torch.testing.assert_close(found.to(expected.device), expected, rtol=0, atol=0, equal_nan=True)


def assert_same_operands(found: Quantized, expected: Quantized) -> None:
    """The bits of values and of scales, whatever the order of scales in memory and the device."""
    for one, other in zip(found[:2], expected[:2], strict=True):
        assert (one is None) is (other is None)
        if one is not None and other is not None:
            in_order = one.inverse.dim() >= other.inverse.dim()
            inverse = other.inverse if in_order else swizzle(other.inverse)
            assert one.inverse.dtype is inverse.dtype
            _assert_all_same((one.values, one.inverse, one.outer), (other.values, inverse, other.outer))
    _assert_all_same([found.factor], [expected.factor])


def _assert_all_same(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) is (other is None)
        if one is not None:
            assert_same_bits(one, other)


def inputs(*shape: int) -> dict[str, Tensor]:
    """Return matrices with all that numbers can be like."""
    torch.manual_seed(0)
    x = torch.randn(shape)
    bits = torch.randint(-(2**31), 2**31, shape).to(torch.int32).view(torch.float32)
    with_inf, with_nan = x.clone(), x.clone()
    with_inf[3, 5], with_nan[17, 40] = torch.inf, torch.nan
    zero_block, small_block = x.clone(), x.clone()
    zero_block[16:32, 16:48] = 0
    small_block[16:32, 16:48] *= 1e-7
    return {
        "normal": x,
        "tails": x**7,
        "ties": torch.randint(-24, 25, shape) * 0.25,
        "zeros": torch.zeros(shape),
        "negative zeros": -torch.zeros(shape),
        "a zero block": zero_block,
        "a small block": small_block,
        "subnormal": x * 2.0**-130,
        "large": x * 2.0**120,
        "bits": bits.nan_to_num(1.0, 2.0, 3.0),
        "inf": with_inf,
        "nan": with_nan,
    }


INPUTS = inputs(96, 128)
SOURCES = (torch.float32, torch.bfloat16, torch.float16)
