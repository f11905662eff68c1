"""Why a function of torch runs in the precision that it does: the rule, and where it is written."""

from __future__ import annotations

from amp.casting.op_names import find, member, spellings
from amp.casting.policy import OpPolicy, OpRule, policy_of
from amp.dtypes import dtype_name
from amp.errors import AmpValueError, did_you_mean
from amp.profiles.keys import shown
from amp.profiles.levels import levels_with
from amp.profiles.properties import Properties


def explain(op: str, properties: Properties) -> str:
    """Return what happens to the function of this full name, and which rule of which file says so."""
    op = op.strip()
    holder, place, name = find(op)
    function = member(holder, name)
    if not callable(function):
        hint = did_you_mean(name, dir(holder)) if holder is not None else ""
        raise AmpValueError(f"there is no function '{op}'; give a full name: torch.softmax{hint}")
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
    told = [rules[op]] if op in rules else []
    if told and told[0].category == "calls":
        told.append(rules[told[0].note])
    lines = [f"{op} at {level}: {describe(rules.get(op), policy)}"]
    lines += [f"{inner.op}: {describe(inner, policy)}" for inner in told[1:]]
    others = [f"{p}.{n}" for p, n in spellings(place, name) if (p, n) != (place, name)]
    if others:
        lines.append(f"other spellings: {', '.join(others)}")
    categories: set[str | None] = {rule.category for rule in told} or {None}
    for other in others:
        rule = rules.get(other)
        if (rule.category if rule else None) not in categories:
            lines.append(f"{other}: {describe(rule, policy)}")
    return "\n".join(lines)


def describe(rule: OpRule | None, policy: OpPolicy) -> str:
    """Return what a rule does, and where it is written, as the rest of a sentence."""
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
