"""The self-test, the tests and the rows in 12 minutes, for a GPU that is at hand for a short time.

    python docs/benchmarks/first_gpu.py --out outputs/first-gpu      # what `make first-gpu` runs

The parts run in the order of their worth. Each is a process that is killed when its time is over, so
that the next ones get theirs. A file has what it prints as soon as it is printed, and summary.md says
after each part how it has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Part(NamedTuple):
    """A command.

    Attributes:
        name: of its file.
        seconds: how long it may take; what earlier parts have left is added.
        command: a target of the Makefile, or the arguments of Python.
    """

    name: str
    seconds: float
    command: str


PARTS = (
    Part("selftest", 100, "-m amp selftest --device cuda"),
    Part("tests-kernels", 180, "make test-gpu-kernels"),
    Part("tests-training", 60, "make test-gpu-training"),
    Part("tests-ops", 60, "make test-gpu-ops"),
    Part("step", 130, "docs/benchmarks/bench_step.py --device cuda"),
    Part("fp8", 120, "docs/benchmarks/bench_fp8.py --device cuda"),
    Part("kernels", 70, "docs/benchmarks/bench_kernels.py --device cuda"),
)


def words_of(part: Part, out: Path, rehearses: bool) -> list[str]:
    """Return the command line of a part; a rehearsal measures the CPU, and collects tests alone."""
    words = shlex.split(part.command)
    if words[0] == "make":
        printed = subprocess.run(
            [*words, "-n", "--no-print-directory", f"PYTHON={sys.executable}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        found = shlex.split(printed.stdout)
        words = found[found.index(sys.executable) + 1 :]
        words += ["-p", "tests.claimed_gpu", "--collect-only", "-q", "-n", "0"] if rehearses else []
    elif rehearses:
        words[words.index("cuda")] = "cpu"
    if "bench_" in part.command:
        words += ["--out", str(out)]
    return [sys.executable, *words]


def run(words: Sequence[str], file: Path, seconds: float) -> str:
    """Run a command, with its output in a file, and return how it has ended."""
    with file.open("w") as output:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its own processes end with it
        )
        try:
            status = process.wait(max(seconds, 1.0))
            return "ended" if status == 0 else f"failed with exit status {status}"
        except subprocess.TimeoutExpired:
            return "cut"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    """Run the parts, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "first-gpu", help="a folder")
    parser.add_argument("--minutes", type=float, default=12.0, help="how long all of it may take")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU; tests are only collected")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    share = options.minutes * 60 / sum(part.seconds for part in PARTS)
    end = time.monotonic() + options.minutes * 60
    with (out / "summary.md").open("w", buffering=1) as summary:
        header = "| part | how it ended | seconds | lines | the last one |"
        summary.write(f"{header}\n| --- | --- | --- | --- | --- |\n")
        for i, part in enumerate(PARTS):
            start = time.monotonic()
            later = share * sum(other.seconds for other in PARTS[i + 1 :])
            file = out / f"{part.name}.txt"
            how = run(words_of(part, out, options.rehearse), file, end - start - later)
            lines = file.read_text(errors="replace").splitlines() or [""]
            last = lines[-1].replace("|", "/").strip()[:100]
            seconds = time.monotonic() - start
            row = f"| {part.name} | {how} | {seconds:.0f} | {len(lines)} | {last} |"
            summary.write(row + "\n")
            print(row, flush=True)


if __name__ == "__main__":
    main()
