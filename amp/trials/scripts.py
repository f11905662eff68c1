"""A script that nobody has edited, run at a level in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

import amp
from amp.errors import AmpRuntimeError, AmpValueError
from amp.trials.observing import Record, Trial

_ROOT = Path(amp.__file__).parents[1]


class Script:
    """Makes runs of a script: it is started anew, and ended after enough steps.

    Args:
        arguments: what `python` would be given: `script.py ...` or `-m package.module ...`.

    Raises:
        AmpValueError: there is no such file.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = list(arguments)
        if self._arguments[0] != "-m" and not Path(self._arguments[0]).exists():
            raise AmpValueError(f"there is no file '{self._arguments[0]}'")

    def __call__(self, trial: Trial) -> Record:
        """Make a run.

        Raises:
            AmpRuntimeError: the script failed, or trained nothing.
        """
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder, "record.pt")
            job = {
                "arguments": self._arguments,
                "trial": dataclasses.asdict(trial),
                "result": str(result),
            }
            ended = subprocess.run(
                [sys.executable, "-m", "amp.trials.child", json.dumps(job)],
                env=_environment(trial.seed),
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
        record = Record(**found["record"])
        if found["error"]:
            raise AmpRuntimeError(f"the script failed: {found['error']}")
        if not found["has_begun"]:
            raise AmpRuntimeError(
                "the script never called amp.initialize on an optimizer, or passed enabled=False"
            )
        if not record.skipped:
            raise AmpRuntimeError("the script ended before its first optimizer.step()")
        return record


def _environment(seed: int) -> dict[str, str]:
    """Return an environment in which this library is found, and sets have the same order each time."""
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(_ROOT)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": str(seed % 2**32)}
