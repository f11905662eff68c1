"""Rounding numbers to a format, their bit patterns, and the neighbours of a number in a format.

All results are exact: computations are in float64, which represents all numbers of these formats, and
multiply only by powers of two. For float32 input the results are those of `torch.Tensor.to`.
"""

from numbers import Real
from typing import Any, Literal, NamedTuple, SupportsFloat, get_args

import torch
from torch import Tensor

from amp.errors import AmpTypeError, AmpValueError
from amp.numerics.formats import Format, Overflow, as_format

Mode = Literal["nearest", "toward_zero", "stochastic"]
Number = SupportsFloat | Tensor
FormatLike = str | torch.dtype | Format


class Bits(NamedTuple):
    """A number in a format: Python numbers for one, tensors of the input's shape for a tensor.

    Attributes:
        pattern: the bits as an integer.
        sign: the sign bit; 0 where there is none.
        exponent: the exponent's bits as an integer, biased.
        mantissa: the mantissa's bits as an integer.
        value: the value of the pattern.
        error: `value` minus the given number.
        overflow: whether a finite number was too large for the format.
        underflow: whether a number other than 0 became 0.
        subnormal: whether the value is a subnormal number.
    """

    pattern: Any
    sign: Any
    exponent: Any
    mantissa: Any
    value: Any
    error: Any
    overflow: Any
    underflow: Any
    subnormal: Any


class Neighbours(NamedTuple):
    """The largest number of a format below a number, and the smallest above it."""

    below: Any
    above: Any


def round_to(
    x: Number,
    fmt: FormatLike,
    mode: Mode = "nearest",
    *,
    overflow: Overflow | None = None,
    generator: torch.Generator | None = None,
) -> Any:
    """Round numbers to a format.

    Args:
        x: a number, or a floating tensor of any shape. A float64 tensor is rounded once, not first to
            FP32.
        fmt: the format.
        mode: `nearest`, with ties to even; `toward_zero`; or `stochastic`: up or down, with the
            probabilities whose mean is `x`.
        overflow: the result for a number that is too large: `inf`, `nan`, or `saturate` for the largest
            finite number. The default is that of torch's cast: E4M3 and E2M1 saturate, even infinities.
            `toward_zero` always saturates finite numbers.
        generator: the random number generator of `stochastic`.

    Returns:
        A float, or a float32 tensor (float64 for a float64 tensor) of the shape and device of `x`.

    Raises:
        AmpValueError: there is no such format, mode or overflow.
        AmpTypeError: `x` is neither a number nor a floating tensor.
    """
    fmt = as_format(fmt)
    return _like(x, _round(_wide(x), fmt, mode, overflow, generator))


def bits(x: Number, fmt: FormatLike) -> Bits:
    """Return the bit patterns of numbers in a format, with their value, error and flags.

        >>> bits(3.14159, "float16").value
        3.140625

    Args:
        x: a number, or a floating tensor of any shape.
        fmt: the format.

    Raises:
        AmpValueError: there is no such format.
        AmpTypeError: `x` is neither a number nor a floating tensor.
    """
    fmt = as_format(fmt)
    wide = _wide(x)
    value = _round(wide, fmt, "nearest")
    pattern = _encode(value, fmt)
    unlimited = _to_grid(wide, fmt, "nearest")
    found = Bits(
        pattern,
        *_fields(pattern, fmt),
        value=value,
        error=value - wide,
        overflow=wide.isfinite() & (unlimited.abs() > fmt.max),
        underflow=(value == 0) & (wide != 0) & wide.isfinite(),
        subnormal=(value != 0) & (value.abs() < fmt.min_normal),
    )
    return Bits(*(_like(x, field) for field in found))


