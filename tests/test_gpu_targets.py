"""The targets for a GPU collect their tests on a machine that has little else than torch and pytest."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TARGETS = {"test-gpu-kernels": 400, "test-gpu-training": 40, "test-gpu-ops": 800}
"""How many tests each must have at least."""


def command_of(target: str) -> list[str]:
    """Return the words of the one command of a target, after `pytest`."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "-n", "--no-print-directory", target]
    printed = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True, check=True)
    words = shlex.split(printed.stdout)
    return words[words.index("pytest") + 1 :]


@pytest.mark.slow
def test_all_tests_of_the_targets_are_collected() -> None:
    """By one command for all of them, whose options are the same."""
    files = {x: [word for word in command_of(x) if word.endswith(".py")] for x in TARGETS}
    options = [word for word in command_of("test-gpu-training") if not word.endswith(".py")]
    command = [sys.executable, "-m", "pytest", "-p", "tests.claimed_gpu", "--collect-only", "-q"]
    command += [*options, *(file for each in files.values() for file in each)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    collected = [line.partition("::")[0] for line in done.stdout.splitlines()]
    for target, least in TARGETS.items():
        assert sum(file in files[target] for file in collected) >= least, target


def test_every_file_with_tests_for_a_gpu_is_in_a_target() -> None:
    """Those of several ranks want a GPU for each."""
    named = {word for target in TARGETS for word in command_of(target) if word.endswith(".py")}
    mark = re.compile(r"mark\.gpu|mark\.triton|on_gpu\(|\bDEVICES\b|kernels\.conftest")
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    files = {name for name in files if not name.startswith("tests/distributed/")}
    have = {name for name in files if mark.search((ROOT / name).read_text())}
    assert have - {"tests/test_gpu_targets.py"} <= named


def test_what_is_skipped_is_no_success(tmp_path: Path) -> None:
    """As without compute-sanitizer."""
    script = ["bash", str(ROOT / "tests/sanitize.sh"), sys.executable]
    empty = {"PATH": str(tmp_path)}
    done = subprocess.run(
        ["/bin/bash", *script[1:]], env=empty, capture_output=True, text=True, check=False
    )
    assert done.returncode == 77
    assert "skipped" in done.stdout
