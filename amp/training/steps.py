"""The ways in which an optimizer steps, chosen by what it declares.

| way         | the optimizer                                     | an overflow                     |
|-------------|---------------------------------------------------|---------------------------------|
| ClosureStep | is given a closure                                | the closure is evaluated again  |
| FusedStep   | declares `_step_takes_scaled_grads`               | the optimizer skips, on device  |
| DeviceSkip  | declares `_step_supports_amp_scaling`, as torch's | the optimizer skips, on device  |
|             | fused ones do                                     |                                 |
| HostSkip    | any other                                         | the host reads it and skips     |

Each uses gradients that are unscaled, or deferred (`amp.training.gradients`), and writes the masters to
the model.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from amp.casting.regions import disable_casts, forget_casts, same_casts
from amp.errors import AmpRuntimeError
from amp.interrupts import followed_by
from amp.masters.whole import MasterWeights
from amp.training.deferred import Deferred
from amp.training.gradients import Gradients, State
from amp.training.parameter_lists import ParameterLists
from amp.training.scaler import Verdict
from amp.training.step_inputs import StepInputs
from amp.training.unattached import unattached
from amp.training.write_back import WriteBack

_CLOSURE_TRIES = 300
"""Enough halvings to bring any loss scale to its floor."""


class Stepper:
    """The base of all ways.

    Attributes:
        has_stepped: whether the step was taken or skipped, and the work after it is still to be done.
    """

    def __init__(
        self, optimizer: Any, gradients: Gradients, masters: MasterWeights, write_back: WriteBack
    ) -> None:
        self.optimizer = optimizer
        self.gradients = gradients
        self.masters = masters
        self.write_back = write_back
        self.has_stepped = False

    def run(self, step: Callable[[], Any], verdicts: Sequence[Verdict]) -> Any:
        """Call the optimizer's own step, or skip it if `verdicts` has an overflow."""
        raise NotImplementedError

    def follow_models(self) -> None:
        """Update masters from values that were written to the model."""
        lists = self.gradients.lists
        self.masters.follow_requires_grad(lists.masters, lists.models)
        self.masters.follow_all(lists.masters, lists.models)

    @contextmanager
    def around_hooks(self, write: Callable[[], None]) -> Iterator[None]:
        """Take over what hooks before the step change, and let those after it find what it has made.

        Args:
            write: writes masters to the model, before the first hook after the step.
        """
        optimizer, handles = self.optimizer, []
        of_all = [x for x in _global_optimizer_pre_hooks.values() if x is not unattached]
        if getattr(optimizer, "_optimizer_step_pre_hooks", None) or of_all:
            handles.append(optimizer.register_step_pre_hook(lambda *_: self._take_changes()))
        if _has_post_hooks(optimizer):
            handles.append(optimizer.register_step_post_hook(lambda *_: write()))
            optimizer._optimizer_step_post_hooks.move_to_end(handles[-1].id, last=False)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _take_changes(self) -> None:
        self.gradients.take_changes()
        self.follow_models()

    def run_unscaled(self, step: Callable[[], Any]) -> Any:
        """Step with the gradients in `.grad`, and write masters to the model."""
        write_back, writes_all = self.write_back, self.gradients.state is not State.OPEN

        def write() -> None:
            nonlocal writes_all
            if writes_all:
                write_back.after_step()
            else:
                write_back.if_changed_in_step()
            self.masters.narrow()
            write_back.note()
            writes_all = False  # hooks may write the model from now on

        def run_step() -> Any:
            with disable_casts(), self.around_hooks(write):
                masters = self.gradients.lists.masters
                result = self.masters.run_step(self.optimizer, masters, step)
            self.has_stepped = True
            return result

        return followed_by(run_step, write)


def _has_post_hooks(optimizer: Any) -> bool:
    own = getattr(optimizer, "_optimizer_step_post_hooks", None)
    return bool(own or _global_optimizer_post_hooks)


