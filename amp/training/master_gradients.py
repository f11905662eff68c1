"""The gradients of masters between a block and the step: unscaled, or deferred to the step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp.distributed import shard_like
from amp.errors import AmpTypeError
from amp.kernels.tensor_lists import TensorList, local
from amp.masters.grads import grads_of, have_grads, store_grads
from amp.masters.whole import MasterWeights
from amp.torch_versions import HAS_GRAD_DTYPE
from amp.training.deferred import Deferred, ShownGradients
from amp.training.new_gradients import NewGradients
from amp.training.parameter_lists import ParameterLists
from amp.training.shared_gradients import SharedGradients

if TYPE_CHECKING:
    from amp.kernels.tables import BadSteps


class MasterGradients(SharedGradients):
    """The gradients of the masters of one optimizer, unscaled or deferred.

    Args:
        optimizer: which steps them.
        masters: the session's.
        takes_scaled: whether the optimizer takes scaled gradients.

    Attributes:
        deferred: the gradients that are kept for the step, or None.
    """

    def __init__(self, optimizer: Any, masters: MasterWeights, takes_scaled: bool) -> None:
        super().__init__(masters)
        self._optimizer = optimizer
        self._takes_scaled = takes_scaled
        self._shown: ShownGradients | None = None
        self.deferred: Deferred | None = None

    def take_lists(self, lists: ParameterLists) -> None:
        """Unscale deferred gradients, and go on with other lists, each with its last gradient."""
        if HAS_GRAD_DTYPE and not self.are_hidden:
            self.take_changes()
        self.unscale()
        self.lists = lists
        self._common = grads_of(lists.masters)

    def settle(self) -> None:
        """Give the model's parameters the gradients of their masters, after a block."""
        is_whole = self.deferred is not None and self.deferred.of is self.lists
        self.show(self._shown.grads if is_whole and self._shown is not None else None)

    def can_defer(self, new: NewGradients) -> bool:
        """Whether the gradients of a block may stay as they are until the step."""
        if not self._takes_scaled or not new.are_dense or new.have_graphs:
            return False
        if self._masters.any_is_shared(self.lists.masters):
            return False
        if self.deferred is None:
            return not have_grads(self.lists.masters)
        is_sum = not new.grads or self.deferred.of is new.of_masters
        return is_sum and not self.deferred.unscaling.is_done

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
        if self.deferred is not None:
            store_grads(deferred.of.masters)  # what is shown may be used again if nothing refers to it
        if not HAS_GRAD_DTYPE:
            store_grads(deferred.of.models)
        self._shown = ShownGradients(deferred) if self._shown is None else self._shown.of(deferred)
        store_grads(deferred.of.masters, self._shown.grads)
        self.deferred = deferred

    def unscale(self) -> None:
        """Put unscaled gradients in the place of deferred ones. No host sync."""
        deferred, shown = self.deferred, self._shown
        if deferred is None or shown is None:
            return
        of, values = deferred.of, map(shard_like, deferred.unscaling.values, deferred.of.masters)
        values_of = {id(grad): value for grad, value in zip(shown.grads, values, strict=True)}
        for tensor in (*of.masters, *of.models):
            if (value := values_of.get(id(tensor.grad))) is not None:
                tensor.grad = value
        self._common = [values_of.get(id(grad), grad) for grad in self._common]
        self.deferred = None

    def for_step(self) -> Deferred:
        """Return the gradients for an optimizer that unscales them itself.

        Raises:
            AmpTypeError: a gradient is sparse.
        """
        if self.deferred is not None:
            if not self.deferred.unscaling.is_done:
                return self.deferred
            self.unscale()
        grads = grads_of(self.lists.masters)
        of = self.lists.only([grad is not None for grad in grads])
        there = [local(grad) for grad in grads if grad is not None]
        for master, grad in zip(of.masters, there, strict=True):
            if grad.layout is not torch.strided:
                raise AmpTypeError(
                    f"the gradient of a parameter of shape {tuple(master.shape)} is sparse "
                    f"({grad.layout}); {type(self._optimizer).__name__} takes dense ones. Leave out "
                    "sparse=True, or give the parameter to another optimizer"
                )
        return Deferred(of, TensorList(there))

    def of_models(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the model's parameters that have a master, and their gradients, scaled or not."""
        if self.deferred is not None:
            yield from zip(self.deferred.of.models, self.deferred.grads, strict=True)
        else:
            yield from zip(self.lists.models, grads_of(self.lists.masters), strict=True)

    def forget(self) -> None:
        """Forget the gradients, and free deferred ones that nothing refers to."""
        super().forget()
        self.deferred = None
        if self._shown is not None and not self._shown.release():
            self._shown = None

    def let_go(self) -> None:
        """Forget the parameters too."""
        self.forget()
        # In one line: a repeated `close` compares the gradients in common with the lists.
        self._shown, self.lists, self._own_common = None, ParameterLists((), self._masters), ()
