"""One step of a fused optimizer: all batches are checked and clipped, then planned, then stepped."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from amp.distributed import WHOLE, reduce_norm, shard_like
from amp.kernels import host_lists
from amp.kernels.tensor_lists import local
from amp.lazy import kernels
from amp.optimizers.batches import Batch, are_alike, layouts_of
from amp.optimizers.checks import check_batch
from amp.training.step_inputs import StepInputs

if TYPE_CHECKING:
    from amp.optimizers.fused import FusedOptimizer


class Ready(NamedTuple):
    """A batch and its tensors, which have been checked.

    Attributes:
        lists: its parameters, gradients and weights to write; see `Batch.tensors`.
        state: a list for each moment, and one of each parameter's step count; None if some of it is
            still to be made.
        inv_scale: float32 `[1]`, what to multiply the gradients by; None is 1.
    """

    batch: Batch
    lists: dict[str, Any]
    state: list[Any] | None
    inv_scale: Tensor | None


def step_batches(optimizer: FusedOptimizer, batches: Sequence[Batch], inputs: StepInputs) -> None:
    """Step the parameters of all batches, or raise an AmpError before any of them.

    An interrupt leaves all of them stepped, or none.
    """
    entries = list(optimizer.state.values())
    ready = [_look_at(optimizer, batch, inputs, entries) for batch in batches]
    clip = _clip_factor(optimizer.max_grad_norm, ready, inputs)
    for one in ready:
        _plan(optimizer, one, clip, inputs)
    inputs.changes.make()


def _look_at(
    optimizer: FusedOptimizer, batch: Batch, inputs: StepInputs, entries: Sequence[Mapping[str, Any]]
) -> Ready:
    """Return the tensors of a batch, which are checked if they are of another kind than before."""
    lists = batch.tensors(inputs)
    names = (*optimizer._kept(optimizer.param_groups[batch.index]), "step")
    try:
        own = [entries[i] for i in batch.entries]  # type: ignore[index]
        state = {name: batch.shards(name, host_lists.lists.items(own, name)) for name in names}
    except (KeyError, TypeError, AttributeError, RuntimeError):  # not all of it is there, or is usable
        state = None
    layouts = {} if state is None else layouts_of(lists | state)
    if not (layouts and are_alike(layouts, batch.layouts)):
        check_batch(optimizer, batch, lists)
    batch.layouts = layouts
    inv_scale = inputs.own_inv_scale if batch.positions is None else inputs.deferred.inv_scale
    return Ready(batch, lists, None if state is None else list(state.values()), inv_scale)


def _clip_factor(max_norm: float | None, ready: Sequence[Ready], inputs: StepInputs) -> Tensor | None:
    """Return the factor that clips the unscaled gradients, float32 `[1]`, or None. No host sync."""
    if max_norm is None or not ready:
        return None
    known, norms = inputs.deferred.norms, []
    given = [one for one in ready if one.batch.positions is not None]
    if known is not None and sum(len(one.batch.stepped) for one in given) == len(inputs.stepped):
        if len(given) == len(ready):
            return known.clip
        norms.append(known.total)
        ready = [one for one in ready if one.batch.positions is None]
    alike: dict[Any, list[Ready]] = {}
    for one in ready:
        alike.setdefault((one.batch.positions is None, one.batch.cut), []).append(one)
    squares: dict[Any, Tensor] = {}
    for (_, cut), some in alike.items():
        grads = [grad for one in some for grad in one.lists["grads"]]
        norm = kernels.l2norm.l2norm(grads, some[0].inv_scale).total
        if cut.groups:
            squares[cut.groups] = squares.get(cut.groups, 0.0) + norm.square() / cut.copies
        else:
            norms.append(norm)
    for groups, square in squares.items():
        norms.append(reduce_norm(square.sqrt(), WHOLE._replace(groups=groups)))
    together = torch.stack([norm.to(norms[0].device) for norm in norms])
    return kernels.l2norm.clip_factor(torch.linalg.vector_norm(together).reshape(1), max_norm)  # type: ignore[no-any-return]


def _plan(optimizer: FusedOptimizer, one: Ready, clip: Tensor | None, inputs: StepInputs) -> None:
    """Plan the step of a batch."""
    batch, found_inf, changes = one.batch, inputs.found_inf, inputs.changes
    group = optimizer.param_groups[batch.index]
    *moments, steps = one.state or _make_state(optimizer, one)
    rule = optimizer._rule(group)
    is_split24 = "lows" in one.lists and one.lists["lows"][0].dtype is torch.int8
    rounds_at_random = optimizer.state_dtype is not None or is_split24
    kernels.stepping.step(
        rule,
        rule.numbers(group),
        moments=moments,
        steps=steps,
        **one.lists,
        of_tensor=optimizer._of_tensor(one, clip, inputs),
        origins=batch.origins(group["seed"]) if rounds_at_random else None,
        inv_scale=one.inv_scale,
        clip=clip,
        found_inf=found_inf,
        maximize=group["maximize"],
        merges=inputs.merges,
        norms_of_all_ranks=functools.partial(reduce_norm, cut=batch.cut) if batch.cut.groups else None,
        changes=changes,
    )
    sizes = one.lists["params"].kind.sizes
    if not batch.cut.groups or 0 not in sizes:
        return
    # This rank has no part of some parameters, and counts their steps as the other ranks do.
    empty = [step for size, step in zip(sizes, steps, strict=True) if not size]
    before = torch.stack(empty)
    after = kernels.stochastic_rounding.next_steps(before)
    if found_inf is not None:
        after = torch.where(found_inf == 0, after, before)
    changes.add(functools.partial(torch._foreach_copy_, empty, list(after.unbind())))


def _make_state(optimizer: FusedOptimizer, one: Ready) -> list[list[Tensor]]:
    """Make missing state, and return the moments and the step counts.

    The step counts of a loaded state move to the device.
    """
    batch, lists = one.batch, one.lists
    group = optimizer.param_groups[batch.index]
    names = (*optimizer._kept(group), "step")
    first = float(group.get("initial_accumulator_value", 0.0))  # Adagrad's
    for parameter, like in zip(batch.stepped, lists["params"], strict=True):
        state = optimizer.state[parameter]
        dtype = optimizer.kept_dtype or (torch.float32 if "lows" in lists else like.dtype)
        for name in names[:-1]:
            if name not in state:
                moment = torch.full_like(like, first, dtype=dtype)
                state[name] = shard_like(moment.requires_grad_(False), parameter)
        for name in ("step", *optimizer._scalars):
            if name not in state:
                state[name] = torch.zeros((), dtype=torch.float32, device=like.device)
        state["step"] = state["step"].to(like.device, non_blocking=True)
    return [[local(optimizer.state[p][name]) for p in batch.stepped] for name in names]
