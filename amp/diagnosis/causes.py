"""Finding the causes of what a shadow has seen.

From a loss, gradient or weight that is not finite, the search goes back over the ops to those that made
an inf or NaN of finite inputs; the earliest of them is the cause. An intended -inf, as in a mask, is
none. If the result is finite for the twins, and not for the op's own inputs, digits were lost before:
see `amp.diagnosis.blame`. Results that reach no gradient are absorbed: the step looks healthy, and is
not. The same walk explains results that are finite and far off, if they have ruined a gradient or the
loss.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from amp.casting.cast_hooks import EXACT_INTEGERS, can_ruin, ruined_by_cast
from amp.diagnosis import advice
from amp.diagnosis.blame import Loss, Walk
from amp.diagnosis.findings import Finding, exact, listed, one_a_rule, rule_for
from amp.diagnosis.lost import LossyCast, Still
from amp.diagnosis.memories import Value, inputs_of, results_from
from amp.diagnosis.places import Place
from amp.diagnosis.records import Op, ancestors
from amp.diagnosis.shadow import Shadow
from amp.diagnosis.twins import is_finite, largest
from amp.dtypes import LOW_PRECISION, dtype_name
from amp.profiles.properties import excepting

_ARGUMENT = re.compile(r"argument '(\w+)'")
LEAST = 2.0**-150
"""Smaller numbers are 0 in FP32."""
SOME = 0.3
"""What share of numbers may stand still."""
NOTHING = 1e-12
"""A smaller gradient moves no weight: optimizers divide by an eps of 1e-8."""
FAR, WORSE, OFF, SHARE = 0.05, 10, 0.2, 0.01
"""A result is far off above the first, if its inputs were off by a tenth of it at most; it matters if
it reaches a gradient that is off by more than the third, and by more than the last of the model's whole
gradient. A result of a backward matters if most of that is off: healthy gradients cancel by chance, and
the slope of a ReLU near 0 is the other one."""
PASSED = 3
"""So many ops may be between two that one function computes."""
VANISHING = 1e-3
"""A gradient smaller than this times the median of all, or a tenth of the largest, is 0 but for
rounding, as that of a bias before a batch norm: nothing is lost with it."""


def findings_of(shadow: Shadow) -> list[Finding]:
    """Return the findings of a shadow in the order of the data flow; the first is the cause."""
    found: list[tuple[int, Finding]] = []
    reached = tuple(shadow.gradients.bad or shadow.bad_weights)
    if (op := _cause(shadow)) is not None:
        found.append((op.number, replace(_explain(shadow, op), reached=reached)))
    elif reached:
        what = "gradients are not finite, and none of the ops that were seen made them so"
        todo = "Put the forward, the loss and the backward of one step inside the block."
        found.append((0, Finding("range", what, todo, "backward", reached=reached)))
    if not found or found[0][1].cause == "loss scale":  # which may be a consequence
        is_forward = bool(found)
        more = _of_sources(shadow) or _absorbed(shadow, is_forward) or _far_off(shadow, is_forward)
        found = [*more, *found]
    explained = {(x.cause, x.line, x.op) for _, x in found}
    lossy = [x for x in shadow.lost.casts if not x.is_mask]
    distinct = {(x.argument, x.op.place): x for x in reversed(lossy)}.values()
    casts = [(cast.op.number, _of_cast(shadow, cast)) for cast in list(distinct)[:3]]
    found += [(at, x) for at, x in casts if (x.cause, x.line, x.op) not in explained]
    for name, place in list(shadow.gradients.in_place.items())[:1]:
        what = f"the gradient of {name} was written to while it was still scaled"
        todo = advice.after_unscaling(shadow.properties)
        found.append((-1, Finding("order", what, todo, "backward", *place)))
    for name, (before, scale, place) in list(shadow.gradients.mixed.items())[:1]:
        what = f"a gradient scaled by {exact(scale)} was added to one scaled by {exact(before)}"
        todo = "Scale the loss of each backward alike, and unscale gradients only before the step."
        found.append((-1, Finding("order", f"{what}, in {name}", todo, "backward", *place)))
    if (penalty := _penalty(shadow)) is not None:  # whose size is no fault of its own
        what = "the loss is computed of gradients that are still scaled, as in a penalty"
        todo = "Take the gradient of the loss itself, or divide it by the loss scale before it is used."
        found = [x for x in found if x[1].cause not in ("loss scale", "range")]
        found.append((-1, _finding(penalty, "order", what, todo)))
    found += [(-1, x) for x in _ruined_buffers(shadow)]
    if not found:
        found += [(0, x) for x in _vanished(shadow)]
    return one_a_rule([x for _, x in sorted(found, key=lambda each: each[0])])


def _penalty(shadow: Shadow) -> Op | None:
    """Return the op that adds a number to what scaled gradients are made into, on the way to a loss."""
    scale, scaled = max(shadow.gradients.scales, default=1.0), set[int]()
    if scale == 1.0:
        return None
    behind = {op.number for op in ancestors(shadow.ops, shadow.gradients.losses)}
    for number, op in shadow.ops.items():
        if op.phase == "backward" and op.loss_scale != 1.0:
            scaled.add(number)
        if number not in behind or op.phase != "forward" or scaled.isdisjoint(op.parents):
            continue
        given = [x for x in tree_leaves(op.args) if isinstance(x, (Value, float, int))]
        others = [x for x in given if not (isinstance(x, Value) and x.made in scaled)]
        other = max([largest(x.real) if isinstance(x, Value) else abs(x) for x in others], default=0.0)
        name, factor = op.aten.rstrip("_"), 1.0
        if name in ("add", "sub", "rsub") and other > 1e-3:  # more than an eps
            return op
        if name in ("mul", "div") and other:
            factor = other if name == "mul" else 1 / other
        scaled |= {number} if factor * scale > 1.001 else set()
    return None


def _ruined_buffers(shadow: Shadow) -> Iterator[Finding]:
    """Yield a finding for each buffer whose integers or masks a cast of amp's has ruined."""
    for name, (buffer, before) in shadow.cast_buffers.items():
        dtype = buffer.dtype
        if ruined := ruined_by_cast(before, dtype) if can_ruin(before, dtype) else "":
            what = f"the buffer '{name}' was cast to {dtype_name(dtype)}, and holds {ruined}"
            keep = advice.keep_buffers([name], True)
            todo = f"Hold integers as torch.long and masks as bools. Or:\n{keep}"
            yield Finding("cast", what, todo, module=name.rpartition(".")[0])


