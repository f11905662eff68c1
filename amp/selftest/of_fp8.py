"""FP8 and FP4: what is quantized, and products on tensor cores against the emulation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amp.kernels.fp8 import (
    DTYPES,
    Fp4Granularity,
    Granularity,
    Operand,
    Quantized,
    Seen,
    dequantize,
)
from amp.kernels.philox import Draw, philox
from amp.kernels.quantize import quantize
from amp.kernels.quantize_fp4 import quantize_fp4
from amp.kernels.scaled_mm import OUT_DTYPES, emulated, scaled_mm, way_of
from amp.selftest.check_registry import (
    CHECKS,
    Check,
    Outcome,
    SkipError,
    assert_same_bits,
    check,
)

PAIRS: tuple[tuple[Granularity, Granularity], ...] = (
    ("tensor", "tensor"),
    ("row", "row"),
    ("1x128", "128x128"),
    ("1x32", "1x32"),
)
FP4_PAIRS: tuple[tuple[Fp4Granularity, Fp4Granularity], ...] = (("1x16", "16x16"), ("1x16", "1x16"))
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
    ways = ("own", "given", "guessed") if granularity == "tensor" else ("own",)
    sizes = (128, 256) if granularity == "128x128" else (128, 200)
    for case, rows, way in itertools.product(CASES, sizes, ways):
        dtype, source, power_of_2 = case
        x = _matrix(rows, 384, rows).to(source)
        x[5], x[7, 3], x[9, 9] = 0.0, *((torch.inf, torch.nan) if rows > 128 else (1.0, 1.0))
        both = []
        for y, backend in ((x.to(device), None), (x, "reference")):
            eight = torch.tensor(8.0, device=y.device)
            seen = Seen(torch.zeros_like(eight), eight) if way == "given" else None
            found = quantize(
                y,
                dtype,
                granularity,
                power_of_2=power_of_2,
                factor=eight if way == "given" else None,
                is_known=True,
                guess=eight if way == "guessed" else None,  # a wrong one
                seen=seen,
                backend=backend,
            )
            both.append(_bits_of(found) + ([] if seen is None else [seen.amax]))
        of_found, plain = both
        assert_same_bits(of_found, plain, f"{source} to {dtype}, {rows} rows, factor {way}")
        bits += of_found
        if way == "own" and rows == 128:
            half_step = 2.0 ** -(4 if dtype is DTYPES[0] else 3)
            values, largest = x.float().abs(), x.float().abs().max()
            off = (of_found[1].cpu() - x.float()).abs()
            is_near = off <= values * half_step + largest * 2.0**-9
            assert bool(is_near.all()), f"{source} to {dtype} is rounded too far"
    return Outcome(bits=bits)


FP4_CASES = ((torch.bfloat16, True), (torch.float32, False), (torch.float16, True))
"""Sources, and whether gradients are quantized: transformed by column, and rounded stochastically."""


def _quantizes_fp4(granularity: Fp4Granularity, device: torch.device) -> Outcome:
    bits = []
    sizes = (128, 256) if granularity == "16x16" else (128, 200)
    for (source, of_gradients), rows in itertools.product(FP4_CASES, sizes):
        x = _matrix(rows, 384, rows).to(source)
        x[5], x[7, 3], x[9, 9] = 0.0, *((torch.inf, torch.nan) if rows > 128 else (1.0, 1.0))
        hadamard = of_gradients and granularity != "16x16"
        draw = Draw(torch.tensor(2**32 + 3), seed=2**40 + 1, name=2**31 + 7) if of_gradients else None
        there = draw and draw._replace(calls=draw.calls.to(device))
        found = quantize_fp4(x.to(device), granularity, hadamard=hadamard, draw=there)
        plain = quantize_fp4(x, granularity, hadamard=hadamard, draw=draw, backend="reference")
        of_found = _bits_of(found)
        assert_same_bits(of_found, _bits_of(plain), f"{source} to FP4, {rows} rows")
        bits += of_found
        if not of_gradients and rows == 128:
            values, largest = x.float().abs(), x.float().abs().max()
            off = (of_found[1].cpu() - x.float()).abs()
            assert bool((off <= 0.3 * values + 0.05 * largest).all()), f"{source} is rounded too far"
    return Outcome(bits=bits)


COUNTER, KEY = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
WORDS = [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
"""What Philox4x32-10 makes of a counter and a key: a known answer of its authors."""
NEGATIVE = {3, 5, 6, 7, 8, 9, 10, 12, 14, 15}
"""Which of 16 neighbours Transformer Engine's Hadamard transform gives the sign -1."""


