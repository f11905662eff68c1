"""From the scaled gradients of a block to unscaled ones, added to those of earlier blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from amp.distributed import shard_like
from amp.kernels.tensor_lists import local
from amp.lazy import kernels

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
    bad_steps: BadSteps | None = None,
) -> None:
    """Unscale gradients, and add them to those of earlier blocks. No host sync.

    The arguments are those of `amp.kernels.unscale.unscale`. `bad_steps` has an entry for each move; it
    is not written where some are sums and others are not.
    """
    if not moves:
        return
    adding = [move for move in moves if move.is_dense_sum()]
    totals = [move.total for move in adding if move.total is not None]
    sources = [move.source for move in adding]
    moving = [move for move in moves if not move.is_dense_sum()]
    noted = {"bad_steps": None if adding and moving else bad_steps}
    kernels.axpby.axpby(inv_scale, sources, 1.0, totals, totals, found_inf, **noted)
    targets = [move.target() for move in moving]
    kernels.unscale.unscale([move.source for move in moving], targets, inv_scale, found_inf, **noted)
    for move in moves:
        move.parameter.grad = None
        move.stepped.grad = move.total
    for move, target in zip(moving, targets, strict=True):
        add_grad(move.stepped, target)


def unscaled(grads: Sequence[Tensor], inv_scale: Tensor | None) -> list[Tensor]:
    """Return dense gradients in FP32, multiplied by `inv_scale`, float32 `[1]`. No host sync."""
    targets = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
    if inv_scale is None:
        torch._foreach_copy_(targets, list(grads))
    else:
        kernels.unscale.unscale(grads, targets, inv_scale, None)
    return targets


@torch.no_grad()
def add_grad(parameter: Tensor, grad: Tensor) -> None:
    """Add an unscaled gradient to the one that a parameter has; either may be sparse."""
    if parameter.grad is None:
        parameter.grad = grad
    elif parameter.grad.is_sparse and not grad.is_sparse:
        parameter.grad = grad.add_(parameter.grad)
    elif parameter.grad.is_sparse:
        parameter.grad = parameter.grad + grad
    else:
        parameter.grad.add_(grad)