def decode(pattern: int | Tensor, fmt: FormatLike) -> Any:
    """Return the values of bit patterns: a float, or a float32 tensor.

    Args:
        pattern: an integer, or an integer tensor of any shape. Bits above those of the format are
            ignored.
        fmt: the format.

    Raises:
        AmpValueError: there is no such format.
        AmpTypeError: `pattern` is neither an integer nor an integer tensor.
    """
    fmt = as_format(fmt)
    mask = (1 << fmt.bits) - 1
    if isinstance(pattern, Tensor) and not pattern.is_floating_point():
        given = pattern.long() & mask
    elif isinstance(pattern, int):
        given = torch.tensor(pattern & mask, dtype=torch.int64, device="cpu")
    else:
        raise AmpTypeError(f"{pattern!r} is no integer and no tensor of them")
    sign, exponent, mantissa = _fields(given, fmt)
    is_normal = (exponent > 0) | (not fmt.has_zero)
    significand = mantissa + is_normal * (1 << fmt.mantissa_bits)
    scale = exponent - fmt.bias + (~is_normal).long() - fmt.mantissa_bits
    value = significand.double() * _power_of_two(scale)
    is_top = exponent == (1 << fmt.exponent_bits) - 1
    if fmt.has_inf:
        value = value.masked_fill(is_top, torch.inf).masked_fill(is_top & (mantissa != 0), torch.nan)
    if fmt.nan == "all_ones":
        value = value.masked_fill(is_top & (mantissa == (1 << fmt.mantissa_bits) - 1), torch.nan)
    value = torch.where(sign == 1, -value, value)
    if fmt.nan == "negative_zero":
        value = value.masked_fill(given == fmt.nan_pattern, torch.nan)
    return value.float() if isinstance(pattern, Tensor) else value.item()


def ulp(x: Number, fmt: FormatLike) -> Any:
    """Return the spacing of a format's numbers in the binade of each number, like `math.ulp`.

    A number is first rounded toward zero to the format, so a number that is too large has the spacing
    of the largest one: 32 in E4M3, whose largest number is 448. The spacing of inf is inf, of NaN NaN.
    """
    fmt = as_format(fmt)
    wide = _wide(x)
    low = _to_grid(wide, fmt, "toward_zero").abs().clamp(max=fmt.max)
    distance = _quantum(low, fmt).masked_fill(wide.isinf(), torch.inf)
    return _like(x, distance.masked_fill(wide.isnan(), torch.nan))


def neighbours(x: Number, fmt: FormatLike) -> Neighbours:
    """Return the largest number of a format below each number, and the smallest above it.

    Above the largest finite number is inf, or NaN in a format without inf. Below the smallest number of
    a format without a sign is NaN.
    """
    fmt = as_format(fmt)
    wide = _wide(x)
    below, above = -_above(-wide, fmt), _above(wide, fmt)
    if not fmt.signed:
        below = below.masked_fill(wide <= fmt.min_normal, torch.nan)
        above = above.masked_fill(wide < fmt.min_normal, fmt.min_normal)
    return Neighbours(_like(x, below), _like(x, above))


def survives_update(w: Number, dw: Number, fmt: FormatLike) -> Any:
    """Return whether adding an update changes a weight that is stored in a format.

    The weight is rounded to the format first. The sum is computed in float64 and rounded to the format,
    as in an optimizer that computes in a wider format than it stores.

        >>> survives_update(1.0, 5e-5, "float16")
        False
    """
    fmt = as_format(fmt)
    weight = _round(_wide(w), fmt, "nearest")
    update = _wide(dw)
    updated = _round(weight + update.to(weight.device), fmt, "nearest")
    changed = (updated != weight) & ~(updated.isnan() & weight.isnan())
    return changed if isinstance(w, Tensor) or isinstance(dw, Tensor) else bool(changed)


# Internal functions on float64 tensors.


def _wide(x: Any) -> Tensor:
    if isinstance(x, Tensor):
        if not x.is_floating_point():
            raise AmpTypeError(f"a tensor of {x.dtype} is not of floating-point numbers")
        return x.detach().double()
    if isinstance(x, bool) or not isinstance(x, Real):  # NumPy's numbers too
        raise AmpTypeError(f"{x!r} is a {type(x).__name__}, not a number or a tensor")
    try:
        return torch.tensor(float(x), dtype=torch.float64, device="cpu")
    except OverflowError:
        raise AmpValueError("an integer that large is no float64") from None


def _like(x: Number, result: Tensor) -> Any:
    """Return a result in the form of the input: a Python number for a number, a tensor for a tensor."""
    if not isinstance(x, Tensor):
        return result.item()
    return result.float() if result.dtype is torch.float64 and x.dtype is not torch.float64 else result


