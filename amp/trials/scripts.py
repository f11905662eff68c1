"""A script that nobody has edited, run in a process of its own."""

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

_ROOT = Path(amp.__file__).parents[1]


class Script:
    """Makes runs of a script: it is started anew, watched, and ended when enough was seen.

    Args:
        arguments: what `python` would be given: `script.py ...` or `-m package.module ...`.

    Raises:
        AmpValueError: there is no such file.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = list(arguments)
        if self._arguments[0] != "-m" and not Path(self._arguments[0]).exists():
            raise AmpValueError(f"there is no file '{self._arguments[0]}'")

    def watched_by(
        self, watcher: str, options: dict[str, Any], level: str | None = None, seed: int | None = None
    ) -> tuple[Any, str]:
        """Run it, and return what was seen, and how it failed, in a line; nothing if it did not.

        Args:
            watcher: a name in `amp.trials.child.WATCHERS`.
            options: what that is made of, plain values.
            level: in place of the script's own, unless None.
            seed: of all random numbers, unless None.

        Raises:
            AmpRuntimeError: it came to no end, or passed nothing to `initialize`.
        """
        with _signals_clean_up(), tempfile.TemporaryDirectory() as folder:
            result = Path(folder, "seen.pt")
            job = {
                "arguments": self._arguments,
                "watcher": watcher,
                "options": options,
                "level": level,
                "seed": seed,
                "result": str(result),
            }
            status, error = _run(job, seed, Path(folder))
            if not result.exists():
                lines = error.strip().splitlines() or [f"exit status {status}"]
                raise AmpRuntimeError(f"the script failed: {lines[-1]}")
            found = torch.load(result, map_location="cpu", weights_only=True)
        if not found["has_begun"] and not found["error"]:
            raise AmpRuntimeError(
                "the script never called amp.initialize on an optimizer, or passed enabled=False"
            )
        return found["seen"], found["error"]


def _run(job: dict[str, Any], seed: int | None, folder: Path) -> tuple[int, str]:
    """Run a job to its end, with all the processes that it starts; return its exit status and stderr.

    What the script prints goes to a file: a process that it leaves behind would keep a pipe open.
    """
    stderr = folder / "stderr"
    with stderr.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(_ROOT), json.dumps(job)],
            env=None if seed is None else {**os.environ, "PYTHONHASHSEED": str(seed % 2**32)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,  # so that it is the first of a group, and asks no terminal
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
"""What finds this library without a word in the environment, which other programs would read too."""


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process, and what is left of its group."""
    with contextlib.suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


class _EndedError(BaseException):
    """A signal that would have ended this process at once."""


@contextlib.contextmanager
def _signals_clean_up() -> Iterator[None]:
    """Let what is inside clean up when a signal ends this process."""
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    ours = [each for each in map(signal.Signals.__getitem__, names) if _ends_at_once(each)]

    def end(number: int, frame: object) -> None:
        for each in ours:
            signal.signal(each, signal.SIG_IGN)  # one is enough
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
    in_main = threading.current_thread() is threading.main_thread()  # others may not set handlers
    return in_main and signal.getsignal(number) is signal.SIG_DFL