class FusedStep(Stepper):
    """The optimizer unscales, skips, and writes masters and the model's weights itself."""

    _latest: ParameterLists | None = None
    """The masters that had gradients in the last step."""
    _traces: tuple[Sequence[int], Sequence[int], int] = (), (), 0
    """The versions and addresses of their parameters after that step, when each equalled its rounded
    master, and how often the masters had been suspected."""

    def run(self, step: Callable[[], Any], verdicts: Sequence[Verdict]) -> Any:
        """Give the optimizer the deferred gradients, and step."""
        self.gradients.check.dtypes()
        versions: list[int] = []

        def look_up() -> Deferred:
            deferred = self.gradients.for_step().now()
            of = deferred.of
            versions[:] = [model._version for model in of.models]
            traces = versions, of.model_list.addresses, self.masters.traces.suspicions
            if of is not self.gradients.lists or of is not self._latest or traces != self._traces:
                self.follow_models()
            self._latest = of
            return deferred

        found_inf = found_inf_of(verdicts)
        inputs = StepInputs(look_up, self.masters.low_halves, found_inf, self._names_of)
        has_returned = False
        try:
            self.optimizer.scaled_grads = inputs
            with disable_casts(), self.around_hooks(self.write_back.note):
                result = step()
            has_returned = True
        finally:
            if has_returned or inputs.changes.are_made:  # a hook may raise after the step
                self.has_stepped = True
                self._agree(inputs, versions)
        if _has_post_hooks(self.optimizer):
            self.write_back.if_changed_in_step()
        return result

    def _names_of(self, stepped: Sequence[Tensor]) -> list[str | None]:
        models = [model if (model := self.masters.model(p)) is not None else p for p in stepped]
        return self.gradients.check.names_of(models)

    def _agree(self, inputs: StepInputs, versions: Sequence[int]) -> None:
        """Note that the optimizer has written the masters to the model."""
        lists, of = self.gradients.lists, inputs.deferred.of
        if of is self._latest and of.are_plain and inputs.changes.are_made:
            now = [version + 1 for version in versions]
        else:
            self._latest = of
            now = [model._version for model in of.models]
        addresses = of.model_list.addresses
        self._traces = now, addresses, self.masters.traces.suspicions
        self.masters.traces.agree(of.master_ids, now, addresses)
        if of is not lists:
            self.write_back.after_step(without=set(of.masters))


class DeviceSkip(Stepper):
    """The optimizer reads `found_inf`, which is set as by `torch.amp.GradScaler`."""

    def run(self, step: Callable[[], Any], verdicts: Sequence[Verdict]) -> Any:
        """Step; the optimizer skips by itself."""
        self.gradients.check.dtypes()
        self.follow_models()
        found_inf = found_inf_of(verdicts)
        self.optimizer.grad_scale = None
        self.optimizer.found_inf = None if found_inf is None else found_inf.reshape(())
        return self.run_unscaled(step)


class HostSkip(Stepper):
    """The host reads what the checks found, 4 bytes for each block."""

    def run(self, step: Callable[[], Any], verdicts: Sequence[Verdict]) -> Any:
        """Step, or do nothing after an overflow."""
        self.gradients.check.dtypes()
        self.follow_models()
        if not any(verdict.overflowed for verdict in verdicts):
            return self.run_unscaled(step)
        # A scheduler made before `initialize` would otherwise warn that it was stepped first.
        self.optimizer._opt_called = self.has_stepped = True
        return None


class ClosureStep(Stepper):
    """The optimizer evaluates the model any number of times, on weights that it sets.

    After an overflow the closure is evaluated again, at the lowered scale, and the step is not skipped.
    """

    def __init__(
        self, *parts: Any, closure: Callable[[], Any], learn: Callable[[Sequence[Verdict]], None]
    ) -> None:
        super().__init__(*parts)
        self._closure = closure
        self._learn = learn
        self._as_around_the_step = same_casts()

    def run(self, step: Callable[..., Any], verdicts: Sequence[Verdict] = ()) -> Any:
        """Step with the closure, which `step` is given."""
        self.gradients.check.dtypes()
        self.follow_models()
        with disable_casts(), self.masters.as_float32(self.gradients.lists.masters):
            result = step(self._evaluate)
        self.write_back.after_step()
        return result

    def _evaluate(self) -> Any:
        self.write_back.after_step()
        forget_casts()  # of the weights of the last evaluation
        with self._as_around_the_step():
            for _ in range(_CLOSURE_TRIES):
                loss = self._closure()
                self.gradients.finish_delayed()
                self.gradients.take_changes()
                self.gradients.of_masters.unscale()
                verdicts = self.gradients.verdicts.take()
                overflowed = any(verdict.overflowed for verdict in verdicts)
                self._learn(verdicts)
                if not overflowed:
                    return loss
                self.gradients.clear()
        raise AmpRuntimeError(
            f"the gradients of the closure overflowed {_CLOSURE_TRIES} times, down to the lowest "
            "loss scale: they are inf or nan without scaling too. Look at the loss and the data."
        )


def can_skip_on_device(optimizer: Any) -> bool:
    """Whether an optimizer that reads `found_inf` changes nothing if it is set.

    Torch's SGD reads it only if `fused` is set. If a parameter's first step is skipped, its momentum
    stays uninitialized, so the host decides about that step.
    """
    return all(
        group.get("fused", True)
        and (not group.get("momentum") or all(p in optimizer.state for p in group["params"]))
        for group in optimizer.param_groups
    )


def forget_inputs(optimizer: Any) -> None:
    """Remove the inputs of a step from an optimizer: later steps would use them."""
    for name in ("scaled_grads", "grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)


def found_inf_of(verdicts: Sequence[Verdict]) -> Tensor | None:
    """Return whether any check found an overflow, float32 `[1]`; None without checks. No host sync."""
    found = [verdict.found_inf for verdict in verdicts]
    if not found:
        return None
    return functools.reduce(lambda x, y: torch.maximum(x, y.to(x.device)), found)
