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
(**) Or if its backward did not reduce over the ranks. At a scale of 1 there is nothing to delay.

| event                      | from           | to             | what happens                          |
|----------------------------|----------------|----------------|---------------------------------------|
| a block is entered         | SETTLED*       | OPEN           | unmastered total is set aside         |
|   at the scale of `new`    | DELAYED        | OPEN           | nothing: backward adds to `new`       |
|   at another scale         | DELAYED        | OPEN           | `new` unscaled first, as on leaving   |
| the block is left          | OPEN           | SETTLED*       | `new` checked, unscaled, added        |
|   with delay_unscale (**)  | OPEN           | DELAYED        | nothing                               |
|   by an exception          | OPEN           | as before      | `new` dropped; see `abort`            |
|   by an error in leaving   | OPEN           | SETTLED        | all dropped                           |
| the step                   | DELAYED        | SETTLED*       | `new` unscaled first, as on leaving   |
|   then                     | SETTLED*       | SETTLED        | gradients used; they stay             |
| zero_grad                  | any            | SETTLED, OPEN  | all dropped, and what checks found    |

SETTLED* is SETTLED or DEFERRED. Deferred gradients become unscaled when something first uses them, also
after the step.

DEFERRED is for an optimizer that takes scaled gradients: the first block's 16-bit gradients are kept
as backward left them, and the step unscales them. Whatever reads one before has all unscaled first; see
`amp.training.deferred_gradients`. The next block's are added to them in FP32, and the sum is kept.
`Deferral.takes` says which gradients are not deferred.

