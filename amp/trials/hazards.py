"""Finding what can go wrong at a level, from a forward at that level and the same forward in FP32."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from amp.casting.by_model import dtypes_to_be
from amp.diagnosis.advice import keep_wide
from amp.diagnosis.diagnose import unchecked
from amp.diagnosis.findings import Finding, grouped
from amp.diagnosis.places import Place
from amp.diagnosis.records import CASTS, CONSTANTS, Op
from amp.dtypes import CASTABLE, LOW_PRECISION, dtype_name
from amp.profiles.properties import Properties
from amp.profiles.rules import Rule
from amp.training.attachment import AttachedOptimizer
from amp.trials.ledger import Ledger, Product

HEADROOM = 4
"""A number is near the limit of its format if it is above the limit divided by this."""
SMALL_CHANNELS = 4
"""Images have at most so many channels, which the user cannot choose."""


def before_initialize(models: Iterable[nn.Module]) -> Iterator[Finding]:
    """Yield a finding if weights were rounded to 16 bits before `initialize`."""
    for model in models:
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
            if tensor.dtype in LOW_PRECISION:
                yield Finding(
                    "cast before initialize",
                    f"'{name}' is {dtype_name(tensor.dtype)} before amp.initialize: the digits that "
                    "masters would keep are rounded away",
                    "Leave out .half() and .bfloat16(): amp.initialize casts the model itself.",
                )
                return


def of_unseen_writes(attached: AttachedOptimizer) -> Iterator[Finding]:
    """Yield a finding if weights were written since the last step, and torch has not counted it."""
    lists, masters = attached.gradients.lists, attached.masters
    for master, model in zip(lists.masters, lists.models, strict=True):
        if masters.was_written_unseen(master):
            yield Finding(
                "unseen write",
                f"{attached.gradients.check.called(model)} was written since the last step in a way "
                "that torch does not count, such as .data.copy_(...), and the step undoes it",
                "Write under torch.no_grad() without .data, or write to amp.master_params(optimizer).",
            )
            return


def of_properties(properties: Properties, model: nn.Module, is_checked: bool) -> Iterator[Finding]:
    """Yield the problems of a profile for a model that do not depend on data.

    Args:
        properties: the session's properties.
        model: the model, before or after `initialize`.
        is_checked: whether gradients are checked before a step.
    """
    yield from unchecked(properties, is_checked)
    yield from _tied(properties, model)


def _is_half(properties: Properties) -> bool:
    return properties.patch_torch_functions or properties.cast_model_type in LOW_PRECISION


def _tied(properties: Properties, model: nn.Module) -> Iterator[Finding]:
    """Yield a finding for each parameter that is shared by modules with different rules."""
    if not properties.casts_model:
        return
    chosen = dtypes_to_be(model, properties)
    holders: defaultdict[nn.Parameter, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if parameter.dtype in CASTABLE:
                holders[parameter].append(name)
    for parameter, names in holders.items():
        rules = {
            name: next((x for x in reversed(properties.rules) if _is_inside(x, name, model)), None)
            for name in names
        }
        dtypes = {None if rule is None else rule.dtype for rule in rules.values()}
        if len(dtypes) > 1:
            said = "; ".join(
                f"'{name}' has {'no rule' if rule is None else f'{rule.source}: {rule}'}"
                for name, rule in rules.items()
            )
            dtype = dtype_name(chosen.get(parameter, parameter.dtype))
            yield Finding(
                "tied",
                f"modules share a weight, and rules do not treat them alike: {said}; it is {dtype}",
                "Write one rule that names all of them, or none.",
                module=names[-1],
            )


def _is_inside(rule: Rule, name: str, model: nn.Module) -> bool:
    """Whether a rule matches a module, or a module around it."""
    while not rule.matches(name, model.get_submodule(name)):
        if not name:
            return False
        name = name.rpartition(".")[0]
    return True


def of_failure(ledger: Ledger, error: Exception) -> Finding:
    """Return a finding for a forward that raises at this level, but not in FP32."""
    place = ledger.failed or Place("", "", "", 0)
    where = ("forward", place.op, place.module, place.file, place.line)
    constant = next((x for x in ledger.constants if x.place == place), None)
    if constant is not None:
        return _of_constant(place, constant.value, constant.dtype, raises=True)
    line = str(error).partition("\n")[0]
    return Finding(
        "fails",
        f"{type(error).__name__} at this level, and not in FP32: {line}",
        "Give the op tensors of one dtype, or keep its module in FP32.",
        *where,
    )


def of_numbers(ledger: Ledger) -> list[Finding]:
    """Return findings about constants that a format changes, and values near its limit."""
    found = [_of_constant(x.place, x.value, x.dtype) for x in ledger.constants]
    for lost in ledger.lost.scalars:
        place = lost.op.place
        found.append(
            Finding(
                "eps",
                f"{lost.value:g} is 0 in float16",
                f"Take at least {2.0**-14:.1e}, or compute in FP32 (x.float()).",
                *("forward", place.op, place.module, place.file, place.line),
                gives="float16",
                value=lost.value,
            )
        )
    limit = torch.finfo(torch.float16).max
    constants = {x.place for x in ledger.constants}
    for op in ledger.ops.values():
        is_near = math.isfinite(op.largest) and op.largest > limit / HEADROOM
        is_near &= all(ledger.ops[each].largest <= limit / HEADROOM for each in op.parents)  # its own
        if (
            is_near
            and op.gives is torch.float16
            and op.aten not in CASTS | CONSTANTS
            and op.place not in constants
        ):
            found.append(_of_value(op, op.largest, limit, ledger.properties))
    return grouped(found)


def _of_value(op: Op, value: float, limit: float, properties: Properties | None) -> Finding:
    place, dtype = op.place, dtype_name(torch.float16)
    is_over = value > limit
    what = f"the result is {value:.6g} in FP32, and {dtype} ends at {limit:g}"
    return Finding(
        "range" if is_over else "headroom",
        what if is_over else f"{what}: less than {HEADROOM} times as much",
        keep_wide(place, properties, torch.float16),
        *("forward", place.op, place.module, place.file, place.line),
        gives=dtype,
        value=value,
        limit=limit,
    )


def _of_constant(place: Place, value: float, dtype: torch.dtype, raises: bool = False) -> Finding:
    then = "the op raises" if raises else "it becomes inf"
    return Finding(
        "mask",
        f"{value:g} is beyond {dtype_name(dtype)}, which ends at {torch.finfo(dtype).max:g}: {then}",
        "Mask by -inf, by a mask of bools, or by torch.finfo(x.dtype).min.",
        *("forward", place.op, place.module, place.file, place.line),
        gives=dtype_name(dtype),
        value=value,
        limit=float(torch.finfo(dtype).max),
    )


# Speed.


def remarks(ledger: Ledger, properties: Properties) -> Iterator[Finding]:
    """Yield findings about what slows a level down."""
    yield from grouped(_alignment(ledger.products))
    undone = ledger.casts.undone
    for place, count in undone.most_common(3):
        yield Finding(
            "round trip",
            f"a cast undoes the one before it, {count} time{'s' if count > 1 else ''} in a forward",
            "Compute both neighbours in one dtype: by a rule, or without a .float() or .to() between.",
            *("forward", place.op, place.module, place.file, place.line),
        )
    flops = flops_of(ledger.products)
    in_half = sum(count for dtype, count in flops.items() if dtype.itemsize <= 2)
    if _is_half(properties) and in_half * 2 < flops.total():
        wide = Counter[Place]()
        for product in ledger.products:
            if product.dtype.itemsize > 2:
                wide[product.place] += product.flops
        place = wide.most_common(1)[0][0]
        yield Finding(
            "share",
            f"only {in_half / flops.total():.0%} of the work of matrix products is in 16 bits or "
            "fewer; the largest of the others is here",
            "Look for FP32 inputs that come from outside of the model, rules, and norms before it.",
            *("forward", place.op, place.module, place.file, place.line),
        )


def _alignment(products: Iterable[Product]) -> Iterator[Finding]:
    for product in products:
        multiple = {1: 16, 2: 8}.get(product.dtype.itemsize)
        sizes = product.sizes
        if multiple is None or not sizes:
            continue
        # The rows of a plain product are tokens, whose number the user cannot choose.
        chosen = sizes[1:] if product.is_plain else sizes
        odd = [size for size in chosen if size % multiple and size > 1]  # nobody pads an output of 1
        if len(sizes) == 2:  # of a convolution
            odd = [size for size in odd if size > SMALL_CHANNELS]
        if odd:
            kind = "channels" if len(sizes) == 2 else " x ".join(map(str, sizes))
            place = product.place
            yield Finding(
                "alignment",
                f"{kind}: {', '.join(map(str, odd))} is no multiple of {multiple}, as "
                f"tensor cores want it in {dtype_name(product.dtype)}",
                f"Pad to {', '.join(str(-(-size // multiple) * multiple) for size in odd)}.",
                *("forward", place.op, place.module, place.file, place.line),
                gives=dtype_name(product.dtype),
                value=float(product.flops),
            )


def flops_of(products: Iterable[Product]) -> Counter[torch.dtype]:
    """Return the floating-point operations of matrix products in each dtype."""
    flops = Counter[torch.dtype]()
    for product in products:
        flops[product.dtype] += product.flops
    return flops
