"""What FP8 keeps of a tensor under each way of scaling, and how a delayed scale follows what it sees.

Both ask what trains: `amp.kernels.quantize`, and the history of `fp8="delayed"`.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from amp.casting.fp8_history import GRADIENT, INPUT, AmaxHistory
from amp.errors import AmpTypeError, AmpValueError
from amp.kernels.fp8 import DTYPES, SOURCES, Granularity, dequantize, factor_of
from amp.kernels.quantize import quantize
from amp.numerics.formats import Format, as_format
from amp.numerics.rounding import FormatLike
from amp.profiles.fp8_recipe import Fp8Recipe

SCALINGS = ("none", *get_args(Granularity))
"""What shares a scale: nothing has one, all of a tensor, a row, and parts of it."""

_DTYPES = {as_format(dtype): dtype for dtype in DTYPES}
_SIDE = 128


class Fp8Loss(NamedTuple):
    """What one way of scaling loses of tensors.

    Attributes:
        format: the format, by its name.
        scaling: what shares a scale, one of `SCALINGS`.
        zero: the fraction of the numbers other than 0 that become 0.
        subnormal: the fraction that become subnormal numbers, which have fewer digits.
        saturated: the fraction that are too large, and become the largest number.
        error: the norm of the error, over the norm of the tensors.
    """

    format: str
    scaling: str
    zero: float
    subnormal: float
    saturated: float
    error: float


def fp8_losses(
    tensors: Tensor | Iterable[Tensor],
    formats: Sequence[FormatLike] = ("float8_e4m3fn", "float8_e5m2"),
    scalings: Sequence[str] = SCALINGS,
) -> list[Fp8Loss]:
    """Return what FP8 loses of tensors, for each format and way of scaling.

        >>> x = torch.tensor([[1.0] * 32 + [2.0**-10] * 32 + [2.0**9] * 32])
        >>> [(loss.scaling, loss.zero) for loss in fp8_losses(x, ["e4m3"], ["none", "tensor", "1x32"])]
        [('none', 0.3333333333333333), ('tensor', 0.3333333333333333), ('1x32', 0.0)]

    Args:
        tensors: float16, bfloat16 or float32 tensors of any shape; their last dimension is a row.
        formats: `float8_e4m3fn` and `float8_e5m2`, or one of them.
        scalings: some of `SCALINGS`. At the end of a row or column a part may be shorter. Scales are
            powers of 2.

    Returns:
        A loss for each format and way of scaling. The host waits for the device.

    Raises:
        AmpTypeError: no tensors of floating-point numbers.
        AmpValueError: numbers that are inf or NaN, or a format or way of scaling that is not there.
    """
    matrices = [_matrix(x) for x in ([tensors] if isinstance(tensors, Tensor) else tensors)]
    for scaling in scalings:
        if scaling not in SCALINGS:
            raise AmpValueError(f"scaling={scaling!r} is not one of {', '.join(SCALINGS)}")
    found = []
    for fmt in map(as_fp8_format, formats):
        for scaling in scalings:
            sums = [(0.0,) * 6, *(_sums(x, fmt, scaling) for x in matrices)]
            count, zero, subnormal, saturated, error, norm = map(sum, zip(*sums, strict=True))
            count = max(count, 1)
            relative = math.sqrt(error / norm) if norm else 0.0
            parts = (zero / count, subnormal / count, saturated / count, relative)
            found.append(Fp8Loss(fmt.name, scaling, *parts))
    return found


def fp8_scaled(x: Tensor, fmt: FormatLike, scaling: str) -> tuple[Tensor, Tensor]:
    """Return a tensor times its scales, and what FP8 makes of that.

    Args:
        x: float16, bfloat16 or float32 of any shape.
        fmt: `float8_e4m3fn` or `float8_e5m2`.
        scaling: one of `SCALINGS`.

    Returns:
        Two float32 tensors of the shape of `x`. The host does not wait for the device.
    """
    scaled, kept, _ = _scaled(_matrix(x), as_fp8_format(fmt), scaling)
    return scaled.view(x.shape), kept.view(x.shape)


def as_fp8_format(fmt: FormatLike) -> Format:
    """Return a format that FP8 products take.

    Raises:
        AmpValueError: another one.
    """
    found = as_format(fmt)
    if found not in _DTYPES:
        names = " and ".join(each.name for each in _DTYPES)
        raise AmpValueError(f"{found.name} is not what FP8 products take; those are {names}")
    return found


def _matrix(x: Tensor) -> Tensor:
    """Return float32 `[M, K]`."""
    if isinstance(x, Tensor) and x.is_meta:
        raise AmpTypeError("a tensor on the meta device has no values")
    if not isinstance(x, Tensor) or x.dtype not in (*SOURCES, torch.float64):
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise AmpTypeError(f"FP8 is made of tensors of floating-point numbers, and this is {kind}")
    x = x.detach().to_dense() if x.layout is not torch.strided else x.detach()
    matrix = x.float().reshape(-1, x.shape[-1] if x.dim() else 1)
    if not bool(matrix.isfinite().all()):
        raise AmpValueError(
            "a tensor holds inf or NaN, and so does each product of it in FP8, with every scale"
        )
    return matrix


def _scaled(x: Tensor, fmt: Format, scaling: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return float32 `[M, K]` times its scales, what FP8 makes of that, and the inverse scales."""
    rows, columns = x.shape
    padded = pad(x, (0, -columns % _SIDE, 0, -rows % _SIDE))
    one = torch.ones((), device=x.device) if scaling == "none" else None
    granularity: Any = "tensor" if scaling == "none" else scaling
    operand = quantize(padded, _DTYPES[fmt], granularity, by_column=False, factor=one).by_row
    assert operand is not None
    kept = operand.values.float()
    inverse = dequantize(operand._replace(values=torch.ones_like(kept)))
    parts = (padded / inverse, kept, inverse)
    scaled, kept, inverse = (part[:rows, :columns].contiguous() for part in parts)
    return scaled, kept, inverse


