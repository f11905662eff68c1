"""Writes what says what the code says: docs/cli.md and docs/ops-table.md.

PYTHONPATH=. python docs/site/reference.py
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

from amp.casting.policy import OpPolicy, OpRule, load_policy
from amp.cli import _parser
from amp.dtypes import dtype_name

DOCS = Path(__file__).parents[1]
NOTE = "<!-- written by docs/site/reference.py; `make docs` writes it anew -->"


def cli_page() -> str:
    """Return docs/cli.md."""
    parser = _parser()
    (subparsers,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    helps = {choice.dest: choice.help for choice in subparsers._choices_actions}
    lines = [
        "# Command line",
        NOTE,
        "`reamp` and `python -m amp` are the same program. In a folder that has an `amp.py`, "
        "`python -m amp` runs that file: use `reamp`. `--help` after a command shows its options.",
        "```sh\nreamp --version\nreamp env\nreamp levels\n```",
        "| command | what it does |\n|---|---|\n"
        + "\n".join(
            f"| [`reamp {name}`](#reamp-{name}) | {helps[name]} |" for name in subparsers.choices
        ),
    ]
    for name, command in subparsers.choices.items():
        lines += [f"## reamp {name}", f"{_sentence(helps[name] or '')}"]
        lines += _arguments_of(command)
        if name == "run":
            lines.append("```sh\nreamp run script.py --lr 0.1\nreamp run -m package.module\n```")
        if command.epilog:
            examples, _, rest = command.epilog.partition("\n\n")
            commands = [line.strip() for line in examples.splitlines()[1:]]
            lines.append("\n".join(["```sh", *commands, "```"]))
            lines += [_sentence(rest)] if rest else []
    return "\n\n".join(lines) + "\n"


def _arguments_of(command: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the table of a command's arguments, if it has any."""
    rows = []
    for action in command._actions:
        if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        name = ", ".join(f"`{option}`" for option in action.option_strings) or f"`{action.dest}`"
        if action.option_strings and action.nargs != 0:
            name += f" {action.metavar or action.dest.upper()}"
        needed = " (required)" if action.required and action.option_strings else ""
        rows.append(f"| {name} | {action.help or ''}{needed} |")
    if rows:
        yield "\n".join(["| argument | meaning |", "|---|---|", *rows])


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def ops_page() -> str:
    """Return docs/ops-table.md."""
    policies = [load_policy(torch.float16), load_policy(torch.bfloat16)]
    tables = [{rule.op: rule for rule in policy.rules} for policy in policies]
    spelled: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for op, rule in tables[0].items():
        does = [_does(table[op], table, policy) for table, policy in zip(tables, policies, strict=True)]
        spelled[rule.name, *does].append(op)
    rows = [
        f"| {', '.join(f'`{op}`' for op in ops)} | {at_o1} | {at_o4} |"
        for (_, at_o1, at_o4), ops in sorted(spelled.items(), key=lambda row: row[0][0].strip("_"))
    ]
    lines = [
        "# Table of ops",
        NOTE,
        "What the functions of torch do with their floating-point arguments at O1 and O4; O6 and "
        "O8 are as O4. A function that is not in the table follows its input: it runs in the dtype of "
        "its arguments. In-place forms (`exp_`) keep the dtype of what they write to. [Ops](ops.md) "
        "explains the rules, and how to change one. `reamp explain NAME` says the same of one "
        "function, with the file and line of its rule.",
        "At O0, O2, O3, O5, O7 and O9 the model's weights and inputs are cast, and functions are left "
        "alone.",
        "| function | at O1 | at O4 |\n|---|---|---|\n" + "\n".join(rows),
    ]
    return "\n\n".join(lines) + "\n"


def _does(rule: OpRule, table: dict[str, OpRule], policy: OpPolicy) -> str:
    """Return in which dtype a function runs."""
    return {
        **dict.fromkeys(("native", "half", "recurrent"), dtype_name(policy.dtype)),
        "float": "float32",
        "promote": "widest of its arguments",
        "sequence": "widest in its sequence",
        "padding": "float32 to reflect or replicate, else follows its input",
        "banned": f"raises on {dtype_name(policy.dtype)}",
        "calls": _does(table[rule.note], table, policy) if rule.category == "calls" else "",
    }[rule.category]


PAGES = {"cli.md": cli_page, "ops-table.md": ops_page}

if __name__ == "__main__":
    for name, text in PAGES.items():
        (DOCS / name).write_text(text())