def _cause(shadow: Shadow) -> Op | None:
    """Return the earliest op that made the gradients inf or NaN, if it was seen."""
    starts = (shadow.gradients.bad_loss, *shadow.gradients.bad.values(), *shadow.bad_weights.values())
    bad = ancestors(shadow.ops, starts, only_bad=True)
    roots = [op for op in bad if (op.is_root or not op.bad.parents) and not op.is_masking]
    nan = [op for op in bad if op.bad.has_nan][:1]
    masks = [cast.op for cast in shadow.lost.casts if cast.is_mask]
    if roots and roots[0] in masks:  # which may leave each row something
        behind = ancestors(shadow.ops, [op.number for op in nan], only_bad=True)
        roots = [op for op in behind if op in roots and op not in masks] or roots
    if roots and roots[0].is_constant:  # as in the FP8 scale of a batch that is not finite
        before = (op for op in shadow.ops.values() if op.number < roots[0].number)
        given = [op for op in before if op.bad.sources and not op.bad.is_minus_inf]
        roots = [*given[:1], *roots]
    if roots:  # what a collective has made is another rank's
        return next((op for op in roots if not op.is_collective), None)
    of_masks = [op for op in bad if shadow.gradients.bad_loss and _reduces(op)]  # as a mean over them
    return next(iter([*nan, *of_masks]), None)


def _reduces(op: Op) -> bool:
    """Whether the result of an op has fewer elements than what it takes."""
    sizes = [x.real.numel() for x in inputs_of(op)]
    return bool(op.outputs) and op.outputs[0][1].numel() < max(sizes, default=0)


