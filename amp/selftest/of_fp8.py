"""FP8: what is quantized, and products on tensor cores against the emulation."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from amp.kernels.fp8 import DTYPES, Granularity, Operand, Quantized, dequantize
from amp.kernels.quantize import quantize
from amp.kernels.scaled_mm import OUT_DTYPES, emulated, scaled_mm, way_of
from amp.selftest.checks import CHECKS, Check, Outcome, SkipError, assert_same_bits

PAIRS: tuple[tuple[Granularity, Granularity], ...] = (
    ("tensor", "tensor"),
    ("row", "row"),
    ("1x128", "128x128"),
    ("1x32", "1x32"),
)
ROWS = (1, 2, 17, 33, 128)


def _matrix(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.logspace(-2, 1, columns)


def _by_row(
    x: Tensor, dtype: torch.dtype, granularity: Granularity, power_of_2: bool = True
) -> Operand:
    operand = quantize(x, dtype, granularity, by_column=False, power_of_2=power_of_2).by_row
    assert operand is not None
    return operand


CASES = (
    (DTYPES[0], torch.bfloat16, True),
    (DTYPES[0], torch.float32, False),
    (DTYPES[1], torch.float16, True),
)
"""FP8 dtype, source, and whether scales are powers of 2: a few, since a GPU compiles each."""


def _quantizes(granularity: Granularity, device: torch.device) -> Outcome:
    bits = []
    factors = [None, torch.tensor(8.0)] if granularity == "tensor" else [None]
    sizes = (128, 256) if granularity == "128x128" else (128, 200)
    for case, rows, factor in itertools.product(CASES, sizes, factors):
        dtype, source, power_of_2 = case
        x = _matrix(rows, 384, rows).to(source)
        x[5], x[7, 3], x[9, 9] = 0.0, *((torch.inf, torch.nan) if rows > 128 else (1.0, 1.0))
        there = None if factor is None else factor.to(device)
        arguments = dtype, granularity
        found = quantize(x.to(device), *arguments, power_of_2=power_of_2, factor=there)
        plain = quantize(x, *arguments, power_of_2=power_of_2, factor=factor, backend="reference")
        of_found = _bits_of(found)
        assert_same_bits(of_found, _bits_of(plain), f"{source} to {dtype}, {rows} rows")
        bits += of_found
        if factor is None and rows == 128:
            half_step = 2.0 ** -(4 if dtype is DTYPES[0] else 3)
            values, largest = x.float().abs(), x.float().abs().max()
            off = (of_found[1].cpu() - x.float()).abs()
            is_near = off <= values * half_step + largest * 2.0**-9
            assert bool(is_near.all()), f"{source} to {dtype} is rounded too far"
    return Outcome(bits=bits)


def _bits_of(quantized: Quantized) -> list[Tensor]:
    """Return values, what they stand for, and scales."""
    found = []
    for each in (quantized.by_row, quantized.by_column):
        if each is not None:
            found += [each.values.view(torch.uint8), dequantize(each)]
            # Those of 1x32 may lie in another order elsewhere.
            found += [each.inverse] if each.inverse.dtype is torch.float32 else []
    return [*found, *(each for each in (quantized.amax, quantized.factor) if each is not None)]


def _multiplies(
    pair: tuple[Granularity, Granularity], power_of_2: bool, device: torch.device
) -> Outcome:
    way, bits = way_of(device, *pair), []
    for rows in ROWS:
        for out_dtype in OUT_DTYPES:
            a = _by_row(_matrix(rows, 256, 1).to(device), DTYPES[0], pair[0], power_of_2)
            b = _by_row(_matrix(128, 256, 2).to(device), DTYPES[0], pair[1], power_of_2)
            found = scaled_mm(a, b, out_dtype)
            exact = dequantize(a).double() @ dequantize(b).double().t()
            assert found.dtype is out_dtype, f"the result is {found.dtype}"
            size = exact.abs().max().item()
            bound = (2.0**-7 if way != "emulated" else torch.finfo(out_dtype).eps) * size + 1e-4
            off = float((found.double() - exact).abs().max())
            assert off <= bound, f"{rows} rows in {out_dtype} are {off:.2e} off, and {bound:.2e} may be"
            bits += [found, emulated(a, b, out_dtype)]
    if way == "emulated" and device.type == "cuda":
        raise SkipError("emulated on this GPU; the emulation is right")
    return Outcome(way, bits)


for _granularity in ("tensor", "row", "1x128", "128x128", "1x32"):
    _name = f"fp8: quantized, {_granularity}"
    CHECKS[_name] = Check(_name, functools.partial(_quantizes, _granularity), 60, False)
for _pair in PAIRS:
    _name = f"fp8: products, {' by '.join(_pair)}"
    CHECKS[_name] = Check(_name, functools.partial(_multiplies, _pair, True), 60, False)
_name = f"fp8: products, {' by '.join(PAIRS[2])}, any scales"
CHECKS[_name] = Check(_name, functools.partial(_multiplies, PAIRS[2], False), 60, False)
