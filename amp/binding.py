"""One optimizer inside one session: where its gradients are, and when it steps.

The optimizer stays the same object; `step`, `zero_grad` and `add_param_group` are replaced on the
instance, and `close` gives them back. Gradients move through three places:

- backward leaves scaled gradients in the `.grad` of the model's parameters;
- `take` moves those of 16-bit parameters to their masters and unscales the others where they are,
  adding to the unscaled gradients of earlier blocks, which `begin` had set aside;
- `step` runs on what is there, or is skipped, and writes the masters back to the model.

For an optimizer that takes scaled gradients, `take` only checks them, and keeps them until the step or
until somebody looks; see `amp.scaledgrads`.

With `delay_unscale` the scaled gradients stay in `.grad` ("pending") and later backwards add to them,
for as long as the scale is the same. When it changes they are unscaled first.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from amp.distributed import check_placements, groups_of_shards, reduce_found_inf
from amp.dtypes import CASTABLE, LOW_PRECISION, SCALABLE
from amp.errors import AmpError, AmpRuntimeError, AmpTypeError, AmpValueError
from amp.kernels import bulk
from amp.masters import Contents, MasterWeights, check_device
from amp.patching import Patches
from amp.regions import disable_casts, same_casts
from amp.scaledgrads import ScaledGrads
from amp.scaler import LossScaler, ScaleSnapshot, Verdict

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_ATTRIBUTE = "_amp_binding"
_PARAMS = operator.itemgetter("params")
_CLOSURE_TRIES = 300
"""Enough halvings to bring any loss scale to its floor."""


class Pending(NamedTuple):
    """Scaled gradients that wait for unscaling: their scale, and all optimizers of their block."""

    scale: ScaleSnapshot
    bindings: list[OptimizerBinding]


class _Move(NamedTuple):
    """The way of one scaled gradient: from `source` to the `.grad` of `stepped`.

    Attributes:
        stepped: what the optimizer steps, a master or a parameter.
        parameter: the model's parameter.
        source: the scaled gradient.
        kept: an unscaled gradient of earlier blocks, to add to.
    """

    stepped: Tensor
    parameter: Tensor
    source: Tensor
    kept: Tensor | None

    def is_dense_sum(self) -> bool:
        return self.kept is not None and not self.kept.is_sparse and not self.source.is_sparse

    def target(self) -> Tensor:
        """Return where the unscaled gradient goes: for a master, new memory in FP32."""
        if self.stepped is self.parameter:
            return self.source
        if self.source.is_sparse:
            return self.source.to(torch.float32)
        return torch.empty_like(self.source, dtype=torch.float32)


class _Layout(NamedTuple):
    """What an optimizer's groups hold; made anew when they hold something else.

    Attributes:
        stepped: all parameters.
        pairs: every master with its model's parameter.
        masters: the first of each pair.
        models: the second of each pair.
        direct: every parameter that is stepped without a master.
    """

    stepped: list[Tensor]
    pairs: list[tuple[Tensor, Tensor]]
    masters: list[Tensor]
    models: list[Tensor]
    direct: list[Tensor]


def innermost(optimizer: Any) -> Any:
    """Return the optimizer that steps: what a wrapper, such as apex's LARC, holds with its groups."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    for value in vars(optimizer).values() if hasattr(optimizer, "__dict__") else ():
        if isinstance(value, torch.optim.Optimizer) and value.param_groups is getattr(
            optimizer, "param_groups", None
        ):
            return value
    return optimizer


