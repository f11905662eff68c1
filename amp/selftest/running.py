"""Runs checks in processes of their own, each under its time limit."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

from amp.selftest.checks import Check

STARTING = 120.0
"""How many seconds a process may take before its first check, to import torch."""


def results(
    checks: Sequence[Check], device: str, child: str = "amp.selftest.child"
) -> Iterator[dict[str, Any]]:
    """Yield what each check finds, as soon as it does.

    A failure may leave a device unusable for its process, so the next check gets another one. So it
    does after a check that has taken too long, or whose process has ended.

    Args:
        checks: the checks.
        device: the device to check.
        child: the module that a process runs.

    Yields:
        `name`, `status` (PASS, FAIL or SKIP), `text`, `bits` (a hash, or an empty text), `seconds`.
    """
    left = list(checks)
    while left:
        for result in _of_one_process(left, device, child):
            left.pop(0)
            yield result
            if result["status"] == "FAIL":
                break


def _of_one_process(checks: Sequence[Check], device: str, child: str) -> Iterator[dict[str, Any]]:
    names = json.dumps([each.name for each in checks])
    command = [sys.executable, "-m", child, device, names]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines, errors = _queue_of(process.stdout), _queue_of(process.stderr)
    try:
        for i, each in enumerate(checks):
            before, limit = time.perf_counter(), each.seconds + (0 if i else STARTING)
            result: dict[str, Any] = {"name": each.name, "status": "FAIL", "bits": ""}
            try:
                line = lines.get(timeout=limit)
            except queue.Empty:
                result["text"] = f"it took longer than {each.seconds:.0f} s"
            else:
                if line is not None:
                    yield json.loads(line)
                    continue
                said = [text for text in iter(lambda: errors.get(timeout=10), None) if text.strip()]
                last = said[-1].strip() if said else "without a word"
                result["text"] = f"its process ended with exit status {process.wait()}: {last}"
            yield {**result, "seconds": time.perf_counter() - before}
            return
    finally:
        process.kill()
        process.wait()


def _queue_of(stream: IO[str] | None) -> queue.Queue[str | None]:
    """Return a queue of the lines of a stream, and of None at its end."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in stream or ():
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines
