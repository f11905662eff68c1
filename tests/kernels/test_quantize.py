"""Quantization to FP8 against the formats themselves, on every backend at hand; see test_operations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from amp.kernels import cpu_passes
from amp.kernels.fp8 import (
    DTYPES,
    MULTIPLE,
    Granularity,
    Part,
    Seen,
    decoded,
    dequantize,
    factor_of,
    power_below,
    swizzle,
    unswizzle,
)
from amp.kernels.language import INTERPRETED
from amp.kernels.quantize import quantize
from amp.numerics import round_to
from tests.covering import covering
from tests.kernels.operands import (
    INPUTS,
    SOURCES,
    assert_same_bits,
    assert_same_operands,
    both_of,
    rows_of,
)

E4M3, E5M2 = DTYPES
LARGEST = {dtype: torch.finfo(dtype).max for dtype in DTYPES}
NAMES = {E4M3: "fp8_e4m3", E5M2: "fp8_e5m2"}
GRANULARITIES: tuple[Granularity, ...] = ("tensor", "row", "1x128", "128x128", "1x32")


def heavy_tailed(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape) * torch.exp(3 * torch.randn(shape))).to(dtype)


def shape_for(granularity: Granularity) -> tuple[int, int]:
    return (128, 256) if granularity == "128x128" else (130, 256)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, 64.0, 2.0**-20])
def test_every_bfloat16_is_rounded_as_the_format_says(
    dtype: torch.dtype, factor: float, device: torch.device
) -> None:
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = bits[bits.isfinite()].reshape(-1, 128).to(device)
    given = torch.tensor(factor, device=device)
    found = rows_of(quantize(x, dtype, "tensor", factor=given, by_column=False))
    scaled = (x.double() * factor).clamp(-LARGEST[dtype], LARGEST[dtype])
    assert torch.equal(found.values.double(), round_to(scaled, NAMES[dtype]).double())


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("power_of_2", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_quantized_comes_back_within_half_a_unit(
    granularity: Granularity, power_of_2: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(shape_for(granularity)).to(device)
    result = quantize(x, dtype, granularity, power_of_2=power_of_2)
    mantissa = 3 if dtype is E4M3 else 2
    for operand, expected in zip(both_of(result), (x, x.t()), strict=True):
        back = dequantize(operand)
        assert operand.values.is_contiguous()
        assert not back[:, expected.shape[1] :].any()  # the padding
        error = (back[:, : expected.shape[1]] - expected).abs()
        # Half of the last bit; below the normal numbers, of the smallest one's.
        smallest = torch.finfo(dtype).smallest_normal * 2 * x.abs().max() / LARGEST[dtype]
        assert (error <= expected.abs().clamp(min=smallest) * 2.0 ** -(mantissa + 1)).all()


@pytest.mark.parametrize(
    ("name", "granularity", "source", "dtype", "power_of_2", "given"),
    covering(list(INPUTS), GRANULARITIES, SOURCES, DTYPES, [True, False], [None, 0.0, 16.0]),
)
def test_every_backend_gives_the_bits_of_plain_torch(
    name: str,
    granularity: Granularity,
    source: torch.dtype,
    dtype: torch.dtype,
    power_of_2: bool,
    given: float | None,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both results, each alone, and the transpose of a part with an odd length of rows; and numbers."""
    monkeypatch.setattr(cpu_passes, "WORTH_COMPILING", 0)
    rows = 128 if granularity == "128x128" else 17 if INTERPRETED else 83
    x = INPUTS[name].to(device, source).repeat(2, 1)[:rows]
    has_factor = given is not None and granularity == "tensor"
    options: dict[str, Any] = {"power_of_2": power_of_2}
    options["factor"] = torch.tensor(given, device=device) if has_factor else None
    asked = [(x, {}), (x, {"by_column": False}), (x, {"by_row": False})]
    asked += [(x[:, :121], {"by_row": False})] if granularity != "128x128" else []
    found = []
    for backend in (None, "reference"):
        if device.type == "cpu" and not INTERPRETED:
            assert cpu_passes.take(x, backend=backend) is (backend is None)
        options["backend"] = backend
        found.append([quantize(part, dtype, granularity, **options, **more) for part, more in asked])
        if backend == "reference":  # products have no such argument
            monkeypatch.setenv("AMP_KERNELS", "reference")
        operands = [each for one in found[-1] for each in one[:2] if each is not None]
        found.append(list(map(dequantize, operands)))
    ours, numbers, plain, plain_numbers = found
    if granularity == "tensor":  # the padding is 0 also where there is no scale
        assert not both_of(plain[0])[1].values.view(torch.uint8)[:, rows:].any()
    for one, other in zip(ours, plain, strict=True):
        assert_same_operands(one, other)
    for one, other in zip(numbers, plain_numbers, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8])
