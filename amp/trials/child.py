"""One run of a script that nobody has edited, in a process of its own."""

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
from amp.observers import Observer, observing
from amp.trials.observing import RunObserver, Trial
from amp.trials.random_numbers import seed_random_numbers
from amp.trials.script_watching import CallExplainer, StepWatcher


class Watcher(Protocol):
    """What looks at the sessions of a script, from `with` to its end.

    Attributes:
        is_complete: whether enough was seen.
    """

    is_complete: bool

    @property
    def has_begun(self) -> bool:
        """Whether anything came through `initialize`."""
        ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: object) -> None: ...

    def seen(self) -> Any:
        """Return what was seen so far, as plain values and tensors."""
        ...


WATCHERS: dict[str, Callable[[dict[str, Any], Callable[[], None]], Watcher]] = {
    "compare": lambda options, end: RunObserver(Trial(**options), end),
    "doctor": lambda options, end: StepWatcher(**options, when_complete=end),
    "explain": lambda options, end: CallExplainer(**options, when_complete=end),
}


class _EnoughError(BaseException):
    """The run is complete. Scripts catch exceptions, and seldom this."""


def main(job: str) -> None:
    """Make a run, and write what was seen to a file.

    Args:
        job: JSON, as `amp.trials.scripts` writes it.
    """
    given = json.loads(job)
    found: dict[str, Any] = {"error": ""}

    def save() -> None:
        found["has_begun"] = watcher.has_begun
        found["seen"] = watcher.seen()
        torch.save(found, given["result"])

    def end() -> None:
        save()
        raise _EnoughError

    run = runner(given["arguments"])
    if given["seed"] is not None:
        seed_random_numbers(given["seed"])
    with WATCHERS[given["watcher"]](given["options"], end) as watcher, ExitStack() as stack:
        if given["level"] is not None:
            stack.enter_context(observing(AtLevel(given["level"])))
        error = _error_of(run)
    if not watcher.is_complete:
        found["error"] = error
        save()
    # What the script has left running, such as a logger's threads, has nothing to wait for.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def _error_of(run: Callable[[], object]) -> str:
    """Run a script, and return how it failed, in a line; nothing if it did not."""
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


class AtLevel(Observer):
    """Lets sessions begin at another level than the script says, with what else it says.

    O0 is a baseline, to which overrides of another level do not apply.
    """

    def __init__(self, level: str) -> None:
        self._level = level

    def session_begins(self, opt_level: Any, options: dict[str, Any]) -> str:
        """Return the level."""
        if self._level == "O0":
            for key in options.keys() - {"enabled"}:
                del options[key]
        return self._level
