"""One `scale_loss` block: the gradients of one loss for all the optimizers that it names.

enter    refused inside another block; what other scales have left is unscaled; each optimizer makes
room
leave    each optimizer's gradients are looked at; only when none is refused are they checked and
unscaled, the ranks agree on what was found, and the scale moves
delay    they stay scaled, until a block at another scale or a step finishes the block
abort    they are dropped
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Collection, Sequence
from itertools import chain

from torch import Tensor

from amp.casting.fp8_history import AmaxHistory
from amp.casting.regions import disable_casts
from amp.distributed import reduce_largest
from amp.errors import AmpRuntimeError, AmpWarning
from amp.kernels.changes import Change, Changes
from amp.training.gradients import Gradients, State
from amp.training.newest import Newest
from amp.training.scaler import LossScaler, ScaleSnapshot


class Block:
    """One block: a loss's scaler, and the gradients of the optimizers whose parameters it reaches."""

    def __init__(
        self,
        scaler: LossScaler,
        gradients: Sequence[Gradients],
        histories: Sequence[AmaxHistory] = (),
    ) -> None:
        self.scaler = scaler
        self._gradients = gradients
        self._histories = histories
        self.scale: ScaleSnapshot  # what the loss was scaled by, once the block is entered

    def enter(self, loss: Tensor) -> Tensor:
        """Make room for the gradients of a loss, and return it scaled. The host does not wait.

        If it raises, `abort` is to be called.
        """
        if any(gradients.state is State.OPEN for gradients in self._gradients):
            raise AmpRuntimeError(
                "amp.scale_loss was entered for an optimizer that is inside another amp.scale_loss "
                "block. Leave the first block, or add the two losses and scale the sum."
            )
        for gradients in self._gradients:
            _check_reduced(gradients, self.scaler)
        # Finishing a block moves a scale, perhaps this one: look again until none is left.
        while any([_finish_other_scale(gradients, self.scaler) for gradients in self._gradients]):  # noqa: C419
            pass
        for gradients in self._gradients:
            gradients.enter(self)
        scaled_loss, self.scale = self.scaler.scale_and_remember(loss)
        for history in self._histories:
            history.begin(None if self.scaler.is_identity else self.scale.scale)
        return scaled_loss

    def leave(self, update: bool = True) -> None:
        """Unscale the block's gradients, or let the step do it, and move the scale. No host sync."""
        _unscale(self._gradients, self.scale, self._histories, update)

    def is_reduced(self) -> bool:
        """Whether the backward has reduced all of these gradients over the ranks."""
        return all(gradients.are_reduced() for gradients in self._gradients)

    def delay(self) -> None:
        """Leave the gradients scaled, with those that are delayed at the same scale."""
        _collect(
            self._gradients, self.scale, are_final=False
        )  # what cannot be unscaled later is refused now
        delays = [gradients.work_out_delay(self) for gradients in self._gradients]
        tuple(map(operator.call, delays))  # by one call: an interrupt finds all delayed, or none

    def abort(self) -> None:
        """Drop the block's gradients, and leave it, as far as it was entered.

        After an interrupt it may be called again.
        """
        for gradients in self._gradients:
            gradients.abort(self)

    def finish(self) -> None:
        """Do what leaving the block without a delay would have done, where it is still to be done."""
        together = [g for g in self._gradients if g.delayed is self and g.state is State.DELAYED]
        if not all(gradients.were_reduced for gradients in together):
            warnings.warn(
                "gradients are stepped on that were not reduced over the ranks: the last backward was "
                "one of no_sync() or set_requires_gradient_sync(False). The ranks go apart. Let the "
                "last backward before a step reduce",
                AmpWarning,
                stacklevel=5,
            )
        _unscale(together, self.scale, self._histories)


