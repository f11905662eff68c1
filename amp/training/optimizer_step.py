"""`optimizer.step` in a session: checks before it, the way in which it steps, and work after it."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from amp.casting.regions import ThreadState, forget_casts
from amp.errors import warn
from amp.interrupts import followed_by
from amp.masters.whole import MasterWeights
from amp.observers import watching
from amp.training.gradients import Gradients, State
from amp.training.scaler import Verdict
from amp.training.steps import (
    ClosureStep,
    DeviceSkip,
    FusedStep,
    HostSkip,
    Stepper,
    can_skip_on_device,
    forget_inputs,
)
from amp.training.write_back import WriteBack


class OptimizerStep:
    """The step of one optimizer, called in place of the optimizer's own, which is an argument.

    Args:
        attached: the `AttachedOptimizer`.
        gradients: the optimizer's gradients.
        write_back: writes its masters to the model.
        capabilities: what the optimizer declares.

    Attributes:
        verdicts: what the checks before the last step found.
        has_stepped: whether there was a step with gradients.
    """

    def __init__(
        self,
        attached: Any,
        gradients: Gradients,
        write_back: WriteBack,
        capabilities: Capabilities,
    ) -> None:
        self._attached = weakref.ref(attached)  # weak: it refers to this
        self._optimizer = attached.optimizer
        self._gradients = gradients
        self._masters: MasterWeights = gradients.masters
        self._write_back = write_back
        self._capabilities = capabilities
        self.has_stepped = False
        self._unchanged: int | None = 0
        """How many steps have changed no master; None once one has, or it is not asked any more."""
        self._parts = self._optimizer, gradients, self._masters, write_back
        self._fused_step = FusedStep(*self._parts)
        self.verdicts: list[Verdict] = []

    @property
    def _owner(self) -> Any:
        attached: Any = self._attached()
        return attached.owner

    @property
    def was_skipped(self) -> bool:
        """Whether the last step was skipped. The host waits if the optimizer itself decided that."""
        return any(verdict.overflowed for verdict in self.verdicts)

    def __call__(self, step: Callable[..., Any], closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Call the optimizer's own step, on unscaled gradients and with masters, or skip it."""
        attached: Any = self._attached()
        if attached.owner.is_rehearsal:
            return None
        attached.share_state()  # a script may have given the optimizer another one
        kwargs = {name: self._stepped(value) for name, value in kwargs.items()}
        for observer in watching(attached.owner.observers):
            closure = observer.step_begins(attached, closure)
        return ThreadState().around(self._run_locked, step, closure, *args, **kwargs)

    def _stepped(self, value: Any) -> Any:
        """Return the master in place of a parameter, which is given to a step in the backward."""
        master = self._masters.master(value) if isinstance(value, Tensor) else None
        return value if master is None else master

    def _run_locked(self, step: Callable[..., Any], closure: Any, *args: Any, **kwargs: Any) -> Any:
        with self._masters.lock, self._write_back.in_step():
            self._gradients.look_at_groups()
            if self._gradients.state is State.OPEN:
                self._gradients.take_for_step_in_block()
            try:
                if closure is not None:
                    return self._run_with_closure(step, closure, *args, **kwargs)
                return self._run(functools.partial(step, *args, **kwargs))
            except RuntimeError as error:
                self._gradients.check.add_hint(error, self._gradients.lists.models)
                raise

    def _run_with_closure(
        self, step: Callable[..., Any], closure: Any, *args: Any, **kwargs: Any
    ) -> Any:
        way = ClosureStep(*self._parts, closure=closure, learn=self._learn)
        result = way.run(lambda evaluate: step(evaluate, *args, **kwargs))
        self._gradients.check.names()
        is_first = not (self.has_stepped or self._gradients.are_none())
        self.has_stepped |= is_first
        self.verdicts = []
        self._tell_end()
        self._gradients.end_step()
        self._end_iteration()
        if is_first:
            self._warn_if_unscaled()
        return result

    def _run(self, step: Callable[[], Any]) -> Any:
        gradients = self._gradients
        gradients.of_masters.look_after_step()
        gradients.finish_delayed()
        if not (self.has_stepped and self._capabilities.takes_scaled):  # else the step does it
            gradients.take_changes()
        if not self.has_stepped or gradients.are_none():
            self._gradients.check.names()
        are_there = self._unchanged is not None and not gradients.are_none()
        if are_there and not self.has_stepped:
            self.has_stepped = True
            self._warn_if_unscaled()
            self._warn_if_unscaled_twice()
        self.verdicts = verdicts = gradients.verdicts_for_step()
        way = self._way()
        way.has_stepped = False
        before = self._copy_to_compare() if are_there else None

        def run() -> Any:
            result = way.run(step, verdicts)
            if before is not None and not self.was_skipped:
                self._warn_if_unchanged(*before)
            forget_casts()  # casts of old weights, if a forward is under way
            self._tell_end()
            return result

        result = followed_by(run, functools.partial(self._end, way))
        self._end_iteration()
        self._learn(verdicts)  # last: it may warn, which may be an error
        return result

    def _way(self) -> Stepper:
        """Return the way in which the optimizer steps now; see `amp.training.steps`."""
        if self._capabilities.takes_scaled:
            return self._fused_step
        skips = self.verdicts and self._capabilities.skips_on_its_own()
        return (DeviceSkip if skips else HostSkip)(*self._parts)

    def _tell_end(self) -> None:
        attached: Any = self._attached()
        for observer in watching(attached.owner.observers):
            observer.step_ends(attached)

    def _end(self, way: Stepper) -> None:
        """Do what follows a step that was taken or skipped. Idempotent."""
        forget_inputs(self._optimizer)
        if way.has_stepped:
            was_skipped = any(verdict.is_known_overflow for verdict in self.verdicts)
            self._gradients.end_step(was_skipped)
            way.has_stepped = False

    def _end_iteration(self) -> None:
        """Move the scales of `fp8="delayed"`, if no block has done so."""
        history = self._owner.amax_history
        if history is not None:
            if not history.ended_in_block:
                history.share(self._gradients.lists.process_groups)
                history.end()
            history.ended_in_block = False

    def _copy_to_compare(self) -> tuple[Tensor, int, Tensor] | None:
        """Return a master with a gradient, its version, and a copy: the first steps must change it.

        A wrapper may step only each n-th time. torch's fused optimizers and dispatch modes leave no
        trace of a change; to compare values there would make the host wait.
        """
        attached: Any = self._attached()
        is_fused = any(group.get("fused") for group in self._optimizer.param_groups)
        may_not_tell = attached.is_wrapped or is_fused or _get_current_dispatch_mode()
        if may_not_tell or not (self._masters.are_whole and self._gradients.lists.masters):
            self._unchanged = None
            return None
        with_grad = (each for each in self._gradients.lists.masters if each.grad is not None)
        master = next(with_grad, None)
        return None if master is None else (master, master._version, master.detach().clone())

    def _warn_if_unchanged(self, master: Tensor, version: int, before: Tensor) -> None:
        """Warn if a step has not changed a master: the optimizer has a list of its own.

        If it has made a state for it, as ADOPT does in a first step that only begins its moments, the
        second step counts.
        """
        if master._version != version or not torch.equal(master, before):
            self._unchanged = None
            return
        self._unchanged = (self._unchanged or 0) + 1
        if self._unchanged == 1 and master in self._optimizer.state:
            return
        self._unchanged = None
        warn(
            f"{type(self._optimizer).__name__}.step() has changed nothing of an FP32 master with a "
            "gradient, so the model is not trained. An optimizer that keeps a list or a table of "
            "parameters from when it was made updates 16-bit weights that masters overwrite. Let it "
            "use group['params'] in each step, or choose a level without masters, such as 'O4'"
        )

    def _warn_if_unscaled_twice(self) -> None:
        """Warn if a GradScaler steps the optimizer, which has unscaled the gradients once more."""
        frame = sys._getframe() if self._gradients.were_scaled else None
        while frame is not None:
            scaler = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
            if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
                warn(
                    f"GradScaler.step calls {type(self._optimizer).__name__}.step, and amp.scale_loss "
                    "has scaled the loss and unscaled its gradients already. The GradScaler divides "
                    "them by its own scale, so the weights hardly move. Leave the GradScaler out: call "
                    "optimizer.step()"
                )
                return
            frame = frame.f_back

    def _learn(self, verdicts: Sequence[Verdict]) -> None:
        for scaler in {verdict.scaler: None for verdict in verdicts}:
            self._owner.learn(scaler)

    @contextmanager
    def none_of_the_training(self) -> Iterator[None]:
        """Do not warn of unscaled gradients in a step that only makes the optimizer's state."""
        before = self.has_stepped, self._unchanged
        self.has_stepped, self._unchanged = True, None
        try:
            yield
        finally:
            self.has_stepped, self._unchanged = before

    def _warn_if_unscaled(self) -> None:
        """Warn if a step uses gradients of a loss that should have been scaled, and was not."""
        owner = self._owner
        was_scaled = self._gradients.were_scaled or self._gradients.of_others
        if was_scaled or all(scaler.is_identity for scaler in owner.scalers):
            return
        warn(
            f"{type(self._optimizer).__name__}.step() was called, and its gradients came from no "
            f"amp.scale_loss block. At opt_level={owner.properties.opt_level!r} losses are to be "
            "scaled: float16 gradients below 6e-8 are 0 without it. Call scaled_loss.backward() in "
            "`with amp.scale_loss(loss, optimizer) as scaled_loss:`. If another gradient scaler scales "
            "the loss, or none is to, pass loss_scale=1.0 to amp.initialize"
        )


class Capabilities:
    """What an optimizer declares that it can do.

    Attributes:
        takes_scaled: whether it unscales gradients itself, and writes the model.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.takes_scaled = declares(optimizer, "_step_takes_scaled_grads")
        self._skips_on_device = (
            declares(optimizer, "_step_supports_amp_scaling")
            and "grad_scaler" not in inspect.signature(optimizer.step).parameters
        )

    def skips_on_its_own(self) -> bool:
        """Whether it skips its next step after an overflow by itself, without the host."""
        return self.takes_scaled or (self._skips_on_device and can_skip_on_device(self._optimizer))


def declares(optimizer: Any, capability: str) -> bool:
    """Whether the optimizer itself declares it; what a wrapper passes on does not count."""
    return inspect.getattr_static(optimizer, capability, False) is True
