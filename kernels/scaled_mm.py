"""Products of scaled FP8 or FP4 matrices, on tensor cores or emulated.

    out[i, j] = sum over c of (a[i, c] * inverse_a[i, c]) * (b[j, c] * inverse_b[j, c])

Shapes: a `[M, C]`, b `[N, C]`, out `[M, N]`, in float16, bfloat16 or float32. Both operands are as
`amp.kernels.quantize` and `amp.kernels.quantize_fp4` return them. In FP8, b is E4M3, and a may be E5M2.
Sums are FP32.

| scales        | native                                                 | elsewhere                   |
|---------------|--------------------------------------------------------|-----------------------------|
| tensor, row   | CUDA sm_89 and later, gfx942, gfx950                   | sum first, then both scales |
| 1x128,128x128 | sm_90, CUDA 12.9, E4M3; sm_100 as 1x32, if powers of 2 | scales first, then the sum  |
| 1x32          | sm_100 and later; FP4 is emulated                      | scales first, then the sum  |
| 1x16, 16x16   | sm_100 and later, torch 2.10                           | scales of blocks first,     |
|               |                                                        | the sum, those of tensors   |

Native products are those of `torch._scaled_mm`, or of `torch.nn.functional.scaled_mm` where scales need
a layout, from torch 2.10 on; before, these are emulated. On a GPU torch takes fewer operands than on a
CPU; this module refuses the others on every device. Native products of rows are computed in bfloat16
and then cast, but for sm_90 with CUDA 12.9. Where scales are powers of 2, the emulation on a CPU equals
torch's `_scaled_mm` without AMX bit for bit; where those of blocks are not, strips of 128 columns are
summed first and then scaled. bfloat16 holds FP8 values exactly, and those of FP4 times an E4M3 scale,
so on CUDA the emulation multiplies in bfloat16, from torch 2.8 on; before, and on ROCm, in float32.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import pad

from amp.kernels.fp8 import (
    DTYPES,
    GROUP,
    MULTIPLE,
    SIDE,
    AnyGranularity,
    Operand,
    decoded,
    exponent_of,
    shape_of_scales,
    swizzle,
    swizzled_size,
    values_of,
)

HAS_SCALED_MM = hasattr(functional, "scaled_mm")
"""Whether torch multiplies matrices whose scales need a layout, as from 2.10 on."""
HAS_MM_DTYPE = "dtype" in torch.ops.aten.mm.overloads()
"""Whether torch multiplies 16-bit matrices into FP32, as from 2.8 on."""

OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

PAIRS = {
    ("tensor", "tensor"),
    ("row", "row"),
    ("1x128", "128x128"),
    ("1x128", "1x128"),
    ("1x32", "1x32"),
    ("1x16", "16x16"),
    ("1x16", "1x16"),
}
"""The supported granularities of a and b."""
DTYPE_OF_SCALES = {"1x32": torch.uint8, "1x16": torch.float8_e4m3fn, "16x16": torch.float8_e4m3fn}
"""Where it is not float32."""


def scaled_mm(a: Operand, b: Operand, out_dtype: torch.dtype, *, fast_accum: bool = False) -> Tensor:
    """Return a times the transpose of b, `[M, N]`. The host does not wait for the device.

    Args:
        a: `[M, C]`, E4M3 or E5M2; or FP4.
        b: `[N, C]`, E4M3, on the same device; FP4 if a is.
        out_dtype: float16, bfloat16 or float32.
        fast_accum: let sm_90 sum with fewer bits, which is faster.

    Raises:
        ValueError: shapes, dtypes or scales that tensor cores cannot multiply.
    """
    if torch.compiler.is_compiling():
        _check(a, b, out_dtype)
    elif (kinds := (_kind_of(a), _kind_of(b), out_dtype)) not in _checked:
        _check(a, b, out_dtype)
        if len(_checked) >= 4096:  # as for inputs of ever new lengths
            _checked.clear()
        _checked.add(kinds)
    if not a.values.numel():
        return a.values.new_zeros((a.shape[0], b.shape[0]), dtype=out_dtype)
    way = way_of(a.values.device, a.granularity, b.granularity, a.is_fp4)
    if way == "as 1x32" and a.power_of_2 and b.power_of_2:
        return _by_block(_as_1x32(a), _as_1x32(b), out_dtype)
    if way == "native" and a.granularity in ("tensor", "row"):
        return _by_tensor_or_row(a, b, out_dtype, fast_accum)
    if way == "native" and (a.granularity != "1x128" or a.values.dtype is torch.float8_e4m3fn):
        return _by_block(a, b, out_dtype)
    return emulated(a, b, out_dtype)


_checked: set[Any] = set()
"""Kinds of operands that were checked: a check takes longer on the host than a launch."""


def _kind_of(operand: Operand) -> tuple[Any, ...]:
    """Return all of an operand that its check looks at."""
    values, inverse = operand.values, operand.inverse
    of_values = values.dtype, values.shape, values.stride()
    return (*of_values, inverse.dtype, inverse.shape, inverse.stride(), operand.granularity)


def _check(a: Operand, b: Operand, out_dtype: torch.dtype) -> None:
    multiple = max(MULTIPLE[a.granularity], MULTIPLE[b.granularity])
    if (a.granularity, b.granularity) not in PAIRS:
        allowed = ", ".join(f"{one} by {other}" for one, other in sorted(PAIRS))
        raise ValueError(f"{_shown(a, b)}: scales can be {allowed}")
    has_fp4_scales = a.granularity == "1x16"
    is_fp4 = a.is_fp4 and b.is_fp4 and (has_fp4_scales or a.granularity == "1x32")
    is_fp8 = a.values.dtype in DTYPES and b.values.dtype is torch.float8_e4m3fn and not has_fp4_scales
    if not (is_fp4 or is_fp8):
        raise ValueError(
            f"{_shown(a, b)}: a must be float8_e4m3fn or float8_e5m2, and b float8_e4m3fn; or both FP4 "
            "in uint8, with scales for 1x16, 16x16 or 1x32"
        )
    if out_dtype not in OUT_DTYPES:
        raise ValueError(f"out_dtype={out_dtype} is not one of {', '.join(map(str, OUT_DTYPES))}")
    if a.values.dim() != 2 or b.values.dim() != 2 or a.values.shape[1] != b.values.shape[1]:
        raise ValueError(f"{_shown(a, b)}: both must be matrices with rows of one length")
    multiple = 32 if is_fp4 else multiple
    if a.shape[1] % multiple or b.shape[0] % 16:
        raise ValueError(
            f"{_shown(a, b)}: the length of rows must be a multiple of {multiple}, and the number of "
            "rows of b a multiple of 16"
        )
    for operand in (a, b):
        if not _is_contiguous(operand):
            raise ValueError(f"{_shown(a, b)}: values and scales must be contiguous")
        shape = shape_of_scales(operand.granularity, *operand.shape)
        if operand.granularity == "1x32" and operand.inverse.dim() == 1:
            shape = (swizzled_size(*shape),)
        dtype = DTYPE_OF_SCALES.get(operand.granularity, torch.float32)
        if operand.inverse.shape != shape or operand.inverse.dtype is not dtype:
            raise ValueError(
                f"{_shown(a, b)}: scales are {operand.inverse.dtype} of shape "
                f"{tuple(operand.inverse.shape)}, and not {dtype} of shape {shape}"
            )


def _is_contiguous(operand: Operand) -> bool:
    """Whether an operand is contiguous; taken for granted in Dynamo.

    Asking there in a backward would lose the state of autocast.
    """
    is_known = torch.compiler.is_compiling()
    return is_known or (operand.values.is_contiguous() and operand.inverse.is_contiguous())


def _shown(a: Operand, b: Operand) -> str:
    return ", ".join(
        f"{name} is {str(each.values.dtype).removeprefix('torch.')} {tuple(each.values.shape)} with "
        f"scales for {each.granularity}"
        for name, each in (("a", a), ("b", b))
    )


def _rocm_name(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).gcnArchName)


@torch.compiler.assume_constant_result
def way_of(device: torch.device, a: AnyGranularity, b: AnyGranularity, is_fp4: bool = False) -> str:
    """Return how products are computed on a device: `native`, `as 1x32`, `emulated`."""
    return _way_of(device, a, b, is_fp4)


@functools.cache  # of a function of its own: Dynamo warns of a cache that it is not to look into
def _way_of(device: torch.device, a: AnyGranularity, b: AnyGranularity, is_fp4: bool) -> str:
    if device.type != "cuda" or not (HAS_SCALED_MM or a in ("tensor", "row")):
        return "emulated"
    if is_fp4 and a == "1x32":  # torch multiplies these with a library that its wheels do not have
        return "emulated"
    if torch.version.hip is not None:
        is_known = any(name in _rocm_name(device) for name in ("gfx942", "gfx950"))
        return "native" if is_known and a in ("tensor", "row") else "emulated"
    capability = torch.cuda.get_device_capability(device)
    if a in ("tensor", "row"):
        since = _rows_since(capability) if a == "row" else "2.6"
        return "native" if capability >= (8, 9) and torch.__version__ >= since else "emulated"
    if a in ("1x32", "1x16"):
        return "native" if capability >= (10, 0) else "emulated"
    if capability[0] == 9:
        return "native" if _cuda() >= (12, 9) else "emulated"
    return "as 1x32" if capability >= (10, 0) else "emulated"


def _rows_since(capability: tuple[int, int]) -> str:
    """Return the first torch that multiplies matrices with scales for rows on a GPU."""
    if capability[0] == 9:
        return "2.6"
    return "2.7" if capability == (8, 9) else "2.9"


def _cuda() -> tuple[int, ...]:
    return tuple(map(int, str(torch.version.cuda).split(".")[:2]))


@torch.compiler.assume_constant_result
def dtype_of_rows(device: torch.device, out_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a device multiplies matrices with scales for rows natively.

    Only cuBLAS has others than bfloat16 in all releases of torch, and only on sm_90 from CUDA 12.9 on.
    """
    return _dtype_of_rows(device, out_dtype)


