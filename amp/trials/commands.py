"""The command `python -m amp compare`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from amp.errors import AmpValueError
from amp.numerics.text import Printer
from amp.trials.comparing import LEVELS, REFERENCES, check_request, compare_runs
from amp.trials.scripts import Script

_EXAMPLES = """examples:
  reamp compare train.py
  reamp compare train.py --levels O0,O2,O5 --steps 50 --out compare.html -- --epochs 1
  reamp compare -m package.train --json"""


def add_commands(commands: Any) -> None:
    """Add the parser of this command to those of the program."""
    text = "train a script at several levels, and say which are as good as FP32"
    parser = commands.add_parser(
        "compare",
        help=text,
        description=f"{text[0].upper()}{text[1:]}. Arguments of the script come after --.",
        epilog=f"{_EXAMPLES}\n\nexit status: 0 all levels are healthy, 1 one is not, 2 an error",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", nargs="?", help="a script that calls amp.initialize, or apex's")
    parser.add_argument("-m", dest="module", help="a module, as python -m takes it, instead")
    parser.add_argument("--levels", default=",".join(LEVELS), help=f"({','.join(LEVELS)})")
    parser.add_argument("--steps", type=int, default=25, help="optimizer steps of each run (25)")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers (0)")
    parser.add_argument("--reference", default="fp64", help=f"{' or '.join(REFERENCES)} (fp64)")
    parser.add_argument("--out", metavar="FILE", help="write a page with the curves and a heat map")
    parser.add_argument("--json", action="store_true", help="write JSON")
    parser.set_defaults(run=_compare)


def _compare(arguments: argparse.Namespace) -> int:
    if (arguments.script is None) == (arguments.module is None):
        raise AmpValueError("give one script.py, or -m package.module; its arguments come after --")
    what = [arguments.script] if arguments.script else ["-m", arguments.module]
    levels = [level.strip() for level in arguments.levels.split(",") if level.strip()]
    check_request(levels, arguments.steps, arguments.reference)  # before minutes are spent
    script = Script([*what, *arguments.for_the_script])
    found = compare_runs(script, levels, arguments.steps, arguments.seed, arguments.reference)
    if arguments.out:
        found.write_html(arguments.out)
    if arguments.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        found.print_to(Printer())
        if arguments.out:
            print(f"wrote {arguments.out}: open it in a browser")
    return 0 if found.is_healthy else 1
