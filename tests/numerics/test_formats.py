"""Number formats against torch's casts, against ml_dtypes, and against the numbers that books give."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from amp import numerics
from amp.numerics import FORMATS, bits, decode, describe, neighbours, round_to, survives_update, ulp

ml_dtypes = pytest.importorskip("ml_dtypes")
SMALL = [fmt for fmt in FORMATS.values() if fmt.bits <= 16]
WITH_DTYPE = [fmt for fmt in FORMATS.values() if fmt.dtype is not None]
TORCH_SATURATES = (
    float(torch.tensor(1e9).to(torch.float8_e4m3fn).float()) == 448.0
)  # 2.13 does, 2.11 gives NaN


def name(fmt: Any) -> str:
    return str(fmt.name)


def numpy_dtype(fmt: numerics.Format) -> Any:
    return np.dtype(
        {"float32": "float32", "float16": "float16"}.get(fmt.name) or getattr(ml_dtypes, fmt.name)
    )


def patterns(fmt: numerics.Format) -> Tensor:
    return torch.arange(2**fmt.bits)


def inputs(fmt: numerics.Format) -> Tensor:
    """Random FP32 numbers, and where the format changes: ties, ends, subnormals, infinities."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (10**6,), generator=generator).int().view(torch.float32)
    near = torch.randn(10**5, generator=generator) * torch.exp2(
        torch.randint(-30, 20, (10**5,), generator=generator).float()
    )
    values = decode(patterns(fmt), fmt).double() if fmt.bits <= 16 else torch.zeros(1).double()
    values = values[values.isfinite()].unique()
    ties = ((values[1:] + values[:-1]) / 2).float()
    ends = torch.tensor([fmt.max, fmt.min_normal, fmt.min_subnormal, 0.0, -0.0, torch.inf, torch.nan])
    around = torch.cat([ties, values.float(), ends, ends * 1.03125, ends * 1.0625, ends / 2])
    around = torch.cat([around, -around])
    beside = [torch.nextafter(around, torch.tensor(end)) for end in (-torch.inf, torch.inf)]
    return torch.cat([random, near, around, *beside])


def assert_same(ours: Tensor, theirs: Tensor, x: Tensor) -> None:
    """Equal with signs of zeros, NaN for NaN."""
    same = (ours == theirs) & (ours.signbit() == theirs.signbit()) | ours.isnan() & theirs.isnan()
    assert bool(same.all()), [t[~same][:5].tolist() for t in (x, ours, theirs)]


@pytest.mark.parametrize("fmt", WITH_DTYPE, ids=name)
def test_rounding_is_what_torch_does(fmt: numerics.Format) -> None:
    x = inputs(fmt)
    if fmt.overflow == "saturate" and not TORCH_SATURATES:
        x = x[x.abs() <= fmt.max]
    assert fmt.dtype is not None
    assert_same(round_to(x, fmt), x.to(fmt.dtype).float(), x)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=name)
def test_rounding_is_what_ml_dtypes_does(fmt: numerics.Format) -> None:
    x = inputs(fmt)
    overflow: Any = None
    if not fmt.signed:
        x = x[(x > 0) | x.isnan()]  # to ml_dtypes the others are NaN
    if fmt.name == "float8_e4m3fn":
        overflow = "nan"
    with np.errstate(all="ignore"):
        theirs = torch.from_numpy(x.numpy().astype(numpy_dtype(fmt)).astype(np.float32))
    assert_same(round_to(x, fmt, overflow=overflow), theirs, x)


@pytest.mark.parametrize("fmt", SMALL, ids=name)
def test_every_pattern_means_what_it_means_elsewhere(fmt: numerics.Format) -> None:
    every = patterns(fmt)
    raw = every.numpy().astype(f"uint{max(fmt.bits, 8)}")
    theirs = torch.from_numpy(raw.view(numpy_dtype(fmt)).astype(np.float32))
    assert_same(decode(every, fmt), theirs, every)
    if fmt.dtype is not None:
        narrow = torch.from_numpy(raw.view(f"int{fmt.bits}").copy()).view(fmt.dtype)
        assert_same(decode(every, fmt), narrow.float(), every)


@pytest.mark.parametrize("fmt", SMALL, ids=name)
def test_every_pattern_survives_its_value(fmt: numerics.Format) -> None:
    every = patterns(fmt)
    values = decode(every, fmt)
    number = ~values.isnan()
    found = bits(values, fmt)
    assert torch.equal(found.pattern[number], every[number])
    assert found.value.isnan().equal(values.isnan())
    fields = (found.sign << fmt.exponent_bits | found.exponent) << fmt.mantissa_bits | found.mantissa
    assert torch.equal(fields, found.pattern)
    assert not found.overflow.any()
    assert not found.underflow.any()
    assert (found.error[values.isfinite()] == 0).all()
    subnormal = (values != 0) & (values.abs() < fmt.min_normal)
    assert torch.equal(found.subnormal, subnormal)


