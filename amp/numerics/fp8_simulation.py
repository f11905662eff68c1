"""Losses of a tensor in FP8 and FP4 with each granularity of scales, and delayed scaling simulated.

Both use the code that training uses: `amp.kernels.quantize` and `quantize_fp4`, and the amax history of
`fp8="delayed"`.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from amp.casting.fp8_history import GRADIENT, INPUT, AmaxHistory
from amp.errors import AmpTypeError, AmpValueError
from amp.kernels.fp8 import (
    DTYPES,
    SIDE,
    SOURCES,
    Granularity,
    Operand,
    dequantize,
    factor_of,
    unpacked,
)
from amp.kernels.quantize import quantize
from amp.kernels.quantize_fp4 import quantize_fp4
from amp.numerics.formats import Format, as_format
from amp.numerics.rounding import FormatLike
from amp.profiles.fp8_recipe import Fp8Recipe

SCALINGS = ("none", *get_args(Granularity))
"""The granularities of scales: no scale, one for a tensor, one for a row, or one for a block."""
FP4_SCALINGS = ("1x16", "1x32")
"""Those of FP4: `nvfp4`, where the tensor has a scale besides, and `mxfp4`."""

_DTYPES = {as_format(dtype): dtype for dtype in DTYPES}
_E2M1 = as_format("e2m1")


class Fp8Loss(NamedTuple):
    """The losses of tensors with one format and granularity of scales.

    Attributes:
        format: the format's name.
        scaling: the granularity of scales, one of `SCALINGS` or `FP4_SCALINGS`.
        zero: the fraction of the numbers other than 0 that become 0.
        subnormal: the fraction of them that become subnormal numbers, which have fewer digits.
        saturated: the fraction of them that are too large, and become the largest number.
        error: the norm of the error, divided by the norm of the tensors. A few outliers decide it.
        median: the median of |error| / |number|, of the numbers other than 0.
        decibels: by how many dB the other numbers are above their errors, if the largest of each 50
            are left out; inf if they have no errors.
    """

    format: str
    scaling: str
    zero: float
    subnormal: float
    saturated: float
    error: float
    median: float
    decibels: float


def fp8_losses(
    tensors: Tensor | Iterable[Tensor],
    formats: Sequence[FormatLike] = ("float8_e4m3fn", "float8_e5m2"),
    scalings: Sequence[str] | None = None,
) -> list[Fp8Loss]:
    """Return what FP8 or FP4 loses of tensors, for each format and granularity of scales.

        >>> x = torch.tensor([[1.0] * 32 + [2.0**-10] * 32 + [2.0**9] * 32])
        >>> [(loss.scaling, loss.zero) for loss in fp8_losses(x, ["e4m3"], ["none", "tensor", "1x32"])]
        [('none', 0.3333333333333333), ('tensor', 0.3333333333333333), ('1x32', 0.0)]

    Args:
        tensors: float16, bfloat16 or float32 tensors of any shape; their last dimension is a row.
        formats: some of `float8_e4m3fn`, `float8_e5m2` and `float4_e2m1fn`.
        scalings: some of `SCALINGS`, for FP4 of `FP4_SCALINGS`; None is all of them. The last block of
            a row or column may be smaller. Scales are powers of 2, but for E4M3 in `1x16`.

    Returns:
        A loss for each format and granularity. The host waits for the device.

    Raises:
        AmpTypeError: an argument is not a floating-point tensor, or is on the meta device.
        AmpValueError: a tensor has inf or NaN, or there is no such format or granularity.
    """
    matrices = [_matrix(x) for x in ([tensors] if isinstance(tensors, Tensor) else tensors)]
    found = []
    for fmt in map(_as_scaled_format, formats):
        for scaling in _scalings_of(fmt) if scalings is None else scalings:
            each = [_errors(x, fmt, scaling) for x in matrices]
            sums = [(0,) * 4, *(counts for counts, _, _ in each)]
            count, *fates = map(sum, zip(*sums, strict=True))
            nothing = torch.zeros(0, dtype=torch.float64, device="cpu")
            numbers = torch.cat([nothing, *(x.flatten().cpu() for _, x, _ in each)])
            errors = torch.cat([nothing, *(x.flatten().cpu() for _, _, x in each)])
            zero, subnormal, saturated = (fate / max(count, 1) for fate in fates)
            sizes = _sizes(numbers, errors)
            found.append(Fp8Loss(fmt.name, scaling, zero, subnormal, saturated, *sizes))
    return found


def _sizes(numbers: Tensor, errors: Tensor) -> tuple[float, float, float]:
    """Return the last three fields of a `Fp8Loss`."""
    is_there = numbers != 0
    numbers, errors = numbers[is_there].abs(), errors[is_there].abs()
    if not len(numbers):
        return 0.0, 0.0, math.inf
    error = float(errors.norm() / numbers.norm())
    median = float((errors / numbers).sort().values[(len(numbers) - 1) // 2])
    usual = numbers.sort(stable=True).indices[: len(numbers) - len(numbers) // 50]
    noise = float(errors[usual].norm())
    decibels = 20 * math.log10(float(numbers[usual].norm()) / noise) if noise else math.inf
    return error, median, decibels


def fp8_scaled(x: Tensor, fmt: FormatLike, scaling: str) -> tuple[Tensor, Tensor]:
    """Return a tensor times its scales, and that product rounded to FP8.

    Args:
        x: float16, bfloat16 or float32 tensor of any shape.
        fmt: `float8_e4m3fn` or `float8_e5m2`.
        scaling: one of `SCALINGS`.

    Returns:
        Two float32 tensors of the shape of `x`. The host waits for the device.

    Raises:
        AmpTypeError: `x` is not a floating-point tensor, or is on the meta device.
        AmpValueError: `x` has inf or NaN, or there is no such format or granularity.
    """
    scaled, kept, _ = _scaled(_matrix(x), as_fp8_format(fmt), scaling)
    return scaled.view(x.shape), kept.view(x.shape)


def as_fp8_format(fmt: FormatLike) -> Format:
    """Return the `Format` of an FP8 format that matrix products support.

    Raises:
        AmpValueError: it is another format.
    """
    found = as_format(fmt)
    if found not in _DTYPES:
        names = " or ".join(each.name for each in _DTYPES)
        raise AmpValueError(f"FP8 products do not support {found.name}; give {names}")
    return found


def _as_scaled_format(fmt: FormatLike) -> Format:
    """Return the `Format` of FP4, or an FP8 format that matrix products support."""
    return _E2M1 if as_format(fmt) == _E2M1 else as_fp8_format(fmt)


def _scalings_of(fmt: Format) -> tuple[str, ...]:
    return FP4_SCALINGS if fmt == _E2M1 else SCALINGS


def _matrix(x: Tensor) -> Tensor:
    """Return a tensor as float32 `[M, K]`, after checks. The host waits for the device."""
    if isinstance(x, Tensor) and x.is_meta:
        raise AmpTypeError("a tensor on the meta device has no values")
    if not isinstance(x, Tensor) or x.dtype not in (*SOURCES, torch.float64):
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise AmpTypeError(f"FP8 can be made only from floating-point tensors, and this is {kind}")
    matrix = x.detach().to_dense().float().reshape(-1, x.shape[-1] if x.dim() else 1)
    if not bool(matrix.isfinite().all()):
        raise AmpValueError(
            "a tensor holds inf or NaN, so each product with it in FP8 does too, with every scale"
        )
    return matrix


def _scaled(x: Tensor, fmt: Format, scaling: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return float32 `[M, K]` times its scales, that product rounded, and the inverse scales."""
    if scaling not in _scalings_of(fmt):
        raise AmpValueError(f"scaling={scaling!r} is not one of {', '.join(_scalings_of(fmt))}")
    rows, columns = x.shape
    padded = pad(x, (0, -columns % SIDE, 0, -rows % SIDE))
    granularity: Any = "tensor" if scaling == "none" else scaling
    operand: Operand | None
    if fmt == _E2M1:
        operand = quantize_fp4(padded, granularity, by_column=False).by_row
        assert operand is not None
        kept, ones = unpacked(operand.values), torch.full_like(operand.values, 0x22)
    else:
        one = torch.ones((), device=x.device) if scaling == "none" else None
        operand = quantize(padded, _DTYPES[fmt], granularity, by_column=False, factor=one).by_row
        assert operand is not None
        kept = operand.values.float()
        ones = torch.ones_like(kept).to(operand.values.dtype)
    inverse = dequantize(operand._replace(values=ones))
    kept = torch.where(inverse == 0, 0.0, kept)  # a block far below the tensor's largest is lost
    parts = (padded / torch.where(inverse == 0, 1.0, inverse), kept, inverse)
    scaled, kept, inverse = (part[:rows, :columns].contiguous() for part in parts)
    return scaled, kept, inverse


