"""Judging the levels of a comparison: how far off, which are healthy, and which to recommend."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from amp.trials.observing import ModuleGradients, Record
from amp.trials.results import LevelResult, ModuleError, Problem

FLOORS = 10
"""A loss may be above the reference by so many times the distance of FP32 from the reference ..."""
OF_THE_LOSS = 0.01
"""... or by this fraction of the run's mean loss, if that is more."""
LARGEST_ERROR = 0.2
"""The largest error at a healthy level, of modules that stand out and of all gradients together. The
latter is below 0.1 in FP8."""
STILL = 0.1
"""The fraction of weights that may stand still, beyond those at O0."""
SKIPPED = 0.5
"""The fraction of steps that may be skipped, after the search for the loss scale."""
_ZERO = {"FP64": 1e-12, "FP32": 1e-6}
"""A gradient smaller than this times the median of all modules is 0 up to rounding errors."""

ON_A_GPU = ("O5", "O4", "O7", "O6", "O2", "O1")
"""The cheapest level first, with bfloat16 tensor cores; FP8 pays only for layers wider than 2,000."""
WITHOUT_BFLOAT16 = ("O2", "O1")


@dataclass(frozen=True)
class Basis:
    """The runs that levels are compared with.

    Attributes:
        name: the precision of the reference, `FP64` or `FP32`.
        record: the reference.
        floor: a run at O0, whose distance from the reference is noise.
        notes: remarks on both, for the user.
    """

    name: str
    record: Record
    floor: Record
    notes: tuple[str, ...] = ()


def error_of(grads: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Return |g - r| / |r| of gradients g as one vector, and reference gradients r, computed in FP64.

    It is 0 if both are 0, and inf if g is not finite or only r is 0.
    """
    found, exact = _as_vector(grads), _as_vector(reference)
    if found.shape != exact.shape or not found.isfinite().all():
        return math.inf
    difference, size = float((found - exact).norm()), float(exact.norm())
    if not size:
        return math.inf if difference else 0.0
    return difference / size


def errors_of(grads: ModuleGradients, reference: ModuleGradients) -> dict[str, float]:
    """Return the error of each module that has a gradient in both runs."""
    return {name: error_of(grads[name], exact) for name, exact in reference.items() if name in grads}


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


def gaps_of(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return how far each of the last losses, a third of all, is above the reference's."""
    gaps = [x - y for x, y in zip(losses, reference, strict=False)]
    return gaps[-max(1, math.ceil(len(gaps) / 3)) :]


def _as_vector(grads: Sequence[Tensor]) -> Tensor:
    parts = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads]
    return torch.cat([part.double().flatten() for part in parts] or [torch.zeros(0)])


def judged(
    level: str, record: Record, basis: Basis, still_at_o0: float | None = None, searched: int = 0
) -> LevelResult:
    """Return how far a run is from the reference, and what is wrong with it."""
    exact = basis.record
    if not record.losses:
        return LevelResult(level, (Problem("not_run", "not run: it made no step"),))
    vanishing = vanishing_modules(exact.first, _ZERO[basis.name])
    errors, floor = errors_of(record.first, exact.first), errors_of(basis.floor.first, exact.first)
    telling = {name: error for name, error in errors.items() if name not in vanishing}
    both = ([x for name in errors for x in run.first[name]] for run in (record, exact))
    together = error_of(*both)  # as one vector
    out = outstanding(telling, {name: floor[name] for name in telling if name in floor}, together)
    gap = worst_gap(record.losses, exact.losses, basis.floor.losses) or (None, None)
    result = LevelResult(
        level,
        losses=record.losses,
        loss_gap=gap[0],
        loss_gap_allowed=gap[1],
        gradient_error=together if telling else None,
        median_error=median_of(telling.values()) if telling else None,
        modules=tuple(ModuleError(name, telling.get(name), name in out) for name in errors),
        skipped=sum(record.skipped),
        scale_search=searched,
        still=statistics.fmean(record.still) if record.still else None,
        seconds=statistics.median(record.seconds) if record.seconds else None,
        memory=record.memory | {"total": record.memory.get("peak") or sum(record.memory.values())},
    )
    problems = tuple(problems_of(result, basis.name, still_at_o0))
    remarks = (Problem("small_layers", record.small),) if record.small and not problems else ()
    return replace(result, problems=problems, remarks=remarks)


Losses = dict[str, list[float]]


def worst_gap(losses: Losses, reference: Losses, floor: Losses) -> tuple[float, float] | None:
    """Return how far the worst loss is above the reference, and may be; None if no loss is in both.

    Args:
        losses: the losses of the level.
        reference: the losses of the reference.
        floor: the losses of FP32, whose distance from the reference is due to rounding.
    """
    gaps = []
    for name, exact in reference.items():
        if name in losses:
            noise = statistics.fmean(map(abs, gaps_of(floor.get(name, exact), exact)))
            allowed = max(FLOORS * noise, OF_THE_LOSS * statistics.fmean(map(abs, exact)))
            gaps.append((statistics.fmean(gaps_of(losses[name], exact)), allowed))
    return max(gaps, key=lambda gap: gap[0] / (gap[1] or math.ulp(0.0)), default=None)


