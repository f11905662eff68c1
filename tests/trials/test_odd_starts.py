"""`reamp doctor` where it is started in an odd way, or the script does something odd."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from amp.cli import main
from tests.processes import ROOT

pytestmark = pytest.mark.slow
TRAIN = """
import os, sys, threading, time
import torch
import amp

def main(factor=1.0, steps=8, pause=0.0):
    torch.manual_seed(0)
    m = torch.nn.Linear(6, 3)
    o = torch.optim.SGD(m.parameters(), lr=0.1)
    m, o = amp.initialize(m, o, opt_level="O2", verbosity=0)
    for i in range(steps):
        with amp.scale_loss(m(torch.ones(4, 6) * factor).float().pow(2).mean(), o) as s:
            s.backward()
        o.step()
        o.zero_grad()
        time.sleep(pause)
"""
WITHOUT_AMP = """
import sys
import torch

m = torch.nn.Linear(6, 3)
o = torch.optim.SGD(m.parameters(), lr=0.1)
for i in range(6):
    m(torch.ones(4, 6)).mean().backward()
    o.step()
"""
WHATS = {
    "as usual": "main()",
    "in a thread": "t = threading.Thread(target=main, args=[1.0, 10**9]); t.start(); t.join()",
    "forks": "if os.fork() == 0:\n    main()\n    os._exit(0)\nos.wait()\nmain()",
}


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def doctor(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "import amp.cli; raise SystemExit(amp.cli.main())", *arguments]


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300
    )


Run = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def run_here(tmp_path: Path, capsys: pytest.CaptureFixture[str], scripts_in_forks: None) -> Run:
    """Let a doctor in this process look at a script, and return its status and what it says."""

    def run(text: str) -> tuple[int, str, str]:
        (tmp_path / "train.py").write_text(text)
        status = main(["doctor", str(tmp_path / "train.py")])
        said, error = capsys.readouterr()
        return status, said, error

    return run


@pytest.mark.parametrize("what", WHATS)
def test_what_a_script_does_is_reported(run_here: Run, what: str) -> None:
    status, said, error = run_here(f"{TRAIN}\n{WHATS[what]}\n")
    assert status == 0, error
    assert "healthy: nothing found" in said


def test_a_script_that_fails_after_its_steps_keeps_its_report(run_here: Run) -> None:
    status, said, error = run_here(f"{WITHOUT_AMP}\nsys.exit(3)\n")
    assert status == 1, error
    assert "6 steps; training ended before step 20\nhealthy: nothing found" in said
    assert "the script failed: " in said


def test_training_in_a_process_that_the_script_forks_is_said_to_be_unseen(run_here: Run) -> None:
    text = "import multiprocessing as mp\np = mp.get_context('fork').Process(target=main)\n"
    status, _, error = run_here(f"{TRAIN}\n{text}p.start()\np.join()\n")
    assert status == 2
    assert "in processes that it starts, use amp.watch()" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("closed", ["<&-", "<&- >&- 2>&-"])
def test_closed_streams(tmp_path: Path, closed: str) -> None:
    (tmp_path / "train.py").write_text(f"{TRAIN}\nmain()\n")
    line = f'"$0" -m amp doctor train.py {closed}'
    found = run(["bash", "-c", line, sys.executable], tmp_path)
    assert found.returncode == 0, found.stderr
    assert ("healthy: nothing found" in found.stdout) == (closed == "<&-")


def test_a_file_with_the_librarys_name_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "amp.py").write_text("raise RuntimeError('the wrong file')\n")
    (tmp_path / "train.py").write_text(f"{TRAIN}\nmain()\n")
    command = [sys.executable, "-P", "-c", "import amp.cli; raise SystemExit(amp.cli.main())"]
    found = run([*command, "doctor", "train.py"], tmp_path)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("steps", ["0", "-1", "99999999999999999999"])
def test_steps_out_of_range(tmp_path: Path, steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(f"{TRAIN}\nmain()\n")
    assert main(["doctor", str(tmp_path / "train.py"), "--at", steps]) == 2
    assert f"--at {steps} must be numbers of steps, from 1 on" in capsys.readouterr().err


def test_ctrl_c_prints_what_was_found_so_far(tmp_path: Path) -> None:
    train = TRAIN.replace(
        "time.sleep(pause)", "i == 5 and open('stepped', 'w').close(); time.sleep(pause)"
    )
    (tmp_path / "train.py").write_text(f"{train}\nmain(float('inf'), 10**9, 0.5)\n")
    with subprocess.Popen(
        doctor("doctor", "train.py", "--at", "1,4,1000"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in background jobs
    ) as process:
        while not (tmp_path / "stepped").exists() and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        said, error = process.communicate(timeout=120)
    assert "argument 'input' is not finite" in said, error
    assert "the script failed: KeyboardInterrupt" in said


def test_all_ranks_of_torchrun_print_before_one_ends_the_others(tmp_path: Path) -> None:
    late = "time.sleep(10 * (os.environ['RANK'] == '1'))"
    (tmp_path / "train.py").write_text(f"{TRAIN}\n{late}\nmain(float('inf'))\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "amp", "doctor", "train.py"]
    found = run(command, tmp_path)
    assert found.returncode == 1
    assert found.stdout.count("argument 'input' is not finite") == 2
