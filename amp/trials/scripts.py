"""A script that nobody has edited, run in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder, "seen.pt")
            job = {
                "arguments": self._arguments,
                "watcher": watcher,
                "options": options,
                "level": level,
                "seed": seed,
                "result": str(result),
            }
            ended = subprocess.run(
                [sys.executable, "-m", "amp.trials.child", json.dumps(job)],
                env=_environment(seed),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
            if not result.exists():
                lines = ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"]
                raise AmpRuntimeError(f"the script failed: {lines[-1]}")
            found = torch.load(result, map_location="cpu", weights_only=True)
        if not found["has_begun"] and not found["error"]:
            raise AmpRuntimeError(
                "the script never called amp.initialize on an optimizer, or passed enabled=False"
            )
        return found["seen"], found["error"]


def _environment(seed: int | None) -> dict[str, str]:
    """Return an environment in which this library is found, and sets have the same order each time."""
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(_ROOT)]
    hashes = {} if seed is None else {"PYTHONHASHSEED": str(seed % 2**32)}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **hashes}
