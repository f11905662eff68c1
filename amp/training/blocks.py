"""One `scale_loss` block: the gradients of one loss for all the optimizers that it names.

enter     raises inside another block; unscales gradients of other scales; sets aside earlier gradients
_settle   at the end collects each optimizer's gradients, and raises if one cannot be unscaled; checks
          and unscales them; lets the ranks agree on an overflow; moves the scale
finish    does the same for gradients that the end has left scaled, because of `delay_unscale` or since
          they are not reduced: before a block at another scale, and before a step
abort     drops the gradients of a block that raised; see `Gradients.abort`
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, _GeneratorContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp.casting.regions import ThreadState, disable_casts
from amp.distributed import reduce_largest
from amp.dtypes import LOW_PRECISION
from amp.errors import AmpAttributeError, AmpRuntimeError, shape_of, warn
from amp.kernels.interrupts import at_once
from amp.observers import everywhere
from amp.training.gradients import Gradients, State
from amp.training.misuse import BlockWatch
from amp.training.scaler import LossScaler, ScaleSnapshot
from amp.training.unscaling import NewGradients
from amp.training.verdicts import Verdict

if TYPE_CHECKING:
    from amp.casting.fp8_history import AmaxHistory

_INSIDE_ANOTHER = (
    "amp.scale_loss was entered for an optimizer that is inside another amp.scale_loss block. Leave "
    "the first block, or add the two losses and scale the sum."
)


class Block:
    """One block: a loss's scaler, and the gradients of the optimizers whose parameters it reaches.

    Attributes:
        scaler: the scaler of the loss.
        scale: the scale of the loss, once the block is entered.
        is_over: whether it was left without an error.
        with_gradients: the `Gradients` of optimizers for which it has made any.
    """

    scale: ScaleSnapshot

    def __init__(
        self, scaler: LossScaler, gradients: Sequence[Gradients], histories: Sequence[AmaxHistory] = ()
    ) -> None:
        self.scaler = scaler
        self.is_over = False
        self._gradients = gradients
        self._histories = histories
        self._before: ThreadState | None = None
        self.with_gradients: list[Gradients] = []

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
        if session.is_plain and all([each.is_plain for each in attached]):  # noqa: C419 (is faster)
            return _ToEnter(self._around_plain_backward, (session, loss, attached), {})
        return _ToEnter(self._around_backward, (session, loss, attached, delay, update), {})

    def _around_plain_backward(
        self, session: Any, loss: Tensor, attached: Sequence[Any]
    ) -> Generator[Tensor]:
        """Do the same for gradients that need no unscaling: backward adds them to the existing ones."""
        watched = [each for each in attached if each.misuse is not None]
        watch = BlockWatch(session, self, attached) if watched else None
        if any([gradients.open_block is not None for gradients in self._gradients]):  # noqa: C419
            raise AmpRuntimeError(_INSIDE_ANOTHER)
        try:
            for gradients in self._gradients:
                gradients.regroup()
                gradients.open_block = self
            try:
                yield loss.float() if loss.dtype in LOW_PRECISION else loss
            except RuntimeError as error:
                _explain(error, loss, self._gradients)
                raise
            if watch is not None:
                self.with_gradients = [each for each in self._gradients if each.are_there()]
                watch.block_is_left(is_complete=True)
            self.is_over = True
        finally:
            for gradients in self._gradients:
                if gradients.open_block is self:
                    gradients.open_block = None

    def _around_backward(
        self, session: Any, loss: Tensor, attached: Sequence[Any], delay: bool, update: bool
    ) -> Generator[Tensor]:
        watched = [each for each in attached if each.misuse is not None]
        watch = BlockWatch(session, self, attached) if watched else None
        is_in_backward = False
        try:
            try:
                scaled_loss = self.enter(loss)
                for observer in (*everywhere, *session.observers):
                    observer.block_entered(session, self, loss, attached)
                if self.scaler.recorder.states.underway:
                    session.learn(self.scaler)
                if watch is not None:
                    watch.backward_begins(scaled_loss)
                is_in_backward = True
                yield scaled_loss
                is_in_backward = False
                if watch is not None:
                    watch.backward_has_ended()
                delay_matters = not self.scaler.config.is_identity or self._histories
                are_reduced = all([each.are_reduced() for each in self._gradients])  # noqa: C419
                is_complete = are_reduced and not (delay and delay_matters)
                if session.is_rehearsal:
                    self.abort()
                elif is_complete:
                    self._settle(self._gradients, update)
                else:
                    self._collect(self._gradients, are_final=False)  # raises what leaving would raise
                    at_once(*[gradients.delay(self) for gradients in self._gradients])
                if watch is not None:
                    watch.block_is_left(is_complete and not session.is_rehearsal)
                if session.running_stats.modules:
                    session.running_stats.repair()
                for observer in (*everywhere, *session.observers):
                    observer.block_left(session, self)
                self.is_over = True
            except RuntimeError as error:
                if is_in_backward:
                    self._add_hints(error, loss, attached)
                raise
            finally:
                if not self.is_over:
                    self.end()
        finally:
            if not self.is_over:  # again: an interrupt may have come before it was done
                self.end()

    def _add_hints(self, error: RuntimeError, loss: Tensor, attached: Sequence[Any]) -> None:
        """Say what to do about an error of a backward."""
        _explain(error, loss, self._gradients)
        for each in attached:
            each.named.add_hint(error, each.gradients.parameters.models)
        if loss.numel() > 1 and "implicitly created only for scalar" in str(error):
            error.add_note(
                f"amp: the loss has the shape {shape_of(loss)}: scale one number, as in "
                "amp.scale_loss(loss.mean(), optimizer)"
            )

    def enter(self, loss: Tensor) -> Tensor:
        """Make room for the gradients of a loss, and return it scaled. The host does not wait.

        If it raises, the caller calls `end`.
        """
        self._before = ThreadState()
        if any([gradients.open_block is not None for gradients in self._gradients]):  # noqa: C419
            raise AmpRuntimeError(_INSIDE_ANOTHER)
        while others := [
            each
            for each in self._gradients
            if (block := each.delayed) is not None and not block.scale.is_current(self.scaler)
        ]:
            if not all(each.were_reduced for each in others):
                raise AmpRuntimeError(
                    "the gradients of the last block are not reduced over the ranks, for its backward "
                    "was one of no_sync() or set_requires_gradient_sync(False), and this block has "
                    "another loss scale. They cannot be unscaled before they are reduced. Accumulate "
                    "losses of one loss_id, and leave the scale alone meanwhile"
                )
            others[0].finish_delayed()  # this moves a scale, perhaps this one: look again
        for gradients in self._gradients:
            gradients.prepare_to_enter()
        for gradients in self._gradients:
            gradients.enter(self)
        scaled_loss, self.scale = self.scaler.scale_and_remember(loss)
        for history in self._histories:
            history.begin(None if self.scaler.config.is_identity else self.scale.scale)
        return scaled_loss

    def end(self) -> None:
        """After an error, restore torch's state and drop the gradients. It may be called again."""
        if self._before is not None:
            self._before.put_back(after_error=True)
        self.abort()

    def abort(self) -> None:
        """Drop the block's gradients and leave it, unless it was left. Idempotent."""
        for gradients in self._gradients:
            gradients.abort(self)

    def finish(self, update: bool = True) -> None:
        """Unscale gradients that are still delayed, as leaving the block without a delay does."""
        together = [g for g in self._gradients if g.delayed is self and g.state is State.DELAYED]
        if not all(gradients.were_reduced for gradients in together):
            warn(
                "this step uses gradients that were not reduced over the ranks: the last backward was "
                "one of no_sync() or set_requires_gradient_sync(False). The ranks diverge. Let the "
                "last backward before a step reduce"
            )
        self._settle(together, update)

    def _collect(self, together: Sequence[Gradients], are_final: bool) -> list[NewGradients]:
        """Return each optimizer's gradients. A parameter of two optimizers goes with the first."""
        claimed: set[int] = set()
        collected = []
        for gradients in together:
            new = gradients.collect(self.scale, claimed, are_final)
            if new.of_masters.grads or new.own.grads:
                self.with_gradients.append(gradients)
            collected.append(new)
            if len(together) > 1:
                claimed.update(map(id, new.of_masters.parameters), map(id, new.own.parameters))
        return collected

    @disable_casts()
    def _settle(self, together: Sequence[Gradients], update: bool = True) -> None:
        """Unscale the gradients of the loss, tell optimizers of an overflow, and move the scales.

        An error before the first change leaves the block as it was. After that, an error drops all
        gradients of these optimizers: added gradients cannot be told from those that were there.
        """
        collected = self._collect(together, are_final=True)
        try:
            self._commit(together, collected, update)
        except BaseException:
            self.scaler.forget_check()
            for gradients in together:
                gradients.clear()
            raise

    def _commit(
        self, together: Sequence[Gradients], collected: Sequence[NewGradients], update: bool
    ) -> None:
        scaler, histories = self.scaler, self._histories if update else ()
        checked = [each for each in together if scaler.checks(each.capabilities.skips_on_device)]
        found_inf = scaler.found_inf if checked else None
        for gradients, new in zip(together, collected, strict=True):
            gradients.settle(new, self.scale, found_inf if gradients in checked else None)
        shared = [history for history in histories if history.recipe.reduce_amax]
        groups = [group for each in together for group in each.parameters.process_groups]
        if groups or shared or scaler.process_groups:  # ranks agree on overflows, and on amaxes
            of_histories = [group for history in shared for group in history.groups()]
            tensors = [history.seen for history in shared]
            tensors = tensors if found_inf is None else [found_inf, *tensors]
            reduce_largest(tensors, scaler.process_groups_with([*groups, *of_histories]))
        for history in histories:
            history.end(in_block=True)
        deferred = filter(None, [each.deferral.deferred for each in together])
        norm = next((each.norms.total for each in deferred if each.norms is not None), None)
        is_alone = len(together) == 1
        # Ranks of a `process_group` may have other optimizers, and not as many, which ask only here.
        is_final = bool(scaler.process_groups) or not (is_alone or scaler.is_on_host)
        is_updated = bool(update and (checked or not scaler.config.is_identity))
        verdict, to_fill = None, None
        if found_inf is not None:
            if is_updated and not scaler.is_on_host:  # the update itself copies what was found
                kept = to_fill = torch.empty_like(found_inf)
            else:
                kept = found_inf.clone()
            verdict = Verdict(scaler, kept, is_final=is_final)
        if is_updated:  # before the optimizers get the verdict, which has no value until then
            scaler.update(norm, to_fill)
        for gradients in together:
            gradients.leave(verdict if gradients in checked else None, is_alone)


