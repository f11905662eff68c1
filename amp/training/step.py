"""The step of one optimizer in a session: look, decide, merge, step or skip, write back.

| way              | the optimizer                       | gradients  | who writes the model |
|------------------|-------------------------------------|------------|----------------------|
| `_step_from_scaled` | declares `_step_takes_scaled_grads` | deferred   | the optimizer        |
| `_step_from_grads`  | any other, or is given a closure    | in `.grad` | the session          |

`amp.training.verdicts` decides who skips a step after an overflow. `Unattached` finds the steps of
optimizers that no session has, and that should have masters, and those that are not the session's.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from amp.active import newest_caster, open_sessions
from amp.casting.regions import ThreadState, forget_casts, same_casts
from amp.dtypes import LOW_PRECISION
from amp.errors import AmpRuntimeError, warn
from amp.kernels.interrupts import followed_by
from amp.masters.agreement import Pairs
from amp.masters.master_weights import MasterWeights
from amp.masters.shared_state import SharedState
from amp.observers import everywhere
from amp.training.deferred_gradients import Deferred
from amp.training.gradients import Gradients
from amp.training.step_inputs import StepInputs
from amp.training.verdicts import Verdict, decide, note_step
from amp.training.wrapped_optimizers import ATTACHED, innermost

_CLOSURE_TRIES = 300
"""Enough halvings to bring any loss scale to its floor."""


class OptimizerStep:
    """The step of one optimizer, called instead of the optimizer's own, which is an argument.

    Args:
        attached: the `AttachedOptimizer`.

    Attributes:
        verdicts: those about the gradients of the last step that may have been overflows.
        is_running: whether the optimizer's own step runs, or its closure.
    """

    def __init__(self, attached: Any) -> None:
        self._attached: Callable[[], Any] = weakref.ref(attached)  # weak: it refers to this
        self._optimizer = attached.optimizer
        self._gradients: Gradients = attached.gradients
        self._masters: MasterWeights = attached.masters
        self.is_running = False
        self._has_given_inputs = False
        """Whether the optimizer has inputs of this step, and not those of a torch.amp.GradScaler."""
        self._is_to_end = False
        """Whether the step was taken or skipped, and the work after it is still to be done."""
        self._unwritten: Pairs | None = None
        """The pairs whose masters a step has changed, or may have, and not yet written to the model."""
        self.verdicts: list[Verdict] = []

    @property
    def was_skipped(self) -> bool:
        """Whether the last step was skipped. The host waits if the optimizer itself decided that."""
        return any(verdict.ask() for verdict in self.verdicts)

    def __call__(self, step: Callable[..., Any], closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Call the optimizer's own step, on unscaled gradients and with masters, or skip it."""
        attached = self._attached()
        if attached.may_be_plain and self._is_plain_now(attached):
            return step(*args, **kwargs) if closure is None else step(closure, *args, **kwargs)
        if attached.owner.is_rehearsal:
            return None
        state_is_shared = isinstance(self._optimizer.state, SharedState) and not attached.is_wrapped
        if attached.has_half and not state_is_shared:
            attached.share_state()  # a script may have given the optimizer another one
        kwargs = {name: self._stepped(value) for name, value in kwargs.items()}
        for observer in (*everywhere, *attached.owner.observers):
            closure = observer.step_begins(attached, closure)
        state = ThreadState()
        return state.around(self._run_locked, state, step, closure, *args, **kwargs)

    def _is_plain_now(self, attached: Any) -> bool:
        """Whether the optimizer's own step is all there is to do."""
        if attached.misuse is not None or not attached.is_plain or newest_caster() is not None:
            return False
        if getattr(self._optimizer, "state_dtype", None) is not None:
            return False  # its random bits go by the names of parameters, which a session tells it
        self._gradients.regroup()
        return self._gradients.are_there()

    def _stepped(self, value: Any) -> Any:
        """Return the master of a parameter that a script passes to a step in the backward."""
        master = self._masters.master(value) if isinstance(value, Tensor) else None
        return value if master is None else master

    def _run_locked(
        self, state: ThreadState, step: Callable[..., Any], closure: Any, *args: Any, **kwargs: Any
    ) -> Any:
        masters, gradients = self._masters, self._gradients
        with masters.lock, nullcontext() if masters.are_whole else masters.as_split():
            before = masters.are_ahead
            try:
                masters.are_ahead = self.is_running = True
                gradients.begin_step()
                if closure is not None:
                    args = functools.partial(self._evaluate, closure, same_casts()), *args
                step = functools.partial(step, *args, **kwargs)
                return self._run(state, step, closure is not None)
            except RuntimeError as error:
                self._attached().named.add_hint(error, gradients.parameters.models)
                raise
            finally:
                masters.are_ahead, self.is_running = before, False

    def _run(self, state: ThreadState, step: Callable[[], Any], has_closure: bool) -> Any:
        gradients, attached = self._gradients, self._attached()
        misuse, before = attached.misuse, None
        self._is_to_end, self._unwritten, self.verdicts = False, None, []
        if not has_closure:  # else the gradients are still to be made
            if gradients.delayed is not None:
                gradients.finish_delayed()
            if misuse is not None or not gradients.are_there():
                attached.named.check_not_replaced()
            if misuse is not None:
                before = misuse.step_begins()
            self.verdicts = gradients.verdicts_for_step()

        takes_scaled = gradients.capabilities.takes_scaled
        if "grad_scale" in vars(self._optimizer):  # a torch.amp.GradScaler has scaled them otherwise
            takes_scaled = False
            gradients.deferral.unscale(gradients.parameters.pairs)

        def run() -> Any:
            result = None
            is_skipped, found_inf = decide(self.verdicts, gradients.capabilities)
            if is_skipped:
                # A scheduler made before `initialize` would otherwise warn that it was stepped first.
                self._optimizer._opt_called = self._is_to_end = True
            elif takes_scaled and not has_closure:
                result = state.without_casts(self._step_from_scaled, step, found_inf)
            else:
                result = state.without_casts(self._step_from_grads, step, found_inf, has_closure)
            if has_closure:
                attached.named.check_not_replaced()
                if misuse is not None:
                    misuse.closure_has_ended()
            elif misuse is not None:
                misuse.step_has_ended(before)
            forget_casts()  # casts of old weights, if a forward is under way
            if self.verdicts:
                note_step(self.verdicts, attached)
            for observer in (*everywhere, *attached.owner.observers):
                observer.step_ends(attached)
            return result

        result = followed_by(run, self._end)
        if attached.owner.fp8 is not None:
            self._end_iteration()
        self._learn()  # last: it may warn, which may be an error
        return result

    def _step_from_scaled(self, step: Callable[[], Any], found_inf: Tensor | None) -> Any:
        """Let the optimizer itself unscale, skip, merge, and write masters and the model's weights."""
        gradients, pairs = self._gradients, self._gradients.parameters.pairs

        def look_up() -> Deferred:
            deferred = gradients.deferral.for_step(pairs)
            if deferred.of is not pairs:  # the optimizer merges those alone
                Pairs([pair for pair in pairs.pairs if pair.master.grad is None]).merge()
            return deferred

        names_of, merges = self._attached().named.bare_names_of, self._masters.are_whole
        inputs = StepInputs(look_up, names_of, found_inf, merges)
        try:
            self._has_given_inputs = True
            self._optimizer.scaled_grads = inputs
            result = self._with_hooks(step, None, pairs.note_agreement)
            self._is_to_end = True
        except BaseException:
            if inputs.changes.are_made:  # a hook may raise after the step
                self._is_to_end = True
                pairs.write_changed()
            raise
        return result

    def _step_from_grads(
        self, step: Callable[[], Any], found_inf: Tensor | None, has_closure: bool
    ) -> Any:
        """Step with the gradients in `.grad`, and write masters to the model."""
        pairs, masters = self._gradients.parameters.pairs, self._masters
        optimizer, found_inf = self._optimizer, None if found_inf is None else found_inf.reshape(())
        if found_inf is not None and "grad_scale" in vars(optimizer):  # torch removes both itself
            theirs = optimizer.found_inf
            optimizer.found_inf = torch.maximum(theirs, found_inf.to(theirs.device))
        elif found_inf is not None:
            self._has_given_inputs = True
            optimizer.grad_scale, optimizer.found_inf = None, found_inf
        if not pairs.pairs:
            result = step()
        else:
            if not masters.are_whole:
                run = functools.partial(masters.run_step, self._optimizer, pairs.masters)
                step = functools.partial(run, step, has_closure)
            self._unwritten = pairs
            result = self._with_hooks(step, pairs.merge, self._write)
        self._is_to_end = True
        return result

    def _write(self) -> None:
        """Write masters to the model after a step, once: hooks may write the model from then on."""
        if (pairs := self._unwritten) is not None:
            if self._gradients.open_block is not None:
                pairs.write_changed()  # a backward that is under way still needs the others
            else:
                pairs.write_back()
            if not self._masters.are_whole:
                self._masters.split_joined()
            self._unwritten = None

    def _with_hooks(
        self, step: Callable[[], Any], merge: Callable[[], None] | None, agree: Callable[[], None]
    ) -> Any:
        """Step; take over what hooks before it change, and let those after it find what it has made.

        Args:
            step: the optimizer's own step, which calls the hooks.
            merge: lets masters take what was written to the model, after the last hook before the step.
            agree: writes masters to the model, or notes that the optimizer has, before the first hook
                after the step.
        """
        optimizer, handles, is_written = self._optimizer, [], False
        of_all = [x for x in _global_optimizer_pre_hooks.values() if x is not unattached]

        def before(*_: object) -> None:
            self._gradients.reconcile()
            if merge is not None:
                merge()

        def after(*_: object) -> None:
            nonlocal is_written
            agree()
            is_written = True

        has_hooks = hasattr(optimizer, "register_step_pre_hook")  # else torch calls none, of any kind
        if has_hooks and (getattr(optimizer, "_optimizer_step_pre_hooks", None) or of_all):
            handles.append(optimizer.register_step_pre_hook(before))
        elif merge is not None:
            merge()
        if has_hooks and (optimizer._optimizer_step_post_hooks or _global_optimizer_post_hooks):
            handles.append(optimizer.register_step_post_hook(after))
            optimizer._optimizer_step_post_hooks.move_to_end(handles[-1].id, last=False)
        try:
            result = step()
        finally:
            for handle in handles:
                handle.remove()
        if is_written:
            self._gradients.parameters.pairs.write_changed()  # of the hooks
        else:
            agree()
        return result

    def _end(self) -> None:
        """Do what follows a step that was taken or skipped, or was interrupted. Idempotent."""
        if self._unwritten is not None:
            self._write()
        if self._has_given_inputs:
            forget_inputs(self._optimizer)
            self._has_given_inputs = False
        if self._is_to_end:
            self._gradients.end_step(self.verdicts)
            self._is_to_end = False
            attached = self._attached()
            if attached.misuse is not None and attached.misuse.is_over:
                attached.misuse = None

    # With a closure.

    def _evaluate(self, closure: Callable[[], Any], as_around_the_step: Any) -> Any:
        """Evaluate the model on the present masters; after an overflow again, at the lowered scale."""
        gradients = self._gradients
        gradients.parameters.pairs.write_back()
        forget_casts()  # of the weights of the last evaluation
        with as_around_the_step():
            for _ in range(_CLOSURE_TRIES):
                loss = closure()
                gradients.finish_delayed()
                pairs = gradients.reconcile().pairs
                pairs.merge()
                gradients.deferral.unscale(pairs)
                overflowed = any(verdict.overflowed for verdict in gradients.verdicts_for_step())
                self._learn()
                gradients.verdicts.forget()
                if not overflowed:
                    return loss
                gradients.clear()
        raise AmpRuntimeError(
            f"the gradients of the closure overflowed {_CLOSURE_TRIES} times, down to the lowest "
            "loss scale: they are inf or nan without scaling too. Look at the loss and the data."
        )

    # After each step.

    def _end_iteration(self) -> None:
        """Count the step, and move the scales of `fp8="delayed"`, if no block has done so."""
        fp8 = self._attached().owner.fp8
        fp8.switch.steps += 1
        history = fp8.history
        if history is not None:
            if not history.ended_in_block:
                history.share(self._gradients.parameters.process_groups)
                history.end()
            history.ended_in_block = False

    def _learn(self) -> None:
        for scaler in {verdict.scaler: None for verdict in self._gradients.verdicts.found}:
            if scaler.recorder.states.underway:
                self._attached().owner.learn(scaler)