def _explain(shadow: Shadow, op: Op) -> Finding:
    """Return the finding of an op whose result is not finite."""
    if op.bad.sources and not (op.is_root and op.bad.is_wrong):
        return _of_source(shadow, op)
    assert op.gives is not None
    for cast in shadow.lost.casts:
        if cast.op is op and cast.is_mask:
            return _of_cast(shadow, cast)
    is_nan_of_inf = op.bad.has_nan and bool(op.bad.parents)
    if not op.has_twin and not is_nan_of_inf:
        made = "a NaN" if op.bad.has_nan else "an inf"
        what = f"the result has {made}, and the op cannot run in FP64"
        return _finding(op, "range", what, advice.keep_wide(op.place, shadow.properties, op.gives))
    if not op.bad.is_wrong:
        return _of_mathematics(shadow, op)
    if not op.is_too_large:
        loss = Walk(shadow, op).loss()
        if (lost := _constant_behind(shadow, op, loss)) is not None:
            return _of_eps(shadow, op, *lost)
        if loss is not None:
            return _of_loss(shadow, op, loss)
    return _of_range(shadow, op)


def _in_one_call(shadow: Shadow, op: Op) -> str:
    """Return the function that computes an op together with one shortly before it, or an empty text."""
    before = op
    for _ in range(PASSED):
        if len(before.parents) != 1:  # as the sum of several
            break
        before = shadow.ops[before.parents[0]]
        if function := advice.IN_ONE_CALL.get((before.aten, op.aten.rstrip("_"))):
            return f"Take {function}, which rounds nothing on the way."
    return ""


def _of_mathematics(shadow: Shadow, op: Op) -> Finding:
    if op.bad.has_nan and op.bad.parents:
        what = "it is inf - inf or 0 times inf"
        given = [x.real for x in inputs_of(op) if "softmax" in op.aten and x.real.dim()]
        if any(bool((x == -math.inf).all(-1).any()) for x in given):
            what = "a whole row of the input is -inf, as if it were masked entirely: 0 / 0"
        what += ", in FP64 too" if op.has_twin else ""
        todo = _unmasked(shadow, op)
    elif op.bad.parents:
        what = "it takes an -inf that was written, as by a mask, and the loss is not finite"
        todo = "Leave what is masked out of means, sums and labels. No precision cures it."
    else:
        what = f"the {'gradient' if op.phase == 'backward' else 'result'} is {op.largest} in FP64 too"
        names = op.place.op.rpartition(".")[2].strip("_"), op.aten
        inside = next((advice.EPS_INSIDE[name] for name in names if name in advice.EPS_INSIDE), "")
        todo = "Look at the numbers that go in: a logarithm, root or division of 0 or less"
        results = results_from(op, lambda x: x.exact + 1e-6)
        if inside and (op.phase == "backward" or (results and all(map(is_finite, results)))):
            todo = f"Keep it finite by an eps inside, as in {inside}"
        todo += ". No precision cures it."
    if one_call := _in_one_call(shadow, op):
        todo = f"{one_call} Or:\n{todo}"
    return _finding(op, "mathematics", what, todo)


def _unmasked(shadow: Shadow, op: Op) -> str:
    """Return how to mask so that NaN does not come of it, in the result of an op or of a later one."""
    nan = next((x for x in shadow.ops.values() if x.bad.has_nan and x.number >= op.number), op)
    bad = ancestors(shadow.ops, [nan.number], only_bad=True)
    dtypes = [op.gives for op in bad if op.bad.is_minus_inf and op.gives is not None]
    if not dtypes or not Walk(shadow, nan).is_finite_if_filled():
        return advice.UNMASK
    return advice.filled(min(dtypes, key=lambda dtype: torch.finfo(dtype).max))


def _is_mask(x: torch.Tensor, limit: float) -> bool:
    """Whether several numbers of a tensor are the same one near the least of its format."""
    low = x[:0] if x.is_complex() else x[x < -limit / 2]
    return low.numel() > 1 and bool((low == low[0]).all())


def _of_eps(shadow: Shadow, op: Op, eps: float, place: Place) -> Finding:
    what = f"{eps!r} is 0 in float16 ({_where(place)}), and does not keep the result from infinity"
    keep = advice.keep_wide(op.place, shadow.properties)
    todo = f"Take at least {2.0**-14:.1e} in the place of {eps!r}. Or:\n{keep}"
    if op.phase == "step":
        todo = "Give the optimizer eps=1e-4, or float32 parameters or masters."
    return _finding(op, "eps", what, todo)


