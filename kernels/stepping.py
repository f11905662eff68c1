"""One optimizer step for a list of tensors, in one launch: what every element-wise optimizer shares.

    g = gradient * inv_scale * clip                           negated to maximize
    parameter, moments = rule(parameter, g, moments, t)       with t = step + 1
    model = round_to_nearest_even(parameter)                  for 16-bit weights with FP32 masters
    step = t

Instead of having a model, a parameter may itself be a 16-bit weight that is a master together with its
`low` half; see `amp.kernels.split`. Moments in bfloat16 may be rounded stochastically: up with the
probability that makes the mean right. The same seed, step and tensor give the same bits again.

Nothing at all is written where `found_inf` is not 0: a skipped step does not count. Nor does one of a
tensor without elements. A `Rule` is the formula of one optimizer, twice: for Triton and for plain
torch.

Shapes: a parameter, its gradient, moments and model have one shape, of any size; each has its own
`step`, float32 `[]`. DTensors go through their local shards. Dtypes: float16, bfloat16 or float32 each;
the arithmetic is FP32, and each result is rounded once. Where one is float64, plain torch does all in
FP64. Launches: one for each device and combination of dtypes, and three before it for a rule that goes
by the norms of its own direction. Memory traffic: each tensor that is read is read once, and each that
is written is written once: for AdamW with FP32 masters of 16-bit weights, 28 bytes a parameter. Norms
of a direction read all but the models once more.

Plain torch (`amp.kernels.plainstep`) reads `found_inf`, factors and steps on the host, so there the
host waits for a device other than the CPU.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp.kernels.l2norm import norms_of_chunks
from amp.kernels.language import (
    ALIGNMENT,
    STEP,
    dtype_of,
    jit,
    launch,
    locate,
    narrow,
    tl,
    vector_length,
    wide,
)
from amp.kernels.plainstep import Formula, Numbers, Streams, step_plainly
from amp.kernels.split import decode_block, encode_block
from amp.kernels.tables import Launch, cached, numbers_on, plan, stream_of, to_device
from amp.kernels.tensor_lists import local_shards, were_written
from amp.kernels.update_scale import widest

BLOCK = 2048
COUNTERS = 256
WARPS = 8


class Rule(NamedTuple):
    """The formula of one optimizer.

    Attributes:
        moments: how many moments it has, at most 2.
        prepare: for Triton, from a pointer to the numbers, t, a pointer to the tensor's own numbers and
            how far apart they are to what `update` needs of them.
        update: for Triton, from a parameter, gradient, two moments and what `prepare` gave to the new
            parameter and moments; a moment that the rule does not have comes and goes as 0.
        at: for plain torch, what `prepare` is for Triton: from the numbers, t and the tensor's own.
        formula: for plain torch, what `update` is for Triton, all of the tensor with a `direction`.
        direction: for Triton, as `update` but to the direction of the step in place of the parameter;
            then `prepare` finds the norms of parameters and directions.
    """

    moments: int
    prepare: Any
    update: Any
    at: Callable[[list[float], float, float | None], Numbers]
    formula: Formula
    direction: Any = None


def in_double(number: float | Tensor) -> float | Tensor:
    """Return a hyper-parameter in FP64; a tensor on a device without FP64 in FP32."""
    return widest(number) if isinstance(number, Tensor) else float(number)


def step(
    rule: Rule,
    numbers: Sequence[float | Tensor],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    moments: Sequence[Sequence[Tensor]],
    steps: Sequence[Tensor],
    *,
    models: Sequence[Tensor] | None = None,
    lows: Sequence[Tensor] | None = None,
    of_tensor: Tensor | None = None,
    seed: int | None = None,
    inv_scale: Tensor | None = None,
    clip: Tensor | None = None,
    found_inf: Tensor | None = None,
    maximize: bool = False,
    backend: str | None = None,
) -> None:
    """Step parameters in place. On a device with Triton the host does not wait.

    Autograd is told of it: the version of each parameter, model and low half goes up by one.

    Args:
        rule: the optimizer's formula.
        numbers: the hyper-parameters, in the order that the rule has them; a tensor has one element.
        params: what is stepped: FP32 masters, or the model's parameters or weights.
        grads: their gradients, scaled or not.
        moments: one list for each moment of the rule.
        steps: how many steps each parameter has taken, float32 `[]`, on its device.
        models: the weights of the model that `params` are masters of.
        lows: the low halves of the masters whose high halves `params` are; not with `models`.
        of_tensor: float32 `[n]`, a number for each tensor, for a rule that takes one.
        seed: for stochastic rounding of moments in bfloat16; None rounds all to nearest even.
        inv_scale: float32 `[1]`, what to multiply the gradients by; None is 1.
        clip: the same again.
        found_inf: float32 `[1]`; the step is skipped where it is not 0.
        maximize: whether to step along the gradients.
        backend: see `amp.kernels.backend`.

    Raises:
        ValueError: the lists do not match.
        UnsupportedTensorError: a dtype that is not listed above.
    """
    lists = Streams(params, grads, tuple(moments), models, lows)
    how = _How(rule, tuple(numbers), of_tensor, seed, inv_scale, clip, found_inf, maximize, backend)
    todo = plan(*lists.all(), block=BLOCK, numbers=steps, backend=backend)
    in_torch = [*todo.fallback, *(x.indices for x in todo.launches if torch.float64 in x.dtypes)]
    for each in todo.launches:
        if torch.float64 not in each.dtypes:
            _launch_step(how, each, lists)
    if in_torch and (found_inf is None or not found_inf.item()):
        _step_in_torch(how, in_torch, lists.map(local_shards), steps)
    were_written([*params, *(models or ()), *(lows or ())])


class _How(NamedTuple):
    """The arguments of `step` that are no lists."""

    rule: Rule
    numbers: tuple[float | Tensor, ...]
    of_tensor: Tensor | None
    seed: int | None
    inv_scale: Tensor | None
    clip: Tensor | None
    found_inf: Tensor | None
    maximize: bool
    backend: str | None


def _launch_step(how: _How, each: Launch, lists: Streams) -> None:
    rule, device = how.rule, each.device
    dtypes = lists.of(*map(dtype_of, each.dtypes))
    moments = (*dtypes.moments, None, None)
    arguments: dict[str, Any] = {
        "rows": each.rows,
        "chunks": each.chunks,
        "n": len(each.indices),
        "numbers": _on_device(how.numbers, device),
        "of_tensor": None if how.of_tensor is None else to_device(how.of_tensor, device),
        "n_of_tensor": len(lists.param),
        "seed": how.seed,
        "inv_scale": None if how.inv_scale is None else to_device(how.inv_scale, device),
        "clip": None if how.clip is None else to_device(how.clip, device),
        "found_inf": None if how.found_inf is None else to_device(how.found_inf, device),
        "PREPARE": rule.prepare,
        "MAXIMIZE": how.maximize,
        "PARAM": dtypes.param,
        "GRAD": dtypes.grad,
        "FIRST": moments[0],
        "SECOND": moments[1],
        "MODEL": dtypes.model,
        "LOW": dtypes.low,
        "LISTS": len(each.dtypes),
        "BLOCK": BLOCK,
        "COUNTERS": COUNTERS,
        "num_warps": WARPS,
    }
    if rule.direction is not None:
        arguments["of_tensor"] = _norms_of_direction(rule, each, arguments)
    ticket = _ticket(device, stream_of(device))
    _launch(each, arguments, UPDATE=rule.update, sums=None, ticket=ticket)


def _launch(each: Launch, arguments: dict[str, Any], **more: Any) -> None:
    launch(step_kernel, len(each.chunks), each.device, **arguments, **more)


def _norms_of_direction(rule: Rule, each: Launch, arguments: dict[str, Any]) -> Tensor:
    """Return the norms of parameters, and after them those of their directions, float32 `[2 * n]`."""
    n, programs = arguments["n_of_tensor"], len(each.chunks)
    sums = torch.empty(2 * programs, dtype=torch.float32, device=each.device)
    _launch(each, arguments, UPDATE=rule.direction, sums=sums, ticket=None)
    norms = torch.empty(2 * n, dtype=torch.float32, device=each.device)
    for of_kind, of_chunks in zip(norms.split(n), sums.split(programs), strict=True):
        norms_of_chunks(each, of_chunks, of_kind)
    return norms


@torch.no_grad()
def _step_in_torch(
    how: _How, groups: Sequence[Sequence[int]], lists: Streams, steps: Sequence[Tensor]
) -> None:
    """Step what Triton does not, group by group of one device and combination of dtypes."""
    torch._foreach_add_([steps[i] for i in itertools.chain.from_iterable(groups)], 1.0)
    scale = math.prod(float(x) for x in (how.inv_scale, how.clip) if x is not None)
    own = [None] * len(steps) if how.of_tensor is None else how.of_tensor.tolist()
    at = functools.cache(functools.partial(how.rule.at, list(map(float, how.numbers))))
    for number, same in enumerate(groups):
        # What is written by way of `.data` has no version: autograd is told of the whole step once.
        of_same = lists.map(lambda tensors, same=same: [tensors[i].data for i in same])  # type: ignore[misc]
        ts = [float(steps[i]) for i in same]
        step_plainly(
            how.rule.formula,
            of_same,
            [at(t, own[i]) for t, i in zip(ts, same, strict=True)],
            -scale if how.maximize else scale,
            steps=ts,
            seed=None if how.seed is None else how.seed + number,
            whole=how.rule.direction is not None,
            backend=how.backend,
        )


def _on_device(numbers: tuple[float | Tensor, ...], device: torch.device) -> Tensor:
    """Return numbers as float32 `[n]`; those that are on the host already go there at most once."""
    if set(map(type, numbers)) <= {float, int}:
        return numbers_on(device, stream_of(device), numbers, torch.float32)
    there = {
        i: number
        for i, number in enumerate(numbers)
        if isinstance(number, Tensor) and number.device.type != "cpu"
    }
    on_host = tuple(0.0 if i in there else float(number) for i, number in enumerate(numbers))
    result = numbers_on(device, stream_of(device), on_host, torch.float32)
    if there:
        result = result.clone()
        for i, number in there.items():
            result[i].copy_(number.reshape(()), non_blocking=True)
    return result


@cached
def _ticket(device: torch.device, stream: int) -> Tensor:
    """Return the count of programs that have finished, int32 `[1]`; a launch leaves it at 0."""
    return torch.zeros(1, dtype=torch.int32, device=device)


@jit
def _load_block(param, grad, first, second, low, i, mask, scale):
    p = tl.load(param + i, mask=mask, other=0.0)
    if low is not None:
        p = decode_block(p, tl.load(low + i, mask=mask, other=0))
    g = wide(tl.load(grad + i, mask=mask, other=0.0), tl.float32) * scale
    m = 0.0
    v = 0.0
    if first is not None:
        m = wide(tl.load(first + i, mask=mask, other=0.0), tl.float32)
    if second is not None:
        v = wide(tl.load(second + i, mask=mask, other=0.0), tl.float32)
    return wide(p, tl.float32), g, m, v


@jit
def _mixed(x):
    """Return 32 bits that look random, for any 32 bits.

    Source: the hash `triple32` of Wellons' hash-prospector (public domain).
    """
    x ^= x >> 17
    x *= 0xED5AD4BB
    x ^= x >> 11
    x *= 0xAC4C1B51
    x ^= x >> 15
    x *= 0x31848BAB
    return x ^ (x >> 14)


@jit
def _narrow_moment(x, dtype: tl.constexpr, noise):
    """Return a moment in its dtype, rounded by 16 random bits if there are any."""
    result = narrow(x, dtype)
    if noise is not None:
        if dtype == tl.bfloat16:
            bits = x.to(tl.uint32, bitcast=True)
            high = ((bits + noise) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
            result = tl.where((bits & 0x7F800000) == 0x7F800000, result, high)  # inf, NaN
    return result


@jit
def _step_block(
    loaded,
    param,
    first,
    second,
    model,
    low,
    i,
    mask,
    prepared,
    start,
    key,
    UPDATE: tl.constexpr,
    MEASURES: tl.constexpr,
):
    """Step a block; or return the sums of squares of the parameter and of the direction."""
    p, g, m, v = loaded
    result, m, v = UPDATE(p, g, m, v, prepared)
    if MEASURES:
        result = tl.where(mask, result, 0.0)
        return tl.sum(p * p, axis=0), tl.sum(result * result, axis=0)
    if low is not None:
        high, rest = encode_block(result, param.dtype.element_ty, low.dtype.element_ty)
        tl.store(param + i, high, mask=mask)
        tl.store(low + i, rest, mask=mask)
    else:
        tl.store(param + i, narrow(result, param.dtype.element_ty), mask=mask)
    noise1 = None
    noise2 = None
    if key is not None:
        random = _mixed(_mixed((start + i).to(tl.uint32) ^ key) + key)
        noise1 = random & 0xFFFF
        noise2 = random >> 16
    if first is not None:
        tl.store(first + i, _narrow_moment(m, first.dtype.element_ty, noise1), mask=mask)
    if second is not None:
        tl.store(second + i, _narrow_moment(v, second.dtype.element_ty, noise2), mask=mask)
    if model is not None:
        tl.store(model + i, narrow(result, model.dtype.element_ty), mask=mask)
    return 0.0, 0.0


@jit
def _load_and_step_block(
    param,
    grad,
    first,
    second,
    model,
    low,
    i,
    mask,
    scale,
    prepared,
    start,
    key,
    UPDATE: tl.constexpr,
    MEASURES: tl.constexpr,
):
    loaded = _load_block(param, grad, first, second, low, i, mask, scale)
    return _step_block(
        loaded, param, first, second, model, low, i, mask, prepared, start, key, UPDATE, MEASURES
    )


@jit(
    do_not_specialize=[
        *("n", "numbers", "of_tensor", "n_of_tensor", "seed"),
        *("inv_scale", "clip", "found_inf", "sums", "ticket"),
    ]
)
def step_kernel(
    rows,
    chunks,
    n,
    numbers,
    of_tensor,
    n_of_tensor,
    seed,
    inv_scale,
    clip,
    found_inf,
    sums,
    ticket,
    PREPARE: tl.constexpr,
    UPDATE: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    MODEL: tl.constexpr,
    LOW: tl.constexpr,
    LISTS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTERS: tl.constexpr,
):
    """Step one chunk. The program that finishes last counts the step of each tensor.

    With `sums`, `[2, chunks]`, it steps nothing, and sums the squares of parameter and direction.
    LISTS: how many lists of tensors there are; after their addresses comes that of the step.
    """
    row, start, length = locate(chunks, rows, LISTS + 1, BLOCK)
    taken = 1.0
    if found_inf is not None:
        taken = tl.where(tl.load(found_inf) == 0.0, 1.0, 0.0)
        length = tl.where(taken == 1.0, length, 0)
    scale = -1.0 if MAXIMIZE else 1.0
    if inv_scale is not None:
        scale *= tl.load(inv_scale)
    if clip is not None:
        scale *= tl.load(clip)

    param, grad = tl.load(row), tl.load(row + 1)
    addresses = param | grad
    if FIRST is not None:
        first = tl.load(row + 2)
        addresses |= first
    if SECOND is not None:
        second = tl.load(row + 3)
        addresses |= second
    if MODEL is not None or LOW is not None:
        other = tl.load(row + LISTS - 1)
        addresses |= other
    t = tl.load(tl.load(row + LISTS).to(tl.pointer_type(tl.float32))) + 1.0
    index = tl.load(row + LISTS + 2)
    if of_tensor is not None:
        of_tensor += index

    vectors = vector_length(addresses, length)
    i = tl.arange(0, BLOCK)
    p = tl.multiple_of(param.to(tl.pointer_type(PARAM)), ALIGNMENT) + start
    g = tl.multiple_of(grad.to(tl.pointer_type(GRAD)), ALIGNMENT) + start
    m = None if FIRST is None else tl.multiple_of(first.to(tl.pointer_type(FIRST)), ALIGNMENT) + start
    v = (
        None
        if SECOND is None
        else tl.multiple_of(second.to(tl.pointer_type(SECOND)), ALIGNMENT) + start
    )
    model = (
        None if MODEL is None else tl.multiple_of(other.to(tl.pointer_type(MODEL)), ALIGNMENT) + start
    )
    low = None if LOW is None else tl.multiple_of(other.to(tl.pointer_type(LOW)), ALIGNMENT) + start
    loaded = _load_block(p, g, m, v, low, i, i < vectors, scale)
    # All that follows from the number of the step is worked out while these are under way.
    prepared = PREPARE(numbers, t, of_tensor, n_of_tensor)
    key = None
    if seed is not None:
        key = _mixed(_mixed(_mixed(seed.to(tl.uint32)) + t.to(tl.uint32)) + index.to(tl.uint32))
    of_param, of_direction = _step_block(
        loaded,
        p,
        m,
        v,
        model,
        low,
        i,
        i < vectors,
        prepared,
        start,
        key,
        UPDATE,
        sums is not None,
    )
    for tail in range(vectors, length, STEP):
        j = tail + tl.arange(0, STEP)
        more_of_param, more_of_direction = _load_and_step_block(
            param.to(tl.pointer_type(PARAM)) + start,
            grad.to(tl.pointer_type(GRAD)) + start,
            None if FIRST is None else first.to(tl.pointer_type(FIRST)) + start,
            None if SECOND is None else second.to(tl.pointer_type(SECOND)) + start,
            None if MODEL is None else other.to(tl.pointer_type(MODEL)) + start,
            None if LOW is None else other.to(tl.pointer_type(LOW)) + start,
            j,
            j < length,
            scale,
            prepared,
            start,
            key,
            UPDATE,
            sums is not None,
        )
        of_param += more_of_param
        of_direction += more_of_direction
    if sums is not None:
        tl.store(sums + tl.program_id(0), of_param)
        tl.store(sums + tl.num_programs(0) + tl.program_id(0), of_direction)
    else:
        tl.debug_barrier()  # every thread has read its step
        if tl.atomic_add(ticket, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            for at in range(0, n, COUNTERS):
                k = at + tl.arange(0, COUNTERS)
                counter = tl.load(rows + k * (LISTS + 3) + LISTS, mask=k < n, other=0)
                counter = counter.to(tl.pointer_type(tl.float32))
                tl.store(counter, tl.load(counter, mask=k < n, other=0.0) + taken, mask=k < n)
            tl.store(ticket, 0)


@jit
def bias_correction(t, log_beta, corrects_bias):
    """Return 1 - beta^t, or 1 if there is nothing to correct."""
    return tl.where(corrects_bias == 0.0, 1.0, -_expm1_of_negative(t * log_beta))


@jit
def _expm1_of_negative(x):
    """Return e^x - 1 for x <= 0, to a few units in the last place, also near 0."""
    near = 1.0 + x / 8.0
    near = 1.0 + x / 7.0 * near
    near = 1.0 + x / 6.0 * near
    near = 1.0 + x / 5.0 * near
    near = 1.0 + x / 4.0 * near
    near = 1.0 + x / 3.0 * near
    near = 1.0 + x / 2.0 * near
    return tl.where(x > -0.4, x * near, tl.exp(x) - 1.0)
