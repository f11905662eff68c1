"""An optimizer inside a session: masters go into its groups, and its methods are wrapped.

The optimizer stays the same object; `step`, `zero_grad`, `add_param_group` and `load_state_dict` are
replaced on the instance, and `detach` gives them back. Where its gradients are is in
`amp.training.gradients`, and how it steps in `amp.training.steps`.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from amp.casting.regions import ThreadState
from amp.casting.weight_casts import forget_casts
from amp.dtypes import CASTABLE, LOW_PRECISION
from amp.errors import AmpError, AmpValueError, AmpWarning
from amp.masters.parameter import MasterParameter, stored_grad
from amp.masters.whole import MasterWeights
from amp.patching import Patches
from amp.training import optimizer_states
from amp.training.gradients import Gradients, State
from amp.training.optimizer_wrappers import chain_of, inherits, innermost, own_methods
from amp.training.outside_changes import OutsideChanges
from amp.training.ownership import OwnedParameters
from amp.training.parameter_lists import KnownDtypes
from amp.training.scaler import LossScaler, Verdict
from amp.training.steps import (
    ClosureStep,
    DeviceSkip,
    FusedStep,
    HostSkip,
    Stepper,
    can_skip_on_device,
    forget_inputs,
)
from amp.undo import Contents

_ATTRIBUTE = "_amp_attached"


def declares(optimizer: Any, capability: str) -> bool:
    """Whether the optimizer itself says so: what a wrapper passes on is not the wrapper's own."""
    return inspect.getattr_static(optimizer, capability, False) is True


