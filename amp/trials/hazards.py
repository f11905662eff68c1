"""Finding what can go wrong at a level, from a forward at that level and the same forward in FP32."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from amp.casting.by_model import dtypes_to_be
from amp.casting.matching_rules import ruled_modules, ruled_tensors
from amp.diagnosis.advice import keep_wide
from amp.diagnosis.diagnose import computes_in_half, unchecked
from amp.diagnosis.findings import Finding, grouped, one_a_rule
from amp.diagnosis.ledger import Ledger, Product
from amp.diagnosis.lost import LostScalar
from amp.diagnosis.places import Place
from amp.diagnosis.records import CASTS, CONSTANTS
from amp.diagnosis.shadow import Shadow
from amp.dtypes import CASTABLE, LOW_PRECISION, dtype_name
from amp.own_tensors import own_tensors
from amp.profiles.fp8_recipe import FP4
from amp.profiles.properties import Properties

HEADROOM = 4
"""A number is near the limit of its format if it is above the limit divided by this."""
SMALL_CHANNELS = 4
"""Images have at most so many channels, which the user cannot choose."""


def before_initialize(models: Iterable[nn.Module]) -> Iterator[Finding]:
    """Yield a finding if weights were rounded to 16 bits before `initialize`."""
    held = (each for model in models for each in (*model.named_parameters(), *model.named_buffers()))
    for name, tensor in itertools.islice((x for x in held if x[1].dtype in LOW_PRECISION), 1):
        what = f"'{name}' is {dtype_name(tensor.dtype)} before amp.initialize: the digits that masters "
        todo = "Leave out .half() and .bfloat16(): amp.initialize casts the model itself."
        yield Finding("cast before initialize", f"{what}would keep are rounded away", todo)


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
    """Return findings, with those about numbers that a shadow has seen; one for each place."""
    possible = _of_numbers(shadow)
    constants = {_place(x) for x in possible if x.cause == "mask"}
    certain = [x for x in certain if not x.file or _place(x) not in constants]
    known = {_place(x) for x in certain}
    return one_a_rule([*certain, *(x for x in possible if _place(x) not in known)])


def _place(x: Finding) -> tuple[str, str, int]:
    return x.op, x.file, x.line


def _of_numbers(shadow: Shadow) -> list[Finding]:
    """Return findings about constants that a format changes, and values near its limit."""
    # The eps of normalize matters only for a row of zeros, which would show as NaN.
    scalars = [x for x in shadow.lost.scalars if not x.place.op.endswith("normalize")]
    found = [_of_constant(x, f"it becomes {math.copysign(math.inf, x.value)}") for x in scalars]
    limit = torch.finfo(torch.float16).max
    known = {x.place for x in scalars if x.is_large}
    for op in shadow.ops.values():
        is_near = op.gives is torch.float16 and limit / HEADROOM < op.largest < math.inf
        is_own = all(shadow.ops[each].largest <= limit / HEADROOM for each in op.parents)
        if (
            (is_near and is_own and op.phase == "forward")
            and op.aten not in CASTS | CONSTANTS
            and op.place not in known
        ):
            what = f"the result is {op.largest:.6g} in FP32, and float16 ends at {limit:g}"
            near = "" if op.largest > limit else f": less than {HEADROOM} times as much"
            cause = "headroom" if near else "range"
            todo = keep_wide(op.place, shadow.properties, torch.float16)
            found.append(
                Finding(
                    cause, what + near, todo, "forward", *op.place, (), "float16", op.largest, limit
                )
            )
    return grouped(found)


def _of_constant(scalar: LostScalar, then: str) -> Finding:
    place, value, dtype = scalar
    limit, name = float(torch.finfo(dtype).max), dtype_name(dtype)
    if not scalar.is_large:
        todo = f"Take at least {2.0**-14:.1e}, or compute in FP32 (x.float())."
        return Finding("eps", f"{value:g} is 0 in {name}", todo, "forward", *place, (), name, value)
    what = f"{value:g} is beyond {name}, which ends at {limit:g}: {then}"
    todo = "To mask, take x.masked_fill(mask, torch.finfo(x.dtype).min): 0 times -inf is NaN."
    return Finding("mask", what, todo, "forward", *place, (), name, value, limit)


def unseen(properties: Properties) -> Iterator[Finding]:
    """Yield a finding about what a forward alone does not show."""
    if properties.fp8 and properties.fp8.recipe in FP4:
        what = "a check has no backward, so it does not see the gradients, which FP4 rounds to 4 bits"
        todo = "amp.diagnose and reamp doctor compare those of each layer with the noise of rounding."
        yield Finding("noise", what, todo, "backward")


# Speed.


def remarks(ledger: Ledger, properties: Properties | None) -> Iterator[Finding]:
    """Yield findings about what slows a level down."""
    yield from grouped(_alignment(ledger.products))
    for place, count in ledger.undone.most_common(3):
        if count:
            times = f"{count} time{'s' if count > 1 else ''}"
            what = f"a cast undoes the one before it, {times} in a forward"
            todo = "Compute both neighbours in one dtype: by a rule, or without a .float() or .to() "
            yield Finding("round trip", what, f"{todo}between.", "forward", *place)
    flops = flops_of(ledger.products)
    in_half = sum(count for dtype, count in flops.items() if dtype.itemsize <= 2)
    if properties is not None and computes_in_half(properties) and in_half * 2 < flops.total():
        wide = Counter[Place]()
        for product in ledger.products:
            wide[product.place] += product.flops * (product.dtype.itemsize > 2)
        what = f"only {in_half / flops.total():.0%} of the work of matrix products is in 16 bits or "
        what += "fewer; the largest of the others is here"
        todo = "Look for FP32 inputs that come from outside of the model, rules, and norms before it."
        yield Finding("share", what, todo, "forward", *wide.most_common(1)[0][0])


def _alignment(products: Iterable[Product]) -> Iterator[Finding]:
    for place, dtype, flops, sizes, is_plain in products:
        multiple = {1: 16, 2: 8}.get(dtype.itemsize)
        if multiple is None or not sizes:
            continue
        is_convolution = len(sizes) == 2
        # The rows of a plain product are tokens, whose number the user cannot choose; nor are the
        # channels of images, and nobody pads an output of 1.
        chosen = sizes[1:] if is_plain else sizes
        least = SMALL_CHANNELS if is_convolution else 1
        if odd := dict.fromkeys(size for size in chosen if size % multiple and size > least):
            kind = "channels" if is_convolution else " x ".join(map(str, sizes))
            name, odds = dtype_name(dtype), ", ".join(map(str, odd))
            verb = "are" if len(odd) > 1 else "is"
            what = f"{kind}: {odds} {verb} no multiple of {multiple}, as tensor cores want it in {name}"
            padded = dict.fromkeys(-(-size // multiple) * multiple for size in odd)
            todo = f"Pad to {', '.join(map(str, padded))}."
            yield Finding("alignment", what, todo, "forward", *place, gives=name, value=float(flops))


def flops_of(products: Iterable[Product]) -> Counter[torch.dtype]:
    """Return the floating-point operations of matrix products in each dtype."""
    flops = Counter[torch.dtype]()
    for product in products:
        flops[product.dtype] += product.flops
    return flops