def test_every_code_is_decoded_in_cpp(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_passes, "WORTH_COMPILING", 0)
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32).view(dtype)
    found = decoded(codes)
    monkeypatch.setenv("AMP_KERNELS", "reference")
    expected = decoded(codes)
    assert torch.equal(found.signbit(), expected.signbit())
    assert_same_bits(found, expected)


def tensors_of(numbers: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return arguments of `quantize`, numbers as tensors, and where it records the amax."""
    made = {
        name: torch.tensor(value, device=device) if isinstance(value, float) else value
        for name, value in numbers.items()
    }
    before, divisor = torch.tensor(1e-3, device=device), made.pop("divisor", None)
    return {**made, "seen": Seen(before, divisor)}


@pytest.mark.triton
@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"factor": 16.0, "is_known": True, "divisor": 3.0},
        {"factor": 0.0, "is_known": True},
        {"factor": math.nan, "is_known": True},
        {"factor": 0.0, "divisor": 3.0},
        {"factor": 16.0},
        {"guess": 0.5},
        {"guess": 0.0, "divisor": 3.0},
        {"guess": math.nan},
        {"guess": None},  # the right one
    ],
    ids=str,
)
@pytest.mark.parametrize("largest", [5.0, 0.0, math.inf])
def test_no_way_to_a_factor_changes_a_bit(
    numbers: dict[str, Any], largest: float, device: torch.device
) -> None:
    """A known or a guessed factor is checked by the last program, which writes all again if need be."""
    x = torch.randn(17, 384).clamp(-4, 4).bfloat16().to(device)
    if largest == 0:
        x *= -0.0
    else:
        x[16, 380] = largest
    if numbers == {"guess": None}:
        numbers = {"guess": float(factor_of(torch.tensor(largest), E4M3, True))}
    for _ in range(2):  # the second time with what the first one has left
        ours, plain = (tensors_of(numbers, device) for _ in range(2))
        found = quantize(x, E4M3, **ours)
        expected = quantize(x, E4M3, backend="reference", **plain)
        assert_same_operands(found, expected)
        assert_same_bits(ours["seen"].amax, plain["seen"].amax)
        if "factor" not in numbers:
            assert_same_operands(found, quantize(x, E4M3, backend="reference"))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_is_quantized_like_the_whole(
    granularity: Granularity, dim: int, device: torch.device
) -> None:
    x = heavy_tailed(256, 256).to(device)
    whole = quantize(x, E4M3, granularity, power_of_2=False)
    of_rows, of_columns = x.abs().amax(1), x.abs().amax(0)

    def agree(amaxes: Tensor) -> None:
        largest = x.abs().max() if granularity == "tensor" else of_rows if dim else of_columns
        amaxes.copy_(largest.reshape(amaxes.shape))

    for i, half in enumerate(x.chunk(2, dim)):
        found = quantize(half, E4M3, granularity, power_of_2=False, part=Part(dim, agree))
        for one, all_, cut in zip(both_of(found), both_of(whole), (dim, 1 - dim), strict=True):
            assert_same_bits(one.values, all_.values.chunk(2, cut)[i])
            assert_same_bits(dequantize(one), dequantize(all_).chunk(2, cut)[i])


@pytest.mark.triton
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_scales_begin_where_cublas_takes_them(granularity: Granularity, device: torch.device) -> None:
    found = quantize(torch.randn(128, 256).to(device), E4M3, granularity)
    assert all(operand.inverse.data_ptr() % 16 == 0 for operand in both_of(found))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_not_hidden(
    granularity: Granularity, bad: float, device: torch.device
) -> None:
    x = torch.ones(shape_for(granularity))
    x[3, 5] = bad
    seen = Seen(torch.zeros((), device=device)) if granularity == "tensor" else None
    result = quantize(x.to(device), E4M3, granularity, seen=seen)
    for operand, at in zip(both_of(result), ((3, 5), (5, 3)), strict=True):
        assert dequantize(operand)[at].isnan()
    if seen is not None:
        assert seen.amax.isposinf()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_given_factor_hides_nothing_either(bad: float, device: torch.device) -> None:
    x = torch.ones(16, 16)
    x[3, 5] = bad
    given = torch.tensor(4.0, device=device)
    assert rows_of(quantize(x.to(device), E4M3, factor=given, by_column=False)).inverse.isnan()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 3e38])
def test_extreme_magnitudes_stay_finite(
    granularity: Granularity, value: float, device: torch.device
) -> None:
    x = torch.full(shape_for(granularity), value, device=device)
    for power_of_2 in (True, False):
        result = quantize(x, E4M3, granularity, power_of_2=power_of_2)
        for back in map(dequantize, both_of(result)):
            assert back.isfinite().all()
            assert value < 1e-30 or back[0, 0].item() == pytest.approx(value, rel=0.07)


def test_a_factor_of_0_stands_for_the_tensors_own(device: torch.device) -> None:
    x = heavy_tailed(32, 32).to(device)
    own = quantize(x, E4M3)
    found = quantize(x, E4M3, factor=torch.zeros((), device=device))
    assert_same_operands(found, own)
    half = torch.as_tensor(own.factor) / 2
    assert quantize(x, E4M3, factor=half).factor == half


# Other people's formulas.


def test_factors_are_transformer_engines() -> None:
    amax = torch.cat([heavy_tailed(3000).abs(), torch.tensor([0.0, 1e-45, 1e-38])])
    for dtype in DTYPES:
        # compute_scale_from_amax: FP32 division, 1 for 0, FP32's largest number for inf.
        scale = torch.div(torch.tensor(LARGEST[dtype]), amax)
        scale = torch.where(amax == 0, 1.0, scale).clamp(max=torch.finfo(torch.float32).max)
        assert torch.equal(factor_of(amax, dtype, False), scale)
        cleared = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
        normal = amax > 1e-35  # below, 2^126 is the largest here
        assert torch.equal(factor_of(amax, dtype, True)[normal], cleared[normal])


@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("power_of_2", [True, False])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
def test_operands_are_torchaos(
    granularity: Granularity, power_of_2: bool, source: torch.dtype, device: torch.device
) -> None:
    x = heavy_tailed(64, 48, dtype=source).to(device)
    found = rows_of(quantize(x, E4M3, granularity, power_of_2=power_of_2, by_column=False))
    amax = x.abs().amax(1, keepdim=True) if granularity == "row" else x.abs().max()
    scale = (LARGEST[E4M3] / amax.double().clamp(min=1e-12)).float()
    if power_of_2:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    values = (x.float() * scale).clamp(-LARGEST[E4M3], LARGEST[E4M3]).to(E4M3)
    assert_same_bits(found.values, values)
    assert torch.equal(found.inverse, scale.reciprocal())


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_of_mxfp8_are_rounded_up_as_torchaos_rceil(dtype: torch.dtype) -> None:
    near = torch.cat(
        [torch.tensor([1.75, 1.75 + 2**-22, 1.75 - 2**-22, 1.0]) * 2.0**n for n in range(-40, 40)]
    )
    amax = torch.cat([heavy_tailed(10000).abs(), near])
    descale = torch.div(amax, torch.tensor(LARGEST[dtype]))
    exponent = torch.ceil(torch.log2(descale.double())).clamp(-127, 127).int() + 127
    assert torch.equal((254 - power_below(torch.finfo(dtype).max, amax)), exponent)


def test_swizzled_scales_are_in_torchs_order() -> None:
    rows, columns = 300, 6
    scales = torch.randint(0, 255, (rows, columns), dtype=torch.uint8)
    flat = swizzle(scales)
    assert flat.numel() == 384 * 8
    for r, c in ((0, 0), (31, 3), (32, 0), (127, 5), (128, 4), (299, 5)):
        tile = (r // 128) * 2 + c // 4
        assert flat[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] == scales[r, c]
    assert torch.equal(unswizzle(flat, rows, columns), scales)


# Sizes and errors.


@pytest.mark.parametrize("granularity", ["tensor", "row", "1x128", "1x32"])
@pytest.mark.parametrize("rows", [0, 1, 5, 17])
def test_any_number_of_rows(granularity: Granularity, rows: int, device: torch.device) -> None:
    x = torch.randn(rows, 128, device=device)
    by_row, by_column = both_of(quantize(x, E5M2, granularity))
    assert by_row.values.shape == (rows, 128)
    multiple = MULTIPLE[granularity]
    assert by_column.values.shape == (128, math.ceil(rows / multiple) * multiple)
    torch.testing.assert_close(dequantize(by_column)[:, :rows], x.t(), rtol=0.13, atol=1e-2)


def test_a_matrix_need_not_be_contiguous(device: torch.device) -> None:
    x = torch.randn(64, 96, device=device)
    assert_same_operands(quantize(x.t(), E4M3, "row"), quantize(x.t().contiguous(), E4M3, "row"))
    odd = torch.randn(64 * 48 + 1, device=device)[1:].view(64, 48)
    assert_same_operands(quantize(odd, E4M3), quantize(odd.clone(), E4M3))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"x": torch.ones(4, 5)}, r"x has shape \(4, 5\).*multiple of 16"),
        ({"x": torch.ones(4, 48), "granularity": "1x32"}, "multiple of 32"),
        ({"x": torch.ones(100, 128), "granularity": "128x128"}, "both dimensions of a multiple of 128"),
        ({"x": torch.ones(16)}, "x is torch.float32 of shape"),
        ({"x": torch.ones(16, 16, dtype=torch.int32)}, "x is torch.int32"),
        ({"dtype": torch.float16}, "dtype=torch.float16 is not one of torch.float8_e4m3fn"),
        ({"granularity": "column"}, "granularity='column' is not one of tensor, row"),
        ({"granularity": "row", "factor": torch.ones(())}, "a factor is for granularity='tensor'"),
        ({"granularity": "row", "guess": torch.ones(())}, "a guess is for granularity='tensor'"),
        ({"granularity": "row", "seen": Seen(torch.ones(()))}, "seen is for granularity='tensor'"),
        ({"factor": torch.ones(()), "guess": torch.ones(())}, "factor and guess are given"),
    ],
)
def test_what_cannot_be_quantized_is_refused(change: dict[str, Any], text: str) -> None:
    arguments: dict[str, Any] = {"x": torch.ones(16, 16), "dtype": E4M3, **change}
    with pytest.raises(ValueError, match=text):
        quantize(**arguments)


def test_operands_are_small() -> None:
    by_row = rows_of(quantize(torch.ones(256, 512), E4M3, "1x32", by_column=False))
    assert by_row.values.numel() * by_row.values.element_size() == 256 * 512
    assert by_row.inverse.numel() * by_row.inverse.element_size() == 256 * 512 // 32
