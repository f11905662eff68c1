"""The commands that run a script in a process of its own leave none behind, and no file."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from amp.trials import scripts
from tests.processes import ROOT, run_python

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")

SCRIPT = """
import json, os, subprocess, sys, time
from pathlib import Path
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
Path("seen.json").write_text(json.dumps({
    "pids": [os.getpid(), started.pid],
    "environment": dict(os.environ),
}))
"""
"""Says what there is, and leaves a process behind that holds its stdout and stderr."""


def seen(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "seen.json").read_text())
    return found


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "XZ"


def run(folder: Path, end: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command on the script and its end, and check that nothing is left."""
    (folder / "temporary").mkdir()
    (folder / "train.py").write_text(SCRIPT + end)
    # A shell starts what is to run in the background with SIGINT ignored.
    there = "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    there += f"; os.chdir({str(folder)!r})"
    begin = f"{there}; from amp.cli import main; sys.exit(main(sys.argv[1:]))"
    start = time.monotonic()
    ended = run_python("-c", begin, *command, TMPDIR=str(folder / "temporary"))
    assert time.monotonic() - start < 30, "it has waited for a process of the script"
    pids = seen(folder)["pids"]
    assert isinstance(pids, list)
    while any(map(is_running, pids)):  # killed ones take a moment
        assert time.monotonic() - start < 30, "a process of the script is left"
        time.sleep(0.01)
    assert list((folder / "temporary").iterdir()) == []
    return ended


def test_what_the_process_of_a_script_tells_is_shown_beside_its_steps(capsys: Any) -> None:
    told: list[tuple[int, ...]] = []
    reading, writing = os.pipe()
    os.write(writing, b"# 3 watched steps\n1 20\n2 20\n# it is slow\n3 20\n")
    os.close(writing)
    with subprocess.Popen(["sleep", "60"]) as process:
        scripts._tell_steps(process, reading, lambda *at: told.append(at))
        process.kill()
    os.close(reading)
    assert capsys.readouterr().err == "3 watched steps\nit is slow\n"
    assert told == [(3, 20)]


def test_a_command_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    end = "os.kill(os.getppid(), 15); time.sleep(100)"
    assert run(tmp_path, end, "compare", "train.py", "--steps", "1").returncode == -15
    found = seen(tmp_path)
    # Nothing that was not there before: other programs take code from such variables.
    given = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "temporary")}
    environment = found["environment"]
    assert isinstance(environment, dict)
    assert {k: v for k, v in environment.items() if given.get(k) != v} == {"PYTHONHASHSEED": "0"}


@pytest.mark.slow
def test_a_command_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    end = "os.kill(os.getppid(), 2); time.sleep(100)"
    assert "KeyboardInterrupt" in run(tmp_path, end, "doctor", "train.py").stderr


@pytest.mark.slow
def test_a_script_that_leaves_a_process_behind_ends(tmp_path: Path) -> None:
    ended = run(tmp_path, "raise ValueError('no data')", "doctor", "train.py")
    assert ended.returncode == 2
    first, *_, last = ended.stderr.splitlines()  # its own traceback, and one line
    assert first == "Traceback (most recent call last):"
    assert f'File "{tmp_path / "train.py"}", line ' in ended.stderr.splitlines()[1]
    assert last == "reamp: the script failed: ValueError: no data"