def _constant_behind(shadow: Shadow, op: Op, loss: Loss | None) -> tuple[float, Place] | None:
    """Return the small constant that became 0 and is why a result is not finite, and where, if any."""
    if loss is not None and loss.cause != "underflow":
        return None
    made = [] if loss is None or loss.made is None else [loss.made]
    for _ in range(PASSED):
        if loss is None or len(made) != 1:  # as for the sum of several
            break
        for x in tree_leaves((made[0].args, made[0].kwargs)):
            number = _only_number(x)
            if loss.before / 2 <= number <= loss.before * 1.001:
                return number, made[0].place
        made = [shadow.ops[x] for x in made[0].parents]
    return next((x for x in shadow.lost.scalars if x[1].module == op.place.module), None)


def _only_number(x: Any) -> float:
    """Return a number of an op's arguments, also if it is a tensor; 0 if it is something else."""
    if isinstance(x, Value) and x.exact.numel() == 1 and not x.exact.is_complex():
        return float(f"{x.exact.item():.6g}")
    return x if isinstance(x, float) else 0.0


def _of_range(shadow: Shadow, op: Op) -> Finding:
    assert op.gives is not None
    value, limit = op.bad.value, torch.finfo(op.gives).max
    ends = f"{dtype_name(op.gives)} ends at {_number(limit)}"
    scale = shadow.gradients.unscaled_by if op.loss_scale == 1.0 else op.loss_scale
    is_backward = op.phase == "backward"
    is_scaled = is_backward and any(x.phase == op.phase for x in ancestors(shadow.ops, op.parents))
    if is_scaled and value is not None and value / scale <= limit < value:
        alike = [x for x in shadow.ops.values() if x.phase == "backward" and x.gives is op.gives]
        worst = max([value, *(x.largest for x in alike if math.isfinite(x.largest))])
        most = 2.0 ** math.floor(math.log2(limit * scale / worst))
        becomes = f"a gradient of {_number(value / scale)} becomes {_number(value)}"
        what = f"{becomes} by the loss scale of {exact(scale)}; {ends}"
        todo = "A dynamic loss scale goes down by itself: a few skipped steps are normal. "
        todo += f"A static one has to be at most {exact(most)}."
        return _finding(op, "loss scale", what, todo)
    shown = "is too large" if value is None else f"is {_number(value)} in FP64"
    if value is not None and not math.isfinite(value):
        what = "the result is not finite, and is with inputs that were never rounded"
        todo = advice.keep_wide(op.place, shadow.properties)
        if op.gives not in LOW_PRECISION:
            todo = "Compute what it takes in float32 too: digits are lost there."
        return _finding(op, "rounding", what, todo)
    subject = f"{op.argument} was cast, and the result" if op.argument else "the result"
    if op.gives is not torch.float16 or (value is not None and value > torch.finfo(torch.float32).max):
        todo = advice.SMALLER
    else:
        todo = advice.keep_wide(op.place, shadow.properties, op.gives)
    if is_scaled:
        todo = f"Make the loss or its scale smaller: a mean instead of a sum. Or:\n{todo}"
    if "add" in op.aten and any(_is_mask(x.real, limit) for x in inputs_of(op)):  # one of two masks
        todo = f"{_unmasked(shadow, op)} Or:\n{todo}"
    return _finding(op, "range", f"{subject} {shown}; {ends}", todo)


def _of_loss(shadow: Shadow, op: Op, loss: Loss) -> Finding:
    """Return the finding of digits that were lost before an op."""
    made, real = loss.made, loss.value.real.dtype
    is_inside = made is None or made.place.module == loss.taken.place.module
    at = loss.taken if made is None or (loss.cause == "cancellation" and is_inside) else made
    shows = f"; it shows at {_where(op.place)}" if at.place != op.place else ""
    what = f"{_became(loss.before, loss.after)} in {dtype_name(real)}{_THEN[loss.cause]}{shows}"
    in_float32 = torch.tensor(loss.before, dtype=torch.float64).float().item()
    is_lost_too = in_float32 == loss.after or abs(in_float32) < LEAST
    owned = loss.value.memory.owned
    if made is None and owned.kind == "buffer":
        what = f"the buffer {owned.name} was cast, and {what}"
        todo = advice.keep_buffers([owned.name], shadow.properties is not None)
    elif argument := _ARGUMENT.match(made.argument if made is not None else at.argument):
        todo = f"Leave {argument[0]} alone:\n{_excepting(shadow, argument[1])}"
    elif made is not None and real is torch.float32 and torch.float64 in made.takes:
        todo = f"Keep float64 until after line {op.place.line}."
    elif loss.cause == "cast" and real not in LOW_PRECISION:
        todo = "Compute with the integers, or in float64, and cast what is left, as their differences."
    elif real not in LOW_PRECISION or is_lost_too:
        todo = advice.ANOTHER_WAY
    else:  # a subtraction in float32 finds no digits that its input has lost
        lost_at = made if made is not None and made.place.file else at
        todo = advice.keep_wide(lost_at.place, shadow.properties, until=op.place)
    if one_call := _in_one_call(shadow, op):
        todo = f"{one_call} Or:\n{todo}"
    return replace(_finding(at, loss.cause, what, todo), value=loss.before)


