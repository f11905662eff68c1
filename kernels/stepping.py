"""One optimizer step for a list of tensors, in one launch: what every element-wise optimizer shares.

    g = gradient * inv_scale * clip                           negated to maximize
    parameter, moments = rule(parameter, g, moments, t)       with t = step + 1
    model = round_to_nearest_even(parameter)                  for 16-bit weights with FP32 masters
    step = t

Instead of having a model, a parameter may itself be a 16-bit weight that is a master together with its
`low` half; see `amp.kernels.split`. Moments in bfloat16 may be rounded stochastically: up with the
probability that makes the mean right. The same seed and step of a tensor give the same bits again,
whatever else is stepped with it.

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
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from amp.kernels.changes import Change, Changes
from amp.kernels.l2norm import norms_of_chunks
from amp.kernels.language import (
    STEP,
    chunk_addresses,
    jit,
    load_all,
    locate,
    narrow,
    pointers_to,
    tl,
    wide,
)
from amp.kernels.plainstep import measure_plainly, plan_step
from amp.kernels.rule import Numbers, Rule, Settings, Streams, moment_names, square_root
from amp.kernels.split import decode_block, encode_block
from amp.kernels.tables import Launch, cached, number_on, numbers_on, plan
from amp.kernels.tensor_lists import dense, increment_versions

BLOCK = 2048
COUNTERS = 256


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
    seeds: Sequence[int] | None = None,
    inv_scale: Tensor | None = None,
    clip: Tensor | None = None,
    found_inf: Tensor | None = None,
    maximize: bool = False,
    norms_of_all_ranks: Callable[[Tensor], Tensor] | None = None,
    backend: str | None = None,
    changes: Changes | None = None,
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
        seeds: one for each tensor, of 31 bits, for stochastic rounding of moments in bfloat16; None
            rounds all to nearest even.
        inv_scale: float32 `[1]`, what to multiply the gradients by; None is 1.
        clip: the same again.
        found_inf: float32 `[1]`; the step is skipped where it is not 0.
        maximize: whether to step along the gradients.
        norms_of_all_ranks: from the norms of this rank's shards, float32 `[2n]`, to those of whole
            tensors, for a rule that goes by them. None where tensors are whole.
        backend: see `amp.kernels.backend`.
        changes: where the step is planned, to be taken later. Nothing is written before. None takes it
            now.

    Raises:
        ValueError: the lists do not match.
        UnsupportedTensorError: a dtype that is not listed above.
    """
    planned = Changes() if changes is None else changes
    given = params, grads, *moments, models, lows
    names = "param", "grad", *moment_names(len(moments)), "model", "low"
    lists = {name: dense(ts) for name, ts in zip(names, given, strict=True) if ts is not None}
    settings = Settings(
        rule,
        tuple(numbers),
        of_tensor,
        None if seeds is None else tuple(seeds),
        inv_scale,
        clip,
        found_inf,
        maximize,
        backend,
    )
    todo = plan(*lists.values(), block=BLOCK, numbers=steps, backend=backend)
    in_triton = [each for each in todo.launches if torch.float64 not in each.dtypes]
    in_torch = [each.indices for each in todo.launches if torch.float64 in each.dtypes]
    in_torch += todo.fallback
    if in_torch and found_inf is not None and found_inf.item():
        in_torch = []
    if rule.direction is not None and norms_of_all_ranks is not None:
        norms = torch.zeros(2 * len(params), dtype=torch.float32, device=lists["param"][0].device)
        for each in in_triton:
            _launch_norms(settings, each, lists, norms)
        measure_plainly(settings, lists, steps, in_torch, norms)
        settings = settings._replace(of_tensor=norms_of_all_ranks(norms))
    for each in in_triton:
        planned.add_later(functools.partial(_work_out_launch, settings, each, lists))
    if in_torch:
        plan_step(settings, lists, steps, in_torch, planned)
    written = [*params, *(models or ()), *(lows or ())]
    planned.add(functools.partial(increment_versions, written))
    if changes is None:
        planned.make()


