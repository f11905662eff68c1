"""The kernels themselves, run by Triton's interpreter: tests of operations and of training once more.

In a process of their own, because Triton reads `TRITON_INTERPRET` when a kernel is defined.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from amp.kernels.language import INTERPRETED, triton

TESTS = Path(__file__).parents[1]
FILES = {
    "operations": {
        "kernels/test_fp4_tiles.py": 20,
        "kernels/test_fp8_layer.py": 12,
        "kernels/test_merge.py": 25,
        "kernels/test_moments.py": 6,
        "kernels/test_operations.py": 100,
        "kernels/test_quantize.py": 100,
        "kernels/test_special_values.py": 6,
        "kernels/test_split.py": 5,
        "kernels/test_stepping.py": 50,
        "kernels/test_launch_plans.py": 18,
    },
    "training": {"test_bad_steps.py": 8, "test_host_sync.py": 30, "test_moved_memory.py": 25},
    "changes": {"test_changes_between_steps.py": 10},
}
"""The tests that are run again, and how many of each file must pass at least."""
WHOLE = FILES["changes"]
"""The files whose long tests are run here too."""

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


@pytest.mark.slow
@pytest.mark.skipif(triton is None, reason="needs Triton")
@pytest.mark.skipif(INTERPRETED, reason="is the interpreter already")
@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_every_operation_and_a_training_step_in_the_interpreter(files: dict[str, int]) -> None:
    noise = ["invalid value encountered:RuntimeWarning", "Conversion of an array:DeprecationWarning"]
    warnings = [word for message in noise for word in ("-W", f"ignore:{message}")]
    which = [] if files is WHOLE else ["-m", "not slow"]
    run = subprocess.run(
        [*PYTEST, *which, "-rA", *warnings, *(str(TESTS / file) for file in files)],
        env={**os.environ, "TRITON_INTERPRET": "1", "AMP_KERNELS": "triton"},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    passed = Counter(re.findall(r"^PASSED tests/(\S+?)::", run.stdout, re.MULTILINE))
    assert {file: passed[file] for file, least in files.items() if passed[file] < least} == {}
