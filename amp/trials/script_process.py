"""The child process that runs an unmodified script, watches it, and writes what was seen to a file."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from amp.compat import run as running
from amp.diagnosis.findings import Report
from amp.diagnosis.guard import first_line
from amp.diagnosis.watching import TrainingWatch
from amp.errors import AmpWarning
from amp.observers import Observer, observing
from amp.session import Session
from amp.trials.injecting import Injected
from amp.trials.observing import RunObserver, Trial
from amp.trials.random_numbers import seed_random_numbers


class ScriptWatch(TrainingWatch):
    """Watches some steps of a script, and ends it after the last of them.

    Args:
        needs_amp: whether a script without amp is of no use, since a level was asked for.
        when_complete: called when enough was seen; it raises an exception to end the script.
        at: which steps to watch.

    Attributes:
        last_step: the number of the last step to be seen.
    """

    def __init__(self, needs_amp: bool, when_complete: Callable[[], None], at: Sequence[int]) -> None:
        super().__init__(at)
        self.last_step = max(at)
        self._needs_amp, self._when_complete, self._has_session = needs_amp, when_complete, False

    @property
    def has_begun(self) -> bool:
        """Whether anything is trained, at the level if one was asked for."""
        return self._has_session or (bool(self._models) and not self._needs_amp)

    def initialize_ends(
        self, session: Session, models: Sequence[nn.Module], optimizers: Sequence[Any]
    ) -> None:
        """Note that a session trains."""
        self._has_session |= any(optimizers)
        super().initialize_ends(session, models, optimizers)

    def root_called(self, model: nn.Module, args: Any) -> None:
        """End a script when no window is open or still to come."""
        super().root_called(model, args)
        if self.has_begun and not self._due and self._shadow is None:
            self._when_complete()

    def seen(self) -> Report:
        """Return the report."""
        self.look()
        self.report.about = self.about
        return self.report


class _EnoughError(BaseException):
    """Raised when the run is complete; a BaseException, because scripts seldom catch these."""


def main(job: str) -> None:
    """Make a run, and write what was seen to a file.

    Args:
        job: the JSON text from `amp.trials.scripts`.
    """
    given = json.loads(job)
    level, trial = given["level"], given["trial"]
    threading.Thread(target=_end_with, args=[given["alive"]], daemon=True).start()
    process = os.getpid()
    found: dict[str, Any] = {"error": "", "traceback": "", "notes": [], "warnings": []}

    def save() -> None:
        found.update(has_begun=watcher.has_begun, seen=watcher.seen(), made=watcher.steps)
        with open(given["result"], "wb", closefd=False) as file:
            file.seek(0)
            torch.save(found, file)

    def tell(*_: Any) -> None:
        if os.getpid() == process:
            os.write(given["steps"], f"{watcher.steps} {watcher.last_step}\n".encode())

    def end() -> None:
        if os.getpid() != process:
            return  # a fork of the script's: what it trains is not seen
        save()
        if threading.current_thread() is not threading.main_thread():
            os._exit(0)  # an exception would end this thread alone
        raise _EnoughError

    def end_without_amp(*_: Any) -> None:
        if not watcher.has_begun:
            end()

    def warned(*args: Any, **kwargs: Any) -> None:
        if issubclass(args[1], AmpWarning):
            found["warnings"].append(str(args[0]))
        show_warning(*args, **kwargs)

    show_warning, warnings.showwarning = warnings.showwarning, warned
    run = running.runner(given["arguments"])
    watcher: Any
    if trial is not None:
        seed_random_numbers(trial["seed"])
        watcher = RunObserver(Trial(**trial), end)
    else:
        watcher = ScriptWatch(level is not None, end, given["at"])
        watcher.tell = lambda text: os.write(given["steps"], f"# {text}\n".encode())
    with watcher, ExitStack() as stack:
        if given["injects"]:
            found["notes"] = stack.enter_context(Injected(level)).notes
        elif level is not None:
            stack.enter_context(observing(AtLevel(level)))
            register_optimizer_step_pre_hook(end_without_amp)
        register_optimizer_step_post_hook(tell)
        found["error"], found["traceback"] = _error_of(run)
        if os.getpid() != process:
            os._exit(bool(found["error"]))
        if "seen" not in found:
            save()
    # Do not wait for threads that the script has left running, such as a logger's.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def _end_with(alive: int) -> None:
    """End this process, and those that it has started, when the one that waits for it ends."""
    os.read(alive, 1)  # returns when no process can write there any more
    os.killpg(0, signal.SIGKILL)


def _error_of(run: Callable[[], object]) -> tuple[str, str]:
    """Run a script, and return its error in one line, and its traceback; or empty texts."""
    try:
        with suppress(_EnoughError):
            run()
    except SystemExit as end:
        what = f": {end.code}" if isinstance(end.code, str) else f" with exit status {end.code}"
        return f"it ended{what}" if end.code else "", ""
    except BaseException as error:
        frame = error.__traceback__
        while frame is not None and not _is_users(frame.tb_frame.f_code.co_filename):
            frame = frame.tb_next
        text = "".join(traceback.format_exception(error.with_traceback(frame))).rstrip()
        return first_line(error), text
    return "", ""


def _is_users(file: str) -> bool:
    return not (file.startswith("<") or file in (__file__, running.__file__, runpy.__file__))


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
