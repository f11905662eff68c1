"""From the scaled gradients of a block to unscaled ones, added to those of earlier blocks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from amp.distributed import shard_like
from amp.kernels.changes import Change, Changes
from amp.kernels.grad_mode import without_grad
from amp.kernels.tensor_lists import local
from amp.lazy import kernels
from amp.masters.parameter import store_grad, store_grads

if TYPE_CHECKING:
    from amp.kernels.tables import BadSteps


class Move(NamedTuple):
    """The way of one gradient: from `source` to the `.grad` of `stepped`.

    Attributes:
        stepped: what the optimizer steps, a master or a parameter of the model.
        parameter: the model's parameter.
        source: the scaled gradient.
        total: the unscaled gradient of earlier blocks, to add to.
    """

    stepped: Tensor
    parameter: Tensor
    source: Tensor
    total: Tensor | None

    def is_dense_sum(self) -> bool:
        """Whether there is something to add to, and both are dense."""
        return self.total is not None and not self.total.is_sparse and not self.source.is_sparse

    def target(self) -> Tensor:
        """Return where the unscaled gradient goes: for a master, new memory in FP32."""
        if self.stepped is self.parameter:
            return self.source
        if self.source.is_sparse:
            return self.source.to(torch.float32)
        return shard_like(torch.empty_like(local(self.source), dtype=torch.float32), self.stepped)


def unscale_moves(
    moves: Sequence[Move],
    inv_scale: Tensor,
    found_inf: Tensor | None,
    changes: Changes,
    bad_steps: BadSteps | None = None,
) -> None:
    """Unscale gradients, and plan how they are added to those of earlier blocks. No host sync.

    The arguments are those of `amp.kernels.unscale.unscale`, and where to plan. `bad_steps` has an
    entry for each move; it is not written where some are sums and others are not.
    """
    if not moves:
        return
    adding = [move for move in moves if move.is_dense_sum()]
    totals = [move.total for move in adding if move.total is not None]
    sources = [move.source for move in adding]
    moving = [move for move in moves if not move.is_dense_sum()]
    noted = {"bad_steps": None if adding and moving else bad_steps}
    kernels.axpby.axpby(inv_scale, sources, 1.0, totals, totals, found_inf, changes=changes, **noted)
    targets = [move.target() for move in moving]
    kernels.unscale.unscale([move.source for move in moving], targets, inv_scale, found_inf, **noted)
    changes.add(functools.partial(store_grads, [move.parameter for move in moves]))
    there = [move for move in moves if move.total is not None]
    changes.add(functools.partial(store_grads, [m.stepped for m in there], [m.total for m in there]))
    plan_adding([move.stepped for move in moving], targets, changes)


def plan_adding(parameters: Sequence[Tensor], grads: Sequence[Tensor], changes: Changes) -> None:
    """Plan how unscaled gradients are added to those that parameters have."""
    for parameter, grad in zip(parameters, grads, strict=True):
        changes.add_later(functools.partial(work_out_adding, parameter, grad))


@without_grad
def work_out_adding(parameter: Tensor, grad: Tensor) -> Change:
    """Return what adds an unscaled gradient to the one that a parameter has; either may be sparse."""
    total = parameter.grad
    if total is None:
        return functools.partial(store_grad, parameter, grad)
    if total.is_sparse or grad.is_sparse:
        return functools.partial(
            store_grad, parameter, grad + total if total.is_sparse else total + grad
        )
    return functools.partial(torch._foreach_add_, [total], [grad])


def unscaled(grads: Sequence[Tensor], inv_scale: Tensor | None) -> list[Tensor]:
    """Return dense gradients in FP32, multiplied by `inv_scale`, float32 `[1]`. No host sync."""
    targets = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
    if inv_scale is None:
        torch._foreach_copy_(targets, list(grads))
    else:
        kernels.unscale.unscale(grads, targets, inv_scale, None)
    return targets