@check("fp8: known answers")
def _known(device: torch.device) -> None:
    """Philox, and the Hadamard transform of unit vectors, by numbers of others."""
    words = philox([torch.tensor([word], device=device) for word in COUNTER], KEY)
    assert list(map(int, words)) == WORDS, f"Philox makes {[hex(int(word)) for word in words]}"
    # In column k of the identity, only number k is not 0: all its sums are 1 or -1, times a quarter.
    units = torch.eye(32, device=device)
    operand = quantize_fp4(units, by_row=False, hadamard=True).by_column
    assert operand is not None
    found = dequantize(operand).cpu()
    for k in range(32):
        signs = [(-1) ** ((i & k % 16).bit_count() + (k % 16 in NEGATIVE)) for i in range(16)]
        group = found[k].view(2, 16)[k // 16]
        torch.testing.assert_close(group, 0.25 * torch.tensor(signs), rtol=1e-3, atol=0)


def _bits_of(quantized: Quantized) -> list[Tensor]:
    """Return quantized values, the numbers that they stand for, and scales."""
    found = []
    for each in (quantized.by_row, quantized.by_column):
        if each is not None:
            found += [each.values.view(torch.uint8), dequantize(each)]
            # Those of 1x32 may lie in another order elsewhere.
            found += [each.inverse] if each.inverse.dtype is torch.float32 else []
    return found if quantized.factor is None else [*found, quantized.factor]


def _multiplies(
    pair: tuple[Granularity, Granularity], power_of_2: bool, device: torch.device
) -> Outcome:
    def operand(x: Tensor, granularity: Granularity) -> Operand:
        return _by_row(x, DTYPES[0], granularity, power_of_2)

    return _multiplies_operands(pair, operand, device)


def _multiplies_fp4(pair: tuple[Fp4Granularity, Fp4Granularity], device: torch.device) -> Outcome:
    def operand(x: Tensor, granularity: Fp4Granularity) -> Operand:
        found = quantize_fp4(x, granularity, by_column=False).by_row
        assert found is not None
        return found

    return _multiplies_operands(pair, operand, device)


def _multiplies_operands(
    pair: tuple[Any, Any], operand: Callable[[Tensor, Any], Operand], device: torch.device
) -> Outcome:
    """Check products of matrices that `operand` has quantized with a granularity."""
    way, bits = way_of(device, *pair), []
    for rows in ROWS:
        for out_dtype in OUT_DTYPES:
            a = operand(_matrix(rows, 256, 1).to(device), pair[0])
            b = operand(_matrix(128, 256, 2).to(device), pair[1])
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
for _of_fp4 in ("1x16", "16x16", "1x32"):
    _name = f"fp8: quantized, FP4 {_of_fp4}"
    CHECKS[_name] = Check(_name, functools.partial(_quantizes_fp4, _of_fp4), 60, False)
for _pair in PAIRS:
    _name = f"fp8: products, {' by '.join(_pair)}"
    CHECKS[_name] = Check(_name, functools.partial(_multiplies, _pair, True), 60, False)
_name = f"fp8: products, {' by '.join(PAIRS[2])}, any scales"
CHECKS[_name] = Check(_name, functools.partial(_multiplies, PAIRS[2], False), 60, False)
for _fp4_pair in FP4_PAIRS:
    _name = f"fp8: products, FP4 {' by '.join(_fp4_pair)}"
    CHECKS[_name] = Check(_name, functools.partial(_multiplies_fp4, _fp4_pair), 60, False)
