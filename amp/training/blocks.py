"""One `scale_loss` block: the gradients of one loss for all the optimizers that it names.

enter    raises inside another block; unscales gradients of other scales; sets aside earlier gradients
leave    collects each optimizer's gradients, and raises if one cannot be unscaled; checks and unscales
         them; lets the ranks agree on an overflow; moves the scale
delay    leaves gradients scaled, until a block at another scale or a step finishes the block
abort    drops the gradients of a block that raised; see `Gradients.abort`
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, _GeneratorContextManager
from itertools import chain
from typing import Any

from torch import Tensor

from amp.active import open_sessions
from amp.casting.fp8_history import AmaxHistory
from amp.casting.regions import ThreadState, disable_casts
from amp.distributed import reduce_largest
from amp.errors import AmpAttributeError, AmpRuntimeError, warn
from amp.kernels.changes import at_once
from amp.observers import watching
from amp.training.gradients import Gradients, State
from amp.training.new_gradients import NewGradients
from amp.training.scaler import LossScaler, ScaleSnapshot


class Block:
    """One block: a loss's scaler, and the gradients of the optimizers whose parameters it reaches.

    Attributes:
        scaler: the scaler of the loss.
        scale: the scale of the loss, once the block is entered.
        is_over: whether it was left without an error.
    """

    scale: ScaleSnapshot

    def __init__(
        self,
        scaler: LossScaler,
        gradients: Sequence[Gradients],
        histories: Sequence[AmaxHistory] = (),
    ) -> None:
        self.scaler = scaler
        self.is_over = False
        self._gradients = gradients
        self._histories = histories
        self._before = ThreadState()
        self._was_run: bool | None = None
        """Whether backward has run from the scaled loss; None if that is not watched."""

    def around_backward(
        self, session: Any, loss: Tensor, attached: Sequence[Any], *, delay: bool, update: bool
    ) -> AbstractContextManager[Tensor]:
        """Enter the block, yield the scaled loss for its backward, and leave the block.

        Args:
            session: the session of the loss; its observers are called.
            loss: as the caller computed it.
            attached: the `AttachedOptimizer`s of the optimizers, of any session.
            delay: leave the gradients scaled.
            update: let the scale move.
        """
        return _ToEnter(self._around_backward, (session, loss, attached, delay, update), {})

    def _around_backward(
        self, session: Any, loss: Tensor, attached: Sequence[Any], delay: bool, update: bool
    ) -> Generator[Tensor]:
        for each in attached:
            each.write_back.warn_if_missed()
            if not each.step.has_stepped:
                each.gradients.check.wrappers(each.gradients.lists.models)
                each.gradients.check.hooks(each.gradients.lists.masters)
        try:
            try:
                scaled_loss = self.enter(loss)
                for observer in watching(session.observers):
                    observer.block_entered(session, self, loss, attached)
                session.learn(self.scaler)
                others: list[Any] = []
                if not self.scaler.is_identity and not all(each.step.has_stepped for each in attached):
                    self._watch_backward(scaled_loss)
                    others = _others(session, attached)
                before = [each.gradients.grads_and_versions() for each in others]
                try:
                    yield scaled_loss
                except RuntimeError as error:
                    for gradients in self._gradients:
                        gradients.check.add_hint(error, gradients.lists.models)
                    raise
                for each in () if self.scaler.is_identity else attached:
                    if not each.step.has_stepped:
                        each.gradients.of_masters.check_hidden()
                if session.is_rehearsal:
                    self.abort()
                elif (delay and not self._is_plain) or not self.is_reduced():
                    self.delay()
                else:
                    self.leave(update)
                    self._warn_if_empty(attached)
                self._warn_if_not_run()
                for each, grads in zip(others, before, strict=True):
                    if each.owner is session or not each.gradients.were_scaled:
                        each.gradients.note_scaled(grads, self._gradients)
                session.running_stats.repair()
                for observer in watching(session.observers):
                    observer.block_left(session, self)
                self.is_over = True
            finally:
                self.end()
        finally:
            self.end()  # again: an interrupt may have come before it was done

    def _watch_backward(self, scaled_loss: Tensor) -> None:
        """Note whether backward runs from the scaled loss, and warn if it does so after the block."""
        if not scaled_loss.requires_grad:
            return
        self._was_run, block = False, weakref.ref(self)

        def note(grad: Tensor) -> None:
            alive = block()
            if alive is None or alive.is_over:
                if bool((grad != 1).any()):
                    return  # it is a part of another loss
                warn(
                    "scaled_loss.backward() was called after its amp.scale_loss block: gradients are "
                    "not unscaled, and too large by the loss scale. Call it inside of the block"
                )
            else:
                alive._was_run = True

        scaled_loss.register_hook(note)  # type: ignore[no-untyped-call]

    def _warn_if_not_run(self) -> None:
        """Warn if the gradients of the block did not come from the scaled loss."""
        if self._was_run is False and any(each.has_found for each in self._gradients):
            warn(
                "an amp.scale_loss block has found gradients, and none came from the scaled loss: they "
                "are divided by the loss scale all the same, so the weights hardly move. Call "
                "scaled_loss.backward() in `with amp.scale_loss(loss, optimizer) as scaled_loss:`, not "
                "loss.backward()"
            )

    def _warn_if_empty(self, attached: Sequence[Any]) -> None:
        """Warn once if the first block of some optimizers has found no gradient at all."""
        if any(each.gradients.has_ever_found or each.step.has_stepped for each in attached):
            return
        if any(p.requires_grad for each in attached for p in each.gradients.lists.stepped):
            for each in attached:
                each.gradients.has_ever_found = True
            warn(
                "an amp.scale_loss block has ended, and no parameter of its optimizers has a gradient: "
                "no backward was run in it, or the loss does not depend on them, as after .detach(). "
                "Call scaled_loss.backward() inside of the block"
            )

    @property
    def _is_plain(self) -> bool:
        """Whether nothing would be delayed: there is no loss scale, and no history of FP8."""
        return self.scaler.is_identity and not self._histories

    def enter(self, loss: Tensor) -> Tensor:
        """Make room for the gradients of a loss, and return it scaled. The host does not wait.

        If it raises, the caller calls `end`.
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
            gradients.prepare_to_enter()
        for gradients in self._gradients:
            gradients.enter(self)
        scaled_loss, self.scale = self.scaler.scale_and_remember(loss)
        for history in self._histories:
            history.begin(None if self.scaler.is_identity else self.scale.scale)
        return scaled_loss

    def leave(self, update: bool = True) -> None:
        """Unscale the block's gradients, or let the step do it, and move the scale. No host sync."""
        self._unscale(self._gradients, update)

    def is_reduced(self) -> bool:
        """Whether the backward has reduced all of these gradients over the ranks."""
        return all(gradients.are_reduced() for gradients in self._gradients)

    def delay(self) -> None:
        """Leave the gradients scaled, added to delayed ones of the same scale."""
        self._collect(self._gradients, are_final=False)  # raises if they cannot be unscaled later
        at_once(*[gradients.delay(self) for gradients in self._gradients])

    def end(self) -> None:
        """After an error, put torch's state back and drop the gradients. It may be called again."""
        if not self.is_over:
            self._before.put_back(after_error=True)
            self.abort()

    def abort(self) -> None:
        """Drop the block's gradients and leave it, unless it was left. Idempotent."""
        for gradients in self._gradients:
            gradients.abort(self)

    def finish(self) -> None:
        """Unscale gradients that are still delayed, as leaving the block without a delay does."""
        together = [g for g in self._gradients if g.delayed is self and g.state is State.DELAYED]
        if not all(gradients.were_reduced for gradients in together):
            warn(
                "this step uses gradients that were not reduced over the ranks: the last backward was "
                "one of no_sync() or set_requires_gradient_sync(False). The ranks diverge. Let the "
                "last backward before a step reduce"
            )
        self._unscale(together)

    def _collect(self, together: Sequence[Gradients], are_final: bool) -> list[NewGradients]:
        """Return each optimizer's gradients. A parameter of two optimizers goes with the first."""
        claimed: set[int] = set()
        collected = []
        for gradients in together:
            new = gradients.collect(self.scale, claimed, are_final)
            collected.append(new)
            if len(together) > 1:
                claimed.update(map(id, new.of_masters.models), map(id, new.unmastered))
        return collected

    @disable_casts()
    def _unscale(self, together: Sequence[Gradients], update: bool = True) -> None:
        """Unscale the gradients of the loss, tell optimizers of an overflow, and move the scales.

        An error before the first change leaves the block as it was. After that, an error drops all
        gradients of these optimizers: added gradients cannot be told from those that were there.
        """
        collected = self._collect(together, are_final=True)
        is_done = False
        try:
            self._commit(together, collected, self._histories if update else (), update)
            is_done = True
        finally:
            if not is_done:
                self.scaler.forget_check()
                for gradients in together:
                    gradients.clear()

    def _commit(
        self,
        together: Sequence[Gradients],
        collected: Sequence[NewGradients],
        histories: Sequence[AmaxHistory],
        update: bool,
    ) -> None:
        scaler = self.scaler
        checked = [gradients for gradients in together if scaler.checks(gradients.skips_on_device)]
        found_inf = scaler.found_inf if checked else None
        for gradients, new in zip(together, collected, strict=True):
            gradients.unscale(new, self.scale, found_inf if gradients in checked else None)
        _agree(together, scaler, found_inf, histories)
        for history in histories:
            history.end(in_block=True)
        deferred = filter(None, [each.of_masters.deferred for each in together])
        norm = next((each.norms.total for each in deferred if each.norms is not None), None)
        verdict = scaler.verdict() if checked else None
        for gradients in together:
            gradients.settle(verdict if gradients in checked else None)
        if update and (checked or not scaler.is_identity):
            scaler.update(norm)


