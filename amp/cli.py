"""The command line, `python -m amp` or `reamp`."""

import argparse
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, NoReturn

import amp
from amp.compat.run import runner
from amp.errors import AmpError, did_you_mean, printable

if TYPE_CHECKING:
    from amp.terminal.command import Command

GROUPS = {
    "scripts that train": ("run", "compare", "doctor", "explain"),
    "levels and memory": ("levels", "memory"),
    "this machine": ("env", "selftest"),
    "numbers": ("bits", "ranges", "ulp", "simulate", "simulate-fp8", "survival", "crises", "lab"),
}
"""The commands, in the order of `--help`."""
_MEANT = dict.fromkeys(("launch", "train", "exec"), "run") | {
    "diagnose": "doctor",
    "watch": "doctor",
    "estimate-memory": "memory",
    "version": "--version",
}
"""Commands of other programs, and what they are called here."""
_WIDTH = 80


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit status."""
    given = sys.argv[1:] if argv is None else list(argv)
    script, status = None, 0
    _open_closed_streams()
    try:
        if given[:1] == ["run"] and given[1:2] not in (["-h"], ["--help"]):  # the rest is the script's
            script = runner(given[1:])
        else:
            is_for_a_script = "--" in given and _takes_a_script(given[0])
            end = given.index("--") if is_for_a_script else len(given)
            after = argparse.Namespace(for_the_script=given[end + 1 :])
            arguments = _parser().parse(given[:end], after)
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(errors="backslashreplace")  # characters that it cannot show
            status = arguments.run(arguments) or 0
            sys.stdout.flush()
    except BrokenPipeError:  # the reader is gone: Python must not flush once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (AmpError, OSError) as error:
        for note in getattr(error, "__notes__", ()):  # as the traceback of a script
            print(note, file=sys.stderr)
        print(printable(f"reamp: {error}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if script is not None:
        script()  # its errors are its own
    return status


def _open_closed_streams() -> None:
    """Open standard streams that a daemon has closed, so that no other file gets their numbers."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 (it stays open)


def _commands() -> "list[Command]":
    """Return the commands of all tools."""
    from amp import about  # slow to load, and no script waits for it
    from amp.numerics import number_commands
    from amp.selftest import selftest_command
    from amp.trials import script_commands

    modules = (script_commands, number_commands, about, selftest_command)
    return [command for module in modules for command in module.COMMANDS]


def _takes_a_script(name: str | None) -> bool:
    """Whether a command leaves what comes after `--` to a script."""
    return any(command.name == name and command.takes_a_script for command in _commands())


def _parser() -> "_Parser":
    parser = _Parser(prog="reamp", description="Mixed precision, chosen by one word.")
    parser.add_argument("--version", action="version", version=f"reamp {amp.__version__}")
    parser.commands = commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser(
        "run",
        help="run a script that imports apex, unchanged",
        usage="reamp run [-h] [--] script.py ... | -m package.module ...",
    )
    for command in _commands():
        command.add_to(commands)
    parser.set_defaults(run=lambda _: parser.print_help())
    return parser


def _hint(command: str | None, given: Sequence[str], unknown: str) -> str:
    """Return what to write instead of an argument that a command does not know, or an empty text."""
    if "--levels" in given and not unknown.startswith("-"):
        return "; levels are separated by commas, as in --levels O2,O4"
    if command == "explain":
        return "; call amp.explain(model, batch, op) in a script, to see where it runs"
    return "; arguments of the script come after --" if _takes_a_script(command) else ""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and which takes -1e-8 for a number.

    Attributes:
        commands: the parsers of the commands, if this is the program's parser.
    """

    commands: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)
        self.description = fill(self.description or "", _WIDTH)

    def parse(self, given: list[str], after: argparse.Namespace) -> argparse.Namespace:
        """Parse a command line; a command or an option that does not exist is the first error."""
        known: dict[str, _Parser] = self.commands.choices
        name = next((word for word in given[:1] if not word.startswith("-")), None)
        if name is not None and name not in known:
            meant = f"; did you mean '{_MEANT[name]}'?" if name in _MEANT else did_you_mean(name, known)
            if name.endswith(".py"):
                meant = f"; did you mean 'run {name}', 'doctor {name}' or 'compare {name}'?"
            self.error(f"there is no command '{name}'{meant}")
        parser = self if name is None else known[name]
        options = [option for action in parser._actions for option in action.option_strings]
        for word, value in zip(given, [*given[1:], "-"], strict=False):
            option = word.partition("=")[0]
            if word.startswith("--") and not any(each.startswith(option) for each in options):
                unknown = word if value.startswith("-") else f"{word} {value}"
                hint = did_you_mean(option, options, cutoff=0.7) or _hint(name, given, word)
                parser.error(f"unrecognized arguments: {unknown}{hint}")
        arguments, rest = self.parse_known_args(given, after)
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}{_hint(name, given, rest[0])}")
        return arguments

    def format_help(self) -> str:
        if self.commands is None:
            return super().format_help()
        helps = {each.dest: each.help for each in self.commands._choices_actions}
        lines = [self.format_usage(), self.description or ""]
        for title, names in GROUPS.items():
            lines += ["", f"{title}:", *(f"  {name:14}{helps[name]}" for name in names)]
        return "\n".join([*lines, "", "reamp COMMAND --help has the options of a command.", ""])

    def error(self, message: str) -> NoReturn:
        dot = " " if message.endswith("?") else "; "
        see = f"{'See' if dot == ' ' else 'see'} {self.prog} --help"
        print(f"{self.prog}: {message}{dot}{see}", file=sys.stderr)
        raise SystemExit(2)
