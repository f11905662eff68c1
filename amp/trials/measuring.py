"""How far the gradients and losses of one run are from those of another."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from amp.trials.observing import ModuleGradients


class Error(NamedTuple):
    """How far a gradient g is from the reference's, r.

    Attributes:
        relative: |g - r| / |r|, 0 where both are 0; inf where g is not finite.
        cosine: of the angle between them; NaN where one of them is 0 or not finite.
    """

    relative: float
    cosine: float


def error_of(grads: Sequence[Tensor], reference: Sequence[Tensor]) -> Error:
    """Return the error of some gradients, taken as one vector, in FP64."""
    found, exact = _as_vector(grads), _as_vector(reference)
    if found.shape != exact.shape or not found.isfinite().all():
        return Error(math.inf, math.nan)
    difference, norm, size = (float(x.norm()) for x in (found - exact, found, exact))
    cosine = float(found @ exact) / (norm * size) if norm * size else math.nan
    if not size:
        return Error(math.inf if difference else 0.0, cosine)
    return Error(difference / size, cosine)


def errors_of(grads: ModuleGradients, reference: ModuleGradients) -> dict[str, Error]:
    """Return the error of each module that has a gradient in both runs."""
    return {name: error_of(grads[name], exact) for name, exact in reference.items() if name in grads}


def total_error_of(grads: ModuleGradients, reference: ModuleGradients) -> Error:
    """Return the error of all modules that have a gradient in both runs, taken as one vector."""
    names = [name for name in reference if name in grads]
    return error_of(
        [grad for name in names for grad in grads[name]],
        [grad for name in names for grad in reference[name]],
    )


def vanishing_modules(reference: ModuleGradients, limit: float) -> set[str]:
    """Return the modules whose gradient is 0 but for rounding, such as a bias before a BatchNorm.

    Args:
        reference: gradients.
        limit: how small, beside the median of all modules.
    """
    sizes = {
        name: float(vector.norm()) / math.sqrt(max(vector.numel(), 1))
        for name, grads in reference.items()
        if (vector := _as_vector(grads)) is not None
    }
    smallest = limit * median_of(sizes.values())
    return {name for name, size in sizes.items() if size <= smallest}


def median_of(values: Iterable[float]) -> float:
    """Return the median, 0 of nothing."""
    found = list(values)
    return statistics.median(found) if found else 0.0


def mean_of(values: Iterable[float]) -> float:
    """Return the mean, 0 of nothing."""
    found = list(values)
    return sum(found) / len(found) if found else 0.0


def window_of(steps: int) -> int:
    """Return over how many of the last steps losses are compared: a third."""
    return max(1, math.ceil(steps / 3))


def gap_of(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return how far the mean of the last losses is above that of the reference's."""
    both = list(zip(losses, reference, strict=False))
    return mean_of(x - y for x, y in both[-window_of(len(both)) :])


def spread_of(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the mean of how far each of the last losses is from the reference's, either way."""
    both = list(zip(losses, reference, strict=False))
    return mean_of(abs(x - y) for x, y in both[-window_of(len(both)) :])


def _as_vector(grads: Sequence[Tensor]) -> Tensor:
    parts = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads]
    return torch.cat([part.double().flatten() for part in parts] or [torch.zeros(0)])