def _prepared_launch(settings: Settings, each: Launch, lists: Streams) -> Callable[..., None]:
    """Return the launch of a kernel with all that a step and the norms before it share."""
    rule, device, n = settings.rule, each.device, len(lists["param"])
    seeds = None if settings.seeds is None else numbers_on(device, settings.seeds, torch.int32)
    return functools.partial(
        each.run,
        step_kernel,
        n=len(each.indices),
        numbers=_on_device(settings.numbers, device),
        n_of_tensor=n,
        seeds=seeds,
        inv_scale=number_on(device, settings.inv_scale),
        clip=number_on(device, settings.clip),
        found_inf=number_on(device, settings.found_inf),
        NUMBERS=len(settings.numbers),
        PREPARE=rule.prepare,
        MAXIMIZE=settings.maximize,
        MOMENTS=len(rule.moments),
        OTHER="model" if "model" in lists else "low" if "low" in lists else None,
        BLOCK=BLOCK,
        COUNTERS=COUNTERS,
    )


def _launch_norms(settings: Settings, each: Launch, lists: Streams, norms: Tensor) -> None:
    """Write the norms of a launch's parameters, and then of their directions, to float32 `[2n]`."""
    programs = len(each.chunks)
    sums = torch.empty(2 * programs, dtype=torch.float32, device=each.device)
    run = _prepared_launch(settings, each, lists)
    run(UPDATE=settings.rule.direction, of_tensor=None, sums=sums, ticket=None)
    for some, of_chunks in zip(norms.split(len(norms) // 2), sums.split(programs), strict=True):
        norms_of_chunks(each, of_chunks, some)


def _work_out_launch(settings: Settings, each: Launch, lists: Streams) -> Change:
    """Return the launch that steps some of the tensors."""
    rule, device = settings.rule, each.device
    of_tensor = number_on(device, settings.of_tensor)
    if rule.direction is not None and of_tensor is None:
        of_tensor = torch.empty(2 * len(lists["param"]), dtype=torch.float32, device=device)
        _launch_norms(settings, each, lists, of_tensor)
    run = _prepared_launch(settings, each, lists)
    last = {"of_tensor": of_tensor, "sums": None, "ticket": _ticket(device)}
    return functools.partial(run, UPDATE=rule.update, **last)


def _on_device(numbers: Numbers, device: torch.device) -> Tensor:
    """Return numbers as float32 `[n]`; those that are on the host already go there at most once."""
    there = {
        i: number
        for i, number in enumerate(numbers)
        if not isinstance(number, (int, float)) and number.device.type != "cpu"
    }
    on_host = [0.0 if i in there else float(number) for i, number in enumerate(numbers)]
    result = numbers_on(device, tuple(on_host))
    if there:
        result = result.clone()
        for i, number in there.items():
            result[i].copy_(number.reshape(()), non_blocking=True)
    return result


@cached
def _ticket(device: torch.device) -> Tensor:
    """Return the count of programs that have finished, int32 `[1]`; a launch leaves it at 0."""
    return torch.zeros(1, dtype=torch.int32, device=device)


@jit
def _load_block(pointers, i, mask, scale, MOMENTS: tl.constexpr, OTHER: tl.constexpr):
    p = tl.load(pointers[0] + i, mask=mask, other=0.0)
    if OTHER == "low":
        p = decode_block(p, tl.load(pointers[2 + MOMENTS] + i, mask=mask, other=0))
    g = wide(tl.load(pointers[1] + i, mask=mask, other=0.0), tl.float32) * scale
    moments = ()
    for k in tl.static_range(MOMENTS):
        moment = wide(tl.load(pointers[2 + k] + i, mask=mask, other=0.0), tl.float32)
        moments = moments + (moment,)  # type: ignore[assignment]  # noqa: RUF005
    return wide(p, tl.float32), g, moments


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
def _store_block(
    result, moments, pointers, i, mask, start, key, MOMENTS: tl.constexpr, OTHER: tl.constexpr
):
    param = pointers[0]
    if OTHER == "low":
        low = pointers[2 + MOMENTS]
        high, rest = encode_block(result, param.dtype.element_ty, low.dtype.element_ty)
        tl.store(param + i, high, mask=mask)
        tl.store(low + i, rest, mask=mask)
    else:
        tl.store(param + i, narrow(result, param.dtype.element_ty), mask=mask)
    noise = None
    if key is not None:
        noise = _mixed((start + i).to(tl.uint32) ^ key)
    for k in tl.static_range(MOMENTS):
        half = None  # of 32 random bits, which are for two moments
        if key is not None:
            if k % 2 == 0:
                noise = _mixed(noise + key)
            half = (noise >> 16 * (k % 2)) & 0xFFFF
        moment = pointers[2 + k]
        tl.store(moment + i, _narrow_moment(moments[k], moment.dtype.element_ty, half), mask=mask)
    if OTHER == "model":
        model = pointers[2 + MOMENTS]
        tl.store(model + i, narrow(result, model.dtype.element_ty), mask=mask)


@jit
def _step_block(
    loaded,
    pointers,
    i,
    mask,
    prepared,
    start,
    key,
    UPDATE: tl.constexpr,
    MEASURES: tl.constexpr,
    MOMENTS: tl.constexpr,
    OTHER: tl.constexpr,
):
    """Step a block; or return the sums of squares of the parameter and of the direction."""
    p, g, moments = loaded
    result, moments = UPDATE(p, g, moments, prepared, square_root)
    if MEASURES:
        result = tl.where(mask, result, 0.0)
        return tl.sum(p * p, axis=0), tl.sum(result * result, axis=0)
    _store_block(result, moments, pointers, i, mask, start, key, MOMENTS, OTHER)
    return 0.0, 0.0


@jit
def step_kernel(
    rows,
    chunks,
    n,
    numbers,
    of_tensor,
    n_of_tensor,
    seeds,
    inv_scale,
    clip,
    found_inf,
    sums,
    ticket,
    NUMBERS: tl.constexpr,
    PREPARE: tl.constexpr,
    UPDATE: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DTYPES: tl.constexpr,
    MOMENTS: tl.constexpr,
    OTHER: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTERS: tl.constexpr,
):
    """Step one chunk. The program that finishes last counts the step of each tensor.

    With `sums`, `[2, chunks]`, it steps nothing, and sums the squares of parameter and direction.
    OTHER: "model", "low" or None, what there is besides param, grad and moments. A row has the
    addresses of these in this order, and then that of the step.
    """
    lists: tl.constexpr = len(DTYPES)
    measures: tl.constexpr = sums is not None
    row, start, length = locate(chunks, rows, lists + 1, BLOCK)
    taken = 1.0
    if found_inf is not None:
        taken = tl.where(tl.load(found_inf) == 0.0, 1.0, 0.0)
        length = tl.where(taken == 1.0, length, 0)
    scale = -1.0 if MAXIMIZE else 1.0
    if inv_scale is not None:
        scale *= tl.load(inv_scale)
    if clip is not None:
        scale *= tl.load(clip)
    t = tl.load(tl.load(row + lists).to(tl.pointer_type(tl.float32))) + 1.0
    index = tl.load(row + lists + 2)
    if of_tensor is not None:
        of_tensor += index

    addresses, vectors = chunk_addresses(row, length, lists)
    pointers = pointers_to(addresses, start, DTYPES, True)
    i = tl.arange(0, BLOCK)
    loaded = _load_block(pointers, i, i < vectors, scale, MOMENTS, OTHER)
    # All that follows from the number of the step is worked out while these are under way.
    prepared = PREPARE(load_all(numbers, NUMBERS), t, of_tensor, n_of_tensor)
    key = None
    if seeds is not None:
        key = _mixed(_mixed(tl.load(seeds + index).to(tl.uint32)) + t.to(tl.uint32))
    of_param, of_direction = _step_block(
        loaded, pointers, i, i < vectors, prepared, start, key, UPDATE, measures, MOMENTS, OTHER
    )
    unaligned = pointers_to(addresses, start, DTYPES, False)
    for tail in range(vectors, length, STEP):
        j = tail + tl.arange(0, STEP)
        rest = _load_block(unaligned, j, j < length, scale, MOMENTS, OTHER)
        more_of_param, more_of_direction = _step_block(
            rest, unaligned, j, j < length, prepared, start, key, UPDATE, measures, MOMENTS, OTHER
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
                counter = tl.load(rows + k * (lists + 3) + lists, mask=k < n, other=0)
                counter = counter.to(tl.pointer_type(tl.float32))
                tl.store(counter, tl.load(counter, mask=k < n, other=0.0) + taken, mask=k < n)
            tl.store(ticket, 0)
