"""Simulating a dynamic loss scale, and computing which of given gradients each scale would lose."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp.errors import AmpTypeError, AmpValueError
from amp.kernels.interrupts import without_grad
from amp.numerics.formats import Format, as_format
from amp.numerics.rounding import FormatLike, round_to
from amp.profiles.keys import parse_count
from amp.profiles.loss_scaling import parse_loss_scale
from amp.training.scaler import LossScaler

SCALES = tuple(2.0**i for i in range(25))
"""The scales from 1 to 2**24, apex's ceiling."""

GRADIENT_FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""The formats in which gradients may be stored."""


class ScalerStep(NamedTuple):
    """One iteration of a dynamic loss scale.

    Attributes:
        step: the number of the iteration, from 0.
        scale: the loss scale.
        overflow: whether its gradients overflowed, so that the step was skipped.
        next_scale: the scale after the iteration.
        good_steps: good iterations since the scale last changed or an iteration overflowed.
        hysteresis_left: how many overflows are left until the scale backs off.
    """

    step: int
    scale: float
    overflow: bool
    next_scale: float
    good_steps: int
    hysteresis_left: int


def simulate_scaler(
    gradients: Iterable[float | Tensor] | None = None,
    *,
    overflows: Iterable[int] = (),
    steps: int | None = None,
    fmt: FormatLike = "float16",
    **scaling: Any,
) -> list[ScalerStep]:
    """Run the library's own loss scaler over gradients, or over given overflows.

        >>> trace = simulate_scaler(steps=20, overflows=[10], init=2**15, growth_interval=5)
        >>> [trace[i].next_scale for i in (4, 9, 10, 15)]
        [65536.0, 131072.0, 65536.0, 131072.0]

    Args:
        gradients: for each iteration the unscaled gradients, or the largest of them; an iteration
            overflows if one of them, times the scale, does not fit `fmt`.
        overflows: further iterations that overflow, counted from 0.
        steps: how many iterations; by default as many as `gradients` has.
        fmt: the format of the scaled gradients.
        **scaling: `init`, `growth_factor`, `backoff_factor`, `growth_interval`, `hysteresis`,
            `consecutive_hysteresis`, `min`, `max`; see `amp.LossScaling`.

    Raises:
        AmpValueError: a number is out of its range, or neither `gradients` nor `steps` is given.
        AmpTypeError: `amp.LossScaling` has no such argument.
    """
    fmt = as_format(fmt)
    given = None if gradients is None else list(gradients)
    bad = set(overflows)
    count = len(given) if steps is None and given is not None else steps
    if count is None:
        raise AmpValueError("give the gradients of each iteration, or steps=20 and overflows=[10]")
    count = parse_count("steps", count, least=0)
    if given is not None and len(given) < count:
        raise AmpValueError(f"steps={count}, and there are gradients for {len(given)} only")
    if outside := sorted(step for step in bad if step not in range(count)):
        raise AmpValueError(f"overflows={outside} are not among the iterations 0 to {count - 1}")
    scaler = LossScaler(parse_loss_scale("loss_scale", scaling))
    trace = []
    for step in range(count):
        scale = scaler.loss_scale()
        overflow = step in bad or (given is not None and _overflows(given[step], scale, fmt))
        if scaler.found_inf is not None:
            scaler.found_inf.fill_(float(overflow))
        scaler.update()
        state = scaler.state_dict()
        left = state["hysteresis_left"]
        trace.append(ScalerStep(step, scale, overflow, state["loss_scale"], state["unskipped"], left))
    return trace


def _overflows(gradients: float | Tensor, scale: float, fmt: Format) -> bool:
    wide = torch.as_tensor(gradients, dtype=torch.float64, device="cpu") * scale
    return not bool(round_to(wide, fmt, overflow="nan").isfinite().all())


@dataclass(frozen=True)
class FormatSurvival:
    """The gradients that each scale would lose in one format.

    Attributes:
        zero: for each scale, the fraction of the gradients other than 0 that become 0.
        subnormal: the fraction of them that become subnormal numbers, which have fewer digits.
        overflow: the fraction of them that do not fit the format.
        recommended: the smallest of the scales that lose least; None if a gradient overflows at every
            scale.
    """

    zero: tuple[float, ...]
    subnormal: tuple[float, ...]
    overflow: tuple[float, ...]
    recommended: float | None


@dataclass(frozen=True)
class GradientSurvival:
    """The gradients that each scale would lose, in several formats.

    Attributes:
        scales: the scales.
        formats: the result for each format, by its name.
        count: how many gradients are not 0.
        zeros: how many are 0 already.
        not_finite: how many are inf or NaN, which overflow at every scale.
    """

    scales: tuple[float, ...]
    formats: dict[str, FormatSurvival]
    count: int
    zeros: int
    not_finite: int


@without_grad
def gradient_survival(
    grads: Tensor | Iterable[Tensor],
    scales: Sequence[float] = SCALES,
    formats: Sequence[FormatLike] = GRADIENT_FORMATS,
) -> GradientSurvival:
    """Return the fraction of gradients that each scale would lose, in each format.

    Args:
        grads: unscaled gradients: a floating tensor of any shape, or several. FP32 gradients tell most,
            because they have lost nothing yet.
        scales: the loss scales to compare.
        formats: the formats in which gradients would be stored.

    Returns:
        Fractions, and the scale that loses least. The host waits for the device.

    Raises:
        AmpTypeError: a gradient is not a floating-point tensor, or is on the meta device.
        AmpValueError: a scale is not a finite number above 0, or there is no such format.
    """
    tensors = [grads] if isinstance(grads, Tensor) else list(grads)
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise AmpTypeError(f"gradients must be floating-point tensors, and one is {kind}")
    if any(tensor.is_meta for tensor in tensors):
        raise AmpTypeError("gradients on the meta device have no values")
    strided = [t.coalesce().values() if t.layout is torch.sparse_coo else t for t in tensors]
    values = [t.detach().flatten().double().abs().cpu() for t in strided]
    magnitudes = torch.cat(values) if values else torch.zeros(0, dtype=torch.float64, device="cpu")
    finite = magnitudes[magnitudes.isfinite()]
    ordered = finite[finite > 0].sort().values
    not_finite = magnitudes.numel() - finite.numel()
    count, zeros = ordered.numel() + not_finite, finite.numel() - ordered.numel()
    fates = functools.partial(_fates, ordered, not_finite)
    return survival_of(fates, scales, formats, count, zeros, not_finite)


def survival_of(
    fates: Callable[[Format, float], tuple[int, int, int]],
    scales: Sequence[float],
    formats: Sequence[FormatLike],
    count: int,
    zeros: int,
    not_finite: int,
) -> GradientSurvival:
    """Return a `GradientSurvival` from the counts of `fates(format, scale)`: zero, subnormal, overflow.

    Raises:
        AmpValueError: there are no scales, one is not a finite number above 0, or there is no such
            format.
    """
    known = [as_format(fmt) for fmt in formats]
    scales = tuple(map(float, scales))
    if not scales or not all(0 < scale < math.inf for scale in scales):
        raise AmpValueError(f"scales={scales} must be one or more finite numbers above 0")
    found = {}
    for fmt in known:
        counts = [fates(fmt, scale) for scale in scales]
        zero, subnormal, overflow = (
            tuple(number / max(count, 1) for number in column) for column in zip(*counts, strict=True)
        )
        too_large, *_, best = min(zip(overflow, zero, subnormal, scales, strict=True))
        found[fmt.name] = FormatSurvival(zero, subnormal, overflow, None if too_large else best)
    return GradientSurvival(scales, found, count, zeros, not_finite)


class Thresholds(NamedTuple):
    """Magnitudes up to `zero` become 0, from `normal` on they are normal, from `overflow` too large."""

    zero: float
    normal: float
    overflow: float


@functools.cache
def thresholds(fmt: Format) -> Thresholds:
    """Return the largest magnitude that becomes 0, and the smallest that are normal and too large."""
    tie = fmt.max + 2.0 ** (fmt.max_exponent - fmt.mantissa_bits - 1)
    fits = round_to(tie, fmt, overflow="nan") == fmt.max
    overflow = math.nextafter(tie, math.inf) if fits else tie
    if not fmt.has_zero:
        return Thresholds(0.0, 0.0, overflow)
    zero = fmt.min_subnormal / 2
    return Thresholds(zero, fmt.min_normal - zero, overflow)


def _fates(ordered: Tensor, not_finite: int, fmt: Format, scale: float) -> tuple[int, int, int]:
    scaled = ordered * scale
    at = thresholds(fmt)
    zero = int(torch.searchsorted(scaled, at.zero, right=True))
    normal = int(torch.searchsorted(scaled, at.normal))
    overflow = int(torch.searchsorted(scaled, at.overflow))
    return zero, max(normal - zero, 0), ordered.numel() - overflow + not_finite
