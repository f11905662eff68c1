"""Finding the causes of a trace's non-finite gradients.

From a gradient that is not finite, the search goes back over the events to those without a parent
event; the earliest of them is the cause. An intended -inf, as in a mask, is not a cause; if all are
intended, the first event with a NaN is the cause. Events that reach no gradient are absorbed: the step
looks healthy, and is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch

from amp.diagnosis.events import Event, LossyCast
from amp.diagnosis.findings import Finding, rule_for
from amp.diagnosis.trace import CASTS, Trace
from amp.dtypes import dtype_name

_DIVISIONS = {
    "div",
    "div_",
    "addcdiv_",
    "_foreach_addcdiv_",
    "_foreach_div_",
    "reciprocal",
    "rsqrt",
    "sqrt",
    "log",
    "log2",
    "pow",
}


def findings_of(trace: Trace) -> list[Finding]:
    """Return the findings of a trace, the cause first."""
    found: list[Finding] = []
    causes = _causes(trace)
    reached = tuple(trace.bad_grads or trace.bad_weights)
    if causes:
        found.append(_explain(trace, causes[0], reached))
        masked = [event for event in trace.events.values() if event.rows_of_minus_inf and event.has_nan]
        if masked and found[0].cause == "cast":
            found.append(_explain(trace, masked[0], reached))
    elif reached:
        found.append(_unseen(trace))
    found += _of_sources(trace, {x.number for x in causes})
    found += _absorbed(trace, {x.number for x in causes}) if not found else []
    explained = {(x.cause, x.line, x.op) for x in found}
    casts = [_of_cast(cast) for cast in _distinct(trace.casts)]
    found += [x for x in casts if (x.cause, x.line, x.op) not in explained]
    for name, place in list(trace.grads_in_place.items())[:1]:
        found.insert(
            0,
            Finding(
                "order",
                f"the gradient of {name} was written to while it was still scaled",
                "Clip gradients after the scale_loss block, over amp.master_params(optimizer); with a "
                "GradScaler after scaler.unscale_(optimizer).",
                *("backward", place.op, place.module, place.file, place.line),
            ),
        )
    if not found and trace.scales <= {1.0}:
        found += _underflow(trace)
    return found


def _ancestors(trace: Trace, numbers: Iterable[int]) -> set[int]:
    seen: set[int] = set()
    todo = list(numbers)
    while todo:
        number = todo.pop()
        if number not in seen:
            seen.add(number)
            todo += trace.events[number].parents
    return seen


def _causes(trace: Trace) -> list[Event]:
    """Return the events that made the gradients inf or NaN, the earliest first."""
    starts = (trace.loss, *trace.bad_grads.values(), *trace.bad_weights.values())
    made = [number for number in starts if number is not None]
    ancestors = [trace.events[number] for number in sorted(_ancestors(trace, made))]
    roots = [event for event in ancestors if not event.parents and not event.is_benign]
    return roots or [event for event in ancestors if event.has_nan][:1]


def _explain(trace: Trace, event: Event, reached: tuple[str, ...]) -> Finding:
    if event.sources:
        return _of_source(event, reached)
    limit = torch.finfo(event.gives).max
    dtype = dtype_name(event.gives)
    value, loss_scale = event.value, event.loss_scale
    lost = [x for x in trace.lost if x.place.module == event.place.module]
    rule = rule_for(event.place.module)
    if event.rows_of_minus_inf:
        return _finding(
            event,
            "mathematics",
            "a whole row of the input is -inf, as if it were masked entirely: 0 / 0 in any precision",
            "Do not mask whole rows, or set these rows to 0 afterwards. No rule cures it.",
            reached,
        )
    if value is None or not math.isfinite(value) or value <= limit:
        if lost and (event.aten in _DIVISIONS or event.has_nan):
            return _finding(
                event,
                "eps",
                f"{lost[0].value:g} is 0 in {dtype_name(lost[0].dtype)} ({_where(lost[0].place)}), and "
                "does not keep the result from infinity",
                f"Take an eps of at least {2.0**-14:.1e}, or "
                + (f"keep the module in FP32:\nrules: [{rule}]" if rule else "compute it in FP32."),
                reached,
            )
        if value is not None and not math.isfinite(value):
            return _finding(
                event,
                "mathematics",
                f"the result is {value} in FP64 too",
                "Look at the numbers that go in: a logarithm of 0, a division by 0, a root or power "
                "where the gradient is infinite. No precision cures it.",
                reached,
            )
    if event.phase == "backward" and value is not None and value / loss_scale <= limit < value:
        return _finding(
            event,
            "loss scale",
            f"a gradient of {_number(value / loss_scale)} becomes {_number(value)} by the loss scale "
            f"of {loss_scale:g}; {dtype} ends at {_number(limit)}",
            "A dynamic loss scale goes down by itself: a few skipped steps are normal. A static one "
            f"has to be at most {2.0 ** math.floor(math.log2(limit * loss_scale / value)):g}.",
            reached,
        )
    shown = "is too large" if value is None else f"is {_number(value)} in FP64"
    advice = (
        f"Keep it in FP32:\nrules: [{rule}]\nor take O4 or O5: bfloat16 has the range of FP32."
        if rule
        else "Scale its inputs down, or compute it in FP32 (x.float()); or take O4 or O5."
    )
    if event.phase == "backward":
        advice = f"Make the loss smaller: a mean instead of a sum. {advice}"
    for cast in trace.casts if event.aten in CASTS else ():
        if cast.place == event.place and cast.kind == "mask":
            return replace(_of_cast(cast), reached=reached)
    return _finding(
        event, "range", f"the result {shown}; {dtype} ends at {_number(limit)}", advice, reached
    )


def _of_source(event: Event, reached: tuple[str, ...]) -> Finding:
    source = event.sources[0]
    at = f" at {list(source.at)}" if source.at else ""
    if source.value is not None:
        dtype, limit = dtype_name(event.takes[0]), torch.finfo(event.takes[0]).max
        what = f"the weight {source.name} is {_number(source.value)} in FP32; {dtype} ends at {limit:g}"
        rule = rule_for(event.place.module)
        keep = f"Keep its module in FP32:\nrules: [{rule}]\nor take" if rule else "Take"
        advice = f"{keep} O4 or O5."
        return replace(_finding(event, "range", what, advice, reached), value=source.value)
    if source.kind == "data":
        what = f"{source.name or 'a tensor that no op of the step has made'} is not finite{at}"
        advice = "Look at the batch, and skip or mend it. No precision cures it."
        return _finding(event, "data", what, advice, reached)
    what = f"the {source.kind} {source.name} is not finite{at}"
    advice = (
        "It was ruined before this step: go back to a checkpoint, and diagnose the step that ruins it."
        if source.kind == "weight"
        else "A forward has ruined it, though its step was skipped: protect_buffers: true keeps it."
    )
    return _finding(event, "weights", what, advice, reached)


def _of_sources(trace: Trace, known: set[int]) -> list[Finding]:
    """Return a finding for a weight or buffer that is not finite, if no gradient shows it."""
    if known:
        return []
    events = [x for x in trace.events.values() if any(s.kind != "data" for s in x.sources)]
    return [_of_source(event, ()) for event in events[:1]]


def _absorbed(trace: Trace, known: set[int]) -> list[Finding]:
    found = []
    for event in trace.events.values():
        is_range = event.value is not None and math.isfinite(event.value)
        if event.is_root and is_range and event.number not in known:
            explained = _explain(trace, event, ())
            cause = "absorbed range" if explained.cause == "range" else explained.cause
            found.append(
                _finding(
                    event, cause, f"{explained.what}; no later result shows it", explained.advice, ()
                )
            )
    return found[:3]


def _of_cast(cast: LossyCast) -> Finding:
    name = cast.argument or "a tensor"
    dtype = dtype_name(cast.gives)
    place = ("forward", cast.place.op, cast.place.module, cast.place.file, cast.place.line)
    dtypes = ((dtype_name(cast.takes),), dtype, cast.largest, float(torch.finfo(cast.gives).max))
    if cast.kind == "mask":
        what = f"{name} was cast to {dtype}, and {-cast.largest:g} became -inf"
        advice = "Give a mask of bools, or torch.finfo(dtype).min in place of a large number."
    else:
        what = f"{name} holds integers up to {cast.largest:g}, which {dtype} rounds"
        advice = "Give integers as torch.long, or compute with them in FP32."
    return Finding("cast", what, advice, *place, *dtypes)


def _underflow(trace: Trace) -> list[Finding]:
    zeros = trace.zero_grads
    lost = [name for name, share in zeros.items() if share > 0.5]
    if len(lost) * 2 <= len(zeros) or not zeros:
        return []
    return [
        Finding(
            "underflow",
            f"more than half of the gradient is 0 in {len(lost)} of {len(zeros)} parameters, in "
            "float16 without a loss scale",
            "Take loss_scale='dynamic', or O4 or O5.",
            "backward",
            reached=tuple(lost),
        )
    ]


def _unseen(trace: Trace) -> Finding:
    return Finding(
        "range",
        "gradients are not finite, and none of the ops that were seen made them so",
        "Put the forward, the loss and the backward of one step inside the block.",
        "backward",
        reached=tuple(trace.bad_grads),
    )


def _distinct(casts: list[LossyCast]) -> list[LossyCast]:
    return list({(x.kind, x.argument, x.place): x for x in casts}.values())[:3]


def _finding(event: Event, cause: str, what: str, advice: str, reached: tuple[str, ...]) -> Finding:
    place = event.place
    return Finding(
        *(cause, what, advice, event.phase, place.op, place.module, place.file, place.line),
        *(tuple(map(dtype_name, event.takes)), dtype_name(event.gives), event.value),
        *(float(torch.finfo(event.gives).max), reached),
    )


def _where(place: object) -> str:
    return f"{getattr(place, 'op', '')}, line {getattr(place, 'line', 0)}"


def _number(x: float) -> str:
    return f"{x:.6g}"
