"""Runs checks in separate processes, each under its time limit."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

from amp.kernels.language import INTERPRETED
from amp.selftest.check_registry import Check

STARTING, ENDING = 120.0, 10.0
"""How many seconds a process may take before its first check, to import torch, and to end."""


def results(
    checks: Sequence[Check], device: str, child: str = "amp.selftest.check_process"
) -> Iterator[dict[str, Any]]:
    """Yield the result of each check as soon as it is known.

    The next check gets a new process after a failure, which may leave the device unusable for its
    process, after a check that has taken too long, and when a process has ended.

    Args:
        checks: the checks.
        device: the device to check.
        child: the module that a process runs.

    Yields:
        `name`, `status` (PASS, FAIL or SKIP), `text`, `bits` (a hash, or an empty text), `seconds`.
    """
    left = list(checks)
    while left:
        for result in _of_one_process(list(left), device, child):
            left.pop(0)
            yield result
            if result["status"] == "FAIL":
                break


def _of_one_process(checks: Sequence[Check], device: str, child: str) -> Iterator[dict[str, Any]]:
    names = json.dumps([each.name for each in checks])
    command = [sys.executable, "-m", child, device, names]
    # Whoever asks for Triton's interpreter here wants its kernels checked.
    variables = {"AMP_KERNELS": "triton"} if INTERPRETED and device == "cpu" else {}
    process = subprocess.Popen(  # no `with`, which would wait for a process that is stuck in a driver
        command,
        env={**variables, **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    assert process.stderr is not None
    lines, errors = _Lines(process.stdout), _Lines(process.stderr)
    try:
        for i, each in enumerate(checks):
            before, limit = time.perf_counter(), each.seconds + (0 if i else STARTING)
            result: dict[str, Any] = {"name": each.name, "status": "FAIL", "bits": ""}
            try:
                line = lines.queue.get(timeout=limit)
            except queue.Empty:
                result["text"] = f"it took longer than {each.seconds:.0f} s"
            else:
                if line is not None:
                    yield json.loads(line)
                    continue
                result["text"] = f"its process ended with exit status {process.wait()}: {errors.last()}"
            yield {**result, "seconds": time.perf_counter() - before}
            return
    finally:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING)
        lines.join(1.0)
        errors.join(1.0)


class _Lines(threading.Thread):
    """Reads a stream of a process, so that the process never waits for a reader.

    Attributes:
        queue: has the lines of the stream, and None at its end.
    """

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(daemon=True)
        self.queue: queue.Queue[str | None] = queue.Queue()
        self._stream = stream
        self.start()

    def run(self) -> None:
        """Read to the end."""
        with self._stream as stream:
            for line in stream:
                self.queue.put(line)
        self.queue.put(None)

    def last(self) -> str:
        """Return the last line, without waiting for another process that keeps the stream open."""
        self.join(ENDING)
        lines = [line.strip() for line in list(self.queue.queue) if line and line.strip()]
        return lines[-1] if lines else "without a word"
