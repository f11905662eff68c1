"""Products of FP8 matrices: the emulation against torch and FP64, and what tensor cores refuse."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion

from amp.kernels import scaled_mm as module
from amp.kernels.fp8 import DTYPES, Granularity, Operand, dequantize
from amp.kernels.quantize import quantize
from amp.kernels.quantize_fp4 import quantize_fp4
from amp.kernels.scaled_mm import OUT_DTYPES, as_fnuz, emulated, scaled_mm
from tests.kernels.operands import both_of, rows_of

E4M3, E5M2 = DTYPES
PAIRS: tuple[tuple[Granularity, Granularity], ...] = (
    ("tensor", "tensor"),
    ("row", "row"),
    ("1x128", "128x128"),
    ("1x128", "1x128"),
    ("1x32", "1x32"),
)
FP4 = torch.uint8
PAIRS_OF_FP4 = (("1x16", "16x16"), ("1x16", "1x16"), ("1x32", "1x32"))
KINDS: list[tuple[Any, torch.dtype]] = [
    *itertools.product(PAIRS, DTYPES),
    *((pair, FP4) for pair in PAIRS_OF_FP4),
]
"""Pairs of granularities, and the dtype of the first operand."""
HAS_AMX = (
    torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    and getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
)


def quantized(x: Tensor, granularity: Any, dtype: torch.dtype = E4M3, **more: Any) -> Operand:
    if dtype is FP4:
        return rows_of(quantize_fp4(x, granularity, by_column=False, **more))
    return rows_of(quantize(x, dtype, granularity, by_column=False, **more))


def operand(rows: int, columns: int, granularity: Any, dtype: Any = E4M3, **more: Any) -> Operand:
    return quantized(torch.randn(rows, columns), granularity, dtype, **more)


def of_weight(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the second operand, beside one of the first."""
    return FP4 if dtype is FP4 else E4M3


@pytest.mark.parametrize(("pair", "dtype"), KINDS)
@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
def test_products_are_those_of_what_operands_stand_for(
    pair: Any, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    a, b = operand(17, 256, pair[0], dtype), operand(128, 256, pair[1], of_weight(dtype))
    exact = dequantize(a).double() @ dequantize(b).double().t()
    found = scaled_mm(a, b, out_dtype)
    assert found.dtype is out_dtype
    rounding = torch.finfo(out_dtype).eps / 2 + 1e-6
    torch.testing.assert_close(found.double(), exact, rtol=rounding, atol=1e-4)


@pytest.mark.skipif(HAS_AMX, reason="oneDNN multiplies by AMX in another order")
@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_the_emulation_gives_the_bits_of_torchs_own_on_a_cpu(
    granularity: Granularity, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    a, b = operand(48, 512, granularity, dtype), operand(96, 512, granularity)

    def by_torch(out_dtype: torch.dtype) -> Tensor:
        inverse = b.inverse if granularity == "tensor" else b.inverse.t()
        return torch._scaled_mm(a.values, b.values.t(), a.inverse, inverse, out_dtype=out_dtype)

    assert torch.equal(scaled_mm(a, b, out_dtype), by_torch(out_dtype))
    # With scales that are no powers of 2 the order of products matters, in the last place.
    a = operand(48, 512, granularity, dtype, power_of_2=False)
    found = scaled_mm(a, b, torch.bfloat16)
    torch.testing.assert_close(found, by_torch(torch.bfloat16), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("pair", PAIRS)
def test_no_rows_give_no_rows(pair: tuple[Granularity, Granularity]) -> None:
    a, b = operand(0, 256, pair[0]), operand(128, 256, pair[1])
    assert scaled_mm(a, b, torch.bfloat16).shape == (0, 128)
    if pair[1] != "128x128":
        empty = operand(16, 0, pair[0]), operand(32, 0, pair[1])
        assert torch.equal(scaled_mm(*empty, torch.float32), torch.zeros(16, 32))


def test_sm_100_gets_squares_and_strips_as_1x32() -> None:
    a, b = operand(17, 384, "1x128"), operand(256, 384, "128x128")
    fine = [module._as_1x32(each) for each in (a, b)]
    for operand_, other in zip((a, b), fine, strict=True):
        assert torch.equal(dequantize(operand_), dequantize(other))
    assert torch.equal(emulated(fine[0], fine[1], torch.float32), emulated(a, b, torch.float32))


def test_cublas_gets_scales_with_the_outer_dimension_first() -> None:
    a, b = operand(17, 384, "1x128"), operand(256, 384, "128x128")
    assert module._laid_out(a)[1].shape == (17, 3)
    assert module._laid_out(a)[1].stride() == (1, 17)
    assert module._laid_out(b)[1].shape == (4, 2)  # 3 padded to 4
    assert module._laid_out(b)[1].stride() == (1, 4)


@pytest.mark.parametrize("by", ["128x128", "1x128"])
@pytest.mark.parametrize("rows", [8, 17])
def test_cublas_gets_strips_as_e4m3_and_in_rows_by_8(
    by: Granularity, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Tensor] = []

    def cublas(a: Tensor, b: Tensor, scale_a: Tensor, *args: Any, **options: Any) -> Tensor:
        assert a.shape[0] % 8 == 0
        assert scale_a.shape == (a.shape[0], 2)
        assert scale_a.stride() == (1, a.shape[0])
        given.append(a)
        wide = Operand(a, scale_a.t().contiguous(), "1x128")
        return emulated(wide, of_b, options["output_dtype"])

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", cublas)
    monkeypatch.setattr(module, "way_of", lambda *_: "native")
    of_b = operand(128, 256, by)
    for dtype in DTYPES:  # torch takes no E5M2 here
        a = operand(rows, 256, "1x128", dtype)
        assert torch.equal(scaled_mm(a, of_b, torch.bfloat16), emulated(a, of_b, torch.bfloat16))
    assert [each.dtype for each in given] == [E4M3]


GPUS: dict[str, tuple[tuple[int, int], str]] = {
    "sm_89": ((8, 9), "12.8"),
    "sm_90, CUDA 12.8": ((9, 0), "12.8"),
    "sm_90, CUDA 12.9": ((9, 0), "12.9"),
    "sm_100": ((10, 0), "13.0"),
    "sm_120": ((12, 0), "13.0"),
}


@pytest.fixture(params=GPUS)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Claim a GPU."""
    capability, cuda = GPUS[request.param]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    cached = module._way_of, module._dtype_of_rows
    for function in cached:
        function.cache_clear()
    yield request.param
    for function in cached:
        function.cache_clear()


@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_rows_are_multiplied_in_bfloat16_but_for_hopper(
    gpu: str, granularity: Granularity, out_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUTLASS makes bfloat16 alone of rows in torch 2.11, cuBLAS others on sm_90 with CUDA 12.9."""
    asked: list[torch.dtype] = []

    def scaled_mm_of_torch(a: Tensor, b: Tensor, *scales: Tensor, out_dtype: Any, **_: Any) -> Tensor:
        asked.append(out_dtype)
        return torch.zeros(a.shape[0], b.shape[1], dtype=out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm_of_torch)
    monkeypatch.setattr(module, "way_of", lambda *_: "native")
    a, b = operand(16, 64, granularity), operand(32, 64, granularity)
    assert scaled_mm(a, b, out_dtype).dtype is out_dtype
    takes_all = granularity == "tensor" or gpu == "sm_90, CUDA 12.9"
    assert asked == [out_dtype if takes_all else torch.bfloat16]


@pytest.mark.parametrize("has_scaled_mm", [False, True])
def test_without_scaled_mm_blocks_are_emulated(
    gpu: str, has_scaled_mm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with torch 2.6 to 2.9."""
    monkeypatch.setattr(module, "HAS_SCALED_MM", has_scaled_mm)
    ways = {pair: module.way_of(torch.device("cuda", 0), *pair) for pair in PAIRS}
    layout = {pair: way for pair, way in ways.items() if pair[0] not in ("tensor", "row")}
    assert ways["row", "row"] == "native"
    is_new = gpu in ("sm_100", "sm_120", "sm_90, CUDA 12.9") and has_scaled_mm
    assert (set(layout.values()) != {"emulated"}) is is_new


@pytest.mark.parametrize(
    ("torch_version", "native_on"),
    [
        ("2.6.0", {"sm_90"}),
        ("2.7.1", {"sm_89", "sm_90"}),
        ("2.8.0", {"sm_89", "sm_90"}),
        ("2.9.0", None),
    ],
)
def test_rows_are_multiplied_natively_where_torch_can(
    gpu: str, torch_version: str, native_on: set[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(torch_version))
    device = torch.device("cuda", 0)
    is_native = native_on is None or gpu.partition(",")[0] in native_on
    assert module.way_of(device, "row", "row") == ("native" if is_native else "emulated")
    assert module.way_of(device, "tensor", "tensor") == "native"


@pytest.mark.parametrize("hip", [None, "6.4"])
@pytest.mark.parametrize("has_dtype", [False, True])
def test_on_a_gpu_products_are_emulated_in_what_torch_has(
    has_dtype: bool, hip: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.6 and 2.7, and ROCm, multiply 16-bit matrices into 16 bits alone."""
    monkeypatch.setattr(module, "HAS_MM_DTYPE", has_dtype)
    monkeypatch.setattr(torch.version, "hip", hip)
    given: list[dict[str, Any]] = []
    mm = torch.mm

    def note(*args: Any, **options: Any) -> Tensor:
        given.append(options)
        return mm(*args, **options)

    monkeypatch.setattr(torch, "mm", note)
    with FakeTensorMode():
        a = torch.empty(16, 128, dtype=E4M3, device="cuda")
        assert module._mm(a, a).dtype is torch.float32
    assert given == ([{"out_dtype": torch.float32}] if has_dtype and hip is None else [])


@pytest.mark.parametrize("pair", [("1x128", "128x128"), ("1x128", "1x128")])
def test_scaled_values_are_never_multiplied_in_float32(
    pair: tuple[Granularity, Granularity], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TF32 would round them; it rounds no FP8 values."""
    multiply = module._mm

    def check(a: Tensor, b: Tensor) -> Tensor:
        assert a.dtype in DTYPES
        assert b.dtype in DTYPES
        return multiply(a, b)

    a, b = [operand(256, 384, each, power_of_2=False) for each in pair]
    expected = dequantize(a).double() @ dequantize(b).double().t()
    monkeypatch.setattr(module, "_mm", check)
    found = scaled_mm(a, b, torch.float32)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gfx942_gets_the_same_values_in_its_own_formats(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    every = every[every.float().isfinite()].reshape(1, -1)
    other = as_fnuz(Operand(every, torch.ones(()), "tensor"))
    assert torch.equal(other.values.float() * other.inverse, every.float())


def fp8(*shape: int) -> Operand:
    return by_tensor(torch.ones(shape).to(E4M3))


def by_tensor(values: Tensor) -> Operand:
    return Operand(values, torch.ones(()), "tensor")


BY_ROW = Operand(fp8(16, 32).values, torch.ones(16), "row")
BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("a", "b", "out_dtype", "text"),
    [
        (operand(16, 256, "tensor"), operand(32, 256, "row"), F32, "scales can be"),
        (
            operand(16, 256, "tensor", E5M2),
            operand(32, 256, "tensor", E5M2),
            F32,
            "and b float8_e4m3fn",
        ),
        (operand(16, 256, "row"), operand(32, 256, "row", E5M2), F32, "and b float8_e4m3fn"),
        (operand(32, 64, "1x16", FP4), operand(32, 64, "1x32", FP4), F32, "scales can be"),
        (operand(32, 64, "1x16", FP4), operand(8, 64, "1x16", FP4), F32, "rows of b a multiple of 16"),
        (fp8(16, 256), fp8(32, 256), torch.float64, "out_dtype=torch.float64"),
        (fp8(16, 24), fp8(16, 24), BF16, "multiple of 16"),
        (fp8(16, 32), fp8(15, 32), BF16, "rows of b a multiple of 16"),
        (fp8(16, 32), fp8(16, 48), BF16, "rows of one length"),
        (by_tensor(fp8(32, 16).values.t()), fp8(16, 32), BF16, "must be contiguous"),
        (by_tensor(torch.ones(16, 32)), fp8(16, 32), BF16, "a must be float8_e4m3fn"),
        (BY_ROW, BY_ROW, BF16, r"scales are torch.float32 of shape \(16,\), and not"),
    ],
)
def test_what_tensor_cores_refuse_is_refused_on_a_cpu(
    a: Operand, b: Operand, out_dtype: torch.dtype, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        scaled_mm(a, b, out_dtype)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("pair", "dtype", "size"),
    [
        *(
            (*kind, size)
            for kind in itertools.product(PAIRS, DTYPES)
            for size in ((17, 256, 128), (128, 1024, 512), (4096, 4096, 1024))
        ),
        *((pair, FP4, (n, 1024, 512)) for pair in PAIRS_OF_FP4[:2] for n in (1, 16, 127, 128)),
    ],
)
def test_tensor_cores_give_the_emulations_numbers(
    pair: Any, dtype: torch.dtype, size: tuple[int, int, int]
) -> None:
    rows, columns, outs = size
    x, w = torch.randn(rows, columns, device="cuda"), torch.randn(outs, columns, device="cuda")
    a, b = quantized(x, pair[0], dtype), quantized(w, pair[1], of_weight(dtype))
    found, expected = scaled_mm(a, b, torch.bfloat16), emulated(a, b, torch.bfloat16)
    units = torch.finfo(torch.bfloat16).eps * expected.abs().clamp(min=columns**0.5 / 8)
    assert ((found - expected).abs() <= 2 * units).all()


@pytest.mark.gpu
def test_a_gpu_and_a_cpu_quantize_alike() -> None:
    x = torch.randn(130, 256) * torch.randn(130, 256).exp()
    for granularity, dtype in itertools.product(("tensor", "row", "1x128", "1x32"), DTYPES):
        here = quantize(x.bfloat16(), dtype, granularity)  # type: ignore[arg-type]
        there = quantize(x.bfloat16().cuda(), dtype, granularity)  # type: ignore[arg-type]
        for one, other in zip(both_of(here), both_of(there), strict=True):
            assert torch.equal(one.values.view(torch.uint8), other.values.cpu().view(torch.uint8))
            assert torch.equal(dequantize(one), dequantize(other).cpu())
