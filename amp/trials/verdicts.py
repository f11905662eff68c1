"""Which levels are healthy, and which of them to take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from amp.trials.measuring import Error, gap_of, mean_of, median_of, spread_of
from amp.trials.results import LevelResult, Problem

FLOORS = 10
"""How many times the distance of FP32 from the reference a loss may be above it."""
OF_THE_LOSS = 0.01
"""How far it may be above it in any case, as a part of the mean loss of the run."""
MEDIANS = 10
"""A module stands out whose error is more than so many times the median of its level ..."""
LEAST_ERROR = 0.01
"""... and more than this."""
LARGEST_ERROR = 0.2
"""The largest error, at a healthy level, of a module that stands out, and of all gradients together,
which in FP8 is below 0.1."""
STILL = 0.1
"""How many more weights than at O0, as a part of all, may stand still."""
SKIPPED = 0.5
"""The part of the steps that may be skipped, once the loss scale was found."""
AS_FAST = 1.05
"""Times that differ by less are the same."""

ON_A_GPU = ("O5", "O4", "O7", "O6", "O2", "O1")
"""From the cheapest on, with bfloat16 tensor cores; FP8 pays for layers wider than 2,000 only."""
WITHOUT_BFLOAT16 = ("O2", "O1")


class Gap(NamedTuple):
    """How far a loss is above the reference's, and how far it may be."""

    size: float
    allowed: float


Losses = dict[str, list[float]]


def worst_gap(losses: Losses, reference: Losses, floor: Losses) -> Gap | None:
    """Return the gap of the loss that is worst; None if there is none in both runs.

    Args:
        losses: of the level.
        reference: those it is compared with.
        floor: those of FP32, whose distance from the reference is what rounding makes of it.
    """
    gaps = [
        Gap(
            gap_of(losses[name], exact),
            max(
                FLOORS * spread_of(floor.get(name, exact), exact),
                OF_THE_LOSS * mean_of(map(abs, exact)),
            ),
        )
        for name, exact in reference.items()
        if name in losses
    ]
    return max(gaps, key=lambda gap: gap.size / (gap.allowed or math.ulp(0.0)), default=None)


def outstanding(errors: dict[str, Error], floor: dict[str, Error], together: float) -> set[str]:
    """Return the modules whose error is far above what is usual at this level.

    A gradient that is hard to compute in FP32 already is allowed as many times more here. A fault in
    the forward spoils the gradients of most modules, and then the worst one stands out.

    Args:
        errors: of the modules of one level.
        floor: those of FP32.
        together: the error of all gradients as one vector.
    """
    usual = median_of(error.relative for error in errors.values())
    usual_in_floor = median_of(error.relative for error in floor.values())

    def is_allowed(name: str, relative: float) -> bool:
        in_floor = floor[name].relative if name in floor else 0.0
        harder = max(1.0, in_floor / usual_in_floor) if usual_in_floor else 1.0
        return relative <= max(LEAST_ERROR, MEDIANS * usual * harder)

    found = {name for name, error in errors.items() if not is_allowed(name, error.relative)}
    if not found and errors and not together <= LARGEST_ERROR:
        found = {max(errors, key=lambda name: errors[name].relative)}
    return found


def problems_of(result: LevelResult, reference: str, still_at_o0: float | None) -> Iterator[Problem]:
    """Yield what is wrong with a level that was run."""
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
    out = [module for module in result.modules if module.stands_out]
    worst = max(out, key=lambda module: module.error or 0.0, default=None)
    if worst is None or worst.error is None or worst.error <= LARGEST_ERROR:
        return
    together = result.gradient_error or 0.0
    if worst.error == math.inf:
        yield Problem("gradient_error", f"the first gradient of {worst.module} is not finite")
    elif together > LARGEST_ERROR:
        what = f"the gradient of {worst.module} is off by {percent(worst.error)}"
        yield Problem("gradient_error", f"{what}, and all together are off by {percent(together)}")
    else:
        yield Problem("module_stands_out", _standing_out(result))


def remarks_of(result: LevelResult) -> Iterator[Problem]:
    """Yield what deserves a look at a level, and is no reason against it."""
    known = {problem.cause for problem in result.problems}
    if any(module.stands_out for module in result.modules) and not known:
        yield Problem("module_stands_out", _standing_out(result))


def _standing_out(result: LevelResult) -> str:
    out = [module for module in result.modules if module.stands_out]
    worst = max(out, key=lambda module: module.error or 0.0)
    more = f" and {len(out) - 1} more" if len(out) > 1 else ""
    off = f"off by {'up to ' if more else ''}{percent(worst.error)}"
    gradients = "gradients" if more else "gradient"
    usual = f"the median is {percent(result.median_error)}"
    return f"the {gradients} of {worst.module}{more} {'are' if more else 'is'} {off}; {usual}"


def percent(value: float | None) -> str:
    """Return a part of a whole as text: `52 %`, `0.054 %`, or `34 times` it."""
    if value is None or not math.isfinite(value):
        return "inf"
    if value >= 10:
        return f"{value:.3g} times its size"
    return f"{100 * value:.0f} %" if value >= 1 else f"{100 * value:.2g} %"


def recommend(levels: Sequence[LevelResult], device: str, has_bfloat16: bool) -> tuple[str | None, str]:
    """Return the level to take, and the reason.

    On a GPU that is the healthy one that comes first in a fixed order, since a short run of a small
    model says little of speed there; elsewhere the fastest.
    """
    if not levels[0].is_healthy:
        what = levels[0].problems[0].what
        return None, f"At {levels[0].level} {what}: precision is not the cause."
    on_gpu = device == "cuda"
    ranked = _by_order(levels, has_bfloat16) if on_gpu else _by_time(levels)
    chosen = next(level for level in ranked if level.is_healthy)
    before = [level for level in ranked[: ranked.index(chosen)] if level.problems]
    only = len([level for level in levels if level.is_healthy]) == 1 and len(levels) > 1
    best = "cheapest healthy level on this GPU" if on_gpu else "fastest healthy level here"
    why = f"It is the {'only healthy level' if only else best}"
    against = before or ([level for level in levels if level.problems] if only else [])
    if against:
        why += f"; {against[0].level} is not: {against[0].problems[0].what}"
    return chosen.level, f"{why}." + (_of_a_cpu(levels) if device == "cpu" else "")


def _of_a_cpu(levels: Sequence[LevelResult]) -> str:
    """Say that a GPU's times are others, and which level to try there."""
    first = next(level for level in _by_order(levels, has_bfloat16=True) if level.is_healthy)
    there = "" if first is levels[0] else f", and {first.level} is the first healthy level to try there"
    return f" Time and memory are those of a CPU: on a GPU half precision is usually faster{there}."


def _by_order(levels: Sequence[LevelResult], has_bfloat16: bool) -> list[LevelResult]:
    order = ON_A_GPU if has_bfloat16 else WITHOUT_BFLOAT16
    places = {level: place for place, level in enumerate(order)}
    # Profiles of the user's come after the levels that are known, and O0 last.
    last = len(order)
    return sorted(levels, key=lambda x: last + 1 if x is levels[0] else places.get(x.level, last))


def _by_time(levels: Sequence[LevelResult]) -> list[LevelResult]:
    known = [level.seconds for level in levels if level.seconds is not None and level.is_healthy]
    fastest = min(known, default=0.0)

    def key(level: LevelResult) -> float:
        seconds = math.inf if level.seconds is None else level.seconds
        return fastest if fastest <= seconds <= AS_FAST * fastest else seconds

    return sorted(levels, key=key)
