"""`amp.compare`: running the same training at several levels, and comparing the runs."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from amp import active, frontend
from amp.diagnosis.guard import first_line
from amp.errors import (
    AmpError,
    AmpRuntimeError,
    AmpTypeError,
    AmpValueError,
    AmpWarning,
    brief,
    check_function,
)
from amp.other_names import names_keywords
from amp.session import Session
from amp.trials.judging import Basis, errors_of, judged, median_of, recommend
from amp.trials.observing import Record, RunObserver, Trial
from amp.trials.random_numbers import keep_random_numbers, seed_random_numbers
from amp.trials.results import Comparison, LevelResult, Problem

LEVELS = ("O0", "O1", "O2", "O4", "O5")
_PATIENCE = 1000
"""The most calls of `step` in a row without an optimizer step."""
_SEARCHES = 4
"""The most extra runs to find a loss scale."""
_UNLIKE = 1e-2
"""A larger relative error of FP32 gradients is not due to rounding: the runs differ."""
Run = Callable[[Trial], Record]
"""Makes a run and returns its record; raises what the run raised."""


@names_keywords
def compare(
    build: Callable[[], tuple[Any, Any]],
    step: Callable[[Any, Any, int], Any],
    levels: Sequence[str] = LEVELS,
    steps: int = 25,
    seed: int = 0,
    *,
    num_losses: int = 1,
) -> Comparison:
    """Train the same model at several levels, and report which of them are as good as FP32.

        def build():
            model = Net().to(device)
            return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(model, optimizer, i):
            optimizer.zero_grad()
            loss = loss_of(model, batches[i])
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()

        print(amp.compare(build, step))

    Each run starts from the same seed, so that weights, data and dropout are the same; `step` must take
    its data from `i`, from random numbers or from objects that `build` makes, not from an iterator that
    continues from run to run. Losses, gradients, skipped steps, weights, time and memory are measured
    without changes to your code. Afterwards random numbers, the default session and the default dtype
    are as before. O0 is always run: its distance from the reference is the noise level by which the
    other levels are judged.

    Args:
        build: returns an FP32 model and its optimizer, or lists of them, on their device.
        step: one iteration. It is called until the optimizer has made `steps` steps; its result is
            ignored.
        levels: levels, aliases or YAML profiles.
        steps: how many optimizer steps to compare.
        seed: the seed of torch, Python and NumPy.
        num_losses: as in `amp.initialize`.

    Raises:
        AmpValueError: a level, `steps` or `seed` is not valid.
        AmpTypeError: `build` or `step` is no function.
        AmpRuntimeError: a session that casts functions is open, or two runs at O0 differ.
        Exception: an error in the run at O0. An error at another level is in that level's result.
    """
    check_function("build", build, "returns (model, optimizer)")
    check_function("step", step, "trains for one step: step(model, optimizer, i)")
    if active.newest_caster() is not None:
        raise AmpRuntimeError(
            "a session that casts torch's functions is open, at O0 too: close it before amp.compare, "
            "by amp.get_session().close()"
        )
    run = functools.partial(_run_here, build, step, num_losses)
    return compare_runs(run, levels, steps, seed)


def check_request(levels: Sequence[Any], steps: int, seed: int = 0) -> None:
    """Raise AmpError if a level, `steps` or `seed` is not valid."""
    if isinstance(levels, str) or not isinstance(levels, Collection) or not levels:
        raise AmpValueError(f"levels={brief(levels)} is not a list of levels, such as {list(LEVELS)}")
    for level in levels:
        Session(level, verbosity=0).close()
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise AmpValueError(f"steps={brief(steps)} must be an integer of at least 1")
    if not 0 <= seed < 2**64:
        raise AmpValueError(f"seed={brief(seed)} must be from 0 to 2**64 - 1")


def _run_here(
    build: Callable[[], Any], step: Callable[..., Any], num_losses: int, trial: Trial
) -> Record:
    """Make a run of `build` and `step` in this process, and restore the state of the process."""
    with ExitStack() as stack:
        _keep_everything(stack)
        observer = stack.enter_context(RunObserver(trial))
        session = stack.enter_context(Session(trial.level, num_losses=num_losses, verbosity=0))
        frontend._Default.session = session
        seed_random_numbers(trial.seed)
        built = build()
        if not isinstance(built, tuple) or len(built) != 2:
            raise AmpTypeError(
                f"build must return (model, optimizer), and returned {type(built).__name__}"
            )
        model, optimizer = session.initialize(*built)
        idle = 0
        for i in itertools.count():
            before = observer.steps
            step(model, optimizer, i)
            if observer.is_complete:
                break
            idle = 0 if observer.steps > before else idle + 1
            if idle == _PATIENCE:
                raise AmpRuntimeError(f"{_PATIENCE} calls of step made no optimizer.step()")
        return observer.seen()


def _keep_everything(stack: ExitStack) -> None:
    """Restore random numbers, the default session and dtype, and the grad mode when a stack ends."""
    keep_random_numbers(stack)
    stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    stack.callback(setattr, frontend._Default, "session", frontend._Default.session)
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore", AmpWarning)  # the results report the same


def compare_runs(
    run: Run,
    levels: Sequence[str],
    steps: int,
    seed: int = 0,
    note_progress: Callable[[int, int], None] = lambda done, of: None,
) -> Comparison:
    """Compare levels, with a function that makes a run; see `compare`.

    `note_progress` is called with how many of O0, the reference and the levels are done, and with how
    many there are.
    """
    check_request(levels, steps, seed)
    base = Trial("O0", steps, seed)
    floor = run(base)
    if not floor.losses:
        raise AmpRuntimeError("the run made no step after a loss that was scaled: use amp.scale_loss")
    rows = [row for row in dict.fromkeys(levels) if row != "O0"]
    note_progress(1, 2 + len(rows))
    basis = _basis(run, base, floor)
    results = [judged("O0", basis.floor, basis)]
    for done, level in enumerate(rows, 2):
        note_progress(done, 2 + len(rows))
        try:
            record, searched = _settled(run, replace(base, level=level))
        except Exception as error:  # the script fails at this level: that is a result
            results.append(LevelResult(level, (Problem("not_run", f"not run: {_short(error)}"),)))
        else:
            results.append(judged(level, record, basis, results[0].still, searched))
    made, notes = len(floor.skipped), list(basis.notes)
    if made < steps:
        notes.append(f"the run ended after {made} of {steps} steps")
    chosen, reason = recommend(results, floor.device, floor.has_bfloat16)
    known = (basis.name, basis.record.losses, made, seed, floor.device, tuple(notes))
    return Comparison(tuple(results), chosen, reason, *known)


def _basis(run: Run, base: Trial, floor: Record) -> Basis:
    try:
        wide = run(replace(base, in_float64=True))
    except Exception as error:  # an op or an optimizer may not support FP64
        note = f"compared with FP32, since the run in FP64 failed: {_short(error)}"
    else:
        apart = _median_error(floor, wide)
        if wide.losses.keys() == floor.losses.keys() and apart <= _UNLIKE:
            return Basis("FP64", wide, floor)
        note = (
            f"compared with FP32, since the first gradients in FP64 are {apart:.1%} off: the run "
            "draws other random numbers there (dropout on a GPU), or casts by itself"
        )
    again = run(base)
    apart = _median_error(again, floor)
    if apart > _UNLIKE and math.isfinite(apart):  # else O0 has NaN of its own, which the result says
        raise AmpRuntimeError(
            f"two runs at O0 differ: their first gradients are {apart:.1%} apart. Take data by the "
            "number of the step, by random numbers that follow the seed, or from what build makes"
        )
    return Basis("FP32", floor, again, (note,))


def _median_error(record: Record, reference: Record) -> float:
    return median_of(errors_of(record.first, reference.first).values())


def _settled(run: Run, trial: Trial) -> tuple[Record, int]:
    """Make a run whose loss scale fits from the start; return it, and the steps that the search took.

    A skipped first step has no gradients to compare, and the losses after it belong to other steps than
    the reference's. So a run that begins with skipped steps is repeated, from the scale that it found.
    """
    record, searched = run(trial), 0
    for _ in range(_SEARCHES):
        skipped = next((i for i, each in enumerate(record.skipped) if not each), len(record.skipped))
        at_fault = [loss for losses in record.losses.values() for loss in losses[:skipped]]
        if not skipped or not all(map(math.isfinite, at_fault)):  # no scale helps if the loss is inf
            break
        searched += skipped
        record = run(replace(trial, scales=record.scales))
    return record, searched


def _short(error: Exception) -> str:
    """Return the first line of an error, with its class unless it is one of ours."""
    return str(error).partition("\n")[0] if isinstance(error, AmpError) else first_line(error)