@pytest.mark.parametrize("fmt", SMALL, ids=name)
def test_neighbours_and_ulps_of_every_number(fmt: numerics.Format) -> None:
    values = decode(patterns(fmt), fmt).double()
    values = values[values.isfinite()].unique()
    for shift, at, below, above in (
        (0.0, slice(1, -1), slice(0, -2), slice(2, None)),
        (0.5, slice(0, -1), slice(0, -1), slice(1, None)),
    ):
        x = values[at] + shift * (values[above] - values[at]) if shift else values[at]
        found = neighbours(x, fmt)
        assert torch.equal(found.below, values[below] + 0.0)
        assert torch.equal(found.above, values[above] + 0.0)
    positive = values[values >= 0]
    assert torch.equal(ulp(positive[:-1], fmt), positive.diff())
    assert ulp(-positive[:-1], fmt).equal(positive.diff())
    for largest in (fmt.max, fmt.max * 1.5):
        assert ulp(largest, fmt) == 2.0 ** (math.frexp(fmt.max)[1] - 1 - fmt.mantissa_bits)
    assert ulp(math.inf, fmt) == math.inf
    assert math.isnan(ulp(math.nan, fmt))
    beyond = neighbours(fmt.max, fmt).above
    assert beyond == math.inf if fmt.has_inf else math.isnan(beyond)
    assert neighbours(fmt.max * 1.5, fmt).below == fmt.max


FAST = ("float16", "float8_e4m3fn", "float8_e8m0fnu")  # with an inf, without one, without a sign


@pytest.mark.parametrize(
    "fmt",
    [pytest.param(fmt, marks=() if fmt.name in FAST else pytest.mark.slow) for fmt in FORMATS.values()],
    ids=name,
)
def test_toward_zero_and_at_random(fmt: numerics.Format) -> None:
    x = torch.logspace(-12, 6, 2000, dtype=torch.float64)
    x = x[(x >= fmt.min_subnormal) & (x < fmt.max)]
    low = round_to(x, fmt, "toward_zero")
    assert (low <= x).all()
    assert torch.equal(low, torch.where(bits(x, fmt).error == 0, x, neighbours(x, fmt).below))
    if fmt.signed:
        assert torch.equal(round_to(-x, fmt, "toward_zero"), -low)
    generator = torch.Generator().manual_seed(0)
    third = low + ulp(low, fmt).nan_to_num(posinf=0.0) / 3
    drawn = torch.stack([round_to(third, fmt, "stochastic", generator=generator) for _ in range(3000)])
    up = (drawn > low).double().mean(0)
    inside = third > low
    assert ((drawn == low) | (drawn == neighbours(low, fmt).above)).all()
    assert (up[inside] - 1 / 3).abs().max() < 0.05
    assert torch.equal(round_to(low, fmt, "stochastic"), low)
    assert round_to(fmt.max * 4, fmt, "toward_zero") == fmt.max


def test_overflow_as_it_is_asked_for() -> None:
    assert round_to(1e9, "float16") == math.inf
    assert round_to(-1e9, "float16", overflow="saturate") == -65504.0
    assert math.isnan(round_to(1e9, "float16", overflow="nan"))
    assert round_to(math.inf, "e4m3") == 448.0
    assert math.isnan(round_to(math.inf, "e4m3", overflow="nan"))
    with pytest.raises(
        ValueError, match=r"overflow='inf' is not one of nan, saturate for float8_e4m3fn"
    ):
        round_to(1.0, "e4m3", overflow="inf")
    with pytest.raises(ValueError, match="mode='up' is not one of nearest, toward_zero, stochastic"):
        round_to(1.0, "fp16", "up")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fmt", "known"),
    [
        ("float32", (32, 127, 3.4028234663852886e38, 2.0**-126, 2.0**-149, 2.0**-23, 7.2, "inf")),
        ("float16", (16, 15, 65504.0, 2.0**-14, 2.0**-24, 2.0**-10, 3.3, "inf")),
        ("bfloat16", (16, 127, 3.3895313892515355e38, 2.0**-126, 2.0**-133, 2.0**-7, 2.4, "inf")),
        ("float8_e4m3fn", (8, 7, 448.0, 2.0**-6, 2.0**-9, 0.125, 1.2, "saturate")),
        ("float8_e5m2", (8, 15, 57344.0, 2.0**-14, 2.0**-16, 0.25, 0.9, "inf")),
        ("float8_e4m3fnuz", (8, 8, 240.0, 2.0**-7, 2.0**-10, 0.125, 1.2, "nan")),
        ("float8_e5m2fnuz", (8, 16, 57344.0, 2.0**-15, 2.0**-17, 0.25, 0.9, "nan")),
        ("float8_e8m0fnu", (8, 127, 2.0**127, 2.0**-127, 2.0**-127, 1.0, 0.3, "nan")),
        ("float4_e2m1fn", (4, 1, 6.0, 1.0, 0.5, 0.5, 0.6, "saturate")),
    ],
)
def test_what_is_to_be_known_of_a_format(fmt: str, known: tuple[Any, ...]) -> None:
    found, (*numbers, digits, overflow) = describe(fmt), known
    names = ("bits", "bias", "max", "min_normal", "min_subnormal", "ulp_at_1")
    assert [getattr(found, name) for name in names] == numbers
    assert found.overflow == overflow
    assert found.decimal_digits == pytest.approx(digits, abs=0.05)
    if found.dtype is not None:
        info = torch.finfo(found.dtype)
        assert (info.max, info.smallest_normal) == (found.max, found.min_normal)
        if fmt != "float8_e5m2fnuz":  # torch.finfo says 0.125, and 1.125 is not among its numbers
            assert info.eps == found.ulp_at_1


