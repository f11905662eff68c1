"""Where the gradients of one optimizer are, from backward to the step.

A gradient is the sum of two parts. `newest` is what the last block's backward made: it is scaled,
and lies in the `.grad` of the model's parameters, where backward put it. `total` is the sum of what
came before: it is unscaled. What an optimizer steps is a master, for a 16-bit parameter under
master weights, or the model's parameter itself ("unmastered"). At any time the gradients are in one
of four states:

| state   | newest                     | total of masters           | total of unmastered parameters |
|---------|----------------------------|----------------------------|--------------------------------|
| SETTLED | none                       | in their `.grad`           | in their `.grad`               |
| HELD    | none                       | held here, perhaps scaled  | in their `.grad`               |
| OPEN    | in `.grad` of the model    | as in SETTLED, or held     | set aside                      |
| DELAYED | in `.grad` of the model    | as in SETTLED, or held     | set aside                      |

| event                      | from          | to            | what happens                           |
|----------------------------|---------------|---------------|----------------------------------------|
| a block is entered         | SETTLED, HELD | OPEN          | unmastered parameters' total set aside |
|   at the scale of newest   | DELAYED       | OPEN          | nothing: backward adds to newest       |
|   at another scale         | DELAYED       | OPEN          | newest unscaled first, as on leaving   |
| the block is left          | OPEN          | SETTLED, HELD | newest checked, unscaled, added        |
|   with delay_unscale       | OPEN          | DELAYED       | nothing                                |
|   by an exception          | OPEN          | as before     | newest dropped                         |
| a master's `.grad` is seen | HELD, OPEN    | SETTLED, OPEN | what is held is unscaled into `.grad`  |
| the step                   | DELAYED       | SETTLED, HELD | newest unscaled first, as on leaving   |
|   then                     | SETTLED, HELD | SETTLED       | masters' gradients used, and dropped   |
|                            |               |               | before the next forward, block or step |
| zero_grad                  | any           | SETTLED, OPEN | all dropped, and what checks found     |

HELD is for an optimizer that takes scaled gradients: the first block's 16-bit gradients are held as
backward left them, and the step unscales them. The next block's are added in FP32, which is held
too. Nothing is held when the optimizer does not take it, when somebody has put gradients into the
masters, when optimizers share a master, or when a gradient is sparse or of a class of its own.

At a scale of 1 newest needs no unscaling, so unmastered parameters keep it in `.grad`, where
backward adds to the total, and nothing is set aside. What a backward outside of any block leaves in
a 16-bit parameter is unscaled, and is added to the master's gradient when a block is entered and
before a step.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp.casting.regions import ThreadState
from amp.distributed import place_gradients, shard_like
from amp.errors import AmpRuntimeError
from amp.kernels.changes import Change, Changes
from amp.kernels.tensor_lists import dense, local
from amp.lazy import kernels
from amp.masters.parameter import MasterParameter, have_grads, store_grad, store_grads, stored_grad
from amp.masters.whole import MasterWeights, check_device
from amp.training.held import Held
from amp.training.newest import Newest, Notes, look_at_newest
from amp.training.parameter_lists import KnownDtypes, ParameterLists
from amp.training.scaler import LossScaler, ScaleSnapshot, Verdict, joined
from amp.training.synchronization import Synchronization
from amp.training.unscaling import Move, plan_adding, unscale_moves, work_out_adding

if TYPE_CHECKING:
    from amp.kernels.tables import BadSteps
    from amp.training.blocks import Block


MOST_VERDICTS = 256
"""What is kept of blocks until a step, which may never come: more than these are made one."""


class State(enum.Enum):
    """Where the gradients of an optimizer are; see the table above."""

    SETTLED = enum.auto()
    HELD = enum.auto()
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
        self._held: Held | None = None
        self._can_hold = False
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
        return State.SETTLED if self._held is None or self.were_stepped else State.HELD

    def look_at_groups(self) -> ParameterLists:
        """Return what the optimizer's groups hold now."""
        lists = ParameterLists.of(self._optimizer, self.masters, self.lists)
        if lists is not self.lists:
            self.dtypes.check()
            for master in lists.masters:
                if isinstance(master, MasterParameter) and master.holder is MasterParameter.holder:
                    master.holder = self
            self._can_hold = self._takes_scaled and all(
                isinstance(master, MasterParameter) and master.holder is self
                for master in lists.masters
            )
            self.show()
            self.lists = lists
        return self.lists

    @property
    def are_whole_in_block(self) -> bool:
        """Whether what backward adds to in the open block is all that will be stepped."""
        there = self._held is not None or have_grads(self.lists.masters)
        return self._open is not None and self._open.scaler.is_identity and not there

    @property
    def open_scale(self) -> Tensor | None:
        """What the loss of the open block was scaled by, on the device; None outside of any."""
        return None if self._open is None else self._open.scale.scale

    # Around one block.

    def enter(self, block: Block) -> None:
        """Make room for the gradients of a block. Any state but OPEN becomes OPEN."""
        self.were_scaled = True
        lists = self.look_at_groups()
        every = (*lists.stepped, *lists.models) if self.verdicts else ()
        if self._held is None and not self._aside and not have_grads(every):
            self.verdicts = []  # what overflowed, if anything did, was cleared by hand
        self.drop_stepped()
        self.masters.drop_stepped_grads(lists.masters)
        if self.delayed is None:
            self.gather_strays()
        aside = []
        if self.delayed is None and not block.scaler.is_identity:
            there = [(p, grad) for p in lists.unmastered if (grad := p.grad) is not None]
            aside = [(p, grad.clone() if grad._is_view() else grad) for p, grad in there]
        # From here on the block can be left, so an interrupt finds it open or not entered.
        self._aside, self._open = [*self._aside, *aside], block
        for parameter, _ in aside:
            parameter.grad = None

    def gather_strays(self) -> None:
        """Add to masters what a backward outside of any block has left in 16-bit parameters."""
        if not self.lists.are_plain:
            place_gradients(self.lists.models)
        there = [model.grad is not None for model in self.lists.models]
        if any(there):
            self.drop_stepped()
            changes = Changes()
            _plan_gathering(self.lists.only(there), changes)
            changes.make()

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
        """Leave a block that raised, if it was entered.

        Its gradients are dropped, and those that were set aside come back.

        Gradients that it has added to others of its own scale, delayed ones or ones of a scale of 1,
        stay, as they do without amp. After an interrupt it may be called again.
        """
        if self._open is not block:
            return
        changes = Changes()
        if self.delayed is None and not block.scaler.is_identity:
            for parameter in (*self.lists.models, *self.lists.unmastered):
                parameter.grad = None
            self.drop_unreduced()
            self._plan_bringing_back(self._aside, changes)
        changes.add(functools.partial(setattr, self, "_open", None))
        changes.make()

    def are_reduced(self) -> bool:
        """Whether the last backward has reduced all gradients over the ranks."""
        return self._synchronization.are_reduced((*self.lists.models, *self.lists.unmastered))

    def drop_unreduced(self) -> None:
        """Drop gradients that a wrapper keeps to be reduced by a later backward."""
        self._synchronization.drop_unreduced((*self.lists.models, *self.lists.unmastered))

    def work_out_delay(self, block: Block) -> Change:
        """Return what leaves a block with its gradients as they are: OPEN becomes DELAYED."""
        delayed = {"_open": None, "delayed": self.delayed or block, "were_reduced": self.are_reduced()}
        return functools.partial(vars(self).update, delayed)

    def collect(self, scale: ScaleSnapshot, claimed: Collection[int], are_final: bool) -> Newest:
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
            place_gradients((*lists.models, *lists.unmastered))
        newest = look_at_newest(lists, self.dtypes, claimed)
        newest = newest._replace(will_be_held=self._can_be_held(newest))
        if not scale.scaler.is_identity:
            newest.check(self.dtypes)
        return newest

    def _can_be_held(self, newest: Newest) -> bool:
        """Whether the masters' gradients may stay as they are until the step."""
        masters = self.lists.masters
        return (
            self._can_hold
            and newest.are_dense
            and (self._held is None or not newest.grads or self._held.of is newest.of_masters)
            and not (self._are_shown and have_grads(masters))
            and not self.masters.any_is_shared(masters)
        )

    def unscale(
        self, newest: Newest, scale: ScaleSnapshot, found_inf: Tensor | None, changes: Changes
    ) -> None:
        """Unscale what `collect` returned, or let the step do so, and check it. No host sync.

        Until the changes are made, `abort` leaves the block as if it had not been entered.

        Args:
            newest: what `collect` returned.
            scale: what the loss was scaled by.
            found_inf: float32 `[1]`, set to 1 on overflow; None checks nothing.
            changes: where to plan what cannot be taken back.
        """
        is_one, inv_scale = scale.scaler.is_identity, scale.inv_scale
        moves = []
        notes = Notes() if found_inf is None else self._notes(newest, scale.scaler)
        if is_one and found_inf is not None:
            newest.check_finite(inv_scale, found_inf, notes)
        if newest.will_be_held:
            held = self._work_out_held(
                newest, None if is_one else inv_scale, found_inf, notes.of_masters
            )
            changes.add(functools.partial(self._hold, held, newest.of_masters.models))
        elif is_one:
            _plan_gathering(newest.of_masters, changes)
        else:
            self.show()
            of = newest.of_masters
            pairs = zip(of.masters, of.models, newest.grads, strict=True)
            moves = [Move(master, model, grad, master.grad) for master, model, grad in pairs]
        if not is_one:
            if newest.own_are_dense and not self._aside:
                own = newest.own_grads
                kernels.unscale.unscale(own, own, inv_scale, found_inf, bad_steps=notes.of_own)
                noted = notes.of_masters
            else:
                noted = None
                total_of = dict(self._aside)
                moves += [Move(p, p, p.grad, total_of.get(p)) for p in newest.unmastered]  # type: ignore[arg-type]
            unscale_moves(moves, inv_scale, found_inf, changes, noted)
            moved = {move.parameter for move in moves}
            self._plan_bringing_back(
                [(p, total) for p, total in self._aside if p not in moved], changes
            )

    def _notes(self, newest: Newest, scaler: LossScaler) -> Notes:
        """Return where kernels note whose gradients are bad, where the host learns of it too late."""
        if scaler.is_on_host or not self.skips_on_device():
            return Notes()
        masters = own = None
        if of := newest.of_masters.models:
            masters = scaler.bad_steps_of(of, self.dtypes.name)
        if newest.unmastered and newest.unmastered is self.lists.unmastered:
            own = scaler.bad_steps_of(newest.unmastered, self.dtypes.name)
        return Notes(masters, own)

    def _work_out_held(
        self,
        newest: Newest,
        inv_scale: Tensor | None,
        found_inf: Tensor | None,
        bad_steps: BadSteps | None,
    ) -> Held | None:
        """Check the masters' gradients, and return what is to be held: these and those held already."""
        if not newest.grads:
            return self._held
        held = Held(newest.of_masters, newest.grads, inv_scale)
        if self._held is not None:
            return self._held.plus(held, found_inf, bad_steps)
        # The norms of shards are those of one rank; the step asks the others.
        max_norm = getattr(self._optimizer, "max_grad_norm", None) if self.lists.are_plain else None
        held = held.checked(found_inf, max_norm, bad_steps)
        # DDP's gradients are views of a buffer, which any backward through it overwrites.
        return held.in_own_memory() if any(map(Tensor._is_view, held.grads)) else held

    def _hold(self, held: Held | None, models: Sequence[Tensor]) -> None:
        if held is not None:
            self._held, self._are_shown = held, False
            store_grads(models)

    def settle(self, verdict: Verdict | None) -> None:
        """Leave the block, after `unscale`: OPEN or DELAYED becomes SETTLED or HELD.

        `verdict` is what the check found, if there was one.
        """
        verdicts = self.verdicts if verdict is None else [*self.verdicts, verdict]
        if len(verdicts) > MOST_VERDICTS:
            verdicts = joined(verdicts)
        # All at once: what is settled without its verdict would be stepped on whatever was found.
        self.verdicts, self._open, self.delayed = verdicts, None, None

    def bring_back_aside(self) -> None:
        """Add what was set aside to what is there."""
        changes = Changes()
        self._plan_bringing_back(self._aside, changes)
        changes.make()

    def _plan_bringing_back(self, aside: Sequence[tuple[Tensor, Tensor]], changes: Changes) -> None:
        plan_adding([p for p, _ in aside], [total for _, total in aside], changes)
        changes.add(functools.partial(setattr, self, "_aside", []))

    # Between blocks and the step.

    def finish_delayed(self) -> None:
        """Unscale what `delay_unscale` left, as leaving its block without it would have done."""
        if self.delayed is not None:
            self.delayed.finish()

    def show(self) -> None:
        """Put what is held, unscaled, into the masters' `.grad`: somebody looks. No host sync."""
        if self._are_shown:
            return
        before = ThreadState()
        try:
            held = self._held
            grads = [] if held is None else held.copied().grads
            for master, grad in zip([] if held is None else held.of.masters, grads, strict=True):
                store_grad(master, shard_like(grad, master))
        except BaseException:  # an interrupt, say
            before.put_back(after_error=True)
            raise
        self._held, self._are_shown = None, True

    def are_none(self) -> bool:
        """Whether there is no gradient to step on."""
        return self._held is None and not have_grads(self.lists.stepped)

    @property
    def norm(self) -> Tensor | None:
        """The norm of unscaled gradients, float32 of one element, where clipping has it already."""
        norms = None if self._held is None else self._held.norms
        return None if norms is None else norms.total

    def for_step(self) -> Held:
        """Return the gradients of masters, for an optimizer that unscales them itself."""
        if self._held is not None:
            return self._held
        there = [stored_grad(master) is not None for master in self.lists.masters]
        of = self.lists.only(there)
        return Held(of, dense([master.grad for master in of.masters]), None)

    def are_bad(self) -> tuple[list[Tensor], Tensor]:
        """Return the model's parameters, and whose gradient is inf or NaN. No host sync."""
        pairs = [(p, p.grad) for p in self.lists.unmastered]
        if self._held is not None:
            pairs += zip(self._held.of.models, self._held.grads, strict=True)
        else:
            masters, models = self.lists.masters, self.lists.models
            pairs += [(p, stored_grad(m)) for m, p in zip(masters, models, strict=True)]
        there = [(p, _values(local(grad))) for p, grad in pairs if grad is not None]
        flags = [grad.isfinite().all().logical_not().to(torch.float32) for _, grad in there]
        home = flags[0].device if flags else torch.device("cpu")
        found = (
            torch.stack([flag.to(home) for flag in flags]) if flags else torch.zeros(0, device="cpu")
        )
        return [p for p, _ in there], found

    def end_step(self, was_skipped: bool = False) -> None:
        """Say that the masters' gradients were stepped on.

        They stay until the next forward, block or step: a wrapper may look at them after the step that
        it wraps, and pass over parameters that have none. After a skipped step there is nothing to see.
        """
        self.were_stepped = True
        is_in_backward = self._open is not None
        if was_skipped or is_in_backward or self.masters.any_is_shared(self.lists.masters):
            self.drop_stepped()

    def drop_stepped(self) -> None:
        """Free the masters' gradients if they were stepped on, so that nothing is added to them.

        A script that calls `model.zero_grad()` does not reach them.
        """
        if self.were_stepped:
            self._held = None
            if self._are_shown:
                self.masters.drop_grads(self.lists.masters)
                self._are_shown = not self._can_hold
            self.were_stepped = False

    def forget(self) -> None:
        """Drop what is delayed, set aside or held, and what checks found: the gradients are cleared."""
        self.delayed = None
        self._held = None
        self._aside = []
        self.verdicts = []

    def let_go(self) -> None:
        """Forget the parameters: the optimizer leaves the session."""
        self.forget()
        self.lists = ParameterLists((), self.masters)

    def clear(self) -> None:
        """Drop all gradients."""
        self.forget()
        for parameter in (*self.lists.stepped, *self.lists.models):
            parameter.grad = None


def _plan_gathering(lists: ParameterLists, changes: Changes) -> None:
    """Plan that the gradients of 16-bit parameters go to their masters, as they are, one by one."""
    for master, model in zip(lists.masters, lists.models, strict=True):
        check_device(master, model)
    for master, model in zip(lists.masters, lists.models, strict=True):
        changes.add_later(functools.partial(_work_out_gathering, master, model))
        changes.add(functools.partial(store_grad, model, None))


def _work_out_gathering(master: Tensor, model: Tensor) -> Change:
    assert model.grad is not None
    return work_out_adding(master, model.grad.to(torch.float32))


def _values(grad: Tensor) -> Tensor:
    return grad._values() if grad.is_sparse else grad
