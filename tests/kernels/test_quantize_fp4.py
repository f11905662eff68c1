"""Quantization to FP4: by the formulas in NumPy, by statistics, and backends against each other."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from amp.kernels import cpu_passes, fp4
from amp.kernels.fp4 import SIGNS, transformed
from amp.kernels.fp8 import Operand, Quantized, dequantize, unpacked
from amp.kernels.philox import Draw, philox, random_bytes
from amp.kernels.quantize_fp4 import quantize_fp4
from amp.kernels.scaled_mm import scaled_mm
from amp.numerics import round_to
from tests.covering import covering
from tests.kernels.operands import INPUTS, SOURCES, assert_same_operands, both_of, rows_of

NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""Of the codes 0 to 7 of E2M1."""
SHAPE = 96, 128


def draw_of(calls: int = 3, seed: int = 5, name: int = 7, rank: int = 0) -> Draw:
    return Draw(torch.tensor(calls), seed, name, rank)


GRANULARITIES = ("1x16", "16x16", "1x32")


# The formulas.


def nearest_code(y: Any) -> Any:
    """Return codes by a search: the nearest number, and of two the one whose code is even."""
    codes = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # the first of those that are equally near is taken
    size = np.minimum(np.abs(y), 6)[..., None]
    distance = np.abs(size.astype(np.float64) - np.array(NUMBERS)[codes])
    return codes[np.argmin(distance, -1)] + 8 * np.signbit(y)