def test_examples_of_the_chapter() -> None:
    assert bits(math.pi, "float16").value == 3.140625
    pi = bits(math.pi, "float16")
    assert (pi.sign, pi.exponent, pi.mantissa, pi.pattern) == (0, 0b10000, 0b1001001000, 0x4248)
    assert pi.error == 3.140625 - math.pi
    for small, lost in (("float16", True), ("e4m3", True), ("e5m2", True), ("bfloat16", False)):
        assert bits(1e-8, small).underflow == lost
        assert (round_to(1e-8, small) == 0) == lost
    assert round_to(1.0 + 5e-5, "float16") == 1.0
    assert not survives_update(1.0, 5e-5, "float16")
    assert survives_update(1.0, 5e-5, "float32")
    assert survives_update(1.0, 2.0**-10, "float16")
    assert neighbours(0.0, "float16") == (-(2.0**-24), 2.0**-24)
    assert ulp(1.0, "float8_e4m3fn") == 0.125
    assert bits(70000.0, "float16").overflow
    assert bits(2.0**-20, "float16").subnormal


def test_updates_in_tensors() -> None:
    weights = torch.tensor([0.1, 1.0, 10.0, 100.0])
    assert survives_update(weights, 1e-3, "bfloat16").tolist() == [True, False, False, False]
    assert survives_update(1.0, torch.tensor([1e-4, 1e-2]), "float16").tolist() == [False, True]
    assert survives_update(65504.0, 100.0, "float16") is True
    assert survives_update(math.nan, 1.0, "float16") is False


def test_names_dtypes_and_shapes() -> None:
    for alias, fmt in (
        ("fp16", "float16"),
        ("torch.bfloat16", "bfloat16"),
        (torch.float8_e5m2, "float8_e5m2"),
    ):
        assert describe(alias).name == fmt
    x = torch.randn(2, 3, dtype=torch.float16)
    assert round_to(x, "bfloat16").dtype is torch.float32
    assert round_to(x.double(), "bfloat16").dtype is torch.float64
    assert round_to(x, "e4m3").shape == (2, 3)
    assert round_to(torch.empty(0), "e4m3").shape == (0,)
    assert isinstance(round_to(1, "e4m3"), float)
    assert decode(0x3C00, "float16") == decode(0x3C00 + 2**70, "float16") == 1.0
    assert round_to(np.float32(3.3), "e5m2") == 3.5
    assert describe("e4m3fnuz").max == 240.0


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'float17' is not a number format: .*did you mean 'float16'"):
        describe("float17")
    with pytest.raises(TypeError, match="3 is a int, not the name of a number format"):
        describe(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'1.5' is a str, not a number or a tensor"):
        bits("1.5", "fp16")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a tensor of torch.int64 is not of floating-point numbers"):
        round_to(torch.ones(2).long(), "fp16")
    with pytest.raises(ValueError, match="an integer that large is no float64"):
        bits(10**400, "fp16")
    with pytest.raises(TypeError, match="1.0 is no integer"):
        decode(1.0, "fp16")  # type: ignore[arg-type]


def test_rounding_does_not_depend_on_the_mode_where_nothing_is_rounded() -> None:
    for fmt, mode in itertools.product(SMALL, ("nearest", "toward_zero", "stochastic")):
        values = decode(patterns(fmt), fmt)
        values = values[values.isfinite()]
        assert torch.equal(round_to(values, fmt, mode), values)  # type: ignore[arg-type]
