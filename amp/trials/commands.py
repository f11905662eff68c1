"""The commands `python -m amp compare`, `doctor` and `explain`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from amp.casting.policy import explain
from amp.errors import AmpValueError
from amp.numerics.text import Printer
from amp.outputs import check_output
from amp.profiles.levels import load_profile
from amp.trials.comparing import LEVELS, REFERENCES, InScript, check_request, compare_runs
from amp.trials.explaining import chosen
from amp.trials.injecting import AS_IS
from amp.trials.progress import Progress
from amp.trials.scripts import Script

_COMPARE = """examples:
  reamp compare train.py
  reamp compare train.py --levels O2,O5 --out compare.html -- --epochs 1
  reamp compare -m package.train --json

exit status: 0 all levels are healthy, 1 one is not, 2 an error"""

_DOCTOR = """examples:
  reamp doctor train.py
  reamp doctor train.py --at 1,100
  reamp doctor train.py --opt-level O2 --steps 5 -- --epochs 1
  reamp doctor -m package.train --json

exit status: 0 healthy, 1 something was found, 2 an error"""

_EXPLAIN = """examples:
  reamp explain torch.softmax --opt-level O4
  reamp explain softmax --script train.py --module blocks.3.attn
  reamp explain softmax --script train.py --opt-level O2 -- --epochs 1"""


def add_commands(commands: Any) -> None:
    """Add the parsers of these commands to the program."""
    _add_compare(commands)
    _add_doctor(commands)
    _add_explain(commands)


def _add(commands: Any, name: str, text: str, epilog: str, run: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}. Arguments of the script come after --.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="write JSON")
    parser.set_defaults(run=run)
    return parser


def _add_script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", nargs="?", help="a script that trains, with amp or without it")
    parser.add_argument("-m", dest="module", help="a module, as python -m takes it, instead")


def _script_of(arguments: argparse.Namespace) -> list[str]:
    if (arguments.script is None) == (arguments.module is None):
        raise AmpValueError("give one script.py, or -m package.module; its arguments come after --")
    what = [arguments.script] if arguments.script else ["-m", arguments.module]
    return [*what, *arguments.for_the_script]


def _add_compare(commands: Any) -> None:
    text = "train a script at several levels, and say which match FP32"
    parser = _add(commands, "compare", text, _COMPARE, _compare)
    _add_script(parser)
    parser.add_argument("--levels", default=",".join(LEVELS), help=f"({','.join(LEVELS)})")
    parser.add_argument("--steps", type=int, default=25, help="optimizer steps of each run (25)")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers (0)")
    parser.add_argument("--reference", default="fp64", help=f"{' or '.join(REFERENCES)} (fp64)")
    parser.add_argument("--out", metavar="FILE", help="write a page with the curves and a heat map")


def _compare(arguments: argparse.Namespace) -> int:
    what = _script_of(arguments)
    levels = [level.strip() for level in arguments.levels.split(",") if level.strip()]
    # before minutes are spent
    check_request(levels, arguments.steps, arguments.reference, arguments.seed)
    if arguments.out:
        check_output(Path(arguments.out), ".html")
    script = Script(what, Progress(arguments.json, len({*levels, "O0"}) + 1))
    chosen = levels, arguments.steps, arguments.seed, arguments.reference
    found = compare_runs(InScript(script), *chosen, lambda: [AS_IS] * script.is_injected)
    found = replace(found, notes=(*found.notes, *script.notes))
    if arguments.out:
        found.write_html(arguments.out)
    if arguments.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        found.print_to(Printer())
        if arguments.out:
            print(f"wrote {arguments.out}: open it in a browser")
    return 0 if found.is_healthy else 1


def _add_doctor(commands: Any) -> None:
    text = "find what precision does wrong in the first steps of a script"
    parser = _add(commands, "doctor", text, _DOCTOR, _doctor)
    _add_script(parser)
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps to look at (3)")
    parser.add_argument("--opt-level", help="in place of the script's own, or of no amp")
    parser.add_argument("--level", dest="opt_level", help=argparse.SUPPRESS)  # its name once
    parser.add_argument(
        "--at", default="1,4,20", help="steps to look at in a script without amp (1,4,20)"
    )


def _doctor(arguments: argparse.Namespace) -> int:
    what = _script_of(arguments)
    if arguments.steps < 1:
        raise AmpValueError(f"--steps {arguments.steps} must be at least 1")
    if arguments.opt_level is not None:
        load_profile(arguments.opt_level)
    given = [step.strip() for step in arguments.at.split(",")]
    at = sorted({int(step) if step.isdecimal() else 0 for step in given})
    if at[0] < 1:
        raise AmpValueError(f"--at {arguments.at} must be numbers of steps, from 1 on, as in 1,4,20")
    options = {"steps": arguments.steps, "at": at}
    script = Script(what, Progress(arguments.json))
    found, error = script.watched_by("doctor", options, arguments.opt_level)
    if (
        any(x.cause == "fails" for x in found.findings)
        and Script(what).watched_by("doctor", options, "O0")[1]
    ):
        found.findings = [x for x in found.findings if x.cause != "fails"]  # at any level
    if error and found.is_healthy:
        raise script.failure(error)
    if script.traceback:
        print(script.traceback, file=sys.stderr)
    if arguments.json:
        print(json.dumps({**found.to_json(), "warnings": script.warnings, "error": error}, indent=2))
    else:
        printer, rank = Printer(), os.environ.get("RANK")
        if rank is not None:  # each process of torchrun reports
            printer.line(f"rank {rank}:")
        for text in filter(None, [getattr(found, "about", ""), str(found)]):
            printer.line(text)
        for warning in script.warnings:
            printer.line(f"amp warned: {warning}")
        if error:
            printer.line(f"the script failed: {error}")
    return 0 if found.is_healthy else 1


def _add_explain(commands: Any) -> None:
    text = "say what happens to an op, and why"
    parser = _add(commands, "explain", text, _EXPLAIN, _explain)
    parser.add_argument(
        "op", help="its full name, such as torch.softmax; with --script a short one too"
    )
    parser.add_argument("--opt-level", help="a level, an alias or a YAML profile (O1, or the script's)")
    parser.add_argument("--script", help="look at it where it runs: in the first forward of a script")
    parser.add_argument("--module", help="the name of a module, and those inside of it")


def _explain(arguments: argparse.Namespace) -> None:
    if arguments.script is None:
        if arguments.module is not None or arguments.json:
            raise AmpValueError("--module and --json say what happens in a script: give --script too")
        Printer().line(explain(arguments.op, load_profile(arguments.opt_level or "O1")))
        return
    if arguments.opt_level is not None:
        load_profile(arguments.opt_level)
    script = Script([arguments.script, *arguments.for_the_script], Progress(arguments.json))
    seen, error = script.watched_by("explain", {"at": [1], "steps": 1}, arguments.opt_level)
    if seen is None:
        raise script.failure(error or "it ended before", "the script ran no forward of a model")
    found = chosen(seen, arguments.op, arguments.module)
    print(json.dumps(found.to_json(), indent=2) if arguments.json else found)