def _fields(pattern: Tensor, fmt: Format) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sign, the exponent and the mantissa of bit patterns."""
    exponent = (pattern >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)
    mantissa = pattern & ((1 << fmt.mantissa_bits) - 1)
    return pattern >> (fmt.exponent_bits + fmt.mantissa_bits), exponent, mantissa


def _encode(value: Tensor, fmt: Format) -> Tensor:
    """Return the bit patterns of numbers that the format represents exactly, int64."""
    magnitude = value.abs()
    exponent = _exponent(magnitude, fmt)
    units = (magnitude * _power_of_two(fmt.mantissa_bits - exponent)).nan_to_num(0, 0).long()
    # The implicit leading one of a normal number adds 1 to the exponent field; a subnormal has none.
    first = fmt.min_exponent + (not fmt.has_zero)
    pattern = ((exponent - first) << fmt.mantissa_bits) + units
    if fmt.has_inf:
        infinity = ((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits
        pattern = pattern.masked_fill(magnitude.isinf(), infinity)
    if fmt.signed:
        pattern = pattern + (value.signbit().long() << (fmt.bits - 1))
    return pattern.masked_fill(value.isnan(), fmt.nan_pattern) if fmt.nan != "none" else pattern


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2 to integer powers from -1022 to 1023, exactly, on every device."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def _exponent(magnitude: Tensor, fmt: Format) -> Tensor:
    """Return the exponents of numbers, clamped below at that of the smallest normal number."""
    exponent = torch.frexp(magnitude).exponent.long() - 1
    exponent = exponent.masked_fill(magnitude == 0, fmt.min_exponent)
    return exponent.clamp(fmt.min_exponent, fmt.max_exponent + 1)


def _quantum(magnitude: Tensor, fmt: Format) -> Tensor:
    """Return the spacing of the format's numbers around a number."""
    return _power_of_two(_exponent(magnitude, fmt) - fmt.mantissa_bits)


def _to_grid(x: Tensor, fmt: Format, mode: Mode, generator: torch.Generator | None = None) -> Tensor:
    """Round without saturation, as if the format had one more exponent."""
    magnitude = x.abs()
    quantum = _quantum(magnitude, fmt)
    units = magnitude / quantum
    if mode == "nearest":
        whole = units.round()
    elif mode == "toward_zero":
        whole = units.floor()
    elif mode == "stochastic":
        low = units.floor()
        drawn = torch.rand(x.shape, dtype=x.dtype, device=x.device, generator=generator)
        whole = low + (drawn >= 1 - (units - low))
    else:
        raise AmpValueError(f"mode={mode!r} is not one of {', '.join(get_args(Mode))}")
    rounded = whole * quantum
    if not fmt.has_zero:
        rounded = rounded.clamp(min=fmt.min_normal)
        if mode == "nearest":  # torch and ml_dtypes round FP32's subnormal numbers up
            goes_up = (magnitude > fmt.min_normal) & (magnitude < 2 * fmt.min_normal)
            rounded = rounded.masked_fill(goes_up, 2 * fmt.min_normal)
    return rounded.copysign(x) if fmt.signed else rounded


def _round(
    x: Tensor,
    fmt: Format,
    mode: Mode,
    overflow: Overflow | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    overflow = fmt.overflow if overflow is None else overflow
    allowed = [each for each in get_args(Overflow) if each != "inf" or fmt.has_inf]
    if overflow not in allowed:
        raise AmpValueError(f"overflow={overflow!r} is not one of {', '.join(allowed)} for {fmt.name}")
    rounded = _to_grid(x, fmt, mode, generator)
    too_large = rounded.abs() > fmt.max
    largest = torch.full_like(rounded, fmt.max).copysign(rounded)
    beyond = {"inf": torch.inf * largest, "nan": torch.nan * largest, "saturate": largest}[overflow]
    if mode == "toward_zero":
        beyond = torch.where(x.isinf(), beyond, largest)
    rounded = torch.where(too_large, beyond, rounded)
    if fmt.nan == "none":  # NaN becomes 0, as in ml_dtypes
        rounded = torch.where(x.isnan(), torch.zeros_like(x).copysign(-x), rounded)
    if fmt.nan == "negative_zero":
        rounded = torch.where(rounded == 0, 0.0, rounded)
    return rounded


def _above(x: Tensor, fmt: Format) -> Tensor:
    """Return the smallest number of a format above each number."""
    magnitude = x.abs()
    larger = _to_grid(magnitude, fmt, "toward_zero") + _quantum(magnitude, fmt)
    # The number above a negative number has the next smaller magnitude.
    smaller = _to_grid(torch.nextafter(magnitude, torch.zeros_like(x)), fmt, "toward_zero")
    up = torch.where(x < 0, -smaller, larger).clamp(min=-fmt.max)
    beyond = torch.inf if fmt.has_inf else torch.nan
    return up.masked_fill(up > fmt.max, beyond).masked_fill(x == torch.inf, torch.nan) + 0.0
