"""The child process that runs an unmodified script, watches it, and writes what was seen to a file."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from amp.compat.run import runner
from amp.diagnosis.attaching import Training
from amp.observers import Observer, observing
from amp.trials.injecting import AS_IS, Injected
from amp.trials.observing import RunObserver, Trial
from amp.trials.random_numbers import seed_random_numbers
from amp.trials.script_watching import CallExplainer, StepWatcher


class Watcher(Protocol):
    """Watches the sessions of a script inside a `with` block.

    Attributes:
        is_complete: whether enough was seen.
    """

    is_complete: bool

    @property
    def has_begun(self) -> bool:
        """Whether the script called `initialize`."""
        ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: object) -> None: ...

    def seen(self) -> Any:
        """Return the results so far, as plain values and tensors."""
        ...


WATCHERS: dict[str, Callable[[dict[str, Any], Callable[[], None]], Watcher]] = {
    "compare": lambda options, end: RunObserver(Trial(**options), end),
    "doctor": lambda options, end: StepWatcher(**options, when_complete=end),
    "explain": lambda options, end: CallExplainer(**options, when_complete=end),
}


class _EnoughError(BaseException):
    """Raised when the run is complete; a BaseException, because scripts seldom catch these."""


def main(job: str) -> None:
    """Make a run, and write what was seen to a file.

    Args:
        job: the JSON text from `amp.trials.scripts`.
    """
    given = json.loads(job)
    found: dict[str, Any] = {"error": "", "notes": [], "scale": None}
    injected: Injected | None = None

    def save() -> None:
        found["has_begun"] = watcher.has_begun
        found["seen"] = watcher.seen()
        if injected is not None:
            found["notes"], found["scale"] = injected.notes, injected.scale
        torch.save(found, given["result"])

    def end() -> None:
        save()
        raise _EnoughError

    run = runner(given["arguments"])
    if given["seed"] is not None:
        seed_random_numbers(given["seed"])
    with WATCHERS[given["watcher"]](given["options"], end) as watcher, ExitStack() as stack:
        if given["injects"]:
            injected = stack.enter_context(Injected(given["level"] or AS_IS, given["scale"]))
        else:
            if given["level"] is not None:
                stack.enter_context(observing(AtLevel(given["level"])))
            if given["needs_amp"]:
                stack.enter_context(_Guard(watcher, end))
        error = _error_of(run)
    if not watcher.is_complete:
        found["error"] = error
        save()
    # Do not wait for threads that the script has left running, such as a logger's.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def _error_of(run: Callable[[], object]) -> str:
    """Run a script, and return its error in one line, or an empty string."""
    try:
        run()
    except _EnoughError:
        return ""
    except SystemExit as end:
        return f"it ended with exit status {end.code}" if end.code else ""
    except BaseException as error:
        traceback.print_exc()
        line = str(error).partition("\n")[0]
        return f"{type(error).__name__}: {line}".removesuffix(": ")
    return ""


class _Guard(Training):
    """Ends a script at its first step, if it does not use amp."""

    def __init__(self, watcher: Watcher, end: Callable[[], None]) -> None:
        super().__init__()
        self._watcher, self._end = watcher, end

    def optimizer_steps(self, optimizer: Any) -> None:
        """End the script."""
        if not self._watcher.has_begun:
            self._end()


class AtLevel(Observer):
    """Makes sessions use another level than the script's, with the script's overrides.

    O0 is the baseline: there the overrides are dropped.
    """

    def __init__(self, level: str) -> None:
        self._level = level

    def session_begins(self, opt_level: Any, options: dict[str, Any]) -> str:
        """Return the level."""
        if self._level == "O0":
            for key in options.keys() - {"enabled"}:
                del options[key]
        return self._level
