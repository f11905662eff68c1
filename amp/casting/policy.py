"""Which functions run in which precision, and why: the op tables `configs/ops/*.yaml`, and rules."""

from __future__ import annotations

import difflib
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from amp.casting.op_names import (
    SPELLINGS,
    find,
    functions_of,
    member,
    public_functions,
    resolve,
    spellings,
)
from amp.dtypes import dtype_name
from amp.errors import AmpValueError, did_you_mean
from amp.profiles.keys import shown
from amp.profiles.levels import CONFIGS, levels_with
from amp.profiles.properties import Properties
from amp.profiles.yaml_syntax import Lines, read_mapping

TableCategory = Literal[
    "native", "half", "recurrent", "float", "promote", "padding", "sequence", "banned", "calls"
]
Category = Literal[TableCategory, "cast", "in_place", "in_place_float"]
_KEYS = ("closed", *get_args(TableCategory))


@dataclass(frozen=True)
class OpRule:
    """How one function casts its arguments.

    Attributes:
        category: how arguments are cast; `configs/ops/float16.yaml` explains the categories. `cast` is
            for a user's rules: floating arguments are cast to `dtype`. `in_place` casts to the dtype of
            the tensor that is written to, and `in_place_float` refuses to write to half tensors.
        place: the module or class that holds the function, as a dotted name.
        name: the function's name there.
        dtype: for `cast`, the dtype of the arguments; None casts nothing.
        note: for `banned`, what to do instead; for `calls`, the function that it calls; for
            `in_place_float`, the function that returns FP32.
        closed: whether casts are off in the functions that it calls.
        source: where the rule was written, `file:line`.
    """

    category: Category
    place: str
    name: str
    dtype: torch.dtype | None = None
    note: str = ""
    closed: bool = False
    source: str = ""

    @property
    def op(self) -> str:
        """The function's full name."""
        return f"{self.place}.{self.name}"

    @property
    def in_place(self) -> OpRule | None:
        """The rule for the in-place form of the function, or None if the category allows none."""
        if self.category not in ("native", "half", "promote", "float"):
            return None
        if self.place == "torch.nn.functional" or self.name.startswith("__"):
            return None
        category: Category = "in_place_float" if self.category == "float" else "in_place"
        return OpRule(category, self.place, f"{self.name}_", note=self.op, source=self.source)


@dataclass(frozen=True)
class OpPolicy:
    """The dtype of the ops that run in half precision, and a rule for each function."""

    dtype: torch.dtype
    rules: tuple[OpRule, ...]

    def missing(self) -> list[str]:
        """Return the functions in the policy that this version of torch lacks."""
        return [rule.op for rule in self.rules if not hasattr(resolve(rule.place), rule.name)]


def policy_of(properties: Properties) -> OpPolicy:
    """Return the op table of a profile that casts functions, with the profile's rules for ops on top.

    Raises:
        AmpValueError: a rule matches no function in torch or in the modules imported so far, or one
            that must not be cast.
    """
    policy = load_policy(properties.patch_torch_functions_type or torch.float16)
    table = {rule.op: rule for rule in policy.rules}
    for (place, name), rule in functions_of(r for r in properties.rules if r.kind == "op").items():
        new = OpRule("cast", place, name, rule.dtype, closed=True, source=rule.source)
        table[new.op] = new
    return OpPolicy(policy.dtype, tuple(table.values()))


@functools.cache
def load_policy(dtype: torch.dtype) -> OpPolicy:
    """Return the op table for `dtype`, float16 or bfloat16."""
    table = _load(CONFIGS / "ops" / f"{dtype_name(dtype)}.yaml")
    closed, *_ = table.pop("closed")
    rules = tuple(
        OpRule(
            category,  # type: ignore[arg-type]
            place,
            name,
            note=names[name] if isinstance(names, dict) else "",
            closed=name in closed.get(place, ()),
            source=f"configs/ops/{file}:{lines[category, place, name]}",
        )
        for category, (ops, lines, file) in table.items()
        for place, names in ops.items()
        for name in names
    )
    return OpPolicy(dtype, rules)


def _load(path: Path) -> dict[str, tuple[Any, Lines, str]]:
    """Return the entries of a table and of those that it extends, with line numbers and file."""
    table: dict[str, tuple[Any, Lines, str]] = {}
    values, lines = read_mapping(path)
    for key, value in values.items():
        if key == "extends":
            table = _load(path.with_name(f"{value}.yaml"))
        elif key in _KEYS:
            table[key] = value, lines, path.name
        else:
            raise AmpValueError(
                f"{path}:{lines[key,]}: '{key}' is not one of extends, "
                f"{', '.join(_KEYS)}{did_you_mean(key, _KEYS)}"
            )
    return table


# Explaining the precision of a function.


def explain(op: str, properties: Properties) -> str:
    """Return, as text, how the function of this full name casts, and which rule of which file says so.

    Raises:
        AmpValueError: there is no such function, or it is a class.
    """
    op = op.strip()
    holder, place, name = find(op)
    function = member(holder, name)
    if not callable(function):
        near = _nearest(name, place if holder is not None else "")
        hint = f"did you mean '{near}'?" if near else "give a full name, such as torch.softmax"
        raise AmpValueError(f"there is no function '{op}'; {hint}")
    op = f"{place}.{name}"
    if isinstance(function, type):
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
    rule = rules.get(op)
    lines = [f"{op} at {level}: {describe(rule, policy)}"]
    categories = {rule and rule.category}
    if rule is not None and rule.category == "calls":
        lines.append(f"{rule.note}: {describe(rules[rule.note], policy)}")
        categories.add(rules[rule.note].category)
    others = [f"{p}.{n}" for p, n in spellings(place, name) if (p, n) != (place, name)]
    if others:
        lines.append(f"other spellings: {', '.join(others)}")
    for other in others:
        rule = rules.get(other)
        if (rule and rule.category) not in categories:
            lines.append(f"{other}: {describe(rule, policy)}")
    return "\n".join(lines)


def _nearest(name: str, place: str) -> str:
    """Return the full name of a function of almost this name: in the place, if there is one, or ""."""
    of_place = {each: f"{place}.{each}" for each in public_functions(place)} if place else {}
    all_of = {rule.name: rule.op for rule in load_policy(torch.float16).rules}
    for each in reversed(SPELLINGS):
        all_of |= {function: f"{each}.{function}" for function in public_functions(each)}
    if name not in all_of:
        all_of = of_place if difflib.get_close_matches(name, of_place) else all_of
    return "".join(all_of[each] for each in difflib.get_close_matches(name, all_of, n=1))


def describe(rule: OpRule | None, policy: OpPolicy) -> str:
    """Return what a rule does, and where it is written, as the end of a sentence about a function."""
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
