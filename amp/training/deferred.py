"""Deferred gradients: those of masters, kept as backward left them until the step unscales them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from amp.kernels.tensor_lists import TensorList
from amp.lazy import kernels
from amp.training.parameter_lists import ParameterLists
from amp.training.unscaling import unscaled

if TYPE_CHECKING:
    from amp.kernels.l2norm import Norms
    from amp.kernels.tables import BadSteps


class Deferred(NamedTuple):
    """The gradients of masters, kept for the step.

    Attributes:
        of: the masters that have a gradient, and the model's parameters.
        grads: the gradients, dense: as backward left them, or float32 sums.
        inv_scale: float32 `[1]`, what to multiply them by; None is 1.
        norms: of the unscaled gradients, if the check has found them.
    """

    of: ParameterLists
    grads: TensorList
    inv_scale: Tensor | None
    norms: Norms | None = None

    def now(self) -> Deferred:
        """Return the same, asked where each tensor lies now."""
        return self._replace(of=self.of.now(), grads=self.grads.now())

    def checked(
        self, found_inf: Tensor | None, max_norm: float | None, bad_steps: BadSteps | None
    ) -> Deferred:
        """Check the gradients, and find their norms if they are to be clipped. No host sync."""
        if found_inf is None:
            return self
        inv_scale = torch.ones_like(found_inf) if self.inv_scale is None else self.inv_scale
        if max_norm is None:
            kernels.unscale.check(self.grads, inv_scale, found_inf, bad_steps=bad_steps)
            return self
        norms = kernels.l2norm.l2norm(
            self.grads, inv_scale, found_inf=found_inf, max_norm=max_norm, bad_steps=bad_steps
        )
        return self._replace(norms=norms)

    def plus(self, later: Deferred, found_inf: Tensor | None, bad_steps: BadSteps | None) -> Deferred:
        """Return the sums with the gradients of a later block, which are checked. No host sync."""
        a, b = [1.0 if one.inv_scale is None else one.inv_scale for one in (later, self)]
        sums = [torch.empty_like(grad, dtype=torch.float32) for grad in later.grads]
        grads = TensorList(sums, like=later.grads, dtype=torch.float32)
        kernels.axpby.axpby(a, later.grads, b, self.grads.now(), grads, found_inf, bad_steps=bad_steps)
        return Deferred(later.of, grads, None)

    def in_own_memory(self) -> Deferred:
        """Return the same gradients in memory of their own. No host sync."""
        return self._replace(grads=TensorList([grad.clone() for grad in self.grads]))

    def copied(self) -> Deferred:
        """Return the unscaled gradients in memory of their own, float32. No host sync."""
        grads = TensorList(unscaled(self.grads.now(), self.inv_scale))
        return self._replace(grads=grads, inv_scale=None)
