"""Attach an optimizer to a session: put masters into its groups, and wrap its methods.

The optimizer stays the same object; `step`, `zero_grad`, `add_param_group` and `load_state_dict` are
replaced on the instance, and `detach` restores them. `amp.training.gradients` keeps its gradients, and
`amp.training.step` has the ways in which it steps.
"""

from __future__ import annotations

import functools
import types
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from amp.dtypes import CASTABLE, LOW_PRECISION
from amp.errors import AmpError, AmpValueError, is_out_of_memory
from amp.kernels import host_lists
from amp.kernels.interrupts import at_once
from amp.masters.master_weights import MasterWeights
from amp.masters.shared_state import SharedState
from amp.observers import everywhere
from amp.patching import Patches
from amp.profiles.properties import StateDtype
from amp.training import optimizer_states
from amp.training.gradients import Gradients
from amp.training.misuse import Misuse
from amp.training.parameters import ParameterNames, Parameters
from amp.training.step import OptimizerStep, forget_inputs
from amp.training.wrapped_optimizers import ATTACHED, chain_of, inherits, innermost, own_methods
from amp.undo import Contents


class AttachedOptimizer:
    """One optimizer of a session, with its gradients and wrapped methods.

    Args:
        optimizer: a `torch.optim.Optimizer`, an object that looks like one, or a wrapper around one.
        owner: the session.

    Attributes:
        optimizer: the one that steps, inside all wrappers.
        owner: the session.
        masters: those of the session.
        named: knows the model's parameters by name.
        gradients: its gradients, and the pairs of its parameters and masters.
        is_wrapped: whether another optimizer holds this one.
        step: replaces the optimizer's own `step`.
        misuse: looks at its first iterations; None once it has stepped well.
        has_half: whether the session has weights in 16 bits.
        may_be_plain: whether blocks and steps change nothing, unless somebody watches.
    """

    def __init__(self, optimizer: Any, owner: Any) -> None:
        *self._wrappers, optimizer = chain_of(optimizer)
        self.is_wrapped = bool(self._wrappers)
        self.optimizer = optimizer
        self.owner = owner
        self.masters: MasterWeights = owner.masters
        self.has_half = owner.properties.has_half
        self._patches = Patches()
        self._is_attached = False
        self._released: dict[Tensor, Tensor] = {}
        self.named = ParameterNames(optimizer, owner)
        self._own_state_dtype: StateDtype | None = getattr(optimizer, "state_dtype", None)
        self.gradients = Gradients(optimizer, owner, self.named)
        self.may_be_plain = owner.is_plain and not self.gradients.capabilities.needs_inputs
        self.step = OptimizerStep(self)
        self.misuse: Misuse | None = Misuse(self)

    @property
    def is_plain(self) -> bool:
        """Whether blocks and steps change nothing for this optimizer now, and nobody watches."""
        owner = self.owner
        is_watched = owner.observers or everywhere or owner.synchronization.wrappers
        return self.may_be_plain and not (is_watched or owner.is_rehearsal)

    @staticmethod
    def of(optimizer: Any) -> AttachedOptimizer | None:
        """Return the `AttachedOptimizer` of an optimizer, or of the one inside a wrapper, or None."""
        own: AttachedOptimizer | None = getattr(optimizer, ATTACHED, None)
        return getattr(innermost(optimizer), ATTACHED, None) if own is None else own

    # Attaching and detaching.

    def attach(self, before: Mapping[Tensor, Contents]) -> None:
        """Put masters and wrapped methods into the optimizer. `detach` undoes even a part of it.

        The optimizer's state keeps its dtype until `recast_state`, so that no bit is lost while
        something can still fail.

        Args:
            before: the contents of parameters before they were cast.
        """
        self._is_attached = True
        setattr(self.optimizer, ATTACHED, self)
        for group in self.optimizer.param_groups:
            self._adopt(group, before)
        self.share_state()
        self.gradients.reconcile()
        self._wrap_methods()

    def _wrap_methods(self) -> None:
        """Wrap methods of the optimizer, and of wrappers around it, which have its gradients too."""
        of_all = {"zero_grad": self._zero_grad, "add_param_group": self._add_param_group}
        of_one = {"step": self.step, "load_state_dict": self._load_state_dict}
        for holder in (self.optimizer, *self._wrappers):
            if holder is self.optimizer:
                known, own = {**of_one, **of_all}, list(own_methods(holder))
                methods: dict[str, Any] = {x: known[x] for x in known if hasattr(holder, x)}
            else:  # its own methods call those of the optimizer
                methods = {x: of_all[x] for x in of_all if inherits(holder, x)}
                own = ["step", *own_methods(holder)]
            methods |= dict.fromkeys(own if self.masters.are_used else (), self._run_own_method)
            for name, method in methods.items():
                wrap = functools.partial(_bound_wrapper, self, holder, method)
                self._patches.wrap(holder, name, wrap)

    def _run_own_method(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a method that may change masters, which finds them up to date; write them afterwards."""
        masters = self.masters
        if self.step.is_running or not self.gradients.parameters.masters:
            return method(*args, **kwargs)
        with masters.lock:
            pairs = self.reconcile_and_merge().pairs
            before = masters.are_ahead
            try:
                masters.are_ahead = True
                with masters.as_float32(pairs.masters, may_write=True):
                    return method(*args, **kwargs)
            finally:
                masters.are_ahead = before
                self.gradients.reconcile()

    def reconcile_and_merge(self) -> Parameters:
        """Let masters and model agree, in values too, before masters are read. No host sync."""
        with self.masters.lock:
            parameters = self.gradients.reconcile()
            parameters.pairs.merge()
        return parameters

    def detach(self) -> None:
        """Restore the optimizer's methods and parameters. Idempotent, also after an interrupt."""
        if not self._is_attached:
            return
        try:
            self.gradients.prepare_to_part()
        except (AmpError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            self.gradients.clear()  # the user has seen it before; the session must close
        self._patches.undo()
        forget_inputs(self.optimizer)
        stepped = [each for group in self.optimizer.param_groups for each in group["params"]]
        self._released |= {x: model for x in stepped if (model := self.masters.model(x)) is not None}
        self._give_state_back()
        self._rekey_state(self._released)
        for group in self.optimizer.param_groups:
            params = [self._released.get(p, p) for p in group["params"]]
            if isinstance(group["params"], list):
                group["params"][:] = params  # the same list, which LBFGS keeps
            else:  # a script has put another sequence there
                group["params"] = params
        while self._released:  # each is forgotten once its values and its gradient are given back
            master, parameter = next(iter(self._released.items()))
            self.masters.release(master, self)
            parameter.grad = None if master.grad is None else master.grad.to(parameter.dtype)
            del self._released[master]
        self.gradients.let_go()
        self._is_attached = False

    def let_go(self, has_trained: bool) -> None:
        """Cast the optimizer's state to its former dtype, after `detach` and the casts of parameters.

        Idempotent. From here on `amp.get_session` does not find the session by the optimizer.

        Args:
            has_trained: whether `initialize` has succeeded; if not, moments are unchanged.
        """
        if keeps_moments(self.optimizer):
            self.optimizer.state_dtype = self._own_state_dtype
        elif has_trained:
            self.recast_state()
        if AttachedOptimizer.of(self.optimizer) is self:
            delattr(self.optimizer, ATTACHED)

    def note_parameters(self) -> None:
        """Note which parameters of the session's models this optimizer is to train."""
        self.named.note_names(self.gradients.reconcile().of_model)

    def recast_state(self, state_dtype: StateDtype | None = None) -> None:
        """Cast each parameter's state, except counters, to the parameter's dtype.

        Args:
            state_dtype: the dtype of moments, for an optimizer that has a `state_dtype` itself.
        """
        if keeps_moments(self.optimizer):
            self.optimizer.state_dtype = state_dtype or self.optimizer.state_dtype
            return
        for parameter, entries in self.optimizer.state.items():
            if not isinstance(parameter, Tensor) or not isinstance(entries, dict):
                continue  # some optimizers keep their own things there
            for key, value in entries.items():
                is_moment = isinstance(value, Tensor) and key != "step" and value.dtype in CASTABLE
                if is_moment and (value.dim() or not parameter.dim()):
                    # A number for a whole tensor keeps its dtype.
                    entries[key] = value.to(parameter.dtype)

    def _adopt(self, group: dict[str, Any], before: Mapping[Tensor, Contents]) -> None:
        """Replace a group's 16-bit parameters by masters, in the same list, which LBFGS keeps."""
        params = group["params"]
        master_of: dict[Tensor, Tensor] = {}
        for i, parameter in enumerate(params):
            if self.masters.are_used and parameter.dtype in LOW_PRECISION:
                params[i] = master_of[parameter] = self.masters.acquire(parameter, before, self).master
        self._rekey_state(master_of)

    def _rekey_state(self, new_of: Mapping[Tensor, Tensor]) -> None:
        """Move the state of some parameters to others, in the same order. Interrupts lose nothing."""
        for state in (each.state for each in (self.optimizer, *self._wrappers)):
            if any(parameter in state for parameter in new_of):
                own: Any = dict if isinstance(state, SharedState) else type(state)
                entries = {new_of.get(key, key): entry for key, entry in state.items()}
                at_once(
                    functools.partial(own.clear, state), functools.partial(own.update, state, entries)
                )

    def share_state(self) -> None:
        """Let the model's parameters find the state of their masters. It may be called again."""
        holders = [each for each in (self.optimizer, *self._wrappers) if "state" in vars(each)]
        known = [each.state for each in holders if isinstance(each.state, SharedState)]
        shared = {id(state.replaced): state for state in known}
        for holder in holders if self.has_half else ():
            if type(state := holder.state) in (dict, defaultdict):
                holder.state = shared.setdefault(id(state), SharedState(state, self.masters))
        for state in shared.values():
            state.replaced.clear()  # it would keep entries that are removed from the other

    def _give_state_back(self) -> None:
        for holder in (self.optimizer, *self._wrappers):
            if isinstance(state := vars(holder).get("state"), SharedState):
                state.replaced.update(state)
                holder.state = state.replaced

    def _add_param_group(self, add: Callable[..., Any], group: dict[str, Any]) -> Any:
        if isinstance(group, dict) and "params" in group:
            params = group["params"]
            if not isinstance(params, (Tensor, set)):
                params = group["params"] = list(params)
            stepped = set(map(id, self.gradients.reconcile().stepped))
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
        self.note_parameters()
        return result

    # The wrapped methods.

    def _load_state_dict(self, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = optimizer_states.load(self.optimizer, load, *args, **kwargs)
        self.share_state()
        return result

    def _zero_grad(self, zero_grad: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.may_be_plain and self.misuse is None and self.is_plain:
            return zero_grad(*args, **kwargs)
        if given := [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]:
            found = [self.masters.master(parameter) for parameter in given]  # in the backward
            host_lists.lists.clear_grads([*given, *(master for master in found if master is not None)])
            return zero_grad(*args, **kwargs)
        if self.misuse is not None:
            self.misuse.of_others = []
        to_none = args[0] if args else kwargs.get("set_to_none")
        if to_none is None:
            to_none = getattr(self.optimizer, "defaults", {}).get("set_grad_none", True)
        if not to_none:
            return self.gradients.zero_grad(functools.partial(zero_grad, *args, **kwargs))
        self.gradients.zero_grad(None)
        if getattr(zero_grad, "__func__", None) is not torch.optim.Optimizer.zero_grad:
            return zero_grad(*args, **kwargs)
        # All that is left for it to do.
        return host_lists.lists.clear_grads(self.gradients.parameters.unmastered)


def keeps_moments(optimizer: Any) -> bool:
    """Whether an optimizer has a `state_dtype` for its moments that can be set."""
    return isinstance(getattr(type(optimizer), "state_dtype", None), property)


def _bound_wrapper(
    attached: AttachedOptimizer, holder: Any, method: Callable[..., Any], original: Callable[..., Any]
) -> Any:
    """Return `method(original, ...)` as a bound method: schedulers look for its `__func__`."""

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not attached._is_attached:
            return original(*args, **kwargs)
        if torch.compiler.is_compiling():
            return _call_uncompiled(method, original, *args, **kwargs)
        return method(original, *args, **kwargs)

    return types.MethodType(wrapper, holder)


@_disable_dynamo  # not torch.compiler.disable, which imports Dynamo at once
def _call_uncompiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that Dynamo does not trace, for it would guard on what a step changes."""
    return function(*args, **kwargs)
