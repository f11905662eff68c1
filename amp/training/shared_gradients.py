"""The one gradient of a 16-bit parameter and its FP32 master.

The same tensor stands in the `.grad` of both, so that a script may read, change, assign or remove it at
either. Before torch 2.10 a 16-bit parameter cannot have an FP32 gradient. There the gradient stands in
the master's `.grad` alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp.errors import AmpRuntimeError
from amp.kernels.tensor_lists import are_same
from amp.masters.grads import grads_of, have_grads, store_grads
from amp.masters.whole import MasterWeights
from amp.torch_versions import HAS_GRAD_DTYPE
from amp.training.parameter_lists import ParameterLists
from amp.training.unscaling import add_to_masters


class SharedGradients:
    """The gradients that the masters of one optimizer have in common with the model's parameters.

    Args:
        masters: the session's.

    Attributes:
        lists: the parameters of the optimizer's groups, as of the last look at them.
        were_stepped: whether a step has used the gradients, and nothing has looked for changes since.
        were_assigned: whether other code has assigned any of them.
        are_hidden: whether the masters alone have them, so that a backward may make new ones.
    """

    def __init__(self, masters: MasterWeights) -> None:
        self._masters = masters
        self._own_common: Sequence[Tensor | None] = ()
        self.lists = ParameterLists((), masters)
        self.were_stepped = False
        self.were_assigned = False
        self.are_hidden = False

    @property
    def _common(self) -> Sequence[Tensor | None]:
        """The gradient of each master when it and its parameter last had one gradient."""
        shared = self._masters.common_grads
        pairs = zip(self.lists.masters, self._own_common, strict=True)
        return [shared.get(master, own) for master, own in pairs] if shared else self._own_common

    @_common.setter
    def _common(self, grads: Sequence[Tensor | None]) -> None:
        self._own_common, shared = grads, self._masters.common_grads
        pairs = zip(self.lists.masters, grads, strict=True) if shared else ()
        shared.update((master, grad) for master, grad in pairs if master in shared)

    def unscale(self) -> None:
        """Put unscaled gradients in the place of deferred ones. No host sync."""

    def forget(self) -> None:
        """Forget the gradients."""
        self.were_assigned = self.were_stepped = False
        self._common = [None] * len(self.lists.masters)

    def are_there(self) -> bool:
        """Whether any master has a gradient."""
        return have_grads(self.lists.masters)

    # From a master to its parameter.

    def hide(self) -> None:
        """Leave the gradients to the masters alone, so that a backward may make new ones."""
        self.are_hidden = True
        if any(grad is not None for grad in self._common):
            store_grads(self.lists.models)

    def show(self, grads: Sequence[Tensor | None] | None = None) -> None:
        """Give the model's parameters the gradients of their masters, if these are known."""
        self._common = grads = grads_of(self.lists.masters) if grads is None else grads
        try:
            if HAS_GRAD_DTYPE:
                store_grads(self.lists.models, grads)
        except RuntimeError:  # `torch.utils.swap_tensors` has made parameters that do not know of it
            store_grads(self.lists.models)
            for model in self.lists.models:
                model.grad_dtype = None
            store_grads(self.lists.models, grads)
        self.are_hidden = False  # last: while it is set, `take_changes` may go on after an interrupt

    def note(self) -> None:
        """Note the gradients of masters as those that both have, or will have after the block."""
        self._common = grads_of(self.lists.masters)

    def check_hidden(self) -> None:
        """Raise AmpRuntimeError if the backward of a scaled loss has given a master a gradient."""
        masters, common = self.lists.masters, self._common
        for master, own, known in zip(masters, grads_of(masters), common, strict=True):
            if own is not None and own is not known:
                raise AmpRuntimeError(
                    f"the FP32 master of a parameter of shape {tuple(master.shape)} was given a "
                    "gradient in an amp.scale_loss block, which unscales those of the model's "
                    "parameters. Compute the loss from model.parameters(), not from what "
                    "optimizer.param_groups holds or amp.master_params(optimizer) yields"
                )

    def share_zeros(self) -> None:
        """Let both have one gradient again, after zeros were written to those of both."""
        for master, model in zip(self.lists.masters, self.lists.models, strict=True):
            if master.grad is None and model.grad is not None:
                master.grad = model.grad.to(torch.float32)
        self.show()

    # What other code does to either.

    def take_changes_of_models(self) -> None:
        """Do `take_changes` before a block, where only what was done to parameters matters."""
        if self.are_hidden or not are_same(grads_of(self.lists.models), self._common):
            self.take_changes()

    def take_changes(self) -> None:
        """Let both have one gradient again, if other code has changed that of one.

        Such code assigns a gradient or removes it, or runs a backward outside of any block.

        Raises:
            AmpRuntimeError: both were changed.
        """
        masters, models = self.lists.masters, self.lists.models
        if self.are_hidden:
            if have_grads(models):  # which a backward has made
                self.unscale()
                self.add_those_of_models(in_block=True)
            self.show()
            return
        own, theirs = grads_of(masters), grads_of(models)
        last = self._common
        if are_same(own, theirs) and are_same(own, last):
            return
        if are_same(own, last) and not have_grads(models):  # as after model.zero_grad()
            store_grads(masters)
            self.forget()
            return
        self.unscale()
        last = self._common
        may_differ = self._masters.any_is_shared(masters)
        both = zip(grads_of(masters), grads_of(models), last, strict=True)
        grads = [_changed(i, *three, may_differ) for i, three in enumerate(both)]
        before = set(map(id, last))
        self.were_assigned |= any(id(each) not in before for each in grads if each is not None)
        store_grads(masters, grads)
        self.show()

    def add_those_of_models(self, in_block: bool) -> None:
        """Add the gradients of 16-bit parameters to those of masters, and leave none behind.

        Args:
            in_block: whether a backward has made them, and it is known that they are to be added.

        Raises:
            AmpRuntimeError: that is not known, and a master has a gradient already.
        """
        pairs = zip(self.lists.models, self.lists.masters, strict=True)
        there = [model.grad is not None and model.grad is not master.grad for model, master in pairs]
        if not any(there):
            return
        self.look_after_step()
        lists = self.lists.only(there)
        master = next((each for each in lists.masters if each.grad is not None), None)
        if master is not None and not in_block:
            raise AmpRuntimeError(
                f"a 16-bit parameter of shape {tuple(master.shape)} was given a gradient, or has one "
                "of a backward outside of amp.scale_loss, and its FP32 master has one already. Before "
                "torch 2.10 they cannot be one gradient. Assign it to what "
                "amp.master_params(optimizer) yields, call optimizer.zero_grad() before, or call "
                "backward in an amp.scale_loss block"
            )
        add_to_masters(lists)

    def drop(self) -> None:
        """Drop the gradients of the masters."""
        self._masters.drop_grads(self.lists.masters)
        self.forget()

    def look_after_step(self) -> None:
        """Look, once after each step, for what other code has done to the gradients that it used.

        Before torch 2.10 they are dropped, because `model.zero_grad()` does not reach them.
        """
        if self.were_stepped:
            self.were_stepped = False
            if not HAS_GRAD_DTYPE:
                self.drop()
            elif not self._masters.any_is_shared(self.lists.masters):  # else look at the next block
                self.take_changes()


def _changed(
    index: int, own: Tensor | None, theirs: Tensor | None, common: Tensor | None, may_differ: bool
) -> Tensor | None:
    """Return the gradient that other code has given to a master, or to its parameter.

    Args:
        index: the number of the parameter, for an error.
        own: the gradient of the master.
        theirs: that of the parameter.
        common: the one that both had.
        may_differ: whether both may have been given one, and the parameter's counts.
    """
    if own is theirs or theirs is common or (theirs is None and own is not common):
        return own
    if own is not common and own is not None and not may_differ:
        raise AmpRuntimeError(
            f"a parameter of shape {tuple(own.shape)}, number {index} of those with a master, was "
            "given a gradient, and its master another. Assign a gradient to one of the two: the "
            "parameter, or what amp.master_params(optimizer) yields"
        )
    return theirs if theirs is None else theirs.to(torch.float32)