@functools.cache
def _dtype_of_rows(device: torch.device, out_dtype: torch.dtype) -> torch.dtype:
    if torch.version.hip is not None:
        return torch.bfloat16
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    return out_dtype if is_hopper and _cuda() >= (12, 9) else torch.bfloat16


# Elsewhere.


def emulated(a: Operand, b: Operand, out_dtype: torch.dtype) -> Tensor:
    """Do `scaled_mm` with products in FP32, or in bfloat16 on a GPU."""
    if a.granularity in ("tensor", "row"):
        inverse_b = b.inverse if b.granularity == "tensor" else b.inverse.t()
        return _mm(a.values, b.values).mul_(a.inverse * inverse_b).to(out_dtype)
    if a.outer is not None and b.outer is not None:
        return _mm(values_of(a), values_of(b)).mul_(a.outer * b.outer).to(out_dtype)
    if a.power_of_2 and b.power_of_2:
        return _mm(values_of(a), values_of(b)).to(out_dtype)
    return _sum_of_strips(a, b).to(out_dtype)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """Return a times the transpose of b in float32; both are exact in bfloat16."""
    if a.device.type == "cuda" and HAS_MM_DTYPE and torch.version.hip is None:
        low_a, low_b = a.to(torch.bfloat16), b.to(torch.bfloat16)
        return torch.mm(low_a, low_b.t(), out_dtype=torch.float32)
    a, b = (decoded(each.contiguous()) for each in (a, b))
    return a @ b.t()  # TF32 holds bfloat16 exactly, if the user allows it


