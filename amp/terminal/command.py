"""How a command of `python -m amp` is declared: by a function, its docstring and its arguments."""

import argparse
import inspect
import io
import json
from collections.abc import Callable
from textwrap import indent
from typing import Any, NamedTuple

from amp.terminal.text import Printer, plain

Function = Callable[[argparse.Namespace, Printer], Any]
"""Prints the output of a command, and returns the data that `--json` prints instead: these alone, or an
`Answer`."""

Argument = tuple[str, dict[str, Any]]
"""An argument's name and its options, as `add_argument` takes them."""


class Answer(NamedTuple):
    """The result of a command that judges something.

    Attributes:
        data: what `--json` prints.
        is_good: whether the exit status is 0; else it is 1.
    """

    data: Any
    is_good: bool


class Command(NamedTuple):
    """A command of the program.

    Attributes:
        name: the command's name.
        function: what it runs. Its docstring is the text of `--help`: a summary, examples, and notes.
        arguments: its arguments.
        takes_a_script: whether arguments after `--` go to a script, as `for_the_script`.
    """

    name: str
    function: Function
    arguments: tuple[Argument, ...]
    takes_a_script: bool

    def add_to(self, commands: Any) -> None:
        """Add the parser of this command to the program."""
        summary, _, rest = (inspect.getdoc(self.function) or "").partition("\n\n")
        examples, gap, more = rest.partition("\n\n")
        of_script = " Arguments of the script come after --." if self.takes_a_script else ""
        parser = commands.add_parser(
            self.name,
            help=f"{summary[:1].lower()}{summary[1:].removesuffix('.')}",
            description=f"{summary}{of_script}",
            epilog=f"examples:\n{indent(examples, '  ')}{gap}{more}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for name, options in self.arguments:
            parser.add_argument(name, **options)
        parser.set_defaults(run=self._run, json=False)

    def _run(self, arguments: argparse.Namespace) -> int:
        found = self.function(arguments, Printer(io.StringIO() if arguments.json else None))
        data, is_good = found if isinstance(found, Answer) else (found, True)
        if arguments.json:
            print(json.dumps(plain(data), indent=2))
        return 0 if is_good else 1


def argument(name: str, text: str, **options: Any) -> Argument:
    """Return an argument of a command with its help text; `options` are those of `add_argument`."""
    return name, {**options, "help": text}


_JSON = argument("--json", "write JSON", action="store_true")


def command(
    name: str, *arguments: Argument, as_json: bool = True, takes_a_script: bool = False
) -> Callable[[Function], Command]:
    """Return a decorator that makes a function a command."""
    given = (_JSON, *arguments) if as_json else arguments
    return lambda function: Command(name, function, given, takes_a_script)
