"""The command `reamp selftest`."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections import Counter
from typing import Any

import torch

from amp.arguments import check_environment
from amp.errors import AmpValueError
from amp.selftest.check_registry import all_checks
from amp.selftest.running import results
from amp.terminal.command import Answer, argument, command
from amp.terminal.text import Printer

_OF_DIGEST = ("kernels:", "training:", "fp8:")
"""The sections whose bits go into the digest."""
_WIDTH = 80


@command(
    "selftest",
    argument("--device", "such as cuda:1 or cpu; by default the first GPU, if there is one"),
    argument("--full", "run the checks too that take much memory", action="store_true"),
)
def _selftest(arguments: argparse.Namespace, printer: Printer) -> Answer:
    """Check that this machine computes what it should.

    reamp selftest
    reamp selftest --device cpu --json
    TRITON_INTERPRET=1 reamp selftest --device cpu  # Triton's kernels: minutes
    """
    from amp.about import environment

    check_environment()
    device = _chosen(arguments.device)
    checks = [each for each in all_checks().values() if arguments.full or not each.is_full]
    before = time.perf_counter()
    found: list[dict[str, Any]] = []
    printer.line(f"reamp selftest on {device}: {len(checks)} checks. Please send us all of this.")
    printer.line()
    for result in results(checks, device):
        found.append(result)
        _print(printer, result)
    about = environment()
    counts, seconds = Counter(result["status"] for result in found), time.perf_counter() - before
    summary = (
        f"{counts['PASS']} passed, {counts['FAIL']} failed, {counts['SKIP']} skipped in "
        f"{seconds:.0f} s on {_name_of(device, about)}, torch {torch.__version__}"
    )
    printer.line()
    for name, value in about.items():
        printer.line(f"{name}: {value if isinstance(value, str | int | None) else json.dumps(value)}")
    digest = _digest(found)
    printer.line(f"digest: {digest}")
    printer.line(summary)
    report = {"device": device, "environment": about, "checks": found}
    return Answer({**report, "digest": digest, "summary": summary}, not counts["FAIL"])


def _chosen(named: str | None) -> str:
    """Return the device to check.

    Raises:
        AmpValueError: there is no such device, or it is neither a CUDA or ROCm GPU nor the CPU.
    """
    count = torch.cuda.device_count()
    there = [*(f"cuda:{i}" for i in range(count)), "cpu"]
    if named is None:
        return there[0]
    device = "cuda:0" if named == "cuda" else named
    if device not in there:
        raise AmpValueError(f"--device {named} is none of those to check: {', '.join(there)}")
    return device


def _print(printer: Printer, result: dict[str, Any]) -> None:
    status, text = result["status"], result["text"]
    line = f"{status}  {result['name']}"
    if text and len(line) + len(text) + 2 <= _WIDTH:
        line, text = f"{line}  {text}", ""
    printer.line(printer.alarm(line) if status == "FAIL" else line)
    while text:
        part = text[: _WIDTH - 6]
        if len(text) > len(part) and " " in part:
            part = part.rpartition(" ")[0]
        printer.line(f"      {part}")
        text = text[len(part) :].strip()


def _digest(found: list[dict[str, Any]]) -> str:
    """Return a hash of all bits of kernels, training and FP8, as 16 digits."""
    bits = [result["bits"] for result in found if result["name"].startswith(_OF_DIGEST)]
    return hashlib.sha256("".join(bits).encode()).hexdigest()[:16]


def _name_of(device: str, about: dict[str, Any]) -> str:
    """Return the name of a GPU or, for other devices, of the CPU."""
    names = {row["device"]: row["name"] for row in about["devices"]}
    return str(names.get(device, about["cpu"]))


COMMANDS = (_selftest,)
"""The commands of this module."""