def _sum_of_strips(a: Operand, b: Operand) -> Tensor:
    """Return a times the transpose of b in float32: the products of strips, each times its scales.

    TF32, which would round values that are scaled already, rounds nothing here.
    """
    scaled = [
        _mm(*of_both).mul_(_scales_of_strip(a, k)[:, None] * _scales_of_strip(b, k))
        for k, of_both in enumerate(zip(a.values.split(SIDE, 1), b.values.split(SIDE, 1), strict=True))
    ]
    return functools.reduce(Tensor.add_, scaled)


def _scales_of_strip(operand: Operand, k: int) -> Tensor:
    """Return the inverse scales of the k-th strip of 128 columns, float32 `[rows]`."""
    if operand.granularity == "1x128":
        return operand.inverse[k]
    return operand.inverse[:, k].repeat_interleave(SIDE)[: len(operand.values)]


# Native.


def _by_tensor_or_row(a: Operand, b: Operand, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    device = a.values.device
    computed = dtype_of_rows(device, out_dtype) if a.granularity == "row" else out_dtype
    if torch.version.hip is not None and "gfx942" in _rocm_name(device):
        a, b = as_fnuz(a), as_fnuz(b)
    scale_b = b.inverse if b.granularity == "tensor" else b.inverse.t()
    product = torch._scaled_mm(
        a.values, b.values.t(), a.inverse, scale_b, out_dtype=computed, use_fast_accum=fast_accum
    )
    return product if computed is out_dtype else product.to(out_dtype)


def as_fnuz(operand: Operand) -> Operand:
    """Return an operand in the formats of gfx942, in which the same bits have half the value.

    In these formats the bits of -0 mean NaN, and no others do: an operand's NaN is in its scale.
    """
    names = {torch.float8_e4m3fn: torch.float8_e4m3fnuz, torch.float8_e5m2: torch.float8_e5m2fnuz}
    bits = operand.values.view(torch.uint8)
    bits = torch.where(bits == 0x80, 0, bits)
    return operand._replace(values=bits.view(names[operand.values.dtype]), inverse=operand.inverse * 2)


def _by_block(a: Operand, b: Operand, out_dtype: torch.dtype) -> Tensor:
    """Multiply matrices whose scales need a layout."""
    rows = a.shape[0]
    if a.granularity == "1x128" and rows % 8:  # cuBLAS takes only multiples of 8 rows
        return _by_block(_padded(a, -rows % 8), b, out_dtype)[:rows]
    values_a, scales_a, types_a, swizzle_a = _laid_out(a)
    values_b, scales_b, types_b, swizzle_b = _laid_out(b)
    product: Tensor = functional.scaled_mm(
        values_a,
        values_b.t(),
        scales_a,
        types_a,
        scales_b,
        types_b,
        swizzle_a=swizzle_a,
        swizzle_b=swizzle_b,
        output_dtype=out_dtype,
    )
    return product


def _laid_out(operand: Operand) -> tuple[Tensor, Any, Any, Any]:
    """Return values, scales, their types, and how these are swizzled, as torch takes them.

    In FP4 each row has its own scales of blocks, and torch multiplies those of tensors.
    """
    from torch.nn.functional import ScalingType, SwizzleType

    values, scales, by = operand.values, operand.inverse, operand.granularity
    if by == "1x128":
        return values, scales.t(), ScalingType.BlockWise1x128, None
    if by == "128x128":
        padded = pad(scales, (0, -scales.shape[1] % 4))
        return values, padded.t(), ScalingType.BlockWise128x128, None
    if by == "1x32":
        flat = scales if scales.dim() == 1 else swizzle(scales)
        flat = flat.view(torch.float8_e8m0fnu)
        return values, flat, ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
    scales = scales.view(torch.uint8)
    if by == "16x16":
        scales = scales.repeat_interleave(16, 0)
    both = [swizzle(scales).view(torch.float8_e4m3fn), operand.outer]
    types = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    swizzles = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
    return values.view(torch.float4_e2m1fn_x2), both, types, swizzles


def _padded(a: Operand, added: int) -> Operand:
    """Return an operand `1x128` with some more rows of zeros."""
    values = pad(a.values.view(torch.uint8), (0, 0, 0, added)).view(a.values.dtype)
    return a._replace(values=values, inverse=pad(a.inverse, (0, added)))


def _as_1x32(operand: Operand) -> Operand:
    """Return an operand, whose scales are powers of 2, with one scale per 32 neighbours in a row."""
    inverse = operand.inverse.t() if operand.granularity == "1x128" else operand.inverse
    if operand.granularity == "128x128":
        inverse = inverse.repeat_interleave(SIDE, 0)
    exponent = exponent_of(inverse).repeat_interleave(SIDE // GROUP, 1)
    return Operand(operand.values, exponent, "1x32")
