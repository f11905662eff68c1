"""The kernels themselves, run by Triton's interpreter: tests of operations and of training once more.

In a process of their own, because Triton reads `TRITON_INTERPRET` when a kernel is defined.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from amp.kernels.language import INTERPRETED, triton

TESTS = Path(__file__).parent


@pytest.mark.skipif(triton is None, reason="needs Triton")
@pytest.mark.skipif(INTERPRETED, reason="is the interpreter already")
def test_every_operation_and_a_training_step_in_the_interpreter() -> None:
    files = [
        *(TESTS / f"test_{name}.py" for name in ("operations", "split", "tables", "stepping")),
        TESTS.parent / "test_changes_between_steps.py",
        TESTS.parent / "test_host_sync.py",
    ]
    options = ["-q", "-p", "no:cacheprovider", "-m"]
    noise = ["invalid value encountered:RuntimeWarning", "Conversion of an array:DeprecationWarning"]
    warnings = [word for message in noise for word in ("-W", f"ignore:{message}")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "not gpu", *warnings, *map(str, files)],
        env={**os.environ, "TRITON_INTERPRET": "1", "AMP_KERNELS": "triton"},
        cwd=TESTS.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) > 200
