"""`python -m amp`, or `reamp`: what amp would do, without a script."""

import argparse
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from amp.casting.policy import OpPolicy, OpRule, find, policy_of, spellings
from amp.compat.run import runner
from amp.dtypes import dtype_name
from amp.errors import AmpError, AmpValueError, did_you_mean
from amp.profiles.keys import shown
from amp.profiles.levels import levels_with, load_profile
from amp.profiles.properties import Properties


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit status."""
    given = sys.argv[1:] if argv is None else list(argv)
    script, status = None, 0
    try:
        if given[:1] == ["run"] and given[1:2] not in (["-h"], ["--help"]):  # the rest is the script's
            script = runner(given[1:])
        else:
            own, after = given, []
            if given[:1] == ["compare"] and "--" in given:
                cut = given.index("--")
                own, after = given[:cut], given[cut + 1 :]
            arguments = _parser().parse_args(own, argparse.Namespace(for_the_script=after))
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(errors="backslashreplace")  # characters that it cannot show
            status = arguments.run(arguments) or 0
            sys.stdout.flush()
    except AmpError as error:
        print(f"reamp: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader is gone: Python must not flush once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"reamp: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if script is not None:
        script()  # its errors are its own
    return status


def _parser() -> argparse.ArgumentParser:
    from amp.numerics import commands as of_numerics  # slow to load, and no script waits for it
    from amp.trials import commands as of_trials

    parser = _Parser(prog="reamp", description="Mixed precision, chosen by one word.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    explaining = commands.add_parser("explain", help="say what happens to an op, and why")
    explaining.set_defaults(run=_explain)
    explaining.add_argument(
        "op", help="its full name, such as torch.softmax or torch.Tensor.__matmul__"
    )
    explaining.add_argument("--opt-level", default="O1", help="a level, an alias or a YAML profile")
    commands.add_parser(
        "run",
        help="run a script that imports apex, unchanged",
        usage="reamp run [-h] [--] script.py ... | -m package.module ...",
    )
    of_numerics.add_commands(commands)
    of_trials.add_commands(commands)
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and to which -1e-8 is a number."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def _explain(arguments: argparse.Namespace) -> None:
    print(explain(arguments.op, load_profile(arguments.opt_level)))


def explain(op: str, properties: Properties) -> str:
    """Return what happens to the function of this full name, and which rule of which file says so."""
    op = op.strip()
    holder, place, name = find(op)
    if not callable(getattr(holder, name, None)):
        hint = did_you_mean(name, dir(holder)) if holder is not None else ""
        raise AmpValueError(f"there is no function '{op}'; give a full name: torch.softmax{hint}")
    if isinstance(getattr(holder, name), type):
        raise AmpValueError(f"'{op}' is a class; ask about a function that it calls")
    level = properties.opt_level or "this profile"
    if not properties.patch_torch_functions:
        return (
            f"{op} at {level}: runs in the dtype of its arguments. Functions cast only at "
            f"{levels_with('patch_torch_functions')}; here the model's weights and inputs are "
            f"{shown(properties.cast_model_type) if properties.casts_model else 'what they were'}."
        )
    policy = policy_of(properties)
    in_place = [rule.in_place for rule in policy.rules if rule.in_place is not None]
    rules = {rule.op: rule for rule in (*in_place, *policy.rules)}
    told = [rules[op]] if op in rules else []
    if told and told[0].category == "calls":
        told.append(rules[told[0].note])
    lines = [f"{op} at {level}: {_describe(rules.get(op), policy)}"]
    lines += [f"{inner.op}: {_describe(inner, policy)}" for inner in told[1:]]
    others = [f"{p}.{n}" for p, n in spellings(place, name) if (p, n) != (place, name)]
    if others:
        lines.append(f"other spellings: {', '.join(others)}")
    categories: set[str | None] = {rule.category for rule in told} or {None}
    for other in others:
        rule = rules.get(other)
        if (rule.category if rule else None) not in categories:
            lines.append(f"{other}: {_describe(rule, policy)}")
    return "\n".join(lines)


def _describe(rule: OpRule | None, policy: OpPolicy) -> str:
    if rule is None:
        return "follows its input: no rule names it, so it runs in the dtype of its arguments."
    half = dtype_name(policy.dtype)
    cast = dtype_name(rule.dtype) if rule.dtype else ""
    what = {
        "native": f"runs in {half}; in a model's forward torch.autocast casts its arguments, elsewhere "
        "the function itself does",
        "half": f"runs in {half}: its floating arguments are cast down",
        "recurrent": f"runs in {half}: input, state and weights are cast down",
        "float": "runs in float32: half arguments are cast up, unless it is given a dtype",
        "promote": "runs in the widest dtype among its floating arguments",
        "padding": "runs in float32 where mode is reflect or replicate, else follows its input",
        "sequence": "runs in the widest dtype among the tensors of its first argument",
        "banned": f"raises on half arguments: {rule.note}",
        "calls": f"is not patched itself: it calls {rule.note}, which is",
        "in_place": "casts its other arguments to the dtype that it writes to",
        "in_place_float": f"raises on half tensors, because {rule.note} gives float32",
        "cast": f"runs in {cast}, and so does all that it calls"
        if cast
        else "follows its input, and nothing that it calls casts",
    }[rule.category]
    return f"{what} ({rule.category}, {rule.source})."
