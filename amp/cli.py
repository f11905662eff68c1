"""`python -m amp`, or `reamp`: what amp would do, without a script."""

import argparse
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import amp
from amp.compat.run import runner
from amp.errors import AmpError

_TAKE_A_SCRIPT = ("compare", "doctor", "explain")
"""The commands that leave what comes after `--` to a script."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit status."""
    given = sys.argv[1:] if argv is None else list(argv)
    script, status = None, 0
    if sys.stdout is None:  # closed, as under some daemons
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (for the rest of the process)
    try:
        if given[:1] == ["run"] and given[1:2] not in (["-h"], ["--help"]):  # the rest is the script's
            script = runner(given[1:])
        else:
            is_for_a_script = "--" in given and given[0] in _TAKE_A_SCRIPT
            end = given.index("--") if is_for_a_script else len(given)
            after = argparse.Namespace(for_the_script=given[end + 1 :])
            arguments = _parser().parse_args(given[:end], after)
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(errors="backslashreplace")  # characters that it cannot show
            status = arguments.run(arguments) or 0
            sys.stdout.flush()
    except BrokenPipeError:  # the reader is gone: Python must not flush once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (AmpError, OSError) as error:
        print(f"reamp: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if script is not None:
        script()  # its errors are its own
    return status


def _parser() -> argparse.ArgumentParser:
    from amp import about  # slow to load, and no script waits for it
    from amp.numerics import commands as of_numerics
    from amp.selftest import commands as of_selftest
    from amp.trials import commands as of_trials

    parser = _Parser(prog="reamp", description="Mixed precision, chosen by one word.")
    parser.add_argument("--version", action="version", version=f"reamp {amp.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "run",
        help="run a script that imports apex, unchanged",
        usage="reamp run [-h] [--] script.py ... | -m package.module ...",
    )
    of_trials.add_commands(commands)
    for command in (*of_numerics.COMMANDS, *about.COMMANDS):
        command.add_to(commands)
    of_selftest.add_to(commands)
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and to which -1e-8 is a number."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)