def outstanding(errors: dict[str, float], floor: dict[str, float], together: float) -> set[str]:
    """Return the modules whose error is too large.

    A fault in the forward spoils the gradients of most modules; then it is the worst one.

    Args:
        errors: the errors of the modules at one level.
        floor: their errors in FP32. A module whose error is above the median there may have more error.
        together: the error of all gradients as one vector.
    """
    if errors and not together <= LARGEST_ERROR:
        return {max(errors, key=errors.__getitem__)}
    usual = median_of(floor.values()) or math.inf
    harder = {name: max(1.0, floor.get(name, 0.0) / usual / 2) for name in errors}
    return {name for name, error in errors.items() if error > LARGEST_ERROR * harder[name]}


def problems_of(result: LevelResult, reference: str, still_at_o0: float | None) -> Iterator[Problem]:
    """Yield the problems of a level that was run."""
    steps = max(map(len, result.losses.values()), default=0)
    lists = result.losses.values()
    bad = [(i, x) for losses in lists for i, x in enumerate(losses) if not math.isfinite(x)]
    if bad:
        step, loss = min(bad)
        yield Problem("loss_not_finite", f"the loss is {loss}, first at step {step}")
    if result.skipped > SKIPPED * steps:
        yield Problem("steps_skipped", f"{result.skipped} of {steps} steps were skipped")
    elif not bad and (result.loss_gap or 0.0) > (result.loss_gap_allowed or 0.0):
        above = f"the loss is {result.loss_gap:.2g} above that of {reference} at the end"
        yield Problem("loss_gap", f"{above}; {result.loss_gap_allowed:.2g} is within noise")
    if all(math.isfinite(losses[0]) for losses in lists if losses):  # else gradients are not either
        yield from _problems_of_gradients(result)
    if result.still is not None and result.still > (still_at_o0 or 0.0) + STILL:
        at_o0 = "" if still_at_o0 is None else f", {percent(still_at_o0)} at O0"
        what = f"{percent(result.still)} of the weights stand still in a step{at_o0}"
        yield Problem("weights_stand_still", f"{what}: their updates are rounded away")


def _problems_of_gradients(result: LevelResult) -> Iterator[Problem]:
    for worst in result.standing_out[:1]:
        together, what = result.gradient_error or 0.0, f"the gradient of {worst.module} is off by "
        what += percent(worst.error)
        if worst.error == math.inf:
            yield Problem("gradient_error", f"the first gradient of {worst.module} is not finite")
        elif together > LARGEST_ERROR:
            yield Problem("gradient_error", f"{what}, and all together are off by {percent(together)}")
        else:
            median = percent(result.median_error)
            yield Problem("module_stands_out", f"{what}; the median is {median}")


def percent(value: float | None) -> str:
    """Return a relative size as text: `52 %`, `0.054 %`, `34 times its size` or `inf`."""
    if value is None or not math.isfinite(value):
        return "inf"
    if value >= 10:
        return f"{value:.3g} times its size"
    return f"{100 * value:.0f} %" if value >= 0.995 else f"{100 * value:.2g} %"


def recommend(levels: Sequence[LevelResult], device: str, has_bfloat16: bool) -> tuple[str | None, str]:
    """Return the level to take, or None, and the reason.

    On a GPU it is the first healthy level in a fixed order, because a short run of a small model says
    little about speed there; elsewhere the fastest healthy level.
    """
    if not levels[0].is_healthy:
        what = levels[0].problems[0].what
        return None, f"At {levels[0].level} {what}: precision is not the cause."
    order = ON_A_GPU if has_bfloat16 or device == "cpu" else WITHOUT_BFLOAT16
    on_gpu = [level for name in order for level in levels if level.level == name]
    on_gpu += [level for level in levels[1:] if level not in on_gpu] + [levels[0]]  # profiles, and O0
    here = on_gpu if device == "cuda" else sorted(levels, key=lambda x: x.seconds or math.inf)
    chosen, there = (next(level for level in each if level.is_healthy) for each in (here, on_gpu))
    best = "cheapest healthy level on this GPU" if here is on_gpu else "fastest healthy level here"
    why = f"It is the {best}"
    if here[0] is not chosen:
        why += f"; {here[0].level} is not: {here[0].problems[0].what}"
    if device == "cpu":
        why += ". Time and memory are those of a CPU: on a GPU half precision is usually faster"
        if there is not levels[0]:
            why += f", and {there.level} is the first healthy level to try there"
    return chosen.level, f"{why}."
