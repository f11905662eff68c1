"""Where the gradients of one optimizer are, from backward to the step.

A gradient is the sum of two parts. `new` is what the last block's backward made: it is scaled,
and lies in the `.grad` of the model's parameters, where backward put it. `total` is the sum of what
came before: it is unscaled. What an optimizer steps is a master, for a 16-bit parameter under
master weights, or the model's parameter itself ("unmastered"). At any time the gradients are in one
of four states:

| state    | new                        | total of masters          | total of unmastered parameters |
|----------|----------------------------|---------------------------|--------------------------------|
| SETTLED  | none                       | in their `.grad`          | in their `.grad`               |
| DEFERRED | none                       | kept here, perhaps scaled | in their `.grad`               |
| OPEN     | in `.grad` of the model    | as in one of those above  | set aside                      |
| DELAYED  | in `.grad` of the model    | as in one of those above  | set aside                      |

| event                      | from           | to             | what happens                          |
|----------------------------|----------------|----------------|---------------------------------------|
| a block is entered         | SETTLED*       | OPEN           | unmastered parameters' total is aside |
|   at the scale of `new`    | DELAYED        | OPEN           | nothing: backward adds to `new`       |
|   at another scale         | DELAYED        | OPEN           | `new` unscaled first, as on leaving   |
| the block is left          | OPEN           | SETTLED*       | `new` checked, unscaled, added        |
|   with delay_unscale       | OPEN           | DELAYED        | nothing                               |
|   by an exception          | OPEN           | as before      | `new` dropped                         |
|   by one in leaving        | OPEN           | SETTLED        | all dropped                           |
| a master's `.grad` is seen | DEFERRED, OPEN | SETTLED, OPEN  | deferred ones unscaled into `.grad`   |
| the step                   | DELAYED        | SETTLED*       | `new` unscaled first, as on leaving   |
|   then                     | SETTLED*       | SETTLED        | masters' gradients used, and dropped  |
|                            |                |                | by the next forward, block or step    |
| zero_grad                  | any            | SETTLED, OPEN  | all dropped, and what checks found    |

SETTLED* is SETTLED or DEFERRED.

DEFERRED is for an optimizer that takes scaled gradients: the first block's 16-bit gradients are kept
as backward left them, and the step unscales them. The next block's are added in FP32, which is kept
too. Nothing is deferred when the optimizer does not take it, when somebody has put gradients into the
masters, when optimizers share a master, or when a gradient is sparse or of a class of its own.

At a scale of 1 `new` needs no unscaling, so unmastered parameters keep it in `.grad`, where
backward adds to the total, and nothing is set aside. What a backward outside of any block leaves in
a 16-bit parameter is unscaled, and is added to the master's gradient when a block is entered and
before a step.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from amp.casting.regions import ThreadState
from amp.distributed import place_gradients, shard_like
from amp.errors import AmpRuntimeError
from amp.kernels.changes import Change
from amp.kernels.tensor_lists import dense
from amp.masters.parameter import MasterParameter, have_grads, store_grad, store_grads, stored_grad
from amp.masters.whole import MasterWeights
from amp.training.deferred import Deferred
from amp.training.new_gradients import Logs, NewGradients
from amp.training.parameter_lists import KnownDtypes, ParameterLists
from amp.training.scaler import ScaleSnapshot, Verdict, joined
from amp.training.synchronization import Synchronization
from amp.training.unscaling import add_grad, add_to_masters

if TYPE_CHECKING:
    from amp.kernels.tables import BadSteps
    from amp.training.blocks import Block


MOST_VERDICTS = 256
"""What is kept of blocks until a step, which may never come: more than these are made one."""


class State(enum.Enum):
    """Where the gradients of an optimizer are; see the table above."""

    SETTLED = enum.auto()
    DEFERRED = enum.auto()
    OPEN = enum.auto()
    DELAYED = enum.auto()


class Gradients:
    """The gradients of one optimizer.

    Attributes:
        masters: of the session.
        dtypes: of the model's parameters, as they were.
        lists: what the groups held when that was last looked at.
        verdicts: what the checks found since the last step.
        delayed: the block that left its gradients scaled, if one did.
        were_reduced: whether these were reduced over the ranks.
        were_stepped: whether the masters' gradients are those of the last step, still to be dropped.
        were_scaled: whether a block was ever entered for this optimizer.
        skips_on_device: tells whether the optimizer skips a step without a word from the host.
    """

    def __init__(
        self,
        optimizer: Any,
        masters: MasterWeights,
        dtypes: KnownDtypes,
        takes_scaled: bool,
        synchronization: Synchronization,
        skips_on_device: Callable[[], bool],
    ) -> None:
        self._optimizer = optimizer
        self._synchronization = synchronization
        self.skips_on_device = skips_on_device
        self.masters = masters
        self.dtypes = dtypes
        self._takes_scaled = takes_scaled
        self.lists = ParameterLists((), masters)
        self.verdicts: list[Verdict] = []
        self.delayed: Block | None = None
        self.were_reduced = True
        self.were_scaled = False
        self._open: Block | None = None
        self._aside: list[tuple[Tensor, Tensor]] = []
        self._deferred: Deferred | None = None
        self._can_defer = False
        self._are_shown = True
        """Whether the masters' gradients are in their `.grad`, as in SETTLED."""
        self.were_stepped = False

    @property
    def state(self) -> State:
        """Where the gradients are."""
        if self._open is not None:
            return State.OPEN
        if self.delayed is not None:
            return State.DELAYED
        return State.SETTLED if self._deferred is None or self.were_stepped else State.DEFERRED

    def look_at_groups(self) -> ParameterLists:
        """Return what the optimizer's groups hold now."""
        lists = ParameterLists.of(self._optimizer, self.masters, self.lists)
        if lists is not self.lists:
            self.dtypes.check()
            for master in lists.masters:
                if isinstance(master, MasterParameter) and master.holder is MasterParameter.holder:
                    master.holder = self
            self._can_defer = self._takes_scaled and all(
                isinstance(master, MasterParameter) and master.holder is self
                for master in lists.masters
            )
            self.show()
            self.lists = lists
        return self.lists

    @property
    def are_whole_in_block(self) -> bool:
        """Whether what backward adds to in the open block is all that will be stepped."""
        there = self._deferred is not None or have_grads(self.lists.masters)
        return self._open is not None and self._open.scaler.is_identity and not there

    @property
    def open_scale(self) -> Tensor | None:
        """What the loss of the open block was scaled by, on the device; None outside of any."""
        return None if self._open is None else self._open.scale.scale

    @property
    def _of_model(self) -> tuple[Tensor, ...]:
        """The parameters of the model that the optimizer trains."""
        return (*self.lists.models, *self.lists.unmastered)

    # Around one block.

    def enter(self, block: Block) -> None:
        """Make room for the gradients of a block. Any state but OPEN becomes OPEN."""
        self.were_scaled = True
        lists = self.look_at_groups()
        every = (*lists.stepped, *lists.models) if self.verdicts else ()
        if self._deferred is None and not self._aside and not have_grads(every):
            self.verdicts = []  # what overflowed, if anything did, was cleared by hand
        self.drop_stepped()
        self.masters.drop_stepped_grads(lists.masters)
        if self.delayed is None:
            self.move_to_masters()
        aside = []
        if self.delayed is None and not block.scaler.is_identity:
            there = [(p, grad) for p in lists.unmastered if (grad := p.grad) is not None]
            aside = [(p, grad.clone() if grad._is_view() else grad) for p, grad in there]
        # From here on the block can be left, so an interrupt finds it open or not entered.
        self._aside, self._open = [*self._aside, *aside], block
        for parameter, _ in aside:
            parameter.grad = None

    def move_to_masters(self) -> None:
        """Add to masters what a backward outside of any block has left in 16-bit parameters."""
        if not self.lists.are_plain:
            place_gradients(self.lists.models)
        there = [model.grad is not None for model in self.lists.models]
        if any(there):
            self.drop_stepped()
            add_to_masters(self.lists.only(there))

    def take_for_step_in_block(self) -> None:
        """Prepare a step inside the block, from a hook of backward: at a scale of 1 that is right.

        Raises:
            AmpRuntimeError: the gradients are scaled.
        """
        scaler = None if self._open is None else self._open.scaler
        if scaler is None or not scaler.is_identity or scaler.config.check is True:
            raise AmpRuntimeError(
                "optimizer.step() was called inside the amp.scale_loss block, where gradients are "
                "still scaled, or are still to be checked. Call it after the block, or take a level "
                "without loss scaling, such as O4 or O5, if each parameter is to be stepped in the "
                "backward."
            )
        self.show()

    def abort(self, block: Block) -> None:
        """Leave a block that raised, if it was entered. It may be called again.

        Its gradients are dropped, and those that were set aside come back. Gradients that it has added
        to others of its own scale, delayed ones or ones of a scale of 1, stay, as they do without amp.
        """
        if self._open is not block:
            return
        if self.delayed is None and not block.scaler.is_identity:
            for parameter in self._of_model:
                parameter.grad = None
            self.drop_unreduced()
            for parameter, total in self._aside:
                parameter.grad = total
            vars(self).update({"_aside": [], "_open": None})  # by one call, which no interrupt divides
        self._open = None

    def are_reduced(self) -> bool:
        """Whether the last backward has reduced all gradients over the ranks."""
        return self._synchronization.are_reduced(self._of_model)

    def drop_unreduced(self) -> None:
        """Drop gradients that a wrapper keeps to be reduced by a later backward."""
        self._synchronization.drop_unreduced(self._of_model)

    def delay(self, block: Block) -> Change:
        """Return what leaves a block with its gradients as they are: OPEN becomes DELAYED."""
        delayed = {"_open": None, "delayed": self.delayed or block, "were_reduced": self.are_reduced()}
        return functools.partial(vars(self).update, delayed)

    def collect(self, scale: ScaleSnapshot, claimed: Collection[int], are_final: bool) -> NewGradients:
        """Look at the gradients that a block has made, once, and change nothing.

        Args:
            scale: what the loss was scaled by.
            claimed: ids of parameters whose gradients another optimizer of the block sees to.
            are_final: whether they are unscaled next. Then what backward has left of DTensors to be
                summed over ranks is summed, as torch's optimizers would do it.

        Raises:
            AmpTypeError: a gradient's dtype cannot be unscaled.
            AmpRuntimeError: the model was moved or cast.
        """
        lists = self.look_at_groups()
        if are_final and not lists.are_plain:
            place_gradients(self._of_model)
        new = NewGradients.of(lists, self.dtypes, claimed)
        new = new._replace(will_be_deferred=self._can_be_deferred(new))
        if not scale.scaler.is_identity:
            new.check(self.dtypes)
        return new

    def _can_be_deferred(self, new: NewGradients) -> bool:
        """Whether the masters' gradients may stay as they are until the step."""
        masters = self.lists.masters
        return (
            self._can_defer
            and new.are_dense
            and (self._deferred is None or not new.grads or self._deferred.of is new.of_masters)
            and not (self._are_shown and have_grads(masters))
            and not self.masters.any_is_shared(masters)
        )

    def unscale(self, new: NewGradients, scale: ScaleSnapshot, found_inf: Tensor | None) -> None:
        """Unscale what `collect` returned, or let the step do so, and check it. No host sync.

        What it was called for cannot be taken back: after an error all gradients are to be dropped.

        Args:
            new: what `collect` returned.
            scale: what the loss was scaled by.
            found_inf: float32 `[1]`, set to 1 on overflow; None checks nothing.
        """
        scaler, is_one = scale.scaler, scale.scaler.is_identity
        is_logged = found_inf is not None and not scaler.is_on_host and self.skips_on_device()
        logs = new.logs(scaler, self.lists, self.dtypes.name) if is_logged else Logs()
        if is_one and found_inf is not None:
            new.check_finite(scale.inv_scale, found_inf, logs)
        if new.will_be_deferred:
            self._defer(new, None if is_one else scale.inv_scale, found_inf, logs.of_masters)
        elif is_one:
            add_to_masters(new.of_masters)
        else:
            self.show()
        if not is_one:
            totals = dict(self._aside)
            new.unscale(totals, scale.inv_scale, found_inf, logs)
            for parameter in totals.keys() - set(new.unmastered):
                add_grad(parameter, totals[parameter])
            self._aside = []

    def _defer(
        self,
        new: NewGradients,
        inv_scale: Tensor | None,
        found_inf: Tensor | None,
        bad_steps: BadSteps | None,
    ) -> None:
        """Check the masters' gradients, and keep them for the step, with those of earlier blocks."""
        if not new.grads:
            return
        deferred = Deferred(new.of_masters, new.grads, inv_scale)
        if self._deferred is not None:
            deferred = self._deferred.plus(deferred, found_inf, bad_steps)
        else:
            # The norms of shards are those of one rank; the step asks the others.
            max_norm = getattr(self._optimizer, "max_grad_norm", None) if self.lists.are_plain else None
            deferred = deferred.checked(found_inf, max_norm, bad_steps)
            # DDP's gradients are views of a buffer, which any backward through it overwrites.
            if any(map(Tensor._is_view, deferred.grads)):
                deferred = deferred.in_own_memory()
        self._deferred, self._are_shown = deferred, False
        store_grads(new.of_masters.models)

    def settle(self, verdict: Verdict | None) -> None:
        """Leave the block, after `unscale`: OPEN or DELAYED becomes SETTLED or DEFERRED.

        `verdict` is what the check found, if there was one.
        """
        verdicts = self.verdicts if verdict is None else [*self.verdicts, verdict]
        self.verdicts = joined(verdicts) if len(verdicts) > MOST_VERDICTS else verdicts
        self._open = self.delayed = None

    # Between blocks and the step.

    def finish_delayed(self) -> None:
        """Unscale what `delay_unscale` left, as leaving its block without it would have done."""
        if self.delayed is not None:
            self.delayed.finish()

    def show(self) -> None:
        """Put deferred gradients, unscaled, into the masters' `.grad`: somebody looks. No host sync."""
        if not self._are_shown:
            ThreadState().around(self._show)

    def _show(self) -> None:
        deferred = self._deferred
        grads = [] if deferred is None else deferred.copied().grads
        for master, grad in zip([] if deferred is None else deferred.of.masters, grads, strict=True):
            store_grad(master, shard_like(grad, master))
        self._deferred, self._are_shown = None, True

    def are_none(self) -> bool:
        """Whether there is no gradient to step on."""
        return self._deferred is None and not have_grads(self.lists.stepped)

    @property
    def norm(self) -> Tensor | None:
        """The norm of unscaled gradients, float32 of one element, where clipping has it already."""
        norms = None if self._deferred is None else self._deferred.norms
        return None if norms is None else norms.total

    def for_step(self) -> Deferred:
        """Return the gradients of masters, for an optimizer that unscales them itself."""
        if self._deferred is not None:
            return self._deferred
        there = [stored_grad(master) is not None for master in self.lists.masters]
        of = self.lists.only(there)
        return Deferred(of, dense([master.grad for master in of.masters]), None)

    def of_model(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the model's parameters that have a gradient to be stepped on, and that, as it is."""
        lists, deferred = self.lists, self._deferred
        pairs = [(p, p.grad) for p in lists.unmastered]
        if deferred is not None:
            pairs += zip(deferred.of.models, deferred.grads, strict=True)
        else:
            pairs += zip(lists.models, map(stored_grad, lists.masters), strict=True)
        return ((p, grad) for p, grad in pairs if grad is not None)

    def end_step(self, was_skipped: bool = False) -> None:
        """Say that the masters' gradients were stepped on. It may be called again.

        They stay until the next forward, block or step: a wrapper may look at them after the step that
        it wraps, and pass over parameters that have none. After a skipped step there is nothing to see.
        """
        vars(self).update(were_stepped=True, verdicts=[])
        is_in_backward = self._open is not None
        if was_skipped or is_in_backward or self.masters.any_is_shared(self.lists.masters):
            self.drop_stepped()

    def drop_stepped(self) -> None:
        """Free the masters' gradients if they were stepped on, so that nothing is added to them.

        A script that calls `model.zero_grad()` does not reach them.
        """
        if self.were_stepped:
            self._deferred = None
            if self._are_shown:
                self.masters.drop_grads(self.lists.masters)
                self._are_shown = not self._can_defer
            self.were_stepped = False

    def prepare_to_write_zeros(self) -> None:
        """Put all gradients where backward puts them, for `zero_grad(set_to_none=False)`."""
        self.show()
        for parameter, total in self._aside:
            if parameter.grad is None:
                parameter.grad = total

    def forget(self) -> None:
        """Drop what is delayed, set aside or deferred, and what checks found."""
        self.delayed = None
        self._deferred = None
        self._aside = []
        self.verdicts = []

    def let_go(self) -> None:
        """Forget the parameters: the optimizer leaves the session."""
        self.forget()
        self.lists = ParameterLists((), self.masters)

    def clear(self) -> None:
        """Drop all gradients. It may be called again."""
        self.forget()
        for parameter in (*self.lists.stepped, *self.lists.models):
            parameter.grad = None

    def drop_block(self) -> None:
        """Drop all gradients, and leave the block whose leaving failed. It may be called again."""
        self.clear()
        self._open = None
