"""The commands `python -m amp compare` and `doctor`, which run a script, and `explain`."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

from amp.casting.policy import explain
from amp.diagnosis.findings import CAUSES
from amp.errors import AmpRuntimeError, AmpValueError
from amp.profiles.levels import load_profile
from amp.terminal.command import Answer, argument, command
from amp.terminal.output_files import check_output
from amp.terminal.progress import Progress
from amp.terminal.text import Printer
from amp.trials.comparing import LEVELS, check_request, compare_runs
from amp.trials.scripts import Script, wait_for_ranks

_SCRIPT = (
    argument("script", "a script that trains, with amp or without it", nargs="?"),
    argument("-m", "instead of a script, a module, as in python -m MODULE", dest="module"),
)


def _script_of(arguments: argparse.Namespace) -> list[str]:
    if (arguments.script is None) == (arguments.module is None):
        raise AmpValueError("give one script.py, or -m package.module; its arguments come after --")
    what = [arguments.script] if arguments.script else ["-m", arguments.module]
    return [*what, *arguments.for_the_script]


@command(
    "compare",
    *_SCRIPT,
    argument("--levels", f"({','.join(LEVELS)})", default=",".join(LEVELS)),
    argument("--steps", "optimizer steps of each run (25)", type=int, default=25),
    argument("--seed", "the seed of all random numbers (0)", type=int, default=0),
    argument("--out", "write a page with the curves and a heat map", metavar="FILE"),
    takes_a_script=True,
)
def _compare(arguments: argparse.Namespace, printer: Printer) -> Answer:
    """Train a script at several levels, and say which match FP32.

    reamp compare train.py
    reamp compare train.py --levels O2,O5 --out compare.html -- --epochs 1
    reamp compare -m package.train --json

    exit status: 0 all levels are healthy, 1 one is not, 2 an error
    """
    what = _script_of(arguments)
    levels = [level.strip() for level in arguments.levels.split(",") if level.strip()]
    # before minutes are spent
    check_request(levels, arguments.steps, arguments.seed)
    if arguments.out:
        check_output(Path(arguments.out))
    script = Script(what, progress := Progress(arguments.json))
    found = compare_runs(script.run, levels, arguments.steps, arguments.seed, progress.note)
    found = replace(found, notes=(*found.notes, *script.notes))
    found.print_to(printer)
    if arguments.out:
        found.write_html(arguments.out)
        printer.line(f"wrote {arguments.out}: open it in a browser")
    return Answer(found.to_json(), found.is_healthy)


def _look_of(line: str) -> str:
    """Return how a line of a report looks: one that begins with a cause stands out."""
    cause = re.sub(r"^rank \d+: ", "", line).partition(":")[0]
    return "cause" if cause in CAUSES else "good" if line.startswith("healthy: ") else "plain"


@command(
    "doctor",
    *_SCRIPT,
    argument("--opt-level", "a level, instead of the script's own precision"),
    argument("--level", argparse.SUPPRESS, dest="opt_level"),  # its name once
    argument("--at", "optimizer steps to look at (1,4,20)", default="1,4,20"),
    takes_a_script=True,
)
def _doctor(arguments: argparse.Namespace, printer: Printer) -> Answer:
    """Find what precision does wrong in the first steps of a script.

    reamp doctor train.py
    reamp doctor train.py --at 1,100
    reamp doctor train.py --opt-level O2 --at 1,2,3 -- --epochs 1
    reamp doctor -m package.train --json

    exit status: 0 healthy, 1 something was found or the script failed, 2 an error
    """
    what = _script_of(arguments)
    if arguments.opt_level is not None:
        load_profile(arguments.opt_level)
    given = [step.strip() for step in arguments.at.split(",")]
    at = sorted({int(step) if step.isdecimal() else 0 for step in given})
    if at[0] < 1 or at[-1] > sys.maxsize:
        raise AmpValueError(f"--at {arguments.at} must be numbers of steps, from 1 on, as in 1,4,20")
    script = Script(what, Progress(arguments.json))
    found, error = script.watched_by(at, arguments.opt_level)
    rank = os.environ.get("RANK")
    if rank is None and found.cause == "loss":  # other ranks may have found something else
        step = int(found.findings[0].value)  # to look at
        with contextlib.suppress(AmpRuntimeError):  # a script that goes on from its own checkpoint
            again = script.watched_by(sorted({max(step - 1, 1), step}), arguments.opt_level)
            found, error = again if again[0].findings else (found, error)
    if not (found.findings or found.is_healthy):
        raise script.failure(error) if error else AmpRuntimeError(str(found).partition("\n")[0])
    if script.traceback:
        print(script.traceback, file=sys.stderr)
    if rank is not None:  # each process of torchrun reports
        printer.line(f"rank {rank}:")
    printer.line(found.about, "quiet")
    for line in str(found).split("\n"):
        printer.line(line, _look_of(line))
    for warning in script.warnings:
        printer.line(f"amp warned: {warning}")
    if error:
        printer.line(f"the script failed: {error}")
    data = {**found.to_json(), "warnings": script.warnings, "error": error}
    if rank is not None and not arguments.json:
        printer.stream.flush()
        wait_for_ranks()  # torchrun ends the others when the first one exits with 1
    return Answer(data, found.is_healthy and not error)


@command(
    "explain",
    argument("op", "its full name, such as torch.softmax"),
    argument("--opt-level", "a level, an alias or a YAML profile (O1)", default="O1"),
    as_json=False,
)
def _explain(arguments: argparse.Namespace, printer: Printer) -> None:
    """Say what happens to an op, and why.

    reamp explain torch.softmax --opt-level O4
    """
    printer.line(explain(arguments.op, load_profile(arguments.opt_level)))


COMMANDS = (_compare, _doctor, _explain)
"""The commands of this module, in the order of `--help`."""
