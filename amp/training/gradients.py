"""Where the gradients of one optimizer are, from backward to the step.

A gradient is the sum of two parts. `new` comes from the last block's backward: it is scaled, and in the
`.grad` of the model's parameters. `total` is the sum of earlier gradients: it is unscaled. The
optimizer updates the FP32 masters of 16-bit parameters, or the parameter itself ("unmastered"). At any
time the gradients are in one of four states:

| state    | new                      | total of masters              | total of unmastered parameters |
|----------|--------------------------|-------------------------------|--------------------------------|
| SETTLED  | none                     | in `.grad` of both (*)        | in their `.grad`               |
| DEFERRED | none                     | the same, not yet unscaled    | in their `.grad`               |
| OPEN     | in `.grad` of the model  | in the masters' `.grad` alone | set aside                      |
| DELAYED  | in `.grad` of the model  | in the masters' `.grad` alone | set aside                      |

(*) The master and the model's parameter; before torch 2.10 the master alone.

| event                      | from           | to             | what happens                          |
|----------------------------|----------------|----------------|---------------------------------------|
| a block is entered         | SETTLED*       | OPEN           | unmastered total is set aside         |
|   at the scale of `new`    | DELAYED        | OPEN           | nothing: backward adds to `new`       |
|   at another scale         | DELAYED        | OPEN           | `new` unscaled first, as on leaving   |
| the block is left          | OPEN           | SETTLED*       | `new` checked, unscaled, added        |
|   with delay_unscale       | OPEN           | DELAYED        | nothing                               |
|   by an exception          | OPEN           | as before      | `new` dropped; see `abort`            |
|   by an error in leaving   | OPEN           | SETTLED        | all dropped                           |
| the step                   | DELAYED        | SETTLED*       | `new` unscaled first, as on leaving   |
|   then                     | SETTLED*       | SETTLED        | gradients used; they stay             |
| zero_grad                  | any            | SETTLED, OPEN  | all dropped, and what checks found    |

SETTLED* is SETTLED or DEFERRED.

DEFERRED is for an optimizer that takes scaled gradients: the first block's 16-bit gradients are kept
as backward left them, and the step unscales them. Whatever reads one before has all unscaled first; see
`amp.training.deferred`. The next block's are added to them in FP32, and the sum is kept instead.
Nothing is deferred if the optimizer does not take scaled gradients, if masters have gradients in
`.grad` already, if optimizers share a master, or if a gradient is sparse or of a class that keeps its
values elsewhere.

At a scale of 1 `new` needs no unscaling: in the `.grad` of unmastered parameters backward adds it to
the total, and nothing is set aside. Other code may change, assign or remove the `.grad` of a master or
of its parameter, and run a backward outside of any block, which adds to the parameter's. What it has
done to the one is taken over for the other when a block is entered and before a step.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from amp.distributed import place_gradients
from amp.errors import AmpRuntimeError, warn
from amp.kernels.changes import Change
from amp.masters.grads import grads_of, have_grads, store_grads
from amp.masters.whole import MasterWeights
from amp.torch_versions import HAS_GRAD_DTYPE
from amp.training.deferred import Deferred
from amp.training.hiding import hide_gradients_from_dynamo
from amp.training.master_gradients import MasterGradients
from amp.training.new_gradients import Logs, NewGradients
from amp.training.parameter_check import ParameterCheck
from amp.training.parameter_lists import ParameterLists
from amp.training.scaler import ScaleSnapshot, Verdict
from amp.training.synchronization import Synchronization
from amp.training.unscaling import add_grad, add_to_masters
from amp.training.verdicts import Verdicts

if TYPE_CHECKING:
    from amp.training.blocks import Block


class State(enum.Enum):
    """Where the gradients of an optimizer are; see the table above."""

    SETTLED = enum.auto()
    DEFERRED = enum.auto()
    OPEN = enum.auto()
    DELAYED = enum.auto()


class StepGradients:
    """The gradients of one optimizer, as a step and other code find them.

    Attributes:
        masters: the masters of the session.
        of_masters: the total of masters.
        check: the check of the model's parameters.
        verdicts: what the checks found since the last step.
        delayed: the block that left its gradients scaled, or None.
        were_scaled: whether a block was ever entered for this optimizer.
        of_others: the parameters that a scaled loss of other optimizers has given gradients, which
            nothing unscales.
    """

    def __init__(
        self, optimizer: Any, masters: MasterWeights, check: ParameterCheck, takes_scaled: bool
    ) -> None:
        self._optimizer = optimizer
        self.masters = masters
        self.check = check
        self.of_masters = MasterGradients(optimizer, masters, takes_scaled)
        self.verdicts = Verdicts()
        self.delayed: Block | None = None
        self.were_scaled = False
        self.of_others: list[Tensor] = []
        self._open: Block | None = None
        self._aside: list[tuple[Tensor, Tensor]] = []

    @property
    def state(self) -> State:
        """Where the gradients are."""
        if self._open is not None:
            return State.OPEN
        if self.delayed is not None:
            return State.DELAYED
        is_deferred = self.of_masters.deferred is not None and not self.of_masters.were_stepped
        return State.DEFERRED if is_deferred else State.SETTLED

    @property
    def lists(self) -> ParameterLists:
        """The parameters of the optimizer's groups, as of the last look at them."""
        return self.of_masters.lists

    def look_at_groups(self) -> ParameterLists:
        """Return the parameters that the optimizer's groups hold now."""
        lists = ParameterLists.of(self._optimizer, self.masters, self.lists)
        if lists is not self.lists:
            self.check.dtypes()
            self.of_masters.take_lists(lists)
        return lists

    @property
    def are_whole_in_block(self) -> bool:
        """Whether the open block's backward adds to the whole gradient, unscaled."""
        is_open = self._open is not None and self._open.scaler.is_identity
        return is_open and not self.of_masters.are_there()

    @property
    def open_scale(self) -> Tensor | None:
        """The scale of the open block's loss, on the device; None outside of a block."""
        return None if self._open is None else self._open.scale.scale

    @property
    def _of_model(self) -> tuple[Tensor, ...]:
        """The parameters of the model that the optimizer trains."""
        return (*self.lists.models, *self.lists.unmastered)

    def verdicts_for_step(self) -> list[Verdict]:
        """Return what the checks found in the gradients that the step is about to use."""
        if self.of_others:
            self._warn_if_of_others()
        if not self.verdicts.has_cleared:
            return self.verdicts.of_gradients
        self.take_changes()
        self.verdicts.look_for_assigned(grads_of(self.lists.unmastered))
        return self.verdicts.for_step(self.of_masters.were_assigned)

    def grads_and_versions(self) -> list[tuple[Tensor | None, int]]:
        """Return the gradients of the model's parameters, and how often each was changed."""
        grads = grads_of(self._of_model)
        return [(grad, 0 if grad is None else grad._version) for grad in grads]

    def note_scaled(
        self, before: Sequence[tuple[Tensor | None, int]], together: Iterable[StepGradients]
    ) -> None:
        """Note what the backward of a scaled loss of other optimizers has changed since `before`."""
        now, of_block = self.grads_and_versions(), {p for each in together for p in each._of_model}
        if len(now) == len(before) and self.state is not State.DELAYED:
            self.of_others = [
                parameter
                for parameter, (grad, version), known in zip(self._of_model, now, before, strict=True)
                if (grad is not known[0] or version != known[1]) and parameter not in of_block
            ]

    def _warn_if_of_others(self) -> None:
        """Warn if gradients are about to be used that nothing has unscaled."""
        found = [parameter for parameter in self.of_others if parameter.grad is not None]
        self.of_others = []
        if found:
            warn(
                f"the gradient of {self.check.called(found[0])} comes from a loss that was scaled, in "
                "an amp.scale_loss block that does not name its optimizer: it is too large by the loss "
                "scale. Pass all optimizers whose parameters a loss reaches, as in "
                "amp.scale_loss(loss, [first, second]), or call zero_grad before the next block"
            )

    def hide(self) -> bool:
        """Leave the gradients to the masters alone; return whether both had them."""
        if not HAS_GRAD_DTYPE or self._open is not None or self.delayed is not None:
            return False
        if self.of_masters.are_hidden:
            return False
        self.of_masters.take_changes()
        self.of_masters.hide()
        return True

    def show(self) -> None:
        """Undo `hide`, and add what a backward has made meanwhile."""
        if self._open is None and self.delayed is None and self.of_masters.are_hidden:
            self.of_masters.take_changes()

    def take_changes(self, for_block: bool = False) -> None:
        """Take over what other code has done to the gradient of a master, or of its parameter.

        Args:
            for_block: whether a block is about to be entered.

        Raises:
            AmpRuntimeError: it has changed both.
        """
        if not self.lists.are_plain:
            place_gradients(self.lists.models)
        if HAS_GRAD_DTYPE and for_block:
            self.of_masters.take_changes_of_models()
        elif HAS_GRAD_DTYPE and self._open is None:
            self.of_masters.take_changes()
        else:
            self.of_masters.add_those_of_models(in_block=self._open is not None)

    def for_step(self) -> Deferred:
        """Return the gradients of masters for an optimizer that unscales them itself."""
        self.take_changes()
        return self.of_masters.for_step()

    def take_for_step_in_block(self) -> None:
        """Prepare a step inside the block, from a hook of backward, which a scale of 1 allows.

        Raises:
            AmpRuntimeError: the gradients are scaled, or still to be checked.
        """
        scaler = None if self._open is None else self._open.scaler
        if scaler is None or not scaler.is_identity or scaler.config.check is True:
            raise AmpRuntimeError(
                "optimizer.step() was called inside the amp.scale_loss block, where gradients are "
                "still scaled, or are still to be checked. Call it after the block, or take a level "
                "without loss scaling, such as O4 or O5, if each parameter is to be stepped in the "
                "backward."
            )
        self.of_masters.unscale()

    def finish_delayed(self) -> None:
        """Unscale delayed gradients, as leaving their block without `delay_unscale` does."""
        if self.delayed is not None:
            self.delayed.finish()

    def are_none(self) -> bool:
        """Whether there is no gradient for a step."""
        return not (self.of_masters.are_there() or have_grads(self.lists.unmastered))

    def of_model(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the model's parameters that have a gradient for the step, with it, scaled or not."""
        own = [(parameter, parameter.grad) for parameter in self.lists.unmastered]
        for parameter, grad in (*own, *self.of_masters.of_models()):
            if grad is not None:
                yield parameter, grad

    def end_step(self, was_skipped: bool = False) -> None:
        """Note that a step has used the masters' gradients. Idempotent.

        They stay, as in torch; after a step in a backward they are dropped. Before torch 2.10 they stay
        until the next forward, block or step, for a wrapper may read them after the step that it wraps;
        after a skipped step they are dropped at once.
        """
        self.verdicts.end_step()
        was_odd = was_skipped or self.masters.any_is_shared(self.lists.masters)
        is_dropped = self._open is not None or (was_odd and not HAS_GRAD_DTYPE)
        if is_dropped:
            self.of_masters.drop()
        self.of_masters.were_stepped = not is_dropped

    def prepare_to_write_zeros(self) -> None:
        """Put all gradients where backward puts them, for `zero_grad(set_to_none=False)`."""
        self.of_masters.unscale()
        for parameter, total in self._aside:
            if parameter.grad is None:
                parameter.grad = total

    def note_zeros(self) -> None:
        """Note that `zero_grad(set_to_none=False)` has written zeros."""
        self.verdicts.note_left(grads_of(self.lists.unmastered))
        if self._open is None:
            self.of_masters.share_zeros()
        else:
            self.of_masters.note()

    def forget(self) -> None:
        """Forget the delayed block, gradients that are set aside or deferred, and verdicts."""
        self.of_masters.forget()
        self.delayed, self._aside, self.of_others = None, [], []
        self.verdicts.clear()

    def let_go(self) -> None:
        """Forget the parameters: the optimizer leaves the session."""
        self.forget()
        self.of_masters.let_go()


class Gradients(StepGradients):
    """The gradients of one optimizer, and what blocks do with them.

    Attributes:
        were_reduced: whether delayed gradients were reduced over the ranks.
        has_found: whether the last block that was left has made gradients.
        has_ever_found: whether any block has, or there was a warning that none has.
        skips_on_device: returns whether the optimizer itself skips a step on the device.
    """

    def __init__(
        self,
        *of_optimizer: Any,
        synchronization: Synchronization,
        skips_on_device: Callable[[], bool],
    ) -> None:
        super().__init__(*of_optimizer)
        self._synchronization = synchronization
        self.skips_on_device = skips_on_device
        self.were_reduced = True
        self.has_found = self.has_ever_found = False

    def prepare_to_enter(self) -> None:
        """Take over what other code has done to gradients since the last block."""
        lists = self.look_at_groups()
        if self.of_others:
            self._warn_if_of_others()
        if self.delayed is None:
            if not HAS_GRAD_DTYPE:
                self.of_masters.look_after_step()
            self.of_masters.were_stepped = False
            self.masters.drop_stepped_grads(lists.masters)
            self.take_changes(for_block=True)
        if self.verdicts.has_cleared and self.delayed is None:
            self.verdicts.look_for_assigned(grads_of(lists.unmastered))
        is_checked = self.verdicts.of_gradients and not self._aside
        if is_checked and not have_grads((*lists.stepped, *lists.models)):
            self.verdicts.clear()  # other code has cleared the gradients that they are about

    def enter(self, block: Block) -> None:
        """Make room for the gradients of a block. Any state but OPEN becomes OPEN."""
        self.were_scaled = True
        lists, aside = self.lists, []
        if self.delayed is None and not block.scaler.is_identity:
            there = [(p, grad) for p in lists.unmastered if (grad := p.grad) is not None]
            aside = [(p, grad.clone() if grad._is_view() else grad) for p, grad in there]
        # From here on the block can be left, so an interrupt finds it open or not entered.
        self._aside, self._open = [*self._aside, *aside], block
        for parameter, _ in aside:
            parameter.grad = None
        if self.delayed is None:
            self.of_masters.hide()

    def abort(self, block: Block) -> None:
        """Leave a block that raised, if it was entered. Idempotent.

        Its gradients are dropped, and those that were set aside come back. If they were added to others
        of the same scale (delayed ones, or any at a scale of 1), the sums stay, as they do without amp.
        """
        if self._open is not block:
            return
        is_one = block.scaler.is_identity
        if self.delayed is None and not is_one:
            for parameter in self.lists.unmastered:
                parameter.grad = None
            self.drop_unreduced()
            for parameter, total in self._aside:
                parameter.grad = total
            store_grads(self.lists.models)
            self.of_masters.show()
        elif self.delayed is None and self.lists.are_plain:  # else the next block or step does so
            self.of_masters.take_changes()
        self.verdicts.note_left(grads_of(self.lists.unmastered))
        aside = self._aside if self.delayed is not None else []
        vars(self).update({"_aside": aside, "_open": None})  # by one call, which no interrupt divides

    def are_reduced(self) -> bool:
        """Whether the last backward has reduced all gradients over the ranks."""
        return self._synchronization.are_reduced(self._of_model)

    def drop_unreduced(self) -> None:
        """Drop gradients that a wrapper keeps for a later backward to reduce."""
        self._synchronization.drop_unreduced(self._of_model)

    def delay(self, block: Block) -> Change:
        """Return the change that leaves a block and its gradients: OPEN becomes DELAYED."""
        delayed = {"_open": None, "delayed": self.delayed or block, "were_reduced": self.are_reduced()}
        return functools.partial(vars(self).update, delayed)

    def collect(self, scale: ScaleSnapshot, claimed: Collection[int], are_final: bool) -> NewGradients:
        """Return the gradients that a block has made.

        Args:
            scale: the scale of the loss.
            claimed: ids of parameters whose gradients another optimizer of the block handles.
            are_final: whether they are unscaled next. Then partial gradients of DTensors are first
                summed over the ranks, as torch's optimizers would do.

        Raises:
            AmpTypeError: a gradient's dtype cannot be unscaled.
            AmpRuntimeError: the model was moved or cast.
        """
        lists = self.look_at_groups()
        if are_final and not lists.are_plain:
            place_gradients(self._of_model)
        new = NewGradients.of(lists, self.check, claimed)
        self.has_found = bool(new.grads or new.own_grads)
        self.has_ever_found |= self.has_found
        new = new._replace(will_be_deferred=self.of_masters.can_defer(new))
        if not scale.scaler.is_identity:
            new.check(self.check)
        return new

    def unscale(self, new: NewGradients, scale: ScaleSnapshot, found_inf: Tensor | None) -> None:
        """Check and unscale what `collect` returned, or defer it to the step. No host sync.

        This cannot be undone: after an error the caller drops all gradients.

        Args:
            new: what `collect` returned.
            scale: the scale of the loss.
            found_inf: float32 `[1]`, set to 1 on overflow; None checks nothing.
        """
        scaler, is_one = scale.scaler, scale.scaler.is_identity
        is_logged = found_inf is not None and not scaler.is_on_host and self.skips_on_device()
        logs = new.logs(scaler, self.lists, self.check.name) if is_logged else Logs()
        if is_one and found_inf is not None:
            new.check_finite(scale.inv_scale, found_inf, logs)
        if new.will_be_deferred:
            inv_scale = None if is_one else scale.inv_scale
            self.of_masters.defer(new, inv_scale, found_inf, logs.of_masters)
        else:
            self.of_masters.unscale()
        if is_one and not new.will_be_deferred:
            add_to_masters(new.of_masters)
        if not is_one:
            totals = dict(self._aside)
            new.unscale(totals, scale.inv_scale, found_inf, logs)
            for parameter in totals.keys() - set(new.unmastered):
                add_grad(parameter, totals[parameter])
            self._aside = []

    def settle(self, verdict: Verdict | None) -> None:
        """Leave the block, after `unscale`: OPEN or DELAYED becomes SETTLED or DEFERRED.

        `verdict` is what the check found, if there was one.
        """
        self.of_masters.settle()
        hide_gradients_from_dynamo()
        self.verdicts.add(verdict, grads_of(self.lists.unmastered))
        self._open = self.delayed = None

    def clear(self) -> None:
        """Drop all gradients, and leave a block. Idempotent."""
        store_grads((*self.lists.stepped, *self.lists.models))
        self.forget()
        self.of_masters.are_hidden = False
        self._open = None