def oracle(x: Tensor, granularity: str) -> tuple[Any, Any, Any]:
    """Return codes, scales and the tensor's scale by the formulas, in NumPy's float32."""
    height, width = {"1x16": (1, 16), "16x16": (16, 16), "1x32": (1, 32)}[granularity]
    one = np.float32(1)
    rows, columns = x.shape
    a = x.float().numpy().reshape(rows // height, height, columns // width, width)
    amax = np.abs(a).max((1, 3)).astype(np.float32)
    with np.errstate(all="ignore"):
        if granularity == "1x32":
            exponent = np.frexp(amax.astype(np.float64) / 6)
            power = np.where(exponent[0] == 0.5, exponent[1] - 1, exponent[1])
            power = np.where(amax == 0, -126, np.maximum(power, -126))
            scale, outer = power + 127, None
            factor = np.exp2(-power.astype(np.float64)).astype(np.float32)
        else:
            encode = np.minimum(np.float32(2688) / amax.max(), np.finfo(np.float32).max)
            encode = one if amax.max() == 0 or encode == 0 else encode
            ratio = np.minimum(amax * (encode * (one / np.float32(6))), np.float32(448))
            scale = torch.from_numpy(round_to(torch.from_numpy(ratio), "float8_e4m3fn").numpy())
            outer = one / encode
            factor = np.minimum(one / (scale.numpy() * outer), np.finfo(np.float32).max)
        y = (a * factor[:, None, :, None].astype(np.float32)).reshape(rows, columns)
    return nearest_code(y), scale, outer


def codes_of(operand: Operand) -> Any:
    values = operand.values
    return torch.stack([values & 15, values >> 4], -1).reshape(len(values), -1).numpy()


FINITE = [name for name in INPUTS if name not in ("inf", "nan")]


@pytest.mark.parametrize(
    ("name", "granularity", "source"), covering(FINITE, GRANULARITIES, SOURCES[:2])
)
def test_every_byte_follows_the_formulas(name: str, granularity: Any, source: torch.dtype) -> None:
    x = INPUTS[name].to(source)
    both = both_of(quantize_fp4(x, granularity))
    for operand, of in zip(both, (x, x.t().contiguous()), strict=True):
        codes, scale, outer = oracle(of, granularity)
        assert (codes_of(operand) == codes).all()
        if outer is None:
            assert (operand.inverse.numpy() == scale).all()
        else:
            assert operand.outer is not None
            assert torch.equal(operand.inverse.float(), torch.as_tensor(scale))
            assert float(operand.outer) == float(outer)


@pytest.mark.parametrize("name", ["inf", "nan"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_what_is_not_finite_makes_products_nan(name: str, granularity: Any) -> None:
    values = dequantize(rows_of(quantize_fp4(INPUTS[name], granularity)))
    if granularity == "1x32":
        i, j = (3, 5) if name == "inf" else (17, 40)
        assert values[i, j // 32 * 32 : j // 32 * 32 + 32].isnan().all()
    else:
        assert values.isnan().all()


def test_all_numbers_and_ties() -> None:
    x = torch.zeros(1, 32)
    x[0, :16] = torch.tensor([*NUMBERS, *(-number for number in NUMBERS)])
    found = rows_of(quantize_fp4(x, "1x16", by_column=False))
    torch.testing.assert_close(dequantize(found), x, rtol=1e-6, atol=0)
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    x[0, :16] = torch.tensor([*ties, *ties])
    found = rows_of(quantize_fp4(x, "1x16", by_column=False))
    torch.testing.assert_close(dequantize(found)[0, :16], torch.tensor([*even, *even]))


def test_all_bytes_are_their_two_numbers() -> None:
    every = torch.arange(256, dtype=torch.uint8)[:, None]
    found = unpacked(every)
    for byte, (even, odd) in enumerate(found.tolist()):
        for number, code in ((even, byte & 15), (odd, byte >> 4)):
            assert number == NUMBERS[code & 7] * (-1 if code & 8 else 1)


def test_a_weight_and_its_transpose_are_quantized_alike() -> None:
    x = INPUTS["normal"]
    by_row, by_column = both_of(quantize_fp4(x, "16x16"))
    assert torch.equal(dequantize(by_row).t(), dequantize(by_column))
    by_row, by_column = both_of(quantize_fp4(x, "1x16"))
    assert (dequantize(by_row).t() != dequantize(by_column)).float().mean() > 0.5


# Random bits.


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ([2**32 - 1] * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_random123s_known_answers(counter: Any, key: Any, words: Any) -> None:
    assert tuple(map(int, philox([torch.tensor([word]) for word in counter], key))) == words


def test_the_bytes_of_all_draws_differ() -> None:
    shape = torch.Size((64, 64))
    draws = [
        draw_of(),
        draw_of(calls=4),
        draw_of(seed=6),
        draw_of(seed=5 + 2**40),
        draw_of(name=8),
        draw_of(rank=1),
        draw_of().of_columns(),
    ]
    every = [random_bytes(shape, draw).flatten().float() for draw in draws]
    every += [every[0].view(shape).t().flatten()]
    correlations = torch.corrcoef(torch.stack(every)) - torch.eye(len(every))
    assert correlations.abs().max() < 5 / 64
    assert torch.equal(random_bytes(shape, draw_of()).flatten().float(), every[0])


def means(x: Tensor, count: int, **options: Any) -> Tensor:
    """Return the mean of what a matrix becomes in some draws."""
    total = torch.zeros(x.shape, dtype=torch.float64)
    for calls in range(count):
        found = quantize_fp4(x, "1x16", by_column=False, draw=draw_of(calls), **options)
        total += dequantize(rows_of(found))
    return total / count


def test_each_byte_rounds_as_far_as_a_number_is() -> None:
    """The mean over all 256 bytes is within 1/256 of a step, below the number."""
    size = torch.linspace(0, 6, 1201)
    random = torch.arange(256, dtype=torch.uint8)
    found = fp4.stochastically(size[:, None].expand(-1, 256), random.expand(len(size), -1)).mean(1)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    assert ((size - found) / step).max() <= 1 / 256 + 1e-6
    assert ((size - found) / step).min() >= -1e-6


def slope(x: Tensor) -> float:
    mean = means(x, 100)
    return float((mean * x).sum() / x.double().square().sum())


def test_gradients_are_right_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of a small model would not see gradients rounded up, or truncated; their mean does."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    assert 0.99 <= slope(x) <= 1.001
    monkeypatch.setattr(cpu_passes, "take", lambda *_, **__: False)
    right = slope(x)
    assert 0.99 <= right <= 1.001
    whole = {"always up": 255, "truncated": 0}
    for byte in whole.values():
        monkeypatch.setattr(
            fp4, "random_bytes", lambda shape, _, byte=byte: torch.full(shape, byte).to(torch.uint8)
        )
        assert not 0.99 <= slope(x) <= 1.001


def test_the_bits_of_rows_and_columns_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    x = (x + x.t()) / 2

    def correlation() -> float:
        both = both_of(quantize_fp4(x, "1x16", draw=draw_of()))
        errors = torch.stack([(dequantize(each) - x).flatten() for each in both])
        return float(torch.corrcoef(errors)[0, 1])

    independent = correlation()
    monkeypatch.setattr(Draw, "of_columns", lambda self: self)
    assert correlation() > independent + 0.2


# The Hadamard transform.


def sylvester(n: int) -> Tensor:
    h = torch.ones(1, 1)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


@pytest.mark.parametrize("rows", [16, 96, 37])
def test_the_transform_is_that_of_sylvesters_matrix(rows: int) -> None:
    x = torch.randn(rows, 48)
    padded = -(-rows // 32) * 32
    wide = torch.zeros(48, padded, dtype=torch.float64)
    wide[:, :rows] = x.t()
    signed = wide.view(-1, 16) * torch.tensor(SIGNS)
    expected = (signed @ sylvester(16).double() / 4).view(48, padded)
    found = transformed(x, padded)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-5)


def test_transforms_cancel_in_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    x, g = torch.randn(64, 32), torch.randn(64, 48)
    expected = g.t() @ x
    found = transformed(g, 64).float() @ transformed(x, 64).float().t()
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.2)
    monkeypatch.setattr(fp4, "SIGNS", SIGNS[1:] + SIGNS[:1])
    other = transformed(x, 64)
    assert (transformed(g, 64).float() @ other.float().t() - expected).norm() < 0.02 * expected.norm()
    monkeypatch.undo()
    assert (transformed(g, 64).float() @ other.float().t() - expected).norm() > 0.5 * expected.norm()


def test_a_transpose_is_transformed_before_it_is_quantized() -> None:
    x = INPUTS["tails"]
    _, found = both_of(quantize_fp4(x, "1x16", hadamard=True))
    expected = rows_of(quantize_fp4(transformed(x, len(x)), "1x16", by_column=False))
    assert_same_operands(Quantized(found, None), Quantized(expected, None))


# Products.


def decibels(found: Tensor, exact: Tensor) -> float:
    return float(20 * torch.log10(exact.norm() / (found - exact).norm()))


def kinds() -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(0)
    x, weight, grad = torch.randn(256, 1024), torch.randn(128, 1024) * 0.02, torch.randn(256, 128)
    outliers = x * torch.where(torch.arange(1024) % 100 == 0, 30.0, 1.0)
    return {"normal": (x, weight, grad), "outliers": (outliers, weight, grad)}


@pytest.mark.parametrize(
    ("kind", "recipe", "expected"),
    [
        ("normal", "nvfp4", (16.7, 15.0, 15.6)),
        ("outliers", "nvfp4", (17.2, 15.3, 15.8)),
        ("normal", "mxfp4", (15.8, 13.9, 14.0)),
    ],
)
def test_decibels_of_the_three_products(kind: str, recipe: str, expected: Any) -> None:
    x, weight, grad = kinds()[kind]
    of_x: Any = "1x16" if recipe == "nvfp4" else "1x32"
    of_weight: Any = "16x16" if recipe == "nvfp4" else "1x32"
    xs = quantize_fp4(x, of_x, hadamard=True)
    weights = quantize_fp4(weight, of_weight)
    grads = quantize_fp4(grad, of_x, hadamard=True, draw=draw_of())
    pairs: Any = (
        (xs.by_row, weights.by_row, x @ weight.t()),
        (grads.by_row, weights.by_column, grad @ weight),
        (grads.by_column, xs.by_column, grad.t() @ x),
    )
    for (a, b, exact), expects in zip(pairs, expected, strict=True):
        assert decibels(scaled_mm(a, b, torch.float32), exact) == pytest.approx(expects, abs=0.6)


def test_what_tensor_cores_would_refuse_is_refused() -> None:
    with pytest.raises(ValueError, match="rows of a multiple of 32"):
        quantize_fp4(torch.randn(32, 48), "1x16")
    with pytest.raises(ValueError, match="both dimensions of a multiple of 32"):
        quantize_fp4(torch.randn(16, 64), "16x16")
    with pytest.raises(ValueError, match="float64"):
        quantize_fp4(torch.randn(32, 64).double())


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_matrix_without_rows(granularity: Any) -> None:
    by_row = rows_of(quantize_fp4(torch.randn(0, 64), granularity))
    assert dequantize(by_row).shape == (0, 64)


# Backends.


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_passes, "WORTH_COMPILING", 0)
    x = torch.randn(512, 512)
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(cpu_passes, "_threads", lambda threads=threads: threads)
        found.append(quantize_fp4(x, "1x16", hadamard=True, draw=draw_of()))
    for other in found[1:]:
        assert_same_operands(other, found[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Inductor warns of much
def test_compiled_code_gives_the_same_bits() -> None:
    x = torch.randn(64, 64).bfloat16()
    calls = torch.tensor(3)

    def run(x: Tensor, calls: Tensor) -> list[Tensor]:
        row = rows_of(quantize_fp4(x, "1x16", by_column=False, draw=Draw(calls, 5, 0xF4DBDF21)))
        return [row.values, row.inverse]

    compiled = torch.compile(run, fullgraph=True)
    for one, other in zip(run(x, calls), compiled(x, calls), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_nothing_that_is_quantized_is_written_to() -> None:
    for name, granularity in itertools.product(("normal", "tails"), GRANULARITIES):
        x = INPUTS[name].clone()
        quantize_fp4(x, granularity, hadamard=granularity != "16x16", draw=draw_of())
        assert torch.equal(x, INPUTS[name])
