"""FP8: what is quantized, and products on tensor cores against the emulation."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from amp.kernels.fp8 import DTYPES, Granularity, Operand, dequantize
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


def _by_row(x: Tensor, dtype: torch.dtype, granularity: Granularity) -> Operand:
    operand = quantize(x, dtype, granularity, by_column=False).by_row
    assert operand is not None
    return operand


def _quantizes(granularity: Granularity, device: torch.device) -> Outcome:
    bits = []
    for dtype in DTYPES:
        for rows in (128, 256):
            x = _matrix(rows, 384, rows)
            for source in (x, x.half(), x.bfloat16()):
                found = _by_row(source.to(device), dtype, granularity)
                plain = quantize(
                    source, dtype, granularity, by_column=False, backend="reference"
                ).by_row
                assert plain is not None
                # Scales of 1x32 may lie in another order, so they are compared as they are used.
                found_bits = [found.values.view(torch.uint8), dequantize(found)]
                plain_bits = [plain.values.view(torch.uint8), dequantize(plain)]
                assert_same_bits(found_bits, plain_bits, f"{source.dtype} to {dtype}")
                half_step = 2.0 ** -(4 if dtype is DTYPES[0] else 3)
                off = (dequantize(found).cpu() - source.float()).abs()
                largest = source.float().abs().max()
                bound = source.float().abs() * half_step + largest * 2.0**-9
                assert bool((off <= bound).all()), f"{source.dtype} to {dtype} is rounded too far"
                bits += found_bits
    return Outcome(bits=bits)


def _multiplies(pair: tuple[Granularity, Granularity], device: torch.device) -> Outcome:
    way, bits = way_of(device, *pair), []
    for rows in ROWS:
        for out_dtype in OUT_DTYPES:
            a = _by_row(_matrix(rows, 256, 1).to(device), DTYPES[0], pair[0])
            b = _by_row(_matrix(128, 256, 2).to(device), DTYPES[0], pair[1])
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
    CHECKS[_name] = Check(_name, functools.partial(_multiplies, _pair), 60, False)