_THEN = {
    "underflow": "",
    "cancellation": ", and these digits are all that a subtraction leaves",
    "rounding": ", and what follows needs the lost digits",
    "cast": ", which does not hold such integers",
}


def _became(before: float, after: float) -> str:
    """Return two numbers with so many digits that they differ."""
    digits = next((n for n in range(6, 17) if f"{before:.{n}g}" != f"{after:.{n}g}"), 17)
    return f"{before:.{digits}g} became {after:.{digits}g}"


def _far_off(shadow: Shadow, is_forward: bool) -> list[tuple[int, Finding]]:
    """Return the findings of finite results that have ruined a gradient or the loss.

    With `is_forward` only those of a forward, before gradients that are not finite.
    """
    good = {name: grad for name, grad in shadow.gradients.known.items() if not grad.is_bad}
    sizes = sorted(grad.size for grad in good.values())
    least = VANISHING * max(sizes[len(sizes) // 2], sizes[-1] / 10) if sizes else 0.0
    least = max(least, NOTHING * max(shadow.gradients.scales, default=1.0))
    share = {x: grad.off * grad.norm / _norm_beside(shadow, x) for x, grad in good.items() if grad.norm}
    stills = [x.owned for x in shadow.lost.still.values() if x.share > SOME]
    summed = {x.name for x in stills if x.kind == "gradient"}  # whose parts may be right
    ruined = {
        x: grad.made
        for x, grad in good.items()
        if grad.off > OFF and grad.size > least and share[x] > SHARE and x not in summed
    }
    is_whole = math.hypot(*share.values()) > 0.5
    # The value of a loss may be 0 by chance, as that of a policy, where gradients are right.
    of_losses = [shadow.ops[x] for x in shadow.gradients.losses if x in shadow.ops]
    most = FAR * sum(op.largest for op in of_losses)
    losses = [x.number for x in of_losses if x.error > FAR and x.error * x.largest >= most]
    losses = [] if any(x.off <= OFF and x.size > least for x in good.values()) else losses
    found: dict[Any, tuple[int, Finding]] = {}
    in_half: list[tuple[int, Finding]] = []
    known: list[Loss] = []  # of which other ops are consequences
    for op in ancestors(shadow.ops, [*ruined.values(), *losses]):
        before = max((shadow.ops[parent].error for parent in op.parents), default=0.0)
        is_noise = op.phase == "backward" and (is_forward or not is_whole)
        if op.is_bad or op.error <= max(FAR, WORSE * before) or is_noise:
            continue
        loss = Walk(shadow, op).loss(known)
        if loss is None and op.phase == "forward" and op.gives is torch.float32:
            what = f"it computes with too few digits: the result is {op.error:.0%} off that in FP64"
            found[op.place] = op.number, _finding(op, "cancellation", what, advice.ITSELF)
        if loss is None or loss in known:
            continue
        known.append(loss)
        is_vanished = loss.cause == "underflow" and op.phase == "backward"
        is_known = loss.cause == "cast" and shadow.lost.casts  # which are found anyhow
        if not is_vanished and not is_known:
            one = replace(_of_loss(shadow, op, loss), reached=tuple(ruined))
            first = found.setdefault((one.cause, one.module, one.line), (op.number, one))
            in_half += [first] * (loss.value.real.dtype in LOW_PRECISION and first not in in_half)
    return (in_half or list(found.values()))[:3]


def _norm_beside(shadow: Shadow, name: str) -> float:
    """Return the norm of all gradients of the model that a parameter belongs to."""
    prefix = next(x for x in shadow.models if name.startswith(x))
    return math.hypot(*(x.norm for one, x in shadow.gradients.known.items() if one.startswith(prefix)))


def stands_still(records: Iterable[Still], has_amp: bool) -> Iterator[Finding]:
    """Yield a finding for each line that was to change numbers, and left many of them as they were."""
    worst: dict[Any, Still] = {}  # of several steps
    for one in sorted(records, key=lambda one: one.share):
        if one.share > SOME:
            worst[*one.op.place[2:], one.owned.name or one.memory, one.is_decay] = one
    lines: defaultdict[Any, defaultdict[Any, list[Still]]] = defaultdict(lambda: defaultdict(list))
    for one in worst.values():
        lines[one.dtype, *one.op.place[2:]][one.owned.kind, one.is_decay].append(one)
    for kinds in lines.values():
        same = [one for each in kinds.values() for one in each]
        names = {kind for kind, _ in kinds}
        todo = advice.WITH_MASTERS if has_amp else advice.KEEP_MASTERS
        if names == {"average"}:
            todo = advice.KEEP_AVERAGES
        elif names == {"tensor"}:
            todo = advice.KEEP_WIDE
        if names == {"buffer"}:
            todo = advice.keep_buffers([one.owned.name for one in same], has_amp)
        dtype, phase = dtype_name(same[0].dtype), "backward" if names == {"gradient"} else "step"
        what = f"numbers in {dtype} stay as they are, although exactly they move:\n  "
        what += "\n  ".join(map(_counted, kinds.values()))
        value = sum(one.share * one.numbers for one in same)
        yield Finding("still", what, todo, phase, *same[0].op.place, gives=dtype, value=value)


def _counted(same: list[Still]) -> str:
    what = f"{len(same)} {same[0].owned.kind}{'s' * (len(same) > 1)}"
    by = ", by weight decay" if same[0].is_decay else ""
    names = {one.owned.name: one.share == 1.0 for one in same if one.owned.name}
    whole = sorted(name for name, is_whole in names.items() if is_whole)
    named = whole or sorted(names)
    which = f"; {'wholly' if whole else 'in'} {listed(named)}" if named else ""
    still, numbers = sum(one.share * one.numbers for one in same), sum(one.numbers for one in same)
    return f"{still:,.0f} of {numbers:,} ({still / numbers:.0%}) in {what}{by}{which}"


def _of_source(shadow: Shadow, op: Op) -> Finding:
    source, owned = op.bad.sources[0], op.bad.sources[0].owned
    at = f" at {list(source.at)}" if source.at else ""
    if owned.kind == "number":
        assert owned.tensor is not None
        dtype, became = dtype_name(owned.tensor.dtype), f"{'-' * op.bad.is_minus_inf}inf"
        what = f"{owned.name} is made a tensor of {dtype}, and becomes {became}"
        todo = "Make the tensor in float32, or take a smaller number."
        if op.bad.is_minus_inf:
            todo = _unmasked(shadow, op)
        return replace(_finding(op, "cast", what, todo), value=source.value)
    if source.value is not None:
        dtype, limit = dtype_name(op.takes[0]), torch.finfo(op.takes[0]).max
        what = f"the {owned.kind} {owned.name} is {_number(source.value)} in FP32"
        todo = advice.keep_wide(op.place, shadow.properties, op.takes[0])
        if owned.kind == "buffer":
            todo = advice.keep_buffers([owned.name], shadow.properties is not None)
        found = _finding(op, "range", f"{what}; {dtype} ends at {limit:g}", todo)
        return replace(found, value=source.value)
    if owned.kind not in ("weight", "buffer"):
        what = f"{owned.name or 'a tensor that no op of the step has made'} is not finite{at}"
        todo = "Look at the batch, and skip or mend it. No precision cures it."
        return _finding(op, "data", what, todo)
    if owned.kind == "weight":
        todo = "It was so before this step: look at how it is initialized or loaded, and diagnose the "
        todo += "earlier steps."
    elif shadow.properties is None:
        todo = advice.EARLIER
    else:
        todo = "If a forward has ruined it whose step was skipped, protect_buffers: true keeps it."
    return _finding(op, "weights", f"the {owned.kind} {owned.name} is not finite{at}", todo)


def _of_sources(shadow: Shadow) -> list[tuple[int, Finding]]:
    """Return a finding for a weight or buffer that is not finite, if no gradient shows it."""
    for op in shadow.ops.values():
        if any(x.owned.kind in ("weight", "buffer") and not x.is_mask for x in op.bad.sources):
            one, name = _of_source(shadow, op), op.bad.sources[0].owned.name
            if not one.module:  # it was read outside of any, as when buffers are protected
                one = replace(one, op="", file="", line=0, module=name.rpartition(".")[0])
            return [(op.number, one)]
    return []


def _absorbed(shadow: Shadow, is_forward: bool) -> list[tuple[int, Finding]]:
    """Return the findings of results that are not finite, and reach no gradient."""
    roots = [x for x in shadow.ops.values() if x.is_root and math.isfinite(x.bad.value or math.nan)]
    roots = [op for op in roots if not op.bad.is_minus_inf]  # what a mask makes of it is as intended
    roots = [op for op in roots if op.phase != "backward" or not is_forward]
    roots = [op for op in roots if not _is_dropped(shadow, op)]
    found = []
    for op in roots[:3]:
        one = _explain(shadow, op)
        what = f"{one.what}; no gradient shows it"
        if one.cause == "loss scale":  # no scaler sees an overflow, so the scale stays as it is
            todo = advice.keep_wide(op.place, shadow.properties, op.gives)
            one = replace(one, cause="range", advice=todo)
        cause = "absorbed range" if one.cause == "range" else one.cause
        found.append((op.number, replace(one, cause=cause, what=what)))
    return found


def _is_dropped(shadow: Shadow, root: Op) -> bool:
    """Whether all that takes an inf or NaN is as without it, as where `padding_idx` drops it."""
    bad, takers = {root.number}, list[Op]()
    for number, op in shadow.ops.items():
        if not bad.isdisjoint(op.parents):
            if op.is_bad:
                bad.add(number)
            else:
                takers.append(op)
    return bool(takers) and all(op.error <= FAR for op in takers)


def _of_cast(shadow: Shadow, cast: LossyCast) -> Finding:
    op, name = cast.op, cast.argument or "a tensor"
    gives = op.gives or op.takes[0]  # what is cast to integers
    dtype = dtype_name(gives)
    if cast.is_mask:
        what = f"{name} was cast to {dtype}, and {cast.before:g} became -inf"
        todo = _unmasked(shadow, op)
    else:
        became = f"{exact(cast.before)} became {exact(cast.after)}"
        if cast.before == cast.after:
            became = f"it does not hold all above {EXACT_INTEGERS[gives]}"
        what = f"{name} holds integers up to {exact(cast.largest)}, which {dtype} rounds: {became}"
        todo = "Give integers as torch.long, or compute with them in float32."
    if argument := _ARGUMENT.match(op.argument):
        todo += f"\nOr take O4, or leave the argument alone:\n{_excepting(shadow, argument[1])}"
    elif shadow.properties is not None and (rule := rule_for(op.place.module)):
        todo += f"\nOr keep the module in FP32:\nrules: [{rule}]"
    return replace(_finding(op, "cast", what, todo), value=cast.largest)


def _vanished(shadow: Shadow) -> list[Finding]:
    sizes = {name: grad for name, grad in shadow.gradients.known.items() if grad.size > 0}
    lost = [name for name, grad in sizes.items() if grad.gone > 0.5]
    if not lost or len(lost) * 2 < len(sizes):
        return []
    scale = max(shadow.gradients.scales, default=1.0)
    at = "without a loss scale" if scale == 1.0 else f"with the loss scale of {exact(scale)}"
    what = f"more than half of the gradient is 0 in {len(lost)} of {len(sizes)} parameters"
    todo = advice.scale_loss(shadow.properties)
    if scale != 1.0 and shadow.properties is None:
        todo = "Take a larger loss scale, as by GradScaler(init_scale=65536); or use bfloat16."
    what = f"{what}, and is not in FP64, {at}"
    return [Finding("underflow", what, todo, "backward", reached=tuple(lost))]


def _finding(op: Op, cause: str, what: str, todo: str) -> Finding:
    limit = None if op.gives is None else float(torch.finfo(op.gives).max)
    gives = "" if op.gives is None else dtype_name(op.gives)
    takes = tuple(map(dtype_name, op.takes))
    return Finding(cause, what, todo, op.phase, *op.place, takes, gives, op.bad.value, limit)


def _excepting(shadow: Shadow, argument: str) -> str:
    return excepting([argument], shadow.properties.cast_model_inputs if shadow.properties else True)


def _where(place: Place) -> str:
    return f"{place.op}, line {place.line}"


def _number(x: float) -> str:
    return f"{x:.6g}"