def _sums(x: Tensor, fmt: Format, scaling: str) -> tuple[float, ...]:
    """Return how many are not 0, become 0, are subnormal, saturate; squares of errors and numbers."""
    scaled, kept, inverse = _scaled(x, fmt, scaling)
    magnitude = kept.abs()
    fates = (x != 0, (x != 0) & (kept == 0), (kept != 0) & (magnitude < fmt.min_normal))
    counts = [int(fate.sum()) for fate in (*fates, scaled.abs() > fmt.max)]
    wide = x.double()
    error = kept.double() * inverse.double() - wide
    return (*counts, float(error.square().sum()), float(wide.square().sum()))


class Fp8Step(NamedTuple):
    """One iteration of a delayed scale.

    Attributes:
        step: its number, from 0.
        amax: the largest magnitude of its tensor.
        factor: what its values were multiplied by, which follows from the iterations before.
        current: the factor that would have fitted, which `fp8="current"` takes.
        largest: `amax` times `factor`.
        saturated: whether that was too large, so that values were cut off.
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
    """Run the history of `fp8="delayed"` over the largest magnitudes of a tensor.

        >>> trace = simulate_fp8([1.0, 1.0, 16.0, 1.0, 1.0], amax_history=2)
        >>> [(step.factor, step.saturated) for step in trace]
        [(256.0, False), (256.0, False), (256.0, True), (16.0, False), (16.0, False)]

    Args:
        amaxes: for each iteration the largest magnitude of the tensor, or the tensor itself. An
            iteration without a history takes its own.
        fmt: `float8_e4m3fn`, or `float8_e5m2` as for gradients.
        **recipe: `amax_history`, `amax_algo`, `margin`, `power_of_2_scales`; see docs/fp8.md.

    Raises:
        AmpValueError: an amax below 0, or a number out of its range.
        AmpTypeError: an argument that the recipe does not have.
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
        factor = history.factor(layer, entry, x.device)
        found = quantize(x, dtype, by_row=False, factor=factor)
        assert found.amax is not None
        assert found.factor is not None
        history.see(layer, entry, found.amax)
        history.end()
        amax, used = float(found.amax), float(found.factor)
        current = float(factor_of(found.amax, dtype, bool(asked_for.power_of_2_scales)))
        saturated = not amax * used <= torch.finfo(dtype).max
        trace.append(Fp8Step(step, amax, used, current, amax * used, saturated))
    return trace
