"""Where gradients change their values: 16 bits become FP32, scaled ones are unscaled, sums are made.

| from                     | to                         | when                    | function         |
|--------------------------|----------------------------|-------------------------|------------------|
| gradients of a block     | FP32 of masters, and sums  | the block ends, scaled  | `unscale`        |
| the same, with a graph   | operations of autograd     | the same                | `unscale`        |
| the same                 | FP32 of masters, added     | the block ends, scale 1 | `add_to_masters` |
| deferred gradients       | FP32 sums                  | a later block ends      | `sums`           |
| deferred gradients       | FP32 in memory of their own| something reads one     | `unscaled`       |

Gradients that a parameter of the model keeps, and adds to no others, are unscaled where they are.
Masters become 16-bit weights, and take over what was written to these, in `amp.masters.agreement`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from amp.distributed import shard_like
from amp.kernels.interrupts import at_once, without_grad
from amp.kernels.tensor_lists import TensorList, are_plain
from amp.lazy import kernels
from amp.masters.agreement import Pairs

if TYPE_CHECKING:
    from amp.kernels.launch_plans import BadSteps


class Move(NamedTuple):
    """One gradient that is unscaled from `source` to the `.grad` of `stepped`.

    Attributes:
        stepped: what the optimizer updates, a master or a parameter of the model.
        parameter: the model's parameter.
        source: the scaled gradient.
        total: the unscaled gradient of earlier blocks, to add to.
    """

    stepped: Tensor
    parameter: Tensor
    source: Any
    total: Tensor | None


def unscale(
    moves: Sequence[Move],
    inv_scale: Tensor,
    found_inf: Tensor | None,
    bad_steps: BadSteps | None = None,
    *,
    have_graphs: bool = False,
) -> None:
    """Unscale gradients, and add them to those of earlier blocks. No host sync.

    Args:
        moves: from where to where.
        inv_scale: float32 `[1]`, what to multiply by.
        found_inf: float32 `[1]`, set to 1 on overflow; None checks nothing.
        bad_steps: where to log which gradients are bad, with an entry for each move. It is not written
            if some of the targets are sums and others are not.
        have_graphs: whether backward has made them with `create_graph=True`.
    """
    if have_graphs:
        _unscale_in_graph(moves, inv_scale, found_inf)
        return
    adding = [
        move
        for move in moves
        if move.total is not None and not move.total.is_sparse and not move.source.is_sparse
    ]
    known = set(map(id, adding))
    moving = [move for move in moves if id(move) not in known] if adding else moves
    logged = {"bad_steps": None if adding and moving else bad_steps}
    if adding:
        totals = [move.total for move in adding if move.total is not None]
        sources = [move.source for move in adding]
        kernels.axpby.axpby(inv_scale, sources, 1.0, totals, totals, found_inf, **logged)
    new = [move.source for move in moving]
    targets = list(new)
    for i, move in enumerate(moving):
        if move.stepped is not move.parameter:  # a master
            dtype, is_sparse = torch.float32, new[i].is_sparse
            targets[i] = new[i].to(dtype) if is_sparse else torch.empty_like(new[i], dtype=dtype)
    kernels.unscale.unscale(new, targets, inv_scale, found_inf, **logged)
    if not are_plain([move.stepped for move in moving]):
        for i, move in enumerate(moving):
            if move.stepped is not move.parameter:
                targets[i] = shard_like(targets[i], move.stepped)
    for move in moves:
        move.parameter.grad = None
        if move.total is not None:
            move.stepped.grad = move.total
    for move, target in zip(moving, targets, strict=True):
        if move.stepped.grad is None:
            move.stepped.grad = target
        else:
            add_grad(move.stepped, target)


def _unscale_in_graph(moves: Sequence[Move], inv_scale: Tensor, found_inf: Tensor | None) -> None:
    """Unscale gradients by operations that autograd sees: their derivatives are unscaled too."""
    if found_inf is not None:
        kernels.unscale.check([move.source.detach() for move in moves], inv_scale, found_inf)
    with torch.enable_grad():
        for move in moves:
            is_own = move.stepped is move.parameter
            grad = (move.source.to(torch.float32) * inv_scale.reshape(())).to(
                move.source.dtype if is_own else torch.float32
            )
            move.parameter.grad = None
            move.stepped.grad = grad if move.total is None else grad + move.total


def sums(
    later: TensorList,
    inv_of_later: Tensor | None,
    earlier: TensorList,
    inv_of_earlier: Tensor | None,
    found_inf: Tensor | None,
    bad_steps: BadSteps | None,
) -> TensorList:
    """Return the unscaled sums of two lists of gradients in FP32, and check the later ones.

    Args:
        later: dense gradients.
        inv_of_later: float32 `[1]`, what to multiply them by; None is 1.
        earlier: dense gradients of the same shapes.
        inv_of_earlier: the same of these.
        found_inf: float32 `[1]`, set to 1 on overflow; None checks nothing.
        bad_steps: where to log which gradients are bad.
    """
    a, b = [1.0 if inverse is None else inverse for inverse in (inv_of_later, inv_of_earlier)]
    made = [torch.empty_like(grad, dtype=torch.float32) for grad in later]
    grads = TensorList(made, like=later, dtype=torch.float32)
    kernels.axpby.axpby(a, later, b, earlier, grads, found_inf, bad_steps=bad_steps)
    return grads


def unscaled(grads: Sequence[Tensor], inv_scale: Tensor | None) -> list[Tensor]:
    """Return dense gradients in FP32, multiplied by `inv_scale`, float32 `[1]`. No host sync."""
    targets = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
    if inv_scale is None:
        torch._foreach_copy_(targets, list(grads))
    else:
        kernels.unscale.unscale(grads, targets, inv_scale, None)
    return targets


@without_grad
def add_grad(parameter: Tensor, grad: Tensor) -> None:
    """Add an unscaled gradient to a parameter's `.grad`. No host sync."""
    _adding(parameter, grad)()


@without_grad
def add_to_masters(pairs: Pairs) -> None:
    """Add the unscaled gradients of 16-bit parameters to those of masters. No host sync.

    An interrupt finds each in exactly one place.
    """
    pairs.check_devices()
    changes: list[Callable[[], object]] = []
    for master, model in zip(pairs.masters, pairs.models, strict=True):
        new: Any = model.grad
        if new.requires_grad:
            with torch.enable_grad():
                grad = new.to(torch.float32)
        else:
            grad = new.to(torch.float32)
        is_first = master.grad is None
        changes.append(
            functools.partial(setattr, master, "grad", grad) if is_first else _adding(master, grad)
        )
        changes.append(functools.partial(setattr, model, "grad", None))
    at_once(*changes)


def _adding(parameter: Tensor, grad: Tensor) -> Callable[[], object]:
    """Return a function that adds a gradient to a parameter's `.grad`, by one call into C++."""
    total = parameter.grad
    if total is None:
        return functools.partial(setattr, parameter, "grad", grad)
    if total.is_sparse or grad.is_sparse:
        together = grad + total if total.is_sparse else total + grad
        return functools.partial(setattr, parameter, "grad", together)
    return functools.partial(torch._foreach_add_, [total], [grad])
