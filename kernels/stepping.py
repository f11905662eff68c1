"""One optimizer step for a list of tensors, in one launch, for every element-wise optimizer.

    g = gradient * inv_scale * clip                           negated to maximize
    parameter, moments = rule(parameter, g, moments, t)       with t = step + 1
    model = round_to_nearest_even(parameter)                  for 16-bit weights with FP32 masters
    step = t                             see `amp.kernels.stochastic_rounding` from 2^24 on

A step that merges first takes what a script has written to the models, as a merge of
`amp.kernels.master_copy` does, but it steps, and so writes, all elements. Instead of having a
model, a parameter may be a 16-bit weight that forms a master with its `low` half; see
`amp.kernels.split`. Two moments may be packed in one int16. These, moments in bfloat16 and low halves
in int8 are rounded stochastically: up or down at random, with the right mean. The random bits of an
element depend on its `Origin` and the step, whatever else is stepped with it, and however the tensor is
divided among ranks; see `amp.kernels.stochastic_rounding`.

If `found_inf` is not 0, nothing is written: a skipped step does not count. Nor do steps of a tensor
without elements. An `UpdateRule` is the formula of one optimizer, for Triton and for plain torch.

Shapes: a parameter, its gradient, moments and model have one shape, of any size; each has its own
`step`, float32 `[]`. DTensors go through their local shards. Dtypes: float16, bfloat16 or float32 each,
or those of packing; the arithmetic is FP32, and each result is rounded once. Where one is float64,
plain torch computes all in FP64. Launches: one for each device and combination of dtypes, and three
before it for a rule that uses the norm of its direction. Memory traffic: each tensor is read and
written at most once; for AdamW with FP32 masters of 16-bit weights, that is 28 bytes a parameter, 30
for a step that merges, and 12 with packed moments and low halves in int8. Norms of a direction read all
tensors once more, the models only if the step merges. Backends give the same bits, except for rules
that use norms.

Plain torch (`amp.kernels.plainstep`) reads `found_inf`, factors and steps on the host, so there the
host waits for a device other than the CPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from amp.kernels import host_lists
from amp.kernels.interrupts import Change, Changes
from amp.kernels.l2norm import norms_of_chunks
from amp.kernels.language import (
    STEP,
    bits,
    chunk_addresses,
    if_less,
    if_number,
    jit,
    least,
    load_all,
    locate,
    most,
    narrow,
    number,
    pointers_to,
    tl,
    whole,
)
from amp.kernels.launch_plans import Launch, cached, number_on, numbers_on, plan, takes_at_once, upload
from amp.kernels.master_copy import merged_block
from amp.kernels.plainstep import measure_plainly, plan_step
from amp.kernels.rule import Origin, StepArguments, UpdateRule, plus_product, quotient, square_root
from amp.kernels.split import decode_block, encode_block
from amp.kernels.stochastic_rounding import (
    NEAREST,
    bfloat16_bits,
    inverse,
    mixed,
    packed,
    step_after,
    step_of_key,
    unpacked,
)
from amp.kernels.tensor_lists import Kind, TensorList, dense

BLOCK = 2048
"""How many elements a program steps at a time."""
MANY = 2**25
"""From so many elements on, programs that step more of them are still enough to fill a GPU."""
REGISTERS, RANDOM_REGISTERS = 64, 80
"""So many registers let four or three programs share a multiprocessor of 64Ki. On an H100 four were
faster, also where a thread spills some numbers; but not with two moments that are rounded at random.
"""
COUNTERS = 256


def step(
    rule: UpdateRule,
    numbers: Sequence[float | Tensor],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    moments: Sequence[Sequence[Tensor]],
    steps: Sequence[Tensor],
    *,
    models: Sequence[Tensor] | None = None,
    lows: Sequence[Tensor] | None = None,
    of_tensor: Tensor | None = None,
    origins: Sequence[Origin] | None = None,
    inv_scale: Tensor | None = None,
    clip: Tensor | None = None,
    found_inf: Tensor | None = None,
    maximize: bool = False,
    merges: bool = False,
    norms_of_all_ranks: Callable[[Tensor], Tensor] | None = None,
    backend: str | None = None,
    changes: Changes | None = None,
) -> None:
    """Step parameters in place, now or when `changes` are made. With Triton the host does not wait.

    Autograd sees the change: the version of each parameter, model and low half goes up by one.

    Args:
        rule: the optimizer's formula.
        numbers: the hyper-parameters, in the rule's order; a tensor has one element.
        params: the tensors to update: FP32 masters, or the model's parameters or weights.
        grads: their gradients, scaled or not.
        moments: one list for each moment of the rule; or one of int16, for two moments that are packed.
        steps: how many steps each parameter has taken, float32 `[]`, on its device.
        models: the weights of the model that `params` are masters of.
        lows: the low halves of the masters whose high halves `params` are; not with `models`.
        of_tensor: float32 `[n]`, a number for each tensor, for a rule that takes one.
        origins: one for each tensor, for stochastic rounding; None rounds all to nearest. The same
            `Origins` are sent to a device once.
        inv_scale: float32 `[1]`, what to multiply the gradients by; None is 1.
        clip: float32 `[1]`, one more factor of the gradients; None is 1.
        found_inf: float32 `[1]`; the step is skipped where it is not 0.
        maximize: whether to step along the gradients.
        merges: whether each element of `params` is first merged with that of `models`: where the model
            is not the rounded parameter, a script has written it, and its value is stepped. Without
            models there is nothing to merge: a high half is the weight itself.
        norms_of_all_ranks: takes the norms of this rank's shards, float32 `[2n]`, and returns those of
            whole tensors, for a rule with a direction. None where tensors are whole.
        backend: see `amp.kernels.backend`.
        changes: the plan to add the step to, for the caller to make later; nothing is written until
            then. None steps now.

    Raises:
        ValueError: the lists do not match.
        UnsupportedTensorError: a dtype that is not listed above.
    """
    planned = Changes() if changes is None else changes
    origins = origins if origins is None or isinstance(origins, tuple) else tuple(origins)
    of_moments = {f"moment{k}": moment for k, moment in enumerate(moments)}
    given = {"param": params, "grad": grads, **of_moments, "model": models, "low": lows}
    lists = {
        name: tensors if isinstance(tensors, TensorList) else dense(tensors)
        for name, tensors in given.items()
        if tensors is not None
    }
    arguments = StepArguments(
        *(rule, numbers, lists, steps, of_tensor, origins, inv_scale, clip, found_inf, maximize),
        merges=merges and models is not None,
        backend=backend,
    )
    in_triton: list[Launch] = []
    in_torch: list[Sequence[int]] = []
    if takes_at_once([*lists.values()], backend) and _are_counts(steps, lists["param"]):
        in_torch.append(range(len(params)))
    else:
        block = parts_of(lists["param"].kind, origins is not None, "low" in lists) * BLOCK
        todo = plan(*lists.values(), block=block, numbers=steps, backend=backend)
        in_triton += [each for each in todo.launches if torch.float64 not in each.dtypes]
        in_torch += [each.indices for each in todo.launches if torch.float64 in each.dtypes]
        in_torch += todo.fallback
    if in_torch and found_inf is not None and found_inf.item():
        in_torch = []
    if rule.direction is not None and norms_of_all_ranks is not None:
        norms = torch.zeros(2 * len(params), dtype=torch.float32, device=lists["param"][0].device)
        for each in in_triton:
            _launch_norms(arguments, each, norms)
        measure_plainly(arguments, in_torch, norms)
        arguments = arguments._replace(of_tensor=norms_of_all_ranks(norms))
    for each in in_triton:
        planned.add_later(functools.partial(_work_out_launch, arguments, each))
    if in_torch:
        plan_step(arguments, in_torch, planned)
    written = [*params, *(models or ()), *(lows or ())]
    planned.add(functools.partial(host_lists.lists.increment, written))
    if changes is None:
        planned.make()


def _are_counts(steps: Sequence[Tensor], params: list[Tensor]) -> bool:
    """Whether there is a step count, float32 `[]`, beside each parameter; `plan` says what is wrong."""
    counts, n, lists = list(steps), len(params), host_lists.lists
    are_numbers = len(counts) == n and lists.are_of_kind(counts, (1,) * n, (torch.float32,) * n)
    return are_numbers and lists.are_together(counts, params)


@functools.lru_cache(maxsize=256)
def parts_of(kind: Kind, is_random: bool, is_split: bool) -> int:
    """Return how many parts of `BLOCK` elements a program steps, of parameters of a kind.

    What a program computes first, it computes for all of them: most if it rounds at random.
    """
    parts = 2 if is_random else 1
    return 2 * parts if (is_random or is_split) and sum(kind.sizes) >= MANY else parts


def _prepared_launch(
    arguments: StepArguments, each: Launch, of_tensor: Tensor | None, sums: Tensor | None = None
) -> Change:
    """Return the launch that steps some of the tensors; with `sums`, the one that measures them."""
    rule, lists, device = arguments.rule, arguments.lists, each.device
    parts = parts_of(lists["param"].kind, arguments.origins is not None, "low" in lists)
    origins, has_runs = _origins_on(device, arguments.origins) if arguments.origins else (None, False)
    return functools.partial(
        each.run,
        step_kernel,
        registers=RANDOM_REGISTERS if arguments.origins and "moment1" in lists else REGISTERS,
        n=len(each.indices),
        numbers=_on_device(arguments.numbers, device),
        of_tensor=of_tensor,
        n_of_tensor=len(lists["param"]),
        origins=origins,
        inv_scale=number_on(device, arguments.inv_scale),
        clip=number_on(device, arguments.clip),
        found_inf=number_on(device, arguments.found_inf),
        sums=sums,
        ticket=_ticket(device) if sums is None else None,
        NUMBERS=len(arguments.numbers),
        PREPARE=rule.prepare,
        UPDATE=rule.update if sums is None else rule.direction,
        MAXIMIZE=arguments.maximize,
        MOMENTS=sum(name.startswith("moment") for name in lists),
        OTHER="model" if "model" in lists else "low" if "low" in lists else None,
        MERGES=arguments.merges,
        HAS_RUNS=has_runs,
        PARTS=parts,
        BLOCK=parts * BLOCK,
        COUNTERS=COUNTERS,
    )


@cached
def _origins_on(device: torch.device, origins: Sequence[Origin]) -> tuple[Tensor, bool]:
    """Return the numbers of origins, int64 `[4 n]` on a device, and whether any has a run."""
    if has_runs := any(origin.run for origin in origins):
        origins = [
            origin if origin.run else origin._replace(run=2**30, pitch=2**30) for origin in origins
        ]
    numbers = torch.tensor(list(itertools.chain(*origins)), dtype=torch.int64, device="cpu")
    return upload(numbers, device), has_runs


def _launch_norms(arguments: StepArguments, each: Launch, norms: Tensor) -> None:
    """Write the norms of a launch's parameters, and then of their directions, to float32 `[2n]`."""
    programs = len(each.chunks)
    sums = torch.empty(2 * programs, dtype=torch.float32, device=each.device)
    _prepared_launch(arguments, each, None, sums)()
    for some, of_chunks in zip(norms.split(len(norms) // 2), sums.split(programs), strict=True):
        norms_of_chunks(each, of_chunks, some)


def _work_out_launch(arguments: StepArguments, each: Launch) -> Change:
    """Compute the norms that the rule needs, and return the launch that steps some of the tensors."""
    of_tensor = number_on(each.device, arguments.of_tensor)
    if arguments.rule.direction is not None and of_tensor is None:
        n = len(arguments.steps)
        of_tensor = torch.empty(2 * n, dtype=torch.float32, device=each.device)
        _launch_norms(arguments, each, of_tensor)
    return _prepared_launch(arguments, each, of_tensor)


def _on_device(numbers: Sequence[float | Tensor], device: torch.device) -> Tensor:
    """Return numbers as float32 `[n]` on a device; those of the host are sent at most once."""
    there = {i: x for i, x in enumerate(numbers) if isinstance(x, Tensor) and x.device.type != "cpu"}
    result = numbers_on(device, tuple([0.0 if i in there else float(x) for i, x in enumerate(numbers)]))
    if there:
        result = result.clone()
        for i, number in there.items():
            result[i].copy_(number.reshape(()), non_blocking=True)
    return result


@cached
def _ticket(device: torch.device) -> Tensor:
    """Return the count of programs that have finished, int32 `[1]`; a launch resets it to 0."""
    return torch.zeros(1, dtype=torch.int32, device=device)


@jit
def _random_bits(random, i):
    """Return 32 random bits for elements of a chunk, int32; see `amp.kernels.stochastic_rounding`."""
    key, first, inside, run, pitch = random
    index = first + i
    if run is not None:
        within = inside + i
        index = first + within // run * pitch + within % run
    return mixed(index + key)


@jit
def _narrow_moment(x, dtype: tl.constexpr, noise):
    """Return a moment in its dtype, rounded by 16 random bits if there are any."""
    if noise is not None:
        if dtype == tl.bfloat16:
            return bfloat16_bits(x, noise, bits, if_number).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return narrow(x, dtype)


@jit
def _step_block(
    pointers,
    i,
    mask,
    scale,
    prepared,
    random,
    UPDATE: tl.constexpr,
    MEASURES: tl.constexpr,
    MOMENTS: tl.constexpr,
    PACKED: tl.constexpr,
    OTHER: tl.constexpr,
    MERGES: tl.constexpr,
    IS_RANDOM: tl.constexpr,
):
    """Step a block; or return the sums of squares of the parameter and of the direction."""
    p = tl.load(pointers[0] + i, mask=mask, other=0.0)
    if OTHER == "low":
        p = decode_block(p, tl.load(pointers[2 + MOMENTS] + i, mask=mask, other=0))
    p = p.to(tl.float32)
    if MERGES:
        p = merged_block(p, tl.load(pointers[2 + MOMENTS] + i, mask=mask, other=0.0))
    g = tl.load(pointers[1] + i, mask=mask, other=0.0).to(tl.float32) * scale
    if PACKED:
        word = tl.load(pointers[2] + i, mask=mask, other=0)
        moments = unpacked(word.to(tl.int32), bits, number, most, if_less)
    else:
        moments = ()
        for k in tl.static_range(MOMENTS):
            moment = tl.load(pointers[2 + k] + i, mask=mask, other=0.0).to(tl.float32)
            moments = moments + (moment,)  # noqa: RUF005
    result, moments = UPDATE(p, g, moments, prepared, square_root, quotient, plus_product)
    if MEASURES:
        result = tl.where(mask, result, 0.0)
        return tl.sum(p * p, axis=0), tl.sum(result * result, axis=0)
    noise = NEAREST
    if IS_RANDOM:
        noise = _random_bits(random, i)
    if PACKED:
        m, v = moments
        word = packed(m, v, noise, square_root, inverse, bits, number, least, most, if_less, if_number)
        tl.store(pointers[2] + i, word.to(tl.int16), mask=mask)
    else:
        for k in tl.static_range(MOMENTS):
            half = None
            if IS_RANDOM:
                half = (noise >> 16 * (1 - k)) & 0xFFFF  # the lowest bits are the low half's
            moment = pointers[2 + k]
            tl.store(moment + i, _narrow_moment(moments[k], moment.dtype.element_ty, half), mask=mask)
        if IS_RANDOM:
            if MOMENTS == 2:  # which have taken all bits
                noise = mixed(noise + random[0])
    if OTHER == "low":
        param, low = pointers[0], pointers[2 + MOMENTS]
        high, rest = encode_block(result, param.dtype.element_ty, low.dtype.element_ty, noise)
        tl.store(param + i, high, mask=mask)
        tl.store(low + i, rest, mask=mask)
    else:
        tl.store(pointers[0] + i, narrow(result, pointers[0].dtype.element_ty), mask=mask)
    if OTHER == "model":
        model = pointers[2 + MOMENTS]
        tl.store(model + i, narrow(result, model.dtype.element_ty), mask=mask)
    return 0.0, 0.0


@jit
def step_kernel(
    rows,
    chunks,
    n,
    numbers,
    of_tensor,
    n_of_tensor,
    origins,
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
    MERGES: tl.constexpr,
    HAS_RUNS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTERS: tl.constexpr,
):
    """Step one chunk. The program that finishes last counts the step of each tensor.

    With `sums`, `[2, chunks]`, it steps nothing, and sums the squares of parameter and direction.
    OTHER: "model", "low" or None, the list besides param, grad and moments. MERGES: whether parameters
    are merged with models. HAS_RUNS: whether origins have runs. A program steps its BLOCK in PARTS. A
    row has the address of a tensor of each of these lists, in this order, and then that of the step.
    """
    lists: tl.constexpr = len(DTYPES)
    measures: tl.constexpr = sums is not None
    is_packed: tl.constexpr = MOMENTS == 1 and DTYPES[2] == tl.int16
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
    t = tl.load(tl.load(row + lists).to(tl.pointer_type(tl.float32)))
    t = step_after(t, bits, number, if_less)
    index = tl.load(row + lists + 2)
    if of_tensor is not None:
        of_tensor += index

    addresses, vectors = chunk_addresses(row, length, lists)
    pointers = pointers_to(addresses, start, DTYPES, True)
    prepared = PREPARE(load_all(numbers, NUMBERS), t, of_tensor, n_of_tensor)
    random = None
    if origins is not None:
        seed, first, run, pitch = load_all(origins + 4 * index, 4)
        key = mixed(mixed(seed.to(tl.int32)) + step_of_key(t, bits, whole, if_less))
        if HAS_RUNS:
            inside = (start % run).to(tl.int32)
            first = (first + start // run * pitch).to(tl.int32)
            random = key, first, inside, run.to(tl.int32), pitch.to(tl.int32)
        else:
            random = key, (first + start).to(tl.int32), None, None, None
    of_param, of_direction = 0.0, 0.0
    for part in tl.static_range(PARTS):
        i = part * (BLOCK // PARTS) + tl.arange(0, BLOCK // PARTS)
        some = _step_block(
            pointers,
            i,
            i < vectors,
            scale,
            prepared,
            random,
            UPDATE,
            measures,
            MOMENTS,
            is_packed,
            OTHER,
            MERGES,
            origins is not None,
        )
        of_param += some[0]
        of_direction += some[1]
    unaligned = pointers_to(addresses, start, DTYPES, False)
    for tail in range(vectors, length, STEP):
        j = tail + tl.arange(0, STEP)
        more = _step_block(
            unaligned,
            j,
            j < length,
            scale,
            prepared,
            random,
            UPDATE,
            measures,
            MOMENTS,
            is_packed,
            OTHER,
            MERGES,
            origins is not None,
        )
        of_param += more[0]
        of_direction += more[1]
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
                step = tl.load(counter, mask=k < n, other=0.0)
                step += (step_after(step, bits, number, if_less) - step) * taken
                tl.store(counter, step, mask=k < n)
            tl.store(ticket, 0)