class AttachedOptimizer:
    """What a session knows about one of its optimizers.

    Args:
        optimizer: a `torch.optim.Optimizer`, an object that looks like one, or a wrapper around one.
        owner: the session.
        masters: the session's master weights.
        use_masters: whether 16-bit parameters get a master.
        report: called with the scaler of a loss when the step after it was decided.
        named_parameters: returns the parameters that the session's models have now, with their names.

    Attributes:
        optimizer: the one that steps.
        gradients: where its gradients are.
        outside_changes: carries what is changed in its masters outside of `step` to the model.
        stepped_by: what the checks before the last step found.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        owner: Any,
        masters: MasterWeights,
        use_masters: bool,
        report: Callable[[LossScaler], None],
        named_parameters: Callable[[], Mapping[tuple[int, str], Tensor]],
    ) -> None:
        *self._wrappers, optimizer = chain_of(optimizer)
        self.optimizer = optimizer
        self.owner = owner
        self.masters = masters
        self._use_masters = use_masters
        self._report = report
        self._named_parameters = named_parameters
        self._patches = Patches()
        self._is_attached = False
        self._released: dict[Tensor, Tensor] = {}
        self._owned = OwnedParameters(optimizer, named_parameters)
        self._has_stepped = False
        self._dtypes = KnownDtypes(self._owned.name_of)
        self._takes_scaled = declares(optimizer, "_step_takes_scaled_grads")
        self._skips_on_device = (
            declares(optimizer, "_step_supports_amp_scaling")
            and "grad_scaler" not in inspect.signature(optimizer.step).parameters
        )
        self._skips_on_its_own = functools.partial(
            skips_on_its_own, optimizer, self._takes_scaled, self._skips_on_device
        )
        self._own_state_dtype: torch.dtype | None = getattr(optimizer, "state_dtype", None)
        self.gradients = Gradients(
            optimizer,
            masters,
            self._dtypes,
            self._takes_scaled,
            owner.synchronization,
            self._skips_on_its_own,
        )
        self._fused_step = FusedStep(optimizer, self.gradients, masters)
        self.outside_changes = OutsideChanges(self.gradients, masters)
        self.stepped_by: list[Verdict] = []

    @staticmethod
    def of(optimizer: Any) -> AttachedOptimizer | None:
        """Return what is attached to an optimizer, or to the one that a wrapper holds, or None."""
        return getattr(innermost(optimizer), _ATTRIBUTE, None)

    # The optimizer goes in and comes out.

    def attach(self, before: Mapping[Tensor, Contents]) -> None:
        """Put masters and wrapped methods into the optimizer. `detach` undoes what was done so far.

        The optimizer's state keeps its dtype until `recast_state`, so that no bit is lost before
        nothing can fail any more.

        Args:
            before: what parameters held before they were cast.
        """
        self._is_attached = True
        setattr(self.optimizer, _ATTRIBUTE, self)
        for group in self.optimizer.param_groups:
            self._adopt(group, before)
        self.gradients.look_at_groups()
        self.outside_changes.note()
        for name, method in (
            ("step", self._step),
            ("zero_grad", self._zero_grad),
            ("add_param_group", self._add_param_group),
            ("load_state_dict", self._load_state_dict),
        ):
            if hasattr(self.optimizer, name):
                self._wrap(self.optimizer, name, method)
        self._wrap_wrappers()

    def _wrap(self, holder: Any, name: str, method: Callable[..., Any]) -> None:
        self._patches.wrap(holder, name, functools.partial(_bound_wrapper, self, holder, method))

    def _wrap_wrappers(self) -> None:
        """Let wrappers work on this optimizer's gradients and groups, and follow changes of masters."""
        for wrapper in self._wrappers:
            for name, method in (
                ("zero_grad", self._zero_grad),
                ("add_param_group", self._add_param_group),
            ):
                if inherits(wrapper, name):  # else it is the wrapped optimizer's that is called
                    self._wrap(wrapper, name, method)
        holders = [(each, ("step", *own_methods(each))) for each in self._wrappers]
        for holder, names in (*holders, (self.optimizer, own_methods(self.optimizer))):
            for name in names if self._use_masters else ():
                self._wrap(holder, name, self._run_own_method)

    def _run_own_method(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.outside_changes.around_method():
            return method(*args, **kwargs)

    def detach(self) -> None:
        """Give the optimizer its methods and the model's parameters back. Idempotent.

        After an interrupt it may be called again.
        """
        if not self._is_attached:
            return
        self.gradients.drop_stepped()
        try:
            self.gradients.finish_delayed()
            self.gradients.show()
        except AmpError:  # of a kind that was shown already, and must not keep the session open
            self.gradients.clear()
        self._patches.undo()
        forget_inputs(self.optimizer)
        for group in self.optimizer.param_groups:
            for master in group["params"]:
                parameter = self.masters.model(master)
                if parameter is not None:
                    self._released[master] = parameter
        self._rekey_state(self._released)
        for group in self.optimizer.param_groups:
            group["params"][:] = [self._released.get(p, p) for p in group["params"]]
        for master, parameter in self._released.items():
            self.masters.release(master, self)
            if stored_grad(master) is not None:
                parameter.grad = master.grad.to(parameter.dtype)  # type: ignore[union-attr]
            if isinstance(master, MasterParameter) and master.holder is self.gradients:
                del master.holder
        self.gradients.let_go()
        self.outside_changes.note()
        if keeps_moments(self.optimizer):
            self.optimizer.state_dtype = self._own_state_dtype
        if AttachedOptimizer.of(self.optimizer) is self:
            delattr(self.optimizer, _ATTRIBUTE)
        self._released = {}
        self._is_attached = False

    def note_owned(self) -> None:
        """Note which parameters of the session's models this optimizer is to train."""
        lists = self.gradients.look_at_groups()
        self._owned.note((*lists.unmastered, *lists.models))

    def remember_state(self) -> Callable[[], None]:
        """Return what gives the state of each parameter the tensors that it has now."""
        before = [(entries, dict(entries)) for entries in self.optimizer.state.values()]

        def take_back() -> None:
            for entries, own in before:
                entries.update(own)

        return take_back

    def recast_state(self, state_dtype: torch.dtype | None = None) -> None:
        """Give each parameter's state the parameter's dtype, counters apart.

        Args:
            state_dtype: the dtype of moments instead, for an optimizer that has one.
        """
        if keeps_moments(self.optimizer):
            self.optimizer.state_dtype = state_dtype or self.optimizer.state_dtype
            return
        for parameter, entries in self.optimizer.state.items():
            if not isinstance(parameter, Tensor):  # some optimizers keep their own things there
                continue
            for key, value in entries.items():
                if not isinstance(value, Tensor) or key == "step" or value.dtype not in CASTABLE:
                    continue
                if value.dim() or not parameter.dim():  # a number for a whole tensor stays what it is
                    entries[key] = value.to(parameter.dtype)

    def _adopt(self, group: dict[str, Any], before: Mapping[Tensor, Contents]) -> None:
        """Exchange a group's 16-bit parameters for masters, in the same list: LBFGS keeps it."""
        params = group["params"]
        master_of: dict[Tensor, Tensor] = {}
        self._dtypes.add(params)
        for i, parameter in enumerate(params):
            if self._use_masters and parameter.dtype in LOW_PRECISION:
                master = self.masters.acquire(parameter, before, self, self._takes_scaled)
                params[i] = master_of[parameter] = master
        self._rekey_state(master_of)

    def _rekey_state(self, new_of: Mapping[Tensor, Tensor]) -> None:
        """Key the state of some parameters by others, in the same order. An interrupt loses nothing."""
        for state in (each.state for each in (self.optimizer, *self._wrappers)):
            if any(parameter in state for parameter in new_of):
                for parameter in list(state):
                    state[new_of.get(parameter, parameter)] = state.pop(parameter)

    def _add_param_group(self, add: Callable[..., Any], group: dict[str, Any]) -> Any:
        if isinstance(group, dict) and "params" in group:
            params = group["params"]
            if not isinstance(params, (Tensor, set)):
                params = group["params"] = list(params)
            stepped = set(map(id, self.gradients.look_at_groups().stepped))
            for entry in [params] if isinstance(params, Tensor) else params:
                parameter = entry[1] if isinstance(entry, tuple) else entry
                if id(self.masters.master(parameter)) in stepped:
                    raise AmpValueError(
                        f"a parameter of shape {tuple(parameter.shape)} is in this optimizer already; "
                        "give each parameter to one group"
                    )
        known = len(self.optimizer.param_groups)
        result = add(group)
        for new_group in self.optimizer.param_groups[known:]:
            self._adopt(new_group, {})
        self.note_owned()
        self.outside_changes.note()
        return result

    # The wrapped methods.

    def _load_state_dict(self, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return optimizer_states.load(self.optimizer, load, *args, **kwargs)

    def _step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = ThreadState()
        try:
            with self.masters.lock, self.outside_changes.in_step():
                return self._step_once(step, *args, **kwargs)
        except BaseException:
            before.put_back(after_error=True)
            forget_inputs(self.optimizer)
            raise

    def _step_once(
        self, step: Callable[..., Any], closure: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        self.gradients.look_at_groups()
        if self.gradients.state is State.OPEN:
            self.gradients.take_for_step_in_block()
        if closure is not None:
            parts = self.optimizer, self.gradients, self.masters
            with_closure = ClosureStep(*parts, closure=closure, report=self._report_all)
            with_closure.run(lambda evaluate: step(evaluate, *args, **kwargs))
            self._owned.check()
            self.stepped_by = []
            self.gradients.end_step()
            self._end_iteration()
            return with_closure.results[-1]
        self.gradients.drop_stepped()
        self.gradients.finish_delayed()
        self.gradients.gather_strays()
        if not self._has_stepped or self.gradients.are_none():
            self._owned.check()
        if not (self._has_stepped or self.gradients.are_none()):
            self._has_stepped = True
            self._warn_if_unscaled()
        self.stepped_by = verdicts = self.gradients.verdicts
        way = self._way()
        way.results = []
        try:
            self.gradients.verdicts = []
            way.run(functools.partial(step, *args, **kwargs), verdicts)
            forget_casts()  # of the old weights, if a forward is under way
            for scaler in {verdict.scaler: None for verdict in verdicts}:
                scaler.recorder.note_step(v.step for v in verdicts if v.scaler is scaler)
            self._note_bad()
            self.gradients.end_step(was_skipped=any(v.is_known_overflow for v in verdicts))
        except BaseException:
            if way.results:
                self.gradients.end_step()
                self._end_iteration()
            else:
                self.gradients.verdicts = verdicts  # the step is still to be taken
            raise
        self._end_iteration()
        self._report_all(verdicts)  # last: a warning may be an error
        return way.results[-1]

    @contextmanager
    def no_step_of_the_training(self) -> Iterator[None]:
        """Say nothing of gradients that are not scaled to a step that makes the optimizer's state."""
        before, self._has_stepped = self._has_stepped, True
        try:
            yield
        finally:
            self._has_stepped = before

    def _warn_if_unscaled(self) -> None:
        """Warn if gradients are stepped on whose loss was to be scaled, and was not."""
        if self.gradients.were_scaled or all(scaler.is_identity for scaler in self.owner.scalers):
            return
        properties = self.owner.properties
        warnings.warn(
            f"{type(self.optimizer).__name__}.step() was called, and its gradients came from no "
            f"amp.scale_loss block. At opt_level={properties.opt_level!r} losses are to be scaled: "
            "float16 gradients below 6e-8 are 0 without it. Call scaled_loss.backward() in `with "
            "amp.scale_loss(loss, optimizer) as scaled_loss:`. If another gradient scaler scales the "
            "loss, or none is to, pass loss_scale=1.0 to amp.initialize",
            AmpWarning,
            stacklevel=5,
        )

    def _note_bad(self) -> None:
        """Note whose gradients made an overflow that the host knows of."""
        overflows = [verdict for verdict in self.stepped_by if verdict.is_known_overflow]
        if not overflows:
            return
        name_of = {id(p): name for (_, name), p in self._named_parameters().items()}
        parameters, flags = self.gradients.are_bad()
        for verdict in overflows if parameters else ():
            names = [name_of.get(id(p), "a parameter of no model") for p in parameters]
            verdict.scaler.note_bad(verdict.step, names, flags)

    def _end_iteration(self) -> None:
        """Move the scales of `fp8="delayed"`, if no block has done that."""
        history = self.owner.amax_history
        if history is not None:
            if not history.ended_in_block:
                history.share(self.gradients.lists.process_groups)
                history.end()
            history.ended_in_block = False

    def _way(self) -> Stepper:
        """Return the way in which the optimizer steps now; see `amp.training.steps`."""
        if self._takes_scaled:
            return self._fused_step
        skips = self.stepped_by and self._skips_on_its_own()
        return (DeviceSkip if skips else HostSkip)(self.optimizer, self.gradients, self.masters)

    def _zero_grad(self, zero_grad: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        set_to_none = args[0] if args else kwargs.get("set_to_none", True)
        lists = self.gradients.look_at_groups()
        self.gradients.drop_stepped()
        if not set_to_none:
            self.gradients.show()
            self.gradients.bring_back_aside()  # to be written zeros too
        self.gradients.forget()
        self.gradients.drop_unreduced()
        result = zero_grad(*args, **kwargs)
        for parameter in lists.models:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()
        return result

    # What others ask and tell.

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped. The host waits if the optimizer itself decided that."""
        return any(verdict.overflowed for verdict in self.stepped_by)

    def write_back(self) -> None:
        """Write all masters to the model. No host sync."""
        with self.masters.lock:
            self.masters.write_back(self.gradients.look_at_groups().masters)
            self.outside_changes.note()

    def _report_all(self, verdicts: Sequence[Verdict]) -> None:
        for scaler in {verdict.scaler: None for verdict in verdicts}:
            self._report(scaler)


def skips_on_its_own(optimizer: Any, takes_scaled: bool, skips_on_device: bool) -> bool:
    """Whether an optimizer skips its next step, if a check says so, without a word from the host."""
    return takes_scaled or (skips_on_device and can_skip_on_device(optimizer))


def keeps_moments(optimizer: Any) -> bool:
    """Whether an optimizer has a dtype of its own for its moments, which it can be given."""
    return isinstance(getattr(type(optimizer), "state_dtype", None), property)


def _bound_wrapper(
    attached: AttachedOptimizer, holder: Any, method: Callable[..., Any], original: Callable[..., Any]
) -> Any:
    """Return `method(original, ...)` as a bound method: schedulers look for its `__func__`."""

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not attached._is_attached:
            return original(*args, **kwargs)
        return method(original, *args, **kwargs)

    return types.MethodType(wrapper, holder)
