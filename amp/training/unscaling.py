"""Add unscaled gradients, dense or sparse, to the `.grad` of parameters and masters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from amp.kernels.changes import at_once
from amp.kernels.grad_mode import without_grad
from amp.lazy import kernels
from amp.masters.whole import check_device
from amp.training.parameter_lists import ParameterLists


@without_grad
def add_grad(parameter: Tensor, grad: Tensor) -> None:
    """Add an unscaled gradient to a parameter's `.grad`. No host sync."""
    _adding(parameter, grad)()


@without_grad
def add_to_masters(lists: ParameterLists) -> None:
    """Add the unscaled gradients of 16-bit parameters to those of masters. No host sync.

    They move one by one, and an interrupt finds each in exactly one place.
    """
    for master, model in zip(lists.masters, lists.models, strict=True):
        check_device(master, model)
    for master, model in zip(lists.masters, lists.models, strict=True):
        assert model.grad is not None
        with torch.set_grad_enabled(model.grad.requires_grad):
            grad = model.grad.to(torch.float32)
        adding = _adding(master, grad)
        at_once(adding, functools.partial(setattr, model, "grad", None))


def _adding(parameter: Tensor, grad: Tensor) -> Callable[[], object]:
    """Return a function that adds a gradient to a parameter's `.grad`, by one call into C++."""
    total = parameter.grad
    if total is None:
        return functools.partial(setattr, parameter, "grad", grad)
    if total.is_sparse or grad.is_sparse:
        together = grad + total if total.is_sparse else total + grad
        return functools.partial(setattr, parameter, "grad", together)
    return functools.partial(torch._foreach_add_, [total], [grad])


def unscaled(grads: Sequence[Tensor], inv_scale: Tensor | None) -> list[Tensor]:
    """Return dense gradients in FP32, multiplied by `inv_scale`, float32 `[1]`. No host sync."""
    targets = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
    if inv_scale is None:
        torch._foreach_copy_(targets, list(grads))
    else:
        kernels.unscale.unscale(grads, targets, inv_scale, None)
    return targets