def _explain(error: RuntimeError, loss: Tensor, together: Sequence[Gradients]) -> None:
    """Raise AmpRuntimeError if a backward has failed because the loss has no graph."""
    if loss.requires_grad or "does not require grad" not in str(error):
        return
    if any(parameter.requires_grad for each in together for parameter in each.parameters.of_model):
        why = (
            "it was computed under torch.no_grad or in inference mode, or what leads to it was cut off "
            "by .detach(), .data or .item(). Compute it from the model's outputs, with gradients"
        )
    else:
        why = (
            "all parameters of its optimizer are frozen. Set requires_grad of those that are to be "
            "trained, or leave out the block"
        )
    raise AmpRuntimeError(f"the loss of an amp.scale_loss block has no gradient: {why}") from error


class _ToEnter(_GeneratorContextManager[Tensor]):
    """The result of `amp.scale_loss`, for a `with` statement. It is not a tensor.

    Its `__exit__` is that of the standard library: in one of our own, an interrupt before the first
    call would leave the block open.
    """

    def __enter__(self) -> Tensor:
        if "args" not in vars(self):
            raise AmpRuntimeError(
                "what amp.scale_loss returned was entered a second time. Make a new one for each "
                "backward: with amp.scale_loss(loss, optimizer) as scaled_loss"
            )
        return super().__enter__()

    def __getattr__(self, name: str) -> Any:
        raise AmpAttributeError(
            f"amp.scale_loss(...) was used without `with`, and has no attribute '{name}'. Write `with "
            "amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
        )