def _errors(x: Tensor, fmt: Format, scaling: str) -> tuple[list[int], Tensor, Tensor]:
    """Return counts (not 0, become 0, subnormal, saturated), the numbers, and their errors."""
    scaled, kept, inverse = _scaled(x, fmt, scaling)
    magnitude = kept.abs()
    fates = (x != 0, (x != 0) & (kept == 0), (kept != 0) & (magnitude < fmt.min_normal))
    counts = [int(fate.sum()) for fate in (*fates, scaled.abs() > fmt.max)]
    wide = x.double()
    return counts, wide, kept.double() * inverse.double() - wide


class Fp8Step(NamedTuple):
    """One iteration of delayed scaling.

    Attributes:
        step: the number of the iteration, from 0.
        amax: the largest magnitude of its tensor.
        factor: the scale factor of its values, computed from earlier iterations.
        current: the factor computed from `amax` itself, as with `fp8="current"`.
        largest: `amax` times `factor`.
        saturated: whether `largest` does not fit the format, so that values saturated.
    """

    step: int
    amax: float
    factor: float
    current: float
    largest: float
    saturated: bool


def simulate_fp8(
    amaxes: Iterable[float | Tensor], fmt: FormatLike = "float8_e4m3fn", **recipe: Any
) -> list[Fp8Step]:
    """Simulate the delayed scaling of a tensor, with the amax history of `fp8="delayed"`.

        >>> trace = simulate_fp8([1.0, 1.0, 16.0, 1.0, 1.0], amax_history=2)
        >>> [(step.factor, step.saturated) for step in trace]
        [(256.0, False), (256.0, False), (256.0, True), (16.0, False), (16.0, False)]

    Args:
        amaxes: for each iteration the largest magnitude of the tensor, or the tensor itself. While the
            history is empty, an iteration is scaled by its own amax.
        fmt: `float8_e4m3fn`, or `float8_e5m2` as for gradients.
        **recipe: `amax_history`, `amax_algo`, `margin`, `power_of_2_scales`; see docs/fp8.md.

    Raises:
        AmpValueError: an amax is below 0, or an argument is out of its range.
        AmpTypeError: an amax is not a number or a tensor, or the recipe has no such argument.
    """
    dtype = _DTYPES[as_fp8_format(fmt)]
    try:
        asked_for = Fp8Recipe(recipe="delayed", **recipe)
    except TypeError as error:
        raise AmpTypeError(f"simulate_fp8: {error}".replace("Fp8Recipe.__init__() ", "")) from None
    history = AmaxHistory(asked_for, (DTYPES[0], DTYPES[0], dtype))
    layer = history.add(["layer"], torch.device("cpu"))
    entry = GRADIENT if dtype is DTYPES[1] else INPUT
    trace = []
    for step, given in enumerate(amaxes):
        if not isinstance(given, (int, float, Tensor)):
            raise AmpTypeError(f"amaxes: {given!r} of iteration {step} must be a number or a tensor")
        if not isinstance(given, Tensor) and given < 0:
            raise AmpValueError(f"amaxes: {given!r} of iteration {step} must be at least 0")
        x = torch.as_tensor(given, dtype=torch.float32, device="cpu").detach().reshape(1, -1)
        factor, seen = history.factor_and_seen(layer, entry, x.device)
        found = quantize(x, dtype, by_row=False, factor=factor, seen=seen)
        assert found.factor is not None
        amax_found = seen.amax.clone()
        history.end()
        amax, used = float(amax_found), float(found.factor)
        current = float(factor_of(amax_found, dtype, bool(asked_for.power_of_2_scales)))
        saturated = not amax * used <= torch.finfo(dtype).max
        trace.append(Fp8Step(step, amax, used, current, amax * used, saturated))
    return trace