def forget_inputs(optimizer: Any) -> None:
    """Remove the inputs of a step from an optimizer: later steps would use them."""
    for name in ("scaled_grads", "grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)


# Steps outside of sessions.


class Unattached:
    """Finds steps that a session should take, before they change anything.

    An optimizer that steps 16-bit weights of the models, which should have masters, is warned of once:
    optimizers of a session hold the masters instead. Of a wrapper, the one inside it is looked at.

    There is one hook for all sessions. Only `forget` removes it: the garbage collector, which may run
    while torch calls its hooks, must not change them.
    """

    def __init__(self) -> None:
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()
        """The optimizers of no session that have stepped."""
        self._hook: RemovableHandle | None = None

    def watch(self) -> None:
        """Look at each optimizer's steps, also of optimizers that were looked at before."""
        self.known.clear()
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self)

    def forget(self) -> None:
        """Stop looking at steps, if no session is open."""
        if self._hook is not None and not open_sessions():
            self._hook.remove()
            self._hook = None

    def __call__(self, optimizer: Any, *_: object) -> None:
        """Look at an optimizer that is about to step.

        Raises:
            AmpRuntimeError: it is in a session, and its own step was called.
        """
        attached = getattr(optimizer, ATTACHED, None)
        if attached is not None and attached.optimizer is optimizer:
            if not (attached.step.is_running or attached.may_be_plain):
                raise AmpRuntimeError(
                    f"a step of {type(optimizer).__name__} was called that is not the one of "
                    "amp.initialize: it was taken before it, as in step = optimizer.step, or from the "
                    "class, as in type(optimizer).step(optimizer) or super().step(). It would skip no "
                    "overflow, and leave masters out. Call optimizer.step(), or take it after "
                    "amp.initialize"
                )
            return
        if torch.compiler.is_compiling() or optimizer in self.known:
            return
        self.known.add(optimizer)
        with_masters = (x for x in open_sessions() if x.properties.master_weights)
        models = (model for session in with_masters for model in session.live_models())
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        half = (p for model in models for p in model.parameters() if p.dtype in LOW_PRECISION)
        if innermost(optimizer) is optimizer and any(id(parameter) in stepped for parameter in half):
            warn(
                f"{type(optimizer).__name__} has 16-bit weights of a model of amp.initialize and no "
                "FP32 masters: small updates are lost, and its gradients are not unscaled. Pass it to "
                "amp.initialize together with the model, or now to "
                "amp.get_session().initialize([], optimizer). To step 16-bit weights, pass "
                "master_weights=False"
            )


unattached = Unattached()
