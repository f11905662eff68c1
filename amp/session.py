"""A session: everything that one `initialize` set up, and the way to undo it."""

from __future__ import annotations

import functools
import logging
import operator
import os
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn

from amp import active, arguments, checkpoint, dcp, distributed
from amp.advice import advise_on_eps, advise_on_float64, advise_on_rules
from amp.casting.by_op import CastOps
from amp.casting.fp8 import Fp8Linears
from amp.casting.fp8_history import AmaxHistory
from amp.casting.regions import ThreadState
from amp.casting.sharded import fsdp1_groups, reshard
from amp.casting.strategies import strategies_for
from amp.casting.weight_casts import forwards
from amp.diagnosis.arming import Armed
from amp.diagnosis.findings import Report
from amp.distributed import ProcessGroup
from amp.dtypes import LOW_PRECISION
from amp.errors import AmpIndexError, AmpRuntimeError, AmpTypeError, AmpWarning, brief
from amp.masters import averages
from amp.masters.lean import LeanMasterWeights
from amp.masters.state_dicts import install_hooks
from amp.masters.whole import MasterWeights
from amp.patching import Patches
from amp.profiles.levels import resolve
from amp.profiles.overrides import Overrides
from amp.profiles.properties import Properties
from amp.training import synchronization
from amp.training.attachment import AttachedOptimizer
from amp.training.blocks import Block
from amp.training.clipping import lead_to_masters
from amp.training.recorder import Transition
from amp.training.running_stats import RunningStatistics
from amp.training.scaler import LossScaler
from amp.training.synchronization import Synchronization
from amp.undo import Undo

logger = logging.getLogger("amp")

M = TypeVar("M")
T = TypeVar("T")