class OptimizerBinding:
    """What a session knows about one of its optimizers.

    Args:
        optimizer: a `torch.optim.Optimizer`, or an object that looks like one.
        owner: the session.
        masters: the session's master weights.
        use_masters: whether 16-bit parameters get a master.
        report: called with the scaler of a loss when the step after it was decided.
        name_of: returns how to call a parameter in a message, or None.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        owner: Any,
        masters: MasterWeights,
        use_masters: bool,
        report: Callable[[LossScaler], None],
        name_of: Callable[[Tensor], str | None],
    ) -> None:
        self.optimizer = optimizer
        self.owner = owner
        self._masters = masters
        self._use_masters = use_masters
        self._report = report
        self._name_of = name_of
        self._patches = Patches()
        self._live = False
        self._knows_found_inf = False
        self._takes_scaled = False
        self._params: list[Tensor] = []
        self._dtypes: tuple[torch.dtype, ...] = ()
        self._layout = _Layout([], [], [], [], [])
        self._own_state_dtype: torch.dtype | None = getattr(optimizer, "state_dtype", None)
        self._scaled: ScaledGrads | None = None
        self._block: LossScaler | None = None
        self._pending: Pending | None = None
        self._set_aside: list[tuple[Tensor, Tensor]] = []
        self._verdicts: list[Verdict] = []
        self._step_verdicts: list[Verdict] = []

    @staticmethod
    def of(optimizer: Any) -> OptimizerBinding | None:
        """Return the live binding of an optimizer, or of the one that a wrapper holds, or None."""
        return getattr(innermost(optimizer), _ATTRIBUTE, None)

    # The optimizer goes in and comes out.

    def open(self, before: Mapping[Tensor, Contents]) -> None:
        """Put masters and wrapped methods into the optimizer. `close` undoes what was done so far.

        The optimizer's state keeps its dtype until `recast_state`, so that no bit is lost before
        nothing can fail any more.
        """
        self._live = True
        setattr(self.optimizer, _ATTRIBUTE, self)
        for group in self.optimizer.param_groups:
            self._adopt(group, before)
        self._knows_found_inf = (
            self._declares("_step_supports_amp_scaling")
            and "grad_scaler" not in inspect.signature(self.optimizer.step).parameters
        )
        self._takes_scaled = self._declares("_step_takes_scaled_grads")
        for name, method in (
            ("step", self._step),
            ("zero_grad", self._zero_grad),
            ("add_param_group", self._add_param_group),
        ):
            if hasattr(self.optimizer, name):
                make = functools.partial(_bound_wrapper, self, method)
                self._patches.wrap(self.optimizer, name, make)

    def _declares(self, capability: str) -> bool:
        """Whether the optimizer itself says so: what a wrapper passes on is not the wrapper's own."""
        return inspect.getattr_static(self.optimizer, capability, False) is True

    def close(self) -> None:
        """Give the optimizer its methods and the model's parameters back. Idempotent.

        Its state is recast to the parameters' dtype.
        """
        if not self._live:
            return
        try:
            self.unscale_pending()
            self._bring_back()
        except AmpError:  # of a kind that was shown already, and must not keep the session open
            self._forget_gradients()
        self._live = False
        self._patches.undo()
        delattr(self.optimizer, _ATTRIBUTE)
        parameter_of: dict[Tensor, Tensor] = {}
        for group in self.optimizer.param_groups:
            params = group["params"]
            for i, master in enumerate(params):
                parameter = self._masters.model(master)
                if parameter is None:
                    continue
                params[i] = parameter_of[master] = parameter
                if master.grad is not None:
                    parameter.grad = master.grad.to(parameter.dtype)
                self._masters.release(master)
        self._rekey_state(parameter_of)
        self._layout = _Layout([], [], [], [], [])
        if keeps_moments(self.optimizer):
            self.optimizer.state_dtype = self._own_state_dtype
        self.recast_state()

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
        self._params += params
        self._dtypes += bulk.dtypes(params)
        for i, parameter in enumerate(params):
            if self._use_masters and parameter.dtype in LOW_PRECISION:
                params[i] = master_of[parameter] = self._masters.acquire(parameter, before)
        self._rekey_state(master_of)

    def _rekey_state(self, new_of: Mapping[Tensor, Tensor]) -> None:
        """Key the state of some parameters by others, in the same order."""
        state = self.optimizer.state
        if any(parameter in state for parameter in new_of):
            entries = list(state.items())
            state.clear()
            state.update((new_of.get(parameter, parameter), entry) for parameter, entry in entries)

    def _add_param_group(self, add: Callable[..., Any], group: dict[str, Any]) -> Any:
        if isinstance(group, dict) and "params" in group:
            params = group["params"]
            if not isinstance(params, (Tensor, set)):
                params = group["params"] = list(params)
            for entry in [params] if isinstance(params, Tensor) else params:
                parameter = entry[1] if isinstance(entry, tuple) else entry
                master = self._masters.master(parameter)
                if master is not None and any(master is p for p in self._find_layout().stepped):
                    raise AmpValueError(
                        f"a parameter of shape {tuple(parameter.shape)} is in this optimizer already; "
                        "give each parameter to one group"
                    )
        known = len(self.optimizer.param_groups)
        result = add(group)
        for new_group in self.optimizer.param_groups[known:]:
            self._adopt(new_group, {})
        return result

    # Gradients: around one `scale_loss` block.

    def settle_unless(self, scaler: LossScaler) -> bool:
        """Unscale what is pending at another scale than `scaler` has now; tell whether there was."""
        if self._pending is None or self._pending.scale.is_current(scaler):
            return False
        self.unscale_pending()
        return True

    def begin(self, scaler: LossScaler) -> None:
        """Make room for scaled gradients: those that are there are unscaled, and are set aside.

        Pending ones of the same scale stay, and those of the block will be added to them.
        """
        if self._block is not None:
            raise AmpRuntimeError(
                "amp.scale_loss was entered for an optimizer that is inside another amp.scale_loss "
                "block. Leave the first block, or add the two losses and scale the sum."
            )
        self._check_dtypes()
        self._bring_back()
        layout = self._find_layout()
        if (
            self._verdicts
            and not bulk.have_grads(layout.stepped)
            and not bulk.have_grads(layout.models)
        ):
            self._verdicts = []  # what overflowed was cleared by hand
        self._masters.drop_stepped_grads(layout.masters)
        if self._pending is None:
            self._gather_unscaled()
            if not scaler.is_identity:
                for parameter, grad in zip(layout.direct, bulk.grads(layout.direct), strict=True):
                    if grad is not None:
                        # DDP's gradients may be views of a buffer that the next backward overwrites.
                        self._set_aside.append((parameter, grad.clone() if grad._is_view() else grad))
                        parameter.grad = None
        self._block = scaler

    def abort(self) -> None:
        """Forget the gradients of a block that raised; those set aside come back.

        Where its gradients have been added to others that are scaled alike, pending ones or ones
        that need no scaling, they stay, as they do without amp.
        """
        scaler, self._block = self._block, None
        if self._pending is None and scaler is not None and not scaler.is_identity:
            layout = self._layout
            for parameter in (*layout.models, *layout.direct):
                parameter.grad = None
            self._take_back()

    def delay(self, pending: Pending) -> None:
        """Leave the block's gradients scaled, with those that are pending at the same scale."""
        self._block = None
        if self._pending is None:
            self._pending = pending

    def outlook(self, scale: ScaleSnapshot, done: set[int]) -> ScaledGrads | list[_Move]:
        """Return what is to become of the block's gradients, and change nothing.

        Args:
            scale: what the losses were scaled by.
            done: ids of parameters that another optimizer will see to.

        Returns:
            What the optimizer will unscale in its step; or where each gradient goes, unscaled.

        Raises:
            AmpTypeError: a gradient's dtype cannot be unscaled.
            AmpRuntimeError: a parameter was moved away from its master, or a DTensor's gradient is not
                summed over its ranks.
        """
        self._find_layout()
        return self._left_scaled(scale, done) or self._moves(scale, done)

    def _left_scaled(self, scale: ScaleSnapshot, done: set[int]) -> ScaledGrads | None:
        """Return the gradients for an optimizer that takes them scaled, if each is all there is.

        Earlier blocks may have left some to add to, and other optimizers may share a master.
        """
        layout = self._layout
        if not self._takes_scaled or self._set_aside:
            return None
        if bulk.have_grads(layout.masters):
            return None
        if self._masters.any_is_shared(layout.masters):
            return None
        masters, models, direct = layout.masters, layout.models, layout.direct
        if scale.scaler.is_identity:  # then the others' are what they are without amp
            scaled = ScaledGrads(self._bring_back, masters, models, (), None, done)
        else:
            scaled = ScaledGrads(self._bring_back, masters, models, direct, scale.inv_scale, done)
        if not scaled.can_be_kept():
            return None
        for master, parameter in layout.pairs[:1]:  # the optimizer looks at all of them
            check_device(master, parameter)
        return scaled

    def _moves(self, scale: ScaleSnapshot, done: set[int]) -> list[_Move]:
        if scale.scaler.is_identity:
            return []
        moves = []
        for master, parameter in self._layout.pairs:
            if parameter.grad is not None and id(parameter) not in done:
                check_device(master, parameter)
                moves.append(_Move(master, parameter, parameter.grad, master.grad))
        kept_of = dict(self._set_aside)
        moves += [
            _Move(parameter, parameter, parameter.grad, kept_of.get(parameter))
            for parameter in self._layout.direct
            if parameter.grad is not None and id(parameter) not in done
        ]
        for move in moves:
            if move.source.dtype not in SCALABLE:
                raise self._refusal_of(move)
            check_placements(move.source)
        return moves

    def _check_dtypes(self) -> None:
        """Raise if a parameter's dtype is not what it was when the optimizer came."""
        if bulk.dtypes(self._params) == self._dtypes:
            return
        for parameter, dtype in zip(self._params, self._dtypes, strict=True):
            if parameter.dtype is not dtype:
                raise AmpRuntimeError(
                    f"{self._called(parameter)} is {parameter.dtype} and was {dtype} at "
                    "amp.initialize: the model was cast after it, by .half(), .float() or .to(). "
                    "Leave that out, or do it before."
                )

    def _called(self, parameter: Tensor) -> str:
        """Return how to call a parameter in a message."""
        return self._name_of(parameter) or f"a parameter of shape {tuple(parameter.shape)}"

    def _refusal_of(self, move: _Move) -> AmpTypeError:
        return AmpTypeError(
            f"the gradient of {self._called(move.parameter)} is {move.source.dtype} and cannot be "
            "unscaled: loss scaling takes float16, bfloat16, float32 and float64. Freeze the "
            "parameter, leave it out of the optimizer, or use a loss_scale of 1."
        )

    def take(self, outlook: ScaledGrads | list[_Move], scale: ScaleSnapshot) -> None:
        """Check what is in `.grad`, and unscale it unless the optimizer does. No host sync.

        Args:
            outlook: what the method of this name returned.
            scale: what the losses were scaled by; its scaler's `found_inf` is set on overflow.
        """
        if isinstance(outlook, list):
            self._unscale(outlook, scale)
        elif scale.scaler.found_inf is not None:
            outlook.check(scale.scaler.found_inf, getattr(self.optimizer, "max_grad_norm", None))

    def _unscale(self, moves: Sequence[_Move], scale: ScaleSnapshot) -> None:
        from amp.kernels.axpby import axpby  # load Triton
        from amp.kernels.unscale import unscale

        if scale.scaler.is_identity:
            self._gather_unscaled()
            return
        found_inf = scale.scaler.found_inf
        adding = [move for move in moves if move.is_dense_sum()]
        kept = [move.kept for move in adding if move.kept is not None]
        sources = [move.source for move in adding]
        axpby(scale.inv_scale, sources, 1.0, kept, kept, found_inf, check="x")
        moving = [move for move in moves if not move.is_dense_sum()]
        targets = [move.target() for move in moving]
        unscale([move.source for move in moving], targets, scale.inv_scale, found_inf)
        for move in moves:
            move.parameter.grad = None
            move.stepped.grad = move.kept
        for move, target in zip(moving, targets, strict=True):
            _add_grad(move.stepped, target)
        moved = {move.stepped for move in moves}
        self._set_aside = [(p, kept) for p, kept in self._set_aside if p not in moved]
        self._take_back()

    def settle(self, outlook: ScaledGrads | list[_Move]) -> None:
        """Leave the block, after `take`: no gradient that can be seen is scaled any more."""
        self._block = None
        self._pending = None
        if isinstance(outlook, ScaledGrads):
            self._scaled = outlook
            outlook.hide()

    def _bring_back(self) -> None:
        """Unscale what is kept for an optimizer that would have done it: somebody looks at it."""
        scaled, self._scaled = self._scaled, None
        if scaled is not None:
            for stepped, grad in scaled.unscale():
                new, stepped.grad = stepped.grad, grad
                if new is not None:  # of a backward outside of any block
                    _add_grad(stepped, new)

    def process_groups(self) -> list[ProcessGroup]:
        """Return the process groups over which the parameters are cut into shards."""
        return groups_of_shards(self._layout.stepped)

    def note(self, verdict: Verdict) -> None:
        """Remember what a check found until the next step."""
        self._verdicts.append(verdict)

    def unscale_pending(self) -> None:
        """Unscale what `delay_unscale` left, as leaving its block without it would have done."""
        pending = self._pending
        if pending is not None:
            together = [b for b in pending.bindings if b._pending is pending and b._block is None]
            unscale_and_update(together, pending.scale)

    def _gather_unscaled(self) -> None:
        """Move gradients that were never scaled from 16-bit parameters to their masters."""
        layout = self._layout
        if not bulk.have_grads(layout.models):
            return
        for (master, parameter), grad in zip(layout.pairs, bulk.grads(layout.models), strict=True):
            if grad is not None:
                check_device(master, parameter)
                parameter.grad = None
                _add_grad(master, grad.to(torch.float32))

    def _take_back(self) -> None:
        """Add what was set aside to what is there."""
        for parameter, kept in self._set_aside:
            new, parameter.grad = parameter.grad, kept
            if new is not None:
                _add_grad(parameter, new)
        self._set_aside = []

    def _find_layout(self) -> _Layout:
        """Find out what the optimizer's groups hold now: at the begin of whatever goes by it."""
        stepped = list(chain.from_iterable(map(_PARAMS, self.optimizer.param_groups)))
        known = self._layout.stepped
        if not bulk.are_same(stepped, known):
            once = list(dict.fromkeys(stepped))  # torch lets a parameter be in a group twice
            models = [self._masters.model(parameter) for parameter in once]
            pairs = [(p, m) for p, m in zip(once, models, strict=True) if m is not None]
            self._layout = _Layout(
                stepped,
                pairs,
                [master for master, _ in pairs],
                [parameter for _, parameter in pairs],
                [p for p, m in zip(once, models, strict=True) if m is None],
            )
        return self._layout

    def groups(self) -> list[list[tuple[Tensor, Tensor | None]]]:
        """Return what is stepped of each group, with the model's parameter of each master."""
        return [
            [(stepped, self._masters.model(stepped)) for stepped in group["params"]]
            for group in self.optimizer.param_groups
        ]

    @property
    def is_pending(self) -> bool:
        """Whether there are gradients that wait for unscaling."""
        return self._pending is not None

    # The step.

    @property
    def overflowed(self) -> bool:
        """Whether gradients overflowed: those since the last step, else those of it. The host waits."""
        return any(verdict.overflowed for verdict in self._verdicts or self._step_verdicts)

    def write_back(self) -> None:
        """Write all masters to the model. No host sync."""
        self._masters.write_back(self._find_layout().masters)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped. The host waits if the optimizer itself decided that."""
        return any(verdict.overflowed for verdict in self._step_verdicts)

    def _step(self, step: Callable[..., Any], closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self._block is not None:
            raise AmpRuntimeError(
                "optimizer.step() was called inside the amp.scale_loss block, where gradients are "
                "still scaled. Call it after the block."
            )
        self._check_dtypes()
        self._find_layout()
        if closure is not None:
            return self._step_with_closure(step, closure, *args, **kwargs)
        self.unscale_pending()
        scaled = self._for_optimizer()
        if scaled is None:
            self._settle()
        self._follow_parameters()
        self._step_verdicts, self._verdicts = self._verdicts, []
        try:
            result = self._step_or_skip(scaled, functools.partial(step, *args, **kwargs))
        except BaseException:
            self._verdicts = self._step_verdicts  # the step is still to be taken
            raise
        torch.clear_autocast_cache()  # of casts of the old weights, if a forward is under way
        if scaled is None:
            self._drop_master_grads()
        self._report_all(self._step_verdicts)  # last: a warning may be an error
        return result

    def _step_or_skip(self, scaled: ScaledGrads | None, step: Callable[[], Any]) -> Any:
        result = None
        if scaled is not None:
            self._step_on_scaled(scaled, step)
        elif self._takes_scaled and self._masters.lean is not None:
            layout = self._layout
            grads = bulk.grads(layout.masters)
            pairs = layout.masters, layout.models
            unscaled = ScaledGrads(self._bring_back, *pairs, (), None, grads=grads)
            self._step_given(unscaled, step)
        elif self._skips_on_device():
            with disable_casts(), self._found_inf_for_optimizer():
                result = self._group_by_group(step)
            self._write_back()
        elif self.step_was_skipped:
            # A scheduler made before `initialize` would otherwise warn that it was stepped first.
            self.optimizer._opt_called = True
        else:
            with disable_casts():
                result = self._group_by_group(step)
            self._write_back()
        return result

    def _for_optimizer(self) -> ScaledGrads | None:
        """Return the kept gradients if the optimizer can step on them, and nobody sees them before."""
        scaled = self._scaled
        if scaled is None or _has_hooks(self.optimizer):
            return None
        scaled.show()
        layout = self._layout
        others = layout.models if scaled.inv_scale is None else layout.models + layout.direct
        if bulk.have_grads(others):
            return None  # a backward outside of any block
        return scaled

    def _group_by_group(self, step: Callable[[], Any]) -> Any:
        """Step; if masters are lean, on one group at a time, whose masters are spread out."""
        optimizer = self.optimizer
        if self._masters.lean is None:
            return step()
        if "param_groups" not in vars(optimizer):  # a wrapper: the groups are another's
            with self._masters.spread_out(self._layout.masters):
                return step()
        groups, result = optimizer.param_groups, None
        try:
            for group in groups:
                optimizer.param_groups = [group]
                with self._masters.spread_out(group["params"]):
                    result = step()
        finally:
            optimizer.param_groups = groups
        return result

    def _step_on_scaled(self, scaled: ScaledGrads, step: Callable[[], Any]) -> None:
        """Step on gradients that are kept. Those of parameters without a master stay, to be seen."""
        try:
            self._step_given(scaled, step)
        except BaseException:
            scaled.hide()
            raise
        self._scaled = scaled.without_masters()
        if self._scaled is not None:
            self._scaled.hide()

    def _step_given(self, scaled: ScaledGrads, step: Callable[[], Any]) -> None:
        """Step an optimizer that is shown gradients and weights."""
        self.optimizer.scaled_grads = scaled.for_step(
            self._found_inf(), None if self._masters.lean is None else self._masters.low
        )
        try:
            with disable_casts():
                step()
        finally:
            del self.optimizer.scaled_grads
        self._masters.were_written_back(scaled.masters, scaled.models)
        if len(scaled.masters) < len(self._layout.masters):
            self._write_back(without=set(scaled.masters))

    def _skips_on_device(self) -> bool:
        """Whether the optimizer reads `found_inf` itself, as torch's fused ones do.

        Each of its groups has to be fused: a loaded state or a later group may not be. Not in the first
        step of a parameter: torch's fused SGD leaves a new momentum buffer uninitialized when that step
        is skipped.
        """
        if not self._step_verdicts or not self._knows_found_inf:
            return False
        state = self.optimizer.state
        return all(
            group.get("fused", True) and (parameter in state or group.get("momentum") == 0)
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        )

    def _found_inf(self) -> Tensor | None:
        """Return what the checks since the last step found, `[]`; None if there were none."""
        found = [verdict.found_inf.reshape(()) for verdict in self._step_verdicts]
        if not found:
            return None
        return functools.reduce(lambda x, y: torch.maximum(x, y.to(x.device)), found)

    @contextmanager
    def _found_inf_for_optimizer(self) -> Iterator[None]:
        """Show the optimizer what was found, in the way that `torch.amp.GradScaler` does."""
        self.optimizer.grad_scale = None
        self.optimizer.found_inf = self._found_inf()
        try:
            yield
        finally:
            del self.optimizer.grad_scale, self.optimizer.found_inf

    def _report_all(self, verdicts: Sequence[Verdict]) -> None:
        for scaler in {verdict.scaler: None for verdict in verdicts}:
            self._report(scaler)

    def _step_with_closure(
        self, step: Callable[..., Any], closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Let the optimizer evaluate the model as often as it likes, on the weights it has set.

        A closure can be evaluated again, so an overflow in it is answered by doing that at the
        lowered scale, and the step is not skipped.
        """
        self._follow_parameters()
        as_around_the_step = same_casts()

        def evaluate() -> Any:
            self._write_back()
            with as_around_the_step():
                for _ in range(_CLOSURE_TRIES):
                    loss = closure()
                    self._settle()
                    verdicts, self._verdicts = self._verdicts, []
                    overflowed = any(verdict.overflowed for verdict in verdicts)
                    self._report_all(verdicts)
                    if not overflowed:
                        return loss
                    self._forget_gradients()
            raise AmpRuntimeError(
                f"the gradients of the closure overflowed {_CLOSURE_TRIES} times, down to the lowest "
                "loss scale: they are inf or nan without scaling too. Look at the loss and the data."
            )

        with disable_casts(), self._masters.spread_out(self._layout.masters):
            result = step(evaluate, *args, **kwargs)
        self._step_verdicts = []
        self._write_back()
        self._drop_master_grads()
        return result

    def _settle(self) -> None:
        """Bring every gradient, unscaled, to where the optimizer reads it."""
        self.unscale_pending()
        self._bring_back()
        self._gather_unscaled()

    def _write_back(self, without: Collection[Tensor] = ()) -> None:
        self._masters.write_back(
            master
            for master, parameter in self._layout.pairs
            if (parameter.requires_grad or master.grad is not None) and master not in without
        )

    def _follow_parameters(self) -> None:
        layout = self._layout
        self._masters.follow_all(layout.masters, layout.models)

    def _drop_master_grads(self) -> None:
        """Free the masters' gradients, so that `model.zero_grad()` is all a script has to call."""
        self._masters.drop_grads(self._layout.masters)

    def _zero_grad(self, zero_grad: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._scaled is not None:
            self._scaled.put_back()
        result = zero_grad(*args, **kwargs)
        set_to_none = args[0] if args else kwargs.get("set_to_none", True)
        for parameter in self._find_layout().models:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()
        self._forget_history()
        return result

    def _forget_gradients(self) -> None:
        if self._scaled is not None:
            self._scaled.show()
        layout = self._find_layout()
        for parameter in (*layout.stepped, *layout.models):
            parameter.grad = None
        self._forget_history()

    def _forget_history(self) -> None:
        """No gradient is left: none is pending, set aside, or known to be inf."""
        self._pending = None
        self._scaled = None
        self._set_aside = []
        self._verdicts = []


@disable_casts()
def unscale_and_update(
    bindings: list[OptimizerBinding], scale: ScaleSnapshot, update: bool = True
) -> None:
    """Unscale the gradients of one loss, tell its optimizers of an overflow, and move the scale.

    The one place that scales and checks gradients. No host sync.
    """
    scaler = scale.scaler
    outlooks = _outlooks(bindings, scale)
    found_inf = scaler.found_inf
    try:
        for binding, outlook in zip(bindings, outlooks, strict=True):
            binding.take(outlook, scale)
        if found_inf is not None:
            groups = dict.fromkeys(scaler.process_groups)
            for binding in bindings:
                groups.update(dict.fromkeys(binding.process_groups()))
            reduce_found_inf(found_inf, groups)
    except BaseException:
        if found_inf is not None:
            found_inf.zero_()
        raise
    for binding, outlook in zip(bindings, outlooks, strict=True):
        binding.settle(outlook)
    verdict = scaler.verdict()
    if verdict is not None:
        for binding in bindings:
            binding.note(verdict)
    if update and not scaler.is_identity:
        scaler.update()


def delay(bindings: list[OptimizerBinding], scale: ScaleSnapshot) -> None:
    """Leave the gradients of one loss scaled, with those that are pending at the same scale."""
    _outlooks(bindings, scale)  # what cannot be unscaled later is refused now
    pending = Pending(scale, bindings)
    for binding in bindings:
        binding.delay(pending)


def _outlooks(
    bindings: list[OptimizerBinding], scale: ScaleSnapshot
) -> list[ScaledGrads | list[_Move]]:
    """Return each optimizer's outlook, each parameter with the first optimizer that has it."""
    done: set[int] = set()
    outlooks: list[ScaledGrads | list[_Move]] = []
    for i, binding in enumerate(bindings):
        if i > 0:
            done.update(map(id, _parameters(outlooks[-1])))
        outlooks.append(binding.outlook(scale, done))
    return outlooks


def _parameters(outlook: ScaledGrads | list[_Move]) -> list[Tensor]:
    """Return the model's parameters that an outlook is on."""
    if isinstance(outlook, ScaledGrads):
        return outlook.models + outlook.direct
    return [move.parameter for move in outlook]


def keeps_moments(optimizer: Any) -> bool:
    """Whether an optimizer has a dtype of its own for its moments, which it can be given."""
    return isinstance(getattr(type(optimizer), "state_dtype", None), property)


def _has_hooks(optimizer: Any) -> bool:
    """Whether somebody asked to be called around the step, and may look at gradients there."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    own = [getattr(optimizer, name, None) for name in names]
    return any((*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))


def _bound_wrapper(
    binding: OptimizerBinding, method: Callable[..., Any], original: Callable[..., Any]
) -> Any:
    """Return `method(original, ...)` as a bound method: schedulers look for its `__func__`."""

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not binding._live:
            return original(*args, **kwargs)
        return method(original, *args, **kwargs)

    return types.MethodType(wrapper, binding.optimizer)


@torch.no_grad()
def _add_grad(parameter: Tensor, grad: Tensor) -> None:
    """Add an unscaled gradient to the one that a parameter has; either may be sparse."""
    if parameter.grad is None:
        parameter.grad = grad
    elif parameter.grad.is_sparse and not grad.is_sparse:
        parameter.grad = grad.add_(parameter.grad)
    elif parameter.grad.is_sparse:
        parameter.grad = parameter.grad + grad
    else:
        parameter.grad.add_(grad)
