"""Finding what can go wrong at a level, from a forward at that level and the same forward in FP32."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from amp.casting.by_model import dtypes_to_be
from amp.casting.matching_rules import ruled_modules, ruled_tensors
from amp.diagnosis.diagnose import unchecked
from amp.diagnosis.findings import Finding, grouped, one_a_rule
from amp.diagnosis.lost import LostScalar
from amp.diagnosis.places import Place
from amp.diagnosis.shadow import Shadow
from amp.dtypes import CASTABLE, dtype_name
from amp.own_tensors import own_tensors
from amp.profiles.properties import Properties


def of_properties(properties: Properties, model: nn.Module, is_checked: bool) -> Iterator[Finding]:
    """Yield the problems of a profile for a model that do not depend on data.

    Args:
        properties: the session's properties.
        model: the model, before or after `initialize`.
        is_checked: whether gradients are checked before a step.
    """
    yield from unchecked(properties, is_checked)
    yield from _tied(properties, model)


def _tied(properties: Properties, model: nn.Module) -> Iterator[Finding]:
    """Yield a finding for each parameter that is shared by modules with different rules."""
    if not properties.casts_model:
        return
    chosen, ruled = dtypes_to_be(model, properties), ruled_modules(model, properties.rules)
    by_name = ruled_tensors(model, properties.rules)
    holders: defaultdict[nn.Parameter, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in (x for _, x in own_tensors(module) if isinstance(x, nn.Parameter)):
            is_named = parameter in by_name and by_name[parameter].kind == "tensor"
            if parameter.dtype in CASTABLE and not is_named:
                holders[parameter].append(name)
    for parameter, names in holders.items():
        rules = {name: ruled.get(model.get_submodule(name)) for name in names}
        if len({None if rule is None else rule.dtype for rule in rules.values()}) > 1:
            said = "; ".join(
                f"'{name}' has {'no rule' if rule is None else f'{rule.source}: {rule}'}"
                for name, rule in rules.items()
            )
            dtype = dtype_name(chosen.get(parameter, parameter.dtype))
            what = f"modules share a weight, and rules do not treat them alike: {said}; it is {dtype}"
            todo = "Write one rule that names all of them, or none."
            yield Finding("tied", what, todo, module=names[-1])


def of_failure(shadow: Shadow, message: str, error: str) -> Finding:
    """Return a finding for a forward that raises at this level, but not in FP32."""
    place = shadow.failed or Place("", "", "", 0)
    for scalar in shadow.lost.scalars:
        if scalar.place == place and scalar.is_large:
            return _of_constant(scalar, "the op raises")
    what = f"{error} at this level, and not in FP32: {message.partition(chr(10))[0]}"
    todo = "Give the op tensors of one dtype, or keep its module in FP32."
    return Finding("fails", what, todo, "forward", *place)


def merged(certain: Sequence[Finding], shadow: Shadow) -> list[Finding]:
    """Return findings, with those about constants that a shadow has seen; one for each place."""
    possible = _of_constants(shadow)
    constants = {_place(x) for x in possible if x.cause == "mask"}
    certain = [x for x in certain if not x.file or _place(x) not in constants]
    known = {_place(x) for x in certain}
    return one_a_rule([*certain, *(x for x in possible if _place(x) not in known)])


def _place(x: Finding) -> tuple[str, str, int]:
    return x.op, x.file, x.line


def _of_constants(shadow: Shadow) -> list[Finding]:
    """Return findings about constants that a format changes."""
    # The eps of normalize matters only for a row of zeros, which would show as NaN.
    scalars = [x for x in shadow.lost.scalars if not x.place.op.endswith("normalize")]
    return grouped(_of_constant(x, f"it becomes {math.copysign(math.inf, x.value)}") for x in scalars)


def _of_constant(scalar: LostScalar, then: str) -> Finding:
    place, value, dtype = scalar
    limit, name = float(torch.finfo(dtype).max), dtype_name(dtype)
    if not scalar.is_large:
        todo = f"Take at least {2.0**-14:.1e}, or compute in FP32 (x.float())."
        return Finding("eps", f"{value:g} is 0 in {name}", todo, "forward", *place, (), name, value)
    what = f"{value:g} is beyond {name}, which ends at {limit:g}: {then}"
    todo = "To mask, take x.masked_fill(mask, torch.finfo(x.dtype).min): 0 times -inf is NaN."
    return Finding("mask", what, todo, "forward", *place, (), name, value, limit)