def _check_reduced(gradients: Gradients, scaler: LossScaler) -> None:
    """Raise if gradients that no backward has reduced yet would be unscaled for a block of `scaler`."""
    delayed = gradients.delayed
    if delayed is not None and not gradients.were_reduced and not delayed.scale.is_current(scaler):
        raise AmpRuntimeError(
            "the gradients of the last block are not reduced over the ranks, for its backward was one "
            "of no_sync() or set_requires_gradient_sync(False), and this block has another loss scale. "
            "They cannot be unscaled before they are reduced. Accumulate losses of one loss_id, and "
            "leave the scale alone meanwhile"
        )


def _finish_other_scale(gradients: Gradients, scaler: LossScaler) -> bool:
    """Finish the delayed block of an optimizer if its scale is not the one that `scaler` has now."""
    delayed = gradients.delayed
    if delayed is None or delayed.scale.is_current(scaler):
        return False
    delayed.finish()
    return True


def _collect(together: Sequence[Gradients], scale: ScaleSnapshot, are_final: bool) -> list[Newest]:
    """Look at the gradients of each optimizer. A parameter of two of them goes with the first."""
    claimed: set[int] = set()
    collected = []
    for gradients in together:
        newest = gradients.collect(scale, claimed, are_final)
        collected.append(newest)
        if len(together) > 1:
            claimed.update(map(id, newest.of_masters.models), map(id, newest.unmastered))
    return collected


@disable_casts()
def _unscale(
    together: Sequence[Gradients],
    scale: ScaleSnapshot,
    histories: Sequence[AmaxHistory],
    update: bool = True,
) -> None:
    """Unscale the gradients of one loss, tell its optimizers of an overflow, and move the scales."""
    scaler = scale.scaler
    collected = _collect(together, scale, are_final=True)
    checked = [gradients for gradients in together if scaler.checks(gradients.skips_on_device)]
    found_inf = scaler.found_inf if checked else None
    changes = Changes()
    try:
        for gradients, newest in zip(together, collected, strict=True):
            found = found_inf if gradients in checked else None
            gradients.unscale(newest, scale, found, changes)
        _plan_agreeing(together, scaler, found_inf, histories if update else (), changes)
        for history in histories if update else ():
            history.plan_end(changes, in_block=True)
        changes.add(functools.partial(_settle, together, checked, scaler))
        if update and (checked or not scaler.is_identity):
            changes.add_later(functools.partial(_work_out_update, together, scaler, scaler.updates))
        changes.make()
    except BaseException as error:
        if isinstance(error, Exception) or not changes.have_begun:
            if found_inf is not None:
                found_inf.zero_()
            for gradients in together if changes.have_begun else ():
                gradients.clear()  # what has been added cannot be told from what was there
        raise


def _plan_agreeing(
    together: Sequence[Gradients],
    scaler: LossScaler,
    found_inf: Tensor | None,
    histories: Sequence[AmaxHistory],
    changes: Changes,
) -> None:
    """Plan that ranks agree on an overflow, and on the magnitudes that FP8 layers have seen."""
    shared = [history for history in histories if history.recipe.reduce_amax]
    tensors = [*([] if found_inf is None else [found_inf]), *(each.seen for each in shared)]
    if tensors:
        of_gradients = [each.lists.process_groups for each in together]
        of_histories = [history.groups() for history in shared]
        groups = scaler.groups_with(chain.from_iterable([*of_gradients, *of_histories]))
        changes.add_call(functools.partial(reduce_largest, tensors, groups))


def _work_out_update(together: Sequence[Gradients], scaler: LossScaler, number: int) -> Change:
    norms = [gradients.norm for gradients in together]
    norm = next((norm for norm in norms if norm is not None), None)
    return functools.partial(scaler.update, norm, number)


def _settle(together: Sequence[Gradients], checked: Collection[Gradients], scaler: LossScaler) -> None:
    """Let gradients leave their block, with what the check of some has found. It may be repeated."""
    verdict = scaler.verdict() if checked else None
    for gradients in together:
        if gradients.state in (State.OPEN, State.DELAYED):
            gradients.settle(verdict if gradients in checked else None)