class _ToEnter(_GeneratorContextManager[Tensor]):
    """What `amp.scale_loss` returns: it is for a `with` statement, and has nothing of a tensor.

    Its `__exit__` is that of the standard library: an interrupt that came before the call in one of our
    own would leave the block open.
    """

    def __delattr__(self, name: str) -> None:
        """Forget an argument, which the standard library does first when the block is entered."""
        if name not in vars(self):
            raise AmpRuntimeError(
                "what amp.scale_loss returned was entered a second time. Make a new one for each "
                "backward: with amp.scale_loss(loss, optimizer) as scaled_loss"
            )
        super().__delattr__(name)

    def __getattr__(self, name: str) -> Any:
        raise AmpAttributeError(
            f"amp.scale_loss(...) was used without `with`, and has no attribute '{name}'. Write `with "
            "amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
        )


def _others(session: Any, attached: Sequence[Any]) -> list[Any]:
    """Return the optimizers whose gradients should not come from this block, as far as that shows.

    Other threads may train those of other sessions meanwhile, with blocks of their own, or at a level
    that scales no loss.
    """
    of_all = chain.from_iterable(each.attached for each in open_sessions())
    return [
        each
        for each in of_all
        if each not in attached and (each.owner is session or not each.owner.scalers[0].is_identity)
    ]


def _agree(
    together: Sequence[Gradients],
    scaler: LossScaler,
    found_inf: Tensor | None,
    histories: Sequence[AmaxHistory],
) -> None:
    """Let ranks agree on an overflow, and on the magnitudes that FP8 layers have seen."""
    shared = [history for history in histories if history.recipe.reduce_amax]
    tensors = [*([] if found_inf is None else [found_inf]), *(each.seen for each in shared)]
    if tensors:
        of_gradients = [each.lists.process_groups for each in together]
        of_histories = [history.groups() for history in shared]
        groups = scaler.groups_with(chain.from_iterable([*of_gradients, *of_histories]))
        reduce_largest(tensors, groups)


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
