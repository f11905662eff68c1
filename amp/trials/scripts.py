"""Running an unmodified script in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import amp
from amp.errors import AmpRuntimeError, AmpValueError
from amp.trials.injecting import AS_IS

_ROOT = Path(amp.__file__).parents[1]


class Script:
    """Makes runs of a script: each starts it anew, watches it, and ends it after enough was seen.

    Args:
        arguments: the arguments of `python`: `script.py ...` or `-m package.module ...`.

    Attributes:
        is_injected: whether it was found not to use amp, so that amp is injected.
        notes: remarks for the user.

    Raises:
        AmpValueError: there is no such file.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.is_injected = False
        self.notes: list[str] = []
        self._arguments = list(arguments)
        if self._arguments[0] != "-m" and not Path(self._arguments[0]).exists():
            raise AmpValueError(f"there is no file '{self._arguments[0]}'")

    def watched_by(
        self, watcher: str, options: dict[str, Any], level: str | None = None, seed: int | None = None
    ) -> tuple[Any, str]:
        """Run the script, and return what was seen and the error in one line, empty if there was none.

        A script that does not use amp ends at its first step, and is run again with amp injected; the
        doctor without a level looks at it as it is.

        Args:
            watcher: a name in `amp.trials.child.WATCHERS`.
            options: the watcher's arguments, plain values.
            level: replaces the script's own level, unless None.
            seed: the seed of all random number generators; None does not seed them.

        Raises:
            AmpRuntimeError: the process ended without a result, or the script trains nothing.
        """
        needs_amp = watcher != "doctor" or level is not None
        job: dict[str, Any] = {
            "watcher": watcher,
            "options": options,
            "level": level,
            "seed": seed,
            "scale": None,
        }
        job |= {"arguments": self._arguments, "injects": self.is_injected, "needs_amp": needs_amp}
        found = _seen(job)
        if needs_amp and not found["has_begun"] and not found["error"] and not self.is_injected:
            self.is_injected = job["injects"] = True
            found = _seen(job)
        if found["scale"] is not None and level == AS_IS:
            found = _seen(job | {"scale": found["scale"]})
        self.notes = list(dict.fromkeys([*self.notes, *found["notes"]]))
        if not found["has_begun"] and not found["error"]:
            raise AmpRuntimeError(
                "the script trains nothing: it never called amp.initialize, and stepped no optimizer. "
                "In processes that it starts, use amp.watch()"
            )
        return found["seen"], found["error"]


def _seen(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job, and return what was seen.

    Raises:
        AmpRuntimeError: the process ended without a result.
    """
    with _signals_clean_up(), tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "seen.pt")
        status, error = _run(job | {"result": str(result)}, job["seed"], Path(folder))
        if not result.exists():
            lines = error.strip().splitlines() or [f"exit status {status}"]
            raise AmpRuntimeError(f"the script failed: {lines[-1]}")
        found: dict[str, Any] = torch.load(result, map_location="cpu", weights_only=True)
    return found


def _run(job: dict[str, Any], seed: int | None, folder: Path) -> tuple[int, str]:
    """Run a job, and end all processes that it started; return its exit status and stderr.

    Its stderr goes to a file, because a process that it leaves behind would keep a pipe open.
    """
    stderr = folder / "stderr"
    with stderr.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(_ROOT), json.dumps(job)],
            env=None if seed is None else {**os.environ, "PYTHONHASHSEED": str(seed % 2**32)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,  # a process group of its own, without a terminal
        )
        try:
            status = process.wait()
        finally:
            _kill(process)
    return status, stderr.read_text(errors="replace")


_START = """import sys
sys.path.append(sys.argv[1])
from amp.trials.child import main
main(sys.argv[2])
"""
"""The child's code. It sets `sys.path`, since other programs would read an environment variable too."""


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, and the rest of its process group."""
    with contextlib.suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


class _EndedError(BaseException):
    """Raised for a signal that would have ended this process at once."""


@contextlib.contextmanager
def _signals_clean_up() -> Iterator[None]:
    """Run the cleanup of the block if a signal ends this process."""
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    ours = [each for each in map(signal.Signals.__getitem__, names) if _ends_at_once(each)]

    def end(number: int, frame: object) -> None:
        for each in ours:
            signal.signal(each, signal.SIG_IGN)  # ignore further signals during the cleanup
        raise _EndedError(number)

    for each in ours:
        signal.signal(each, end)
    try:
        yield
    except _EndedError as ended:
        (number,) = ended.args
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    finally:
        for each in ours:
            signal.signal(each, signal.SIG_DFL)


def _ends_at_once(number: signal.Signals) -> bool:
    in_main = threading.current_thread() is threading.main_thread()  # only it may set handlers
    return in_main and signal.getsignal(number) is signal.SIG_DFL