class Session:
    """Mixed precision for some models and optimizers, from `initialize` to `close`.

    `amp.initialize` makes one and keeps it as the default; this is the explicit form:

        with amp.Session(opt_level="O2") as session:
            model, optimizer = session.initialize(model, optimizer)
            with session.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()

    Several sessions live side by side, and several threads may each train a model of one. The functions
    that O1 and O4 patch are patched for the whole process, and each thread casts as the session whose
    model it called last. In a thread that has called none, and in compiled code, the newest session's
    casts apply.

    Args:
        opt_level: a level, an alias, or a path to a YAML profile; see `amp.load_profile`.
        num_losses: how many losses are scaled independently, by `loss_id`.
        verbosity: 0 logs nothing, not even skipped steps; 1 logs on rank 0 to the logger `amp`.
        process_group: the process group, or list of them, whose ranks hold different gradients and must
            skip a step together. None is right for one process, for DDP, whose ranks hold the same
            gradients, and for DTensors, which know their groups.
        enabled: False makes `initialize` and `scale_loss` do nothing.
        **overrides: properties on top of the profile, as in docs/profiles.md; None changes nothing.

    Attributes:
        properties: what the profile and the overrides resolved to.
        scalers: one loss scaler per loss.
        attached: what there is of each of its optimizers.
        casts: what decides whether functions cast in a thread that has called a model of it last.
        last_report: of the last step that `diagnose="on_overflow"` has watched, or None.

    Raises:
        AmpError: whatever is wrong with the profile, the overrides or their combination.
    """

    def __init__(
        self,
        opt_level: str | os.PathLike[str] = "O1",
        *,
        num_losses: int = 1,
        verbosity: int = 1,
        process_group: ProcessGroup | Sequence[ProcessGroup] | None = None,
        enabled: bool = True,
        **overrides: Unpack[Overrides],
    ) -> None:
        count = arguments.as_count(num_losses)
        self.properties = (
            Properties(enabled=False)
            if enabled is False
            else resolve(opt_level, {"enabled": enabled, **overrides})
        )
        arguments.as_flag("verbosity", verbosity)
        self.verbosity = verbosity
        self.closed = False
        arguments.check_environment()
        self._process_groups = distributed.as_process_groups(process_group)
        with torch.inference_mode(False):  # what is made in it could not be updated after it
            self.scalers = [
                LossScaler(self.properties.loss_scaling, i, self._process_groups) for i in range(count)
            ]
        self._models: list[weakref.ref[nn.Module]] = []
        kind = self.properties.master_weights
        self.masters = LeanMasterWeights(kind) if isinstance(kind, str) else MasterWeights()
        self._strategies = strategies_for(self.properties)
        self._fp8 = next((x for x in self._strategies if isinstance(x, Fp8Linears)), None)
        by_op = next((x for x in self._strategies if isinstance(x, CastOps)), None)
        self.casts: CastOps | active.NoCasts = by_op or active.NoCasts()
        weakref.finalize(self, self.casts.drop).atexit = False
        self.synchronization = Synchronization(self.properties, self._named_parameters)
        self._running_stats = RunningStatistics()
        self.attached: list[AttachedOptimizer] = []
        self.last_report: Report | None = None
        self._armed = None
        if self.properties.diagnose == "on_overflow":
            self._armed = Armed(self._alive, self._tell)
        self._undo = Undo()
        if self.properties.enabled:
            self._log(
                logging.INFO, "opt_level %s resolves to\n%s", opt_level, self.properties.describe()
            )

    @staticmethod
    def of(model: nn.Module) -> Session | None:
        """Return the open session that a model went through, or None."""
        sessions: list[Session] = active.open_sessions()
        return next((x for x in sessions if any(each is model for each in x._alive())), None)

    # Set up and tear down.

    @overload
    def initialize(
        self, models: M, optimizers: None = None, *, allow_incoming_model_not_fp32: bool = False
    ) -> M: ...

    @overload
    def initialize(
        self, models: M, optimizers: T, *, allow_incoming_model_not_fp32: bool = False
    ) -> tuple[M, T]: ...

    def initialize(
        self, models: Any, optimizers: Any = None, *, allow_incoming_model_not_fp32: bool = False
    ) -> Any:
        """Prepare models and optimizers for training; see `amp.initialize`.

        May be called again, for more models and optimizers of the same session.

        Returns:
            The objects that were passed: models alone if `optimizers` is None, else both.
        """
        self._check_open()
        allow = arguments.as_flag("allow_incoming_model_not_fp32", allow_incoming_model_not_fp32)
        if self.properties.enabled:
            model_list = arguments.as_models(models)
            optimizer_list = arguments.as_optimizers(optimizers)
            arguments.check_inference_mode([*model_list, *optimizer_list])
            for model in model_list:
                self._check_not_cast(model)
                reshard(model)
                arguments.check_model(model, allow)
                for strategy in self._strategies:
                    strategy.check_model(model)
            known = filter(None, [reference() for reference in self._models])
            arguments.check_optimizers(
                optimizer_list, [*known, *model_list], self.properties, self._process_groups
            )
            for message in advise_on_float64(model_list, self.properties):
                warnings.warn(message, AmpWarning, stacklevel=3)
            self._set_up(model_list, optimizer_list)
        return models if optimizers is None else (models, optimizers)

    @staticmethod
    def _check_not_cast(model: nn.Module) -> None:
        """Raise AmpRuntimeError for a model that a session has cast, as when a cell runs twice."""
        other = Session.of(model)
        if other is not None and other.properties.cast_model_type in LOW_PRECISION:
            raise AmpRuntimeError(
                f"this {type(model).__name__} was initialized already, at opt_level="
                f"{other.properties.opt_level!r}, and that session has cast it. Go on with what that "
                "call returned, or make a new model and optimizer, in the same cell of a notebook. To "
                "start again from these weights, close that session: amp.get_session(optimizer).close()"
            )

    def _set_up(self, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
        """Take the strategies' steps, and attach the optimizers; if any of it fails, undo all."""
        undo, is_first = Undo(), not self.is_in_use
        known, known_optimizers = len(self._models), len(self.attached)
        attached: list[AttachedOptimizer] = []
        self._undo.callback(_recast_states, attached)  # once their parameters have their dtype again
        self._undo.callback(undo.close)
        try:
            active.add(self)
            for strategy in self._strategies:
                strategy.begin(undo)
                for model in models:
                    strategy.prepare_model(model, undo)
            self._patch(undo)
            if self.has_half:
                install_hooks(self.masters, models, undo)
            self.masters.note_casts(undo.before)
            new = [self._attach(optimizer, undo) for optimizer in optimizers]
            for model in models:
                undo.callback(_stay_with(model, self))
            self._models += map(weakref.ref, models)
            self.synchronization.watch(models, undo)
            if self.properties.protect_buffers and self.properties.loss_scaling.check:
                self._running_stats.watch(models, undo)
            if self.amax_history is not None:
                self.amax_history.groups = self.synchronization.groups_of_ddps
            groups = fsdp1_groups(models)
            for one in new:
                undo.if_it_fails.append(one.remember_state())
                one.recast_state(self.properties.state_dtype)
                one.note_owned()
            self._advise(models, new)
            for scaler in self.scalers:
                before = {"process_groups": scaler.process_groups}
                undo.if_it_fails.append(functools.partial(vars(scaler).update, before))
                scaler.process_groups += groups
            self.attached += new
            undo.if_it_fails.append(attached.clear)
            attached += new
            undo.has_succeeded()
        except BaseException:
            if not undo.is_for_close:
                if is_first:
                    active.remove(self)
                undo.roll_back()
                del self._models[known:], self.attached[known_optimizers:]
            raise

    @property
    def has_half(self) -> bool:
        """Whether there are weights in 16 bits, or masters of such."""
        properties = self.properties
        return bool(properties.master_weights) or properties.cast_model_type in LOW_PRECISION

    def _patch(self, undo: Undo) -> None:
        """Replace functions of torch that would be wrong in silence; see docs/architecture.md."""
        patches = Patches()
        undo.always(averages.forget_averages)
        undo.always(patches.undo)
        finds_gradients = self.properties.master_weights or not self.scalers[0].is_identity
        if finds_gradients:
            lead_to_masters(undo)
        if finds_gradients or (self.amax_history is not None and self.amax_history.recipe.reduce_amax):
            patches.install(synchronization.PATCHES)
        if self.has_half:
            patches.install(averages.PATCHES)
        if self.properties.master_weights and dcp.is_in_use():
            patches.install(dcp.PATCHES)

    @property
    def is_in_use(self) -> bool:
        """Whether models or optimizers have been set up."""
        return bool(self._models or self.attached)

    def _advise(self, models: Sequence[nn.Module], attached: Iterable[AttachedOptimizer]) -> None:
        """Log what has been prepared, and warn of what will not work well."""
        for message in filter(None, [strategy.finish() for strategy in self._strategies]):
            self._log(logging.INFO, message)
        on_eps = [advise_on_eps(one.optimizer) for one in attached]
        for message in chain(advise_on_rules(self.properties.rules, models), *on_eps):
            self._log(logging.WARNING, message)

    def _attach(self, optimizer: Any, undo: Undo) -> AttachedOptimizer:
        attached = AttachedOptimizer(
            optimizer,
            owner=self,
            masters=self.masters,
            use_masters=bool(self.properties.master_weights),
            report=self._report_overflows,
            named_parameters=self._named_parameters,
        )
        undo.callback(attached.detach)
        attached.attach(undo.before)
        return attached

    @property
    def amax_history(self) -> AmaxHistory | None:
        """What `fp8="delayed"` remembers, or None."""
        return None if self._fp8 is None else self._fp8.history

    @property
    def casts_ops(self) -> bool:
        """Whether this session's functions cast their arguments, here and now."""
        return any(strategy.casts_ops for strategy in self._strategies)

    def stop_casting_ops(self) -> None:
        """Give torch its functions back, and leave models, optimizers and scalers as they are."""
        self.casts.stop()

    def after_fork(self) -> None:
        """Go on in a forked process, which has none of the other threads."""
        self.masters.renew_lock()
        self.casts.is_inherited = True

    def before_forward(self) -> None:
        """Prepare the forward of a model, whose hook calls this. No host sync."""
        if self.casts.live and not forwards.is_in_one():
            active.activate(self.casts)
        for attached in self.attached if self.properties.master_weights else ():
            attached.outside_changes.before_forward()

    def close(self) -> None:
        """Give torch, the models and the optimizers back as they were. Idempotent.

        After an error or an interrupt call it again; it goes on with what is left.

        Models have the dtype that they had before, with the values of the masters, and optimizer state
        the dtype of its parameters. Shards of FSDP2 stay in 16 bits at `O3`, as FSDP2 reads their dtype
        once. A `DistributedDataParallel` around a model that was cast is to be made anew. The host
        waits for the device, to log the last overflows.
        """
        self.closed = True
        before = ThreadState()
        try:
            active.remove(self)
            self.casts.stop()
            if self._armed is not None:
                self._armed.close()
            self._undo.close()
        except BaseException:
            before.put_back(after_error=True)
            raise
        self.attached.clear()
        for scaler in self.scalers:  # last: a warning may be an error
            self._report_overflows(scaler, wait=True)

    def __enter__(self) -> Session:
        self._check_open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Training.

    @contextmanager
    def scale_loss(
        self,
        loss: Tensor,
        optimizers: Any,
        loss_id: int = 0,
        model: Any = None,
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> Iterator[Tensor]:
        """Scale a loss for its backward, and unscale the gradients after it; see `amp.scale_loss`."""
        self._check_open()
        if not isinstance(loss, Tensor) or not loss.is_floating_point():
            kind = loss.dtype if isinstance(loss, Tensor) else type(loss).__name__
            raise AmpTypeError(f"amp.scale_loss needs a floating-point tensor as loss, and got {kind}")
        if not self.properties.enabled:
            yield loss
            return
        scaler = self._scaler(loss_id)
        scaler.check_loss(loss)
        for strategy in self._strategies:
            strategy.check_loss(loss)
        # An optimizer may be of another session: its gradients are as good.
        given = arguments.attached_of_a_loss(optimizers)
        for attached in given:
            attached.outside_changes.warn_if_missed()
        histories = [attached.owner.amax_history for attached in given]
        block = Block(
            scaler,
            [attached.gradients for attached in given],
            list(dict.fromkeys(filter(None, histories))),
        )
        before = ThreadState()
        try:
            try:
                scaled_loss = block.enter(loss)
                if self._armed is not None:
                    self._armed.begin_block(block.scale.scale)
                self._report_overflows(scaler)
                yield scaled_loss
                if delay_unscale or not block.is_reduced():
                    block.delay()
                else:
                    block.leave(update=not delay_overflow_check)
                self._running_stats.repair()
                if self._armed is not None:
                    self._armed.end()
            except BaseException:
                before.put_back(after_error=True)
                block.abort()
                raise
        except BaseException:  # if an interrupt came before that was done
            before.put_back(after_error=True)
            block.abort()
            raise

    def loss_scale(self, loss_id: int = 0) -> float:
        """Return the current loss scale. The host waits for the device."""
        return self._scaler(loss_id).loss_scale()

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return what a checkpoint needs; see `amp.state_dict`."""
        if not self.properties.enabled:
            return OrderedDict()
        state = checkpoint.save(self.scalers, self.properties.opt_level)
        for strategy in self._strategies:
            if strategy.state_key and (own := strategy.state_dict()):
                state[strategy.state_key] = own
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a saved state; see `amp.load_state_dict`."""
        self.take_over(checkpoint.read(state_dict))

    def take_over(self, saved: checkpoint.SavedState) -> None:
        """Go on from a saved state, after warnings of what differs."""
        if not self.properties.enabled:
            return
        own = [(x, saved.strategies.get(x.state_key)) for x in self._strategies if x.state_key]
        differences = checkpoint.differences(saved, len(self.scalers), self.properties.opt_level)
        for message in (*differences, *(strategy.differences(state) for strategy, state in own)):
            if message:  # before anything is changed: a warning may be an error
                warnings.warn(message, AmpWarning, stacklevel=3)
        for i, scaler in enumerate(self.scalers):
            if i in saved.scalers:
                scaler.take_over(saved.scalers[i])
        for strategy, state in own:
            strategy.load_state_dict(state)

    def _scaler(self, loss_id: int) -> LossScaler:
        try:
            number = operator.index(loss_id)
        except Exception:  # whatever a tensor or an array raises
            number = -1
        if not 0 <= number < len(self.scalers):
            raise AmpIndexError(
                f"loss_id={brief(loss_id)} is not one of 0 to {len(self.scalers) - 1}: num_losses was "
                f"{len(self.scalers)}. Pass num_losses=... to amp.initialize for more."
            )
        return self.scalers[number]

    def _report_overflows(self, scaler: LossScaler, wait: bool = False) -> None:
        """Log the overflows that the host has learnt of, and warn once if they do not end."""
        for row in scaler.learn(wait, -1 if self._armed is None else self._armed.until(scaler)):
            if not row.overflow:
                continue
            self._log(
                logging.WARNING,
                "Gradient overflow.  Skipping step, loss scaler %d "
                + ("reducing loss scale to %s" if scaler.config.dynamic else "stays at %s"),
                scaler.loss_id,
                row.next_scale,
            )
        if self._armed is not None:
            self._armed.look(scaler)
        scaler.warn_if_endless()

    def history(self, wait: bool = True) -> list[Transition]:
        """Return the last updates of the loss scalers; see `amp.history`.

        Args:
            wait: for those that are still under way. Otherwise there is no host sync.
        """
        for scaler in self.scalers:
            self._report_overflows(scaler, wait)
        return [row for scaler in self.scalers for row in scaler.history()]

    def _tell(self, report: Report) -> None:
        """Keep and log what was seen in a step after a streak of overflows."""
        self.last_report = report
        self._log(logging.WARNING, "a step after a streak of overflows was watched:\n%s", report)

    def _alive(self) -> list[nn.Module]:
        return [model for reference in self._models if (model := reference()) is not None]

    def _named_parameters(self) -> dict[tuple[int, str], Tensor]:
        """Return the parameters of all models, by the number of the model and their name in it."""
        return {
            (i, name): parameter
            for i, model in enumerate(self._alive())
            for name, parameter in model.named_parameters()
        }

    def _check_open(self) -> None:
        if self.closed:
            raise AmpRuntimeError("this session was closed; make a new one with amp.initialize")

    def _log(self, level: int, message: str, *args: object) -> None:
        if self.verbosity and distributed.rank() == 0:
            logger.log(level, message, *args)


class _BeforeForward:
    """A forward pre-hook of a model, which keeps the session. That of a copy does nothing."""

    def __init__(self, session: Session | None = None) -> None:
        self._session = session

    def __call__(self, module: nn.Module, args: object) -> None:
        if self._session is not None and not torch.compiler.is_compiling():
            self._session.before_forward()

    def __deepcopy__(self, memo: object) -> _BeforeForward:
        return _BeforeForward()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _BeforeForward, ()


def _stay_with(model: nn.Module, session: Session) -> Callable[[], object]:
    """Let a session stay open for as long as a model lives, and return what ends that."""
    if isinstance(session.casts, CastOps):  # whose casts begin in the call itself
        cls: Any = type(model)  # made for this model
        cls._amp_session = session
        return functools.partial(setattr, cls, "_amp_session", None)
    return model.register_forward_pre_hook(_BeforeForward(session), prepend=True).remove


def _recast_states(attached: Iterable[AttachedOptimizer]) -> None:
    for one in attached:
        one.recast_state()
