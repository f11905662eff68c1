"""Measuring how far the gradients and losses of one run are from those of another."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from amp.trials.observing import ModuleGradients


class Error(NamedTuple):
    """How far a gradient g is from the reference gradient r.

    Attributes:
        relative: |g - r| / |r|; 0 if both are 0, and inf if g is not finite or only r is 0.
        cosine: the cosine of the angle between them; NaN if one of them is 0 or not finite.
    """

    relative: float
    cosine: float


def error_of(grads: Sequence[Tensor], reference: Sequence[Tensor]) -> Error:
    """Return the error of gradients as one vector, computed in FP64."""
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
    """Return the error of all modules that have a gradient in both runs, as one vector."""
    names = [name for name in reference if name in grads]
    return error_of(
        [grad for name in names for grad in grads[name]],
        [grad for name in names for grad in reference[name]],
    )


def vanishing_modules(reference: ModuleGradients, limit: float) -> set[str]:
    """Return modules whose gradient is 0 up to rounding errors, as for a bias before a BatchNorm.

    Args:
        reference: the gradients of the reference.
        limit: the largest such gradient, relative to the median of all modules.
    """
    vectors = {name: _as_vector(grads) for name, grads in reference.items()}
    sizes = {name: float(x.norm()) / math.sqrt(max(x.numel(), 1)) for name, x in vectors.items()}
    smallest = limit * median_of(sizes.values())
    return {name for name, size in sizes.items() if size <= smallest}


def median_of(values: Iterable[float]) -> float:
    """Return the median, or 0 if there are no values."""
    found = list(values)
    return statistics.median(found) if found else 0.0


def mean_of(values: Iterable[float]) -> float:
    """Return the mean, or 0 if there are no values."""
    found = list(values)
    return sum(found) / len(found) if found else 0.0


def gaps_of(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return how far each of the last losses, a third of all, is above the reference's."""
    gaps = [x - y for x, y in zip(losses, reference, strict=False)]
    return gaps[-max(1, math.ceil(len(gaps) / 3)) :]


def _as_vector(grads: Sequence[Tensor]) -> Tensor:
    parts = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads]
    return torch.cat([part.double().flatten() for part in parts] or [torch.zeros(0)])
