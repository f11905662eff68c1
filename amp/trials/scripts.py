"""Running an unmodified script in a separate process."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed

import amp
from amp.errors import AmpRuntimeError, AmpValueError
from amp.terminal.progress import Progress
from amp.trials.observing import Record, Trial

_ROOT = Path(amp.__file__).parents[1]


class Script:
    """Makes runs of a script: each starts it anew, watches it, and ends it after enough was seen.

    Args:
        arguments: the arguments of `python`: `script.py ...` or `-m package.module ...`.
        progress: is told of each run and its steps.

    Attributes:
        is_injected: whether it was found not to use amp, so that amp is injected.
        notes: remarks for the user.
        warnings: those of amp in the last run.
        traceback: that of the error which ended the last run, or what it wrote before it ended with an
            exit status; or an empty text.

    Raises:
        AmpValueError: there is no such file.
    """

    def __init__(self, arguments: Sequence[str], progress: Progress | None = None) -> None:
        self.is_injected, self.traceback = False, ""
        self._progress = progress or Progress(is_quiet=True)
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self._arguments = list(arguments)
        path = Path(self._arguments[0])
        if self._arguments[0] != "-m" and not path.exists():
            raise AmpValueError(f"there is no file '{path}'")
        if self._arguments[0] != "-m" and path.is_dir() and not (path / "__main__.py").exists():
            raise AmpValueError(f"'{path}' is a folder without __main__.py: give a script in it")

    def watched_by(
        self, at: Sequence[int] = (1,), level: str | None = None, trial: Trial | None = None
    ) -> tuple[Any, str]:
        """Run the script, and return what was seen and the error in one line, empty if there was none.

        A script that does not use amp is run unchanged. If it is to be compared, or a level is asked
        for, it ends at its first step, and is run again with amp injected.

        Args:
            at: which steps to look at.
            level: replaces the script's own level, unless None.
            trial: a run to compare with others, of its own level, instead of steps to look at.

        Raises:
            AmpRuntimeError: the process ended without a result, or the script trains nothing.
        """
        job = {
            "at": list(at),
            "trial": None if trial is None else asdict(trial),
            "arguments": self._arguments,
            "level": level if trial is None else trial.level,
            "injects": self.is_injected,
        }
        found = self._seen(job)
        needs_amp = job["level"] is not None and not self.is_injected
        if needs_amp and not found["has_begun"] and not found["error"]:
            self.is_injected = job["injects"] = True
            found = self._seen(job)
        self.traceback, self.warnings = found["traceback"], list(dict.fromkeys(found["warnings"]))
        self.notes = list(dict.fromkeys([*self.notes, *found["notes"]]))
        if not found["has_begun"] and found["made"]:  # by a watch
            failed = f" (the script failed: {found['error']})" if found["error"] else ""
            raise AmpRuntimeError(f"nothing was watched: {found['seen'].why_nothing}{failed}")
        if not found["has_begun"] and not found["error"]:
            raise AmpRuntimeError(
                "the script trains nothing: it never called amp.initialize, and stepped no "
                "torch.optim.Optimizer. For steps by hand put one into a block of amp.diagnose(model); "
                "in processes that it starts, use amp.watch()"
            )
        return found["seen"], found["error"]

    def run(self, trial: Trial) -> Record:
        """Make a run to compare with others.

        Raises:
            AmpRuntimeError: the script failed, or trained nothing.
        """
        record: Record
        record, error = self.watched_by(trial=trial)
        if error:
            raise self.failure(error)
        if not record.skipped:
            raise AmpRuntimeError("the script ended before its first optimizer.step()")
        return record

    def failure(self, error: str) -> AmpRuntimeError:
        """Return an error with what the script has raised, and with its traceback as a note."""
        raised = AmpRuntimeError(f"the script failed: {error}")
        if self.traceback:
            raised.add_note(self.traceback)
        return raised

    def _seen(self, job: dict[str, Any]) -> dict[str, Any]:
        name = self._arguments[1] if self._arguments[0] == "-m" else Path(self._arguments[0]).name
        what = "FP64" if (job["trial"] or {}).get("in_float64") else job["level"] or name
        with self._progress.of_run(what) as tell:
            return _seen(job, tell)


def memory_of(path: str) -> tuple[int, float]:
    """Return how many parameters a script trains, and how many numbers its first step keeps at O0.

    Raises:
        AmpRuntimeError: the script failed, or trains nothing.
    """
    record = Script([path]).run(Trial("O0", 1))
    return record.memory["weights"] // 4, record.memory.get("activations", 0) / 4


def _seen(job: dict[str, Any], tell: Callable[[int, int], None]) -> dict[str, Any]:
    """Run a job in a separate process, end all processes that it started, and return its result.

    What it writes goes to files without a name, because a process that it leaves behind would keep a
    pipe open. If this process is killed, the child reads the end of `alive`, and ends too. `tell` is
    called with the number of steps that were made, and with that of all.

    Raises:
        AmpRuntimeError: the process ended without a result.
    """
    seed = None if job["trial"] is None else job["trial"]["seed"]
    with tempfile.TemporaryFile() as result, tempfile.TemporaryFile() as stderr:
        (alive, ours), (steps, theirs) = os.pipe(), os.pipe()
        given = json.dumps(job | {"result": result.fileno(), "alive": alive, "steps": theirs})
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(_ROOT), given],
            env=None if seed is None else {**os.environ, "PYTHONHASHSEED": str(seed % 2**32)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=(result.fileno(), alive, theirs),
            start_new_session=True,  # a process group of its own, without a terminal
        )
        os.close(theirs)
        try:
            try:
                _tell_steps(process, steps, tell)
            except KeyboardInterrupt:  # what was found so far is the result; a second one ends this
                os.killpg(process.pid, signal.SIGINT)
                _tell_steps(process, steps, tell)
            status = process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for each in (alive, ours, steps):
                os.close(each)
        stderr.seek(0)
        wrote = stderr.read().decode(errors="replace").strip()
        if not result.seek(0, os.SEEK_END):
            why = wrote.splitlines()[-1] if wrote else f"exit status {status}"
            raise AmpRuntimeError(f"the script failed: {why}")
        result.seek(0)
        found: dict[str, Any] = torch.load(result, map_location="cpu", weights_only=False)
        if found["error"] and not found["traceback"]:  # as the usage of an argparse
            found["traceback"] = wrote[-_LONGEST:]
    return found


def _tell_steps(process: Any, steps: int, tell: Callable[[int, int], None]) -> None:
    """Pass on how many steps a process has made, and what it tells, until it ends or closes its end."""
    while process.poll() is None:
        if select.select([steps], [], [], 0.2)[0]:
            if not (said := os.read(steps, 4096)):
                break
            lines = said.rpartition(b"\n")[0].decode().splitlines()
            for line in (each for each in lines if each.startswith("#")):
                print(line.removeprefix("# "), file=sys.stderr, flush=True)
            for line in [each for each in lines if not each.startswith("#")][-1:]:
                tell(*map(int, line.split()))


_PATIENCE = timedelta(seconds=60)


def wait_for_ranks() -> None:
    """Wait until all ranks of this job of torchrun have come here, or for a minute."""
    host, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", 0))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not port:
        return  # no other process keeps the store, or nobody knows where it is
    size, run = int(os.environ["WORLD_SIZE"]), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    with contextlib.suppress(RuntimeError, ValueError):  # a rank is gone, or the store is
        distributed: Any = torch.distributed  # without a store where torch was built without it
        store = distributed.TCPStore(host, port, is_master=False, timeout=_PATIENCE)
        if store.add(f"reamp/{run}/ranks", 1) == size:
            store.set(f"reamp/{run}/done", "")
        store.wait([f"reamp/{run}/done"], _PATIENCE)


_LONGEST = 2000
"""How many characters of a script's stderr are shown."""
_START = """import sys
sys.path.insert(0, sys.argv[1])
from amp.trials.script_process import main
sys.path.append(sys.path.pop(0))
main(sys.argv[2])
"""
"""The child's code. It sets `sys.path`, since other programs would read an environment variable too.
The root is first for this import, since there may be an `amp.py` beside the script."""