At a scale of 1 `new` needs no unscaling: if no parameter has a master, backward adds it to the total,
and nothing is set aside. A script may change, assign or remove the `.grad` of a master or of its
parameter, and run a backward outside of any block, which adds to the parameter's. The other side
follows at the next look; see `amp.masters.agreement`.
"""

from __future__ import annotations

import enum
import functools
import operator
import sys
from collections.abc import Callable, Collection, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from amp.distributed import reduce_largest
from amp.dtypes import LOW_PRECISION
from amp.errors import AmpRuntimeError, first_few
from amp.kernels import host_lists
from amp.kernels.host_lists import grads_of, have_grads, store_grads
from amp.kernels.interrupts import Change
from amp.kernels.tensor_lists import local
from amp.lazy import kernels
from amp.masters.agreement import cast_text
from amp.torch_versions import HAS_GRAD_DTYPE
from amp.training import unscaling
from amp.training.deferred_gradients import Deferral
from amp.training.hidden_gradients import begin_compiling, register_with_dynamo
from amp.training.parameters import ParameterNames, Parameters
from amp.training.scaler import ScaleSnapshot
from amp.training.synchronization import Synchronization
from amp.training.unscaling import NewGradients
from amp.training.verdicts import Capabilities, Verdict, Verdicts

if TYPE_CHECKING:
    from amp.training.blocks import Block


class State(enum.Enum):
    """Where the gradients of an optimizer are; see the table above."""

    SETTLED = enum.auto()
    DEFERRED = enum.auto()
    OPEN = enum.auto()
    DELAYED = enum.auto()


class Gradients:
    """The gradients of one optimizer.

    Args:
        optimizer: the one that steps.
        owner: the session.
        named: knows the model's parameters by name.

    Attributes:
        capabilities: what the optimizer declares.
        parameters: what the optimizer's groups held at the last look.
        deferral: the gradients of masters that wait for the step.
        verdicts: what the checks have found.
        open_block: the block that is entered and not left, or None.
        delayed: the block that left its gradients scaled, or None.
        were_reduced: whether delayed gradients were reduced over the ranks.
        were_stepped: whether a step has used the gradients, and no block was entered since.
    """

    def __init__(self, optimizer: Any, owner: Any, named: ParameterNames) -> None:
        self._optimizer, self._named = optimizer, named
        self._synchronization: Synchronization = owner.synchronization
        self.capabilities = Capabilities(optimizer)
        self.parameters = Parameters((), named)
        self.deferral = Deferral(optimizer)
        self.verdicts = Verdicts()
        self.delayed: Block | None = None
        self.were_reduced = True
        self.were_stepped = False
        self._are_hidden = False
        """Whether masters alone have their gradients, so that a backward may make new ones."""
        self._has_looked = False
        """Whether a forward has looked at the masters since the last step."""
        self.open_block: Block | None = None
        self._aside: dict[Tensor, Tensor] = {}

    @property
    def state(self) -> State:
        """Where the gradients are."""
        if self.open_block is not None:
            return State.OPEN
        if self.delayed is not None:
            return State.DELAYED
        is_deferred = self.deferral.deferred is not None and not self.were_stepped
        return State.DEFERRED if is_deferred else State.SETTLED

    # What the script has done.

    def reconcile(self, event: Literal["forward", "block", "step", "read"] = "read") -> Parameters:
        """Let both sides agree, and return what the groups hold now.

        What was written to parameters is left to `Pairs.merge`.

        Args:
            event: what is about to happen. A forward uses no gradients; before a block, masters that
                were changed after a forward are named.

        Raises:
            AmpRuntimeError: the script has made a change that the other side cannot follow; see
                `amp.masters.agreement`.
        """
        parameters = self.parameters if event == "forward" else self.regroup()
        pairs = parameters.pairs
        if not pairs.pairs:
            return parameters
        if not HAS_GRAD_DTYPE:
            self._take_grads_of_models(event)
        elif self._are_hidden and event != "forward":
            self.show()
        found = pairs.differences(HAS_GRAD_DTYPE and not self._are_hidden)
        if found:
            if event == "block" and not self._has_looked and pairs.were_written():
                self._named.forward_has_missed_masters()
            pairs.resolve(found)
        # Before torch 2.10 the look is at no gradients.
        if (found or not HAS_GRAD_DTYPE) and not self._are_hidden:
            self.deferral.unscale_if_changed(pairs)
        self._has_looked = event == "forward" or (self._has_looked and event != "step")
        return parameters

    def regroup(self) -> Parameters:
        """Return what the groups hold now; if that is new, unscale deferred gradients first.

        Raises:
            AmpRuntimeError: a 16-bit parameter stands where a master should be, or a parameter was cast
                after `initialize`.
        """
        known, optimizer, called = self.parameters, self._optimizer, self._named.called
        now = [group["params"] for group in optimizer.param_groups]
        have_dtypes = host_lists.lists.have_dtypes(known.unmastered, known.dtypes)
        if have_dtypes and host_lists.lists.are_all_same(now, known.in_groups):
            return known
        for parameter, dtype in zip(known.unmastered, known.dtypes, strict=True):
            if parameter.dtype is not dtype:
                raise AmpRuntimeError(cast_text(called, parameter, dtype))
        parameters = Parameters(now, self._named)
        half = [each for each in parameters.unmastered if each.dtype in LOW_PRECISION]
        if half and self._named.masters.are_used:
            raise AmpRuntimeError(
                f"the param_groups of this {type(optimizer).__name__} hold 16-bit parameters where "
                f"FP32 masters should be ({first_few(half, called, most=3)}): a script has put them "
                "there after amp.initialize. Leave that assignment out, and add other parameters by "
                "optimizer.add_param_group"
            )
        self.deferral.unscale(known.pairs)
        self.parameters = parameters
        return parameters

    def are_there(self) -> bool:
        """Whether the parameters of the last look have a gradient for a step."""
        stepped = self.parameters.stepped
        return not host_lists.lists.have_grads(stepped, [None] * len(stepped))

    def _take_grads_of_models(self, event: str) -> None:
        """Add gradients of 16-bit parameters to those of masters, before torch 2.10.

        A loop that sets `.grad` to None does not reach the masters, so these drop theirs after a step.

        Raises:
            AmpRuntimeError: outside of a block, and a master has a gradient already.
        """
        pairs, in_block = self.parameters.pairs, self.open_block is not None
        if self.were_stepped and not in_block and event != "read":  # a wrapper may read them
            self.were_stepped = False
            store_grads([pair.master for pair in pairs.pairs if not pair.is_shared])
            self.deferral.forget()
        if event == "forward" or in_block or self.delayed is not None or not have_grads(pairs.models):
            return
        both = zip(pairs.models, pairs.masters, strict=True)
        doubled = [x for model, x in both if model.grad is not None and x.grad is not None]
        if doubled and not self._are_hidden:
            raise AmpRuntimeError(
                f"a 16-bit parameter of shape {tuple(doubled[0].shape)} was given a gradient, or has "
                "one of a backward outside of amp.scale_loss, and its FP32 master has one already. "
                "Before torch 2.10 they cannot be one gradient. Assign it to what "
                "amp.master_params(optimizer) yields, call optimizer.zero_grad() before, or call "
                "backward in an amp.scale_loss block"
            )
        self.deferral.unscale(pairs)
        unscaling.add_to_masters(pairs)

    def hide(self) -> bool:
        """Leave the gradients to the masters alone; return whether both had them."""
        is_shown = self.state in (State.SETTLED, State.DEFERRED) and not self._are_hidden
        if not (HAS_GRAD_DTYPE and is_shown and self.parameters.masters):
            return False
        pairs = self.parameters.pairs
        pairs.follow_grads()
        self.deferral.unscale_if_changed(pairs)
        self._are_hidden = True
        host_lists.lists.clear_grads(pairs.models)
        return True

    def show(self) -> None:
        """Undo `hide`, and add what a backward has made meanwhile."""
        if self.state in (State.OPEN, State.DELAYED) or not self._are_hidden:
            return
        pairs = self.parameters.pairs
        if have_grads(pairs.models):
            self.deferral.unscale(pairs)
            unscaling.add_to_masters(pairs)
        self._show()

    def _show(self) -> None:
        pairs = self.parameters.pairs
        pairs.show(self.deferral.shown_by(pairs) if self.capabilities.takes_scaled else None)
        self._are_hidden = False  # last: while it is set, `show` may go on after an interrupt

    # A block.

    def prepare_to_enter(self) -> None:
        """Take over what the script has done since the last block."""
        parameters = self.reconcile("block")
        if self.delayed is None:
            self.were_stepped = False
        is_checked = self.verdicts.found and not self._aside
        if is_checked and not (self.are_there() or have_grads(parameters.models)):
            self.verdicts.clear()  # the script has cleared the gradients that they are about

    def enter(self, block: Block) -> None:
        """Make room for the gradients of a block. Any state but OPEN becomes OPEN."""
        if self.delayed is not None:
            self.open_block = block
            return
        aside: dict[Tensor, Tensor] = {}
        if self.parameters.masters or not block.scaler.config.is_identity:
            own = self.parameters.unmastered
            there = list(compress(own, host_lists.lists.with_grad(own)))
            grads: list[Any] = grads_of(there) if there else []
            both = zip(there, grads, strict=True)
            aside = {p: grad.clone() if grad._is_view() else grad for p, grad in both}
        # From here on the block can be left, so an interrupt finds it open or not entered.
        self._aside, self.open_block = aside, block
        host_lists.lists.clear_grads(list(aside))
        if self.parameters.masters:
            self._are_hidden = True
            host_lists.lists.clear_grads(self.parameters.models)

    def abort(self, block: Block) -> None:
        """Leave a block that raised, if it was entered. Idempotent.

        Its gradients are dropped, and those that were set aside come back. If backward has added them
        to others in place, the sums stay, as they do without amp: to delayed gradients, and at a scale
        of 1 to all gradients of an optimizer without masters.
        """
        if self.open_block is not block:
            return
        if self.delayed is not None:
            self.open_block = None
            return
        if self.parameters.masters or not block.scaler.config.is_identity:
            store_grads(self.parameters.unmastered)
            self._synchronization.drop_unreduced(self.parameters.of_model)
            store_grads(self._aside.keys(), self._aside.values())
        store_grads(self.parameters.models)
        self._show()
        vars(self).update(_aside={}, open_block=None)  # by one call, which no interrupt divides

    def are_reduced(self) -> bool:
        """Whether the last backward has reduced all gradients over the ranks."""
        is_alone = not self._synchronization.wrappers
        return is_alone or self._synchronization.are_reduced(self.parameters.of_model)

    def delay(self, block: Block) -> Change:
        """Return the change that leaves a block and its gradients: OPEN becomes DELAYED."""
        delayed = {"delayed": self.delayed or block, "were_reduced": self.are_reduced()}
        return functools.partial(vars(self).update, open_block=None, _are_hidden=True, **delayed)

    def collect(self, scale: ScaleSnapshot, claimed: Collection[int], are_final: bool) -> NewGradients:
        """Return the gradients that a block has made.

        Args:
            scale: the scale of the loss.
            claimed: ids of parameters whose gradients another optimizer of the block handles.
            are_final: whether they are unscaled next.

        Raises:
            AmpTypeError: a gradient's dtype cannot be unscaled.
            AmpRuntimeError: the model was moved or cast.
        """
        parameters = self.regroup()
        new = NewGradients.of(parameters, claimed, are_final)
        if self.capabilities.takes_scaled:
            new = new._replace(will_be_deferred=self.deferral.takes(new, parameters.pairs))
        if not scale.scaler.config.is_identity:
            new.refuse_unscalable(self._named)
        return new

    def settle(self, new: NewGradients, scale: ScaleSnapshot, found_inf: Tensor | None) -> None:
        """Check and unscale what `collect` returned, or defer it to the step. No host sync.

        This cannot be undone: after an error the caller drops all gradients.

        Args:
            new: what `collect` returned.
            scale: the scale of the loss.
            found_inf: float32 `[1]`, set to 1 on overflow; None checks nothing.
        """
        scaler, is_one = scale.scaler, scale.scaler.config.is_identity
        if found_inf is not None and not scaler.is_on_host and self.capabilities.skips_on_device():
            names = self._named.names_of
            if new.of_masters.grads:
                new = new._replace(of_masters=new.of_masters.logged(scaler, names))
            if new.own.grads and new.own.parameters is self.parameters.unmastered:
                new = new._replace(own=new.own.logged(scaler, names))
        if is_one and found_inf is not None:
            new.own.find_inf(scale.inv_scale, found_inf)
            if not new.will_be_deferred:
                new.of_masters.find_inf(scale.inv_scale, found_inf)
        if new.will_be_deferred:
            self.deferral.defer(new, None if is_one else scale.inv_scale, found_inf)
        elif self.deferral.deferred is not None:
            self.deferral.unscale(self.parameters.pairs)
        if not is_one:
            new.unscale(self._aside, scale.inv_scale, found_inf)
        elif new.of_masters.grads and not new.will_be_deferred:
            unscaling.add_to_masters(new.pairs)
        if self._aside:
            self._add_aside()

    def _add_aside(self) -> None:
        """Put back what was set aside, with the new gradients, which are unscaled. No host sync."""
        for parameter, total in self._aside.items():
            new, parameter.grad = parameter.grad, total
            if new is not None:
                unscaling.add_grad(parameter, new)
        self._aside = {}

    def leave(self, verdict: Verdict | None, is_alone: bool) -> None:
        """Leave the block, after `settle`: OPEN or DELAYED becomes SETTLED or DEFERRED.

        Args:
            verdict: what the check found, if there was one.
            is_alone: whether the block is of no other optimizer.
        """
        if self._are_hidden:
            self._show()
            dynamo = sys.modules.get("torch._dynamo.callback")
            if dynamo is not None and begin_compiling not in dynamo.callback_handler.start_callbacks:
                register_with_dynamo(dynamo)  # again: `torch._dynamo.reset` forgets it
        self.open_block = self.delayed = None
        if verdict is not None:
            is_in_doubt = not (is_alone or verdict.is_final) and verdict.overflowed_if_known
            if is_in_doubt and not self._check_again(verdict).item():
                verdict = Verdict(verdict.scaler, verdict.found_inf, verdict.step, is_final=True)
            self.verdicts.add(verdict)

    # The step.

    def finish_delayed(self) -> None:
        """Unscale delayed gradients, as leaving their block without `delay_unscale` does."""
        if self.delayed is not None:
            self.delayed.finish()

    def verdicts_for_step(self) -> list[Verdict]:
        """Return the verdicts about the gradients for a step.

        A verdict is about the gradients that a check has seen. If the host knows of an overflow that is
        surely one of them, or if gradients were cleared or left since then, the present gradients are
        checked again: a script may have repaired them, or assigned earlier ones. The host waits for
        what `decide` would, and after an overflow once more.
        """
        found = list(self.verdicts.found)  # which later blocks change
        in_doubt = [each for each in found if each.overflowed_if_known is not False]
        if not in_doubt:
            return found
        if not self.verdicts.may_be_of_others:
            is_on_device = self.capabilities.may_skip and self.capabilities.skips_on_device()
            ask = operator.attrgetter("overflowed_if_known" if is_on_device else "overflowed")
            bad = filter(ask, in_doubt)
            if (first := next(bad, None)) is None or first.is_final:
                return found
        is_bad = self._check_again(in_doubt[0])
        return [each.still(is_bad) for each in found]

    def _check_again(self, verdict: Verdict) -> Tensor:
        """Return whether a gradient for a step is inf or NaN on any rank, float32 `[1]`. No host sync.

        Ranks ask together: they know of the same overflows, and clear gradients at the same time.
        Those of a `process_group` may have other optimizers, and ask only after gradients were cleared
        or left.
        """
        own, deferred = self.parameters.unmastered, self.deferral.kept
        grads = grads_of(own if deferred is not None else self.parameters.stepped)
        values = unscaling.without_complex([local(grad) for grad in grads if grad is not None])
        one, is_bad = torch.ones_like(verdict.found_inf), torch.zeros_like(verdict.found_inf)
        if values:
            kernels.unscale.check(values, one, is_bad)
        if deferred is not None:  # its products may overflow too, at a scale below 1
            factor = one if deferred.inv_scale is None else deferred.inv_scale
            kernels.unscale.check(list(deferred.grads), factor, is_bad)
        if process_groups := verdict.scaler.process_groups_with(self.parameters.process_groups):
            reduce_largest([is_bad], process_groups)
        return is_bad

    def begin_step(self) -> None:
        """Take over what the script has done, and the gradients of a backward that is under way.

        A step may be in a hook of backward, inside of the block, at a scale of 1.

        Raises:
            AmpRuntimeError: gradients are scaled, or still to be checked.
        """
        self.reconcile("step")
        if self.open_block is None:
            return
        config = self.open_block.scaler.config
        if not config.is_identity or config.check is True:
            raise AmpRuntimeError(
                "optimizer.step() was called inside the amp.scale_loss block, where gradients are "
                "still scaled, or are still to be checked. Call it after the block, or take a level "
                "without loss scaling, such as O4 or O5, if each parameter is to be stepped in the "
                "backward."
            )
        self.deferral.unscale(self.parameters.pairs)
        unscaling.add_to_masters(self.parameters.pairs)
        self._add_aside()

    def prepare_to_part(self) -> None:
        """Leave all gradients unscaled in the `.grad` of both sides, before they part."""
        self.finish_delayed()
        self.show()
        pairs = self.parameters.pairs
        if HAS_GRAD_DTYPE:
            pairs.follow_grads()
        pairs.follow_requires_grad()
        self.deferral.unscale(pairs)

    def grads_for_step(self) -> list[tuple[Tensor, Tensor]]:
        """Return the model's parameters that have a gradient for the step, with it, scaled or not."""
        kept, own = self.deferral.kept, self.parameters.unmastered
        pairs = self.parameters.pairs if kept is None else kept.of
        grads = grads_of(pairs.masters) if kept is None else kept.grads
        both = zip((*pairs.models, *own), (*grads, *grads_of(own)), strict=True)
        return [(each, grad) for each, grad in both if grad is not None]

    def end_step(self, verdicts: Sequence[Verdict]) -> None:
        """Note that a step has used the masters' gradients. Idempotent.

        They stay, as in torch; after a step in a backward they are dropped. Before torch 2.10 they stay
        until the next forward, block or step, for a wrapper may read them after the step that it wraps;
        after a skipped step they are dropped at once.

        Args:
            verdicts: those that the step went by.
        """
        self.verdicts.end_step(verdicts)
        is_dropped = self.open_block is not None
        if not HAS_GRAD_DTYPE:
            is_dropped |= any(verdict.overflowed_if_known for verdict in verdicts)
        if is_dropped:
            pairs = self.parameters.pairs
            store_grads(pairs.masters)
            pairs.forget_grads()
            self.deferral.forget()
        self.were_stepped = not is_dropped

    # Dropping.

    def zero_grad(self, write_zeros: Callable[[], Any] | None) -> Any:
        """Drop all gradients, and all that blocks have left for the step.

        Args:
            write_zeros: writes zeros to all gradients, whose result is returned; None removes those of
                parameters and masters.
        """
        self.regroup()
        if write_zeros is None:
            return self._drop()
        pairs = self.parameters.pairs
        self.deferral.unscale(pairs)
        for parameter, total in self._aside.items():
            if parameter.grad is None:
                parameter.grad = total
        for grad in grads_of(pairs.models):
            if grad is not None:
                grad.zero_()
        self._drop(is_to_none=False)
        result = write_zeros()
        if self.open_block is not None:
            host_lists.lists.write_slot(pairs.pairs, "grad", grads_of(pairs.masters))
            return result
        for pair in pairs.pairs:
            if pair.master.grad is None and (grad := pair.parameter.grad) is not None:
                pair.master.grad = grad.float()
        self._show()
        return result

    def clear_hidden(self, module: nn.Module, is_to_none: bool) -> None:
        """Remove or zero the gradients that a module's parameters do not show, as in a block.

        Args:
            module: the model or a part of it, whose own gradients are cleared.
            is_to_none: whether gradients are removed, or get zeros.
        """
        pairs, aside = self.parameters.pairs, self._aside
        if not (aside or self._are_hidden or not HAS_GRAD_DTYPE):
            return
        parameters = set(map(id, module.parameters()))
        masters = [pair.master for pair in pairs.pairs if id(pair.parameter) in parameters]
        if masters:
            self.deferral.unscale(pairs)
        own = [parameter for parameter in aside if id(parameter) in parameters]
        if is_to_none:
            store_grads(masters)
            for parameter in own:
                del aside[parameter]
        else:
            for grad in (*grads_of(masters), *map(aside.get, own)):
                if grad is not None:
                    grad.zero_()
        self.verdicts.may_be_of_others |= bool(self.verdicts.found)

    def _drop(self, is_to_none: bool = True) -> None:
        pairs = self.parameters.pairs
        if pairs.pairs:
            if is_to_none:
                host_lists.lists.clear_grads(pairs.masters)
                host_lists.lists.clear_grads(pairs.models)
            pairs.forget_grads()
        self.were_stepped = False
        if self.capabilities.takes_scaled:
            self.deferral.forget()
        self.delayed, self._aside = None, {}
        if self.verdicts.found:
            self.verdicts.clear()
        if self._synchronization.wrappers:
            self._synchronization.drop_unreduced(self.parameters.of_model)

    def clear(self) -> None:
        """Drop all gradients, and leave a block. Idempotent."""
        store_grads(self.parameters.unmastered)
        self._drop()
        self._are_hidden = False
        self.open_block = None

    def let_go(self) -> None:
        """Forget the parameters: the optimizer leaves the session."""
        self.parameters.pairs.forget_grads()
        self.deferral = Deferral(self._optimizer)
        self.parameters = Parameters((), self._named)
