"""The gradients of masters between a block and the step: in their `.grad`, or deferred.

Deferred gradients stay as backward left them, for a step that unscales them itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from amp.casting.regions import ThreadState
from amp.distributed import shard_like
from amp.kernels.tensor_lists import TensorList, dense
from amp.lazy import kernels
from amp.masters.parameter import MasterParameter, have_grads, store_grad, store_grads, stored_grad
from amp.masters.whole import MasterWeights
from amp.training.new_gradients import NewGradients
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
        norms: the norms of the unscaled gradients, if the check has computed them.
    """

    of: ParameterLists
    grads: TensorList
    inv_scale: Tensor | None
    norms: Norms | None = None

    def now(self) -> Deferred:
        """Return the same with the current address of each tensor."""
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
        """Check the gradients of a later block, and return the sums with them. No host sync."""
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


class MasterGradients:
    """The gradients of the masters of one optimizer, unscaled or deferred.

    Args:
        optimizer: which steps them.
        masters: the session's.
        takes_scaled: whether the optimizer takes scaled gradients.

    Attributes:
        lists: the parameters of its groups, as of the last look at them.
        deferred: the gradients that are kept for the step, or None.
        were_stepped: whether the last step has used them, and they are still to be dropped.
    """

    def __init__(self, optimizer: Any, masters: MasterWeights, takes_scaled: bool) -> None:
        self._optimizer = optimizer
        self._masters = masters
        self._takes_scaled = takes_scaled
        self._can_defer = False
        self._are_shown = True
        """Whether they are in the masters' `.grad`."""
        self.lists = ParameterLists((), masters)
        self.deferred: Deferred | None = None
        self.were_stepped = False

    def take_lists(self, lists: ParameterLists) -> None:
        """Unscale deferred gradients, and go on with other lists."""
        for master in lists.masters:
            if isinstance(master, MasterParameter) and master.holder is MasterParameter.holder:
                master.holder = self
        self._can_defer = self._takes_scaled and all(
            isinstance(master, MasterParameter) and master.holder is self for master in lists.masters
        )
        self.show()
        self.lists = lists

    def are_there(self) -> bool:
        """Whether any master has a gradient."""
        return self.deferred is not None or have_grads(self.lists.masters)

    def can_defer(self, new: NewGradients) -> bool:
        """Whether the gradients of a block may stay as they are until the step."""
        masters = self.lists.masters
        return (
            self._can_defer
            and new.are_dense
            and (self.deferred is None or not new.grads or self.deferred.of is new.of_masters)
            and not (self._are_shown and have_grads(masters))
            and not self._masters.any_is_shared(masters)
        )

    def defer(
        self,
        new: NewGradients,
        inv_scale: Tensor | None,
        found_inf: Tensor | None,
        bad_steps: BadSteps | None,
    ) -> None:
        """Check the gradients of a block, add those of earlier ones, and keep all for the step."""
        if not new.grads:
            return
        deferred = Deferred(new.of_masters, new.grads, inv_scale)
        if self.deferred is not None:
            deferred = self.deferred.plus(deferred, found_inf, bad_steps)
        else:
            # Norms of shards are those of one rank; the step combines all ranks.
            max_norm = getattr(self._optimizer, "max_grad_norm", None) if self.lists.are_plain else None
            deferred = deferred.checked(found_inf, max_norm, bad_steps)
            # DDP's gradients are views of a buffer, which any backward through it overwrites.
            if any(map(Tensor._is_view, deferred.grads)):
                deferred = deferred.in_own_memory()
        self.deferred, self._are_shown = deferred, False
        store_grads(new.of_masters.models)

    def show(self) -> None:
        """Move deferred gradients, unscaled, to the masters' `.grad`, to be read. No host sync."""
        if not self._are_shown:
            ThreadState().around(self._show)

    def _show(self) -> None:
        deferred = self.deferred
        grads = [] if deferred is None else deferred.copied().grads
        for master, grad in zip([] if deferred is None else deferred.of.masters, grads, strict=True):
            store_grad(master, shard_like(grad, master))
        self.deferred, self._are_shown = None, True

    def for_step(self) -> Deferred:
        """Return the gradients for an optimizer that unscales them itself."""
        if self.deferred is not None:
            return self.deferred
        there = [stored_grad(master) is not None for master in self.lists.masters]
        of = self.lists.only(there)
        return Deferred(of, dense([master.grad for master in of.masters]), None)

    def of_models(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the model's parameters that have a master, and their gradients, scaled or not."""
        if self.deferred is not None:
            yield from zip(self.deferred.of.models, self.deferred.grads, strict=True)
        else:
            yield from zip(self.lists.models, map(stored_grad, self.lists.masters), strict=True)

    def drop_stepped(self) -> None:
        """Free the gradients if a step has used them, so that nothing is added to them.

        `model.zero_grad()` does not reach them.
        """
        if self.were_stepped:
            self.deferred = None
            if self._are_shown:
                self._masters.drop_grads(self.lists.masters)
                self._are_shown = not self._can_defer
            self.were_stepped = False
