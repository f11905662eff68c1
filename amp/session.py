"""`Session`: the models, optimizers and loss scalers of one `initialize`, until it is closed."""

from __future__ import annotations

import functools
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn, Unpack, overload

import torch
from torch import Tensor, nn

from amp import active, arguments, checkpoint, distributed
from amp.arguments import Models, Optimizers
from amp.casting.by_op import CastOps
from amp.casting.fp8_strategy import Fp8Linears, set_forward
from amp.casting.memory_checks import named_tensors
from amp.casting.regions import DEVICE_TYPES, ThreadState, forwards
from amp.casting.strategies import strategies_for
from amp.distributed import ProcessGroup
from amp.dtypes import LOW_PRECISION
from amp.errors import AmpAttributeError, AmpRuntimeError, AmpTypeError, truth_of
from amp.masters.master_weights import MasterWeights
from amp.observer_makers import MAKERS
from amp.observers import Observer, everywhere
from amp.other_names import hint_at_attribute
from amp.profiles.keys import parse_count
from amp.profiles.levels import resolve
from amp.profiles.options import OptLevel, Overrides
from amp.profiles.properties import Properties
from amp.setup import Setup
from amp.training.attached_optimizer import AttachedOptimizer
from amp.training.blocks import Block
from amp.training.recorder import Transition
from amp.training.running_stats import RunningStatistics
from amp.training.scaler import LossScaler
from amp.training.synchronization import Synchronization
from amp.training.wrapped_optimizers import ATTACHED, Optimizer
from amp.undo import Undo

logger = logging.getLogger("amp")


class Session:
    """Mixed precision for some models and optimizers, from `initialize` to `close`.

    `amp.initialize` makes one and keeps it as the default; this is the explicit form:

        with amp.Session(opt_level="O2") as session:
            model, optimizer = session.initialize(model, optimizer)
            with session.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()

    There may be several sessions at once, and several threads that train their models. O1 and O4 patch
    functions for the whole process. In each thread, they cast as in the session whose model the thread
    called last. In a thread that has called no model, and in compiled code, the casts of the
    newest session apply.

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
        properties: the properties of the profile and the overrides.
        scalers: one loss scaler per loss.
        observers: the observers that are told what happens in the session; see `amp.observers`.
        attached: the `AttachedOptimizer` of each optimizer.
        strategies: the ways in which its models get their precision.
        fp8: the one of these strategies that runs linear layers in FP8 or FP4, or None.
        is_plain: whether blocks and steps change nothing, as at O0: no scale, no check, no masters.
        masters: the master weights.
        casts: the object that casts functions in threads that have called a model of the session last.
        is_rehearsal: whether blocks drop their gradients and optimizers do not step, as in a trial.
        last_report: the `amp.diagnosis.Report` of the last step that `diagnose="on_overflow"` has
            watched, or None.

    Raises:
        AmpError: the profile, an override or their combination is not valid.
    """

    def __init__(
        self,
        opt_level: OptLevel = "O1",
        *,
        num_losses: int = 1,
        verbosity: int = 1,
        process_group: ProcessGroup | Sequence[ProcessGroup] | None = None,
        enabled: bool = True,
        **overrides: Unpack[Overrides],
    ) -> None:
        count = parse_count("num_losses", num_losses, most=10_000)
        options = {"enabled": enabled, **overrides}
        for observer in tuple(everywhere):
            opt_level = observer.session_begins(opt_level, options)
        self.properties = Properties(enabled=False) if enabled is False else resolve(opt_level, options)
        arguments.check_verbosity(verbosity)
        self._verbosity = verbosity
        self.closed = False
        arguments.check_environment()
        self.process_groups = distributed.as_process_groups(process_group)
        with torch.inference_mode(False):  # tensors made in it could not be updated after it
            self.scalers = [
                LossScaler(self.properties.loss_scaling, i, self.process_groups) for i in range(count)
            ]
        self.models: list[weakref.ref[nn.Module]] = []
        self.attached: list[AttachedOptimizer] = []
        self.masters = MasterWeights(self.properties.master_weights)
        self.strategies = strategies_for(self.properties)
        in_fp8 = [x for x in self.strategies if isinstance(x, Fp8Linears)]
        self.fp8 = in_fp8[0] if in_fp8 and self.properties.fp8 is not None else None
        by_op = next((x for x in self.strategies if isinstance(x, CastOps)), None)
        self.casts: CastOps | active.NoCasts = by_op or active.NoCasts()
        weakref.finalize(self, self.casts.drop).atexit = False
        self.is_plain = not (
            self.properties.master_weights
            or self.fp8
            or any(x.config.check or not x.config.is_identity for x in self.scalers)
        )
        self.synchronization = Synchronization(self)
        self.running_stats = RunningStatistics()
        self.is_rehearsal = False
        self.last_report: Any = None
        self.observers: list[Observer] = []
        if self.properties.diagnose is not None:
            self.observers.append(MAKERS[self.properties.diagnose](self))
        self.undos: list[Undo] = []
        self._called = opt_level

    # Set up and tear down.

    @overload
    def initialize(
        self, models: Models, optimizers: None = None, *, allow_incoming_model_not_fp32: bool = False
    ) -> Models: ...

    @overload
    def initialize(
        self, models: Models, optimizers: Optimizers, *, allow_incoming_model_not_fp32: bool = False
    ) -> tuple[Models, Optimizers]: ...

    def initialize(
        self, models: Any, optimizers: Any = None, *, allow_incoming_model_not_fp32: bool = False
    ) -> Any:
        """Prepare models and optimizers for training; see `amp.initialize`.

        May be called again, for more models and optimizers of the same session.

        Returns:
            The objects that were passed: models alone if `optimizers` is None, else both.
        """
        self._check_open()
        allow = truth_of("allow_incoming_model_not_fp32", allow_incoming_model_not_fp32)
        if self.properties.enabled:
            model_list = arguments.as_models(models)
            optimizer_list = arguments.as_optimizers(optimizers)
            arguments.check_inference_mode([*model_list, *optimizer_list])
            told = (*everywhere, *self.observers)
            for observer in told:
                observer.initialize_begins(self, model_list)
            setup = Setup(self, model_list, optimizer_list)
            setup.check(allow)
            if not (self.models or self.attached):
                level, text = self._called, self.properties.describe()
                self.log(logging.INFO, "opt_level %s resolves to\n%s", level, text)
            setup.run()
            for observer in told:
                observer.initialize_ends(self, model_list, optimizer_list)
        return models if optimizers is None else arguments.Prepared((models, optimizers))

    def close(self) -> None:
        """Restore torch, the models and the optimizers. Idempotent.

        After an interrupt, or an error such as a lack of memory, call it again: it goes on with the
        rest, and nothing is lost.

        Models get back the dtype that they had before, with the values of the masters, and optimizer
        state gets the dtype of its parameters. At `O3`, shards of FSDP2 stay in 16 bits, because FSDP2
        reads their dtype only once. A `DistributedDataParallel` around a model that was cast must be
        made again. The host waits for the device, to log the last overflows.
        """
        self.closed = True
        ThreadState().around(self._close)
        self.attached.clear()
        for scaler in self.scalers:  # last, because a warning may be turned into an error
            self.learn(scaler, wait=True)

    def _close(self) -> None:
        active.remove(self)
        self.casts.stop()
        for each in (*everywhere, *self.observers):
            each.session_ends(self)
        with torch.inference_mode(False):  # weights that are cast in it could not be trained
            memory = self.masters.memory
            memory.note(named_tensors(self.live_models()))
            for undo in self.undos:  # of other models too, whatever fails below
                undo.unpatch()
            for undo in reversed(self.undos):
                undo.close()
            self.masters.forget_casts()
            memory.forget()

    def __enter__(self) -> Session:
        self._check_open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if not self.properties.enabled:
            return f"Session({self._called!r}, enabled=False)"
        scales = [x.loss_scale() if x.is_on_host else x.recorder.scale for x in self.scalers]
        listed = {
            "models": [type(model).__name__ for model in self.live_models()],
            "optimizers": [type(each.optimizer).__name__ for each in self.attached],
            "loss_scale": [f"{scale:g}" for scale in scales],  # on a device, the last that has arrived
        }
        parts = [f"{name}=[{', '.join(values)}]" for name, values in listed.items()]
        return f"Session({', '.join([repr(self._called), *parts])}{', closed' * self.closed})"

    if not TYPE_CHECKING:  # type checkers would allow every name

        def __setattr__(self, name: str, value: Any) -> None:
            is_made = "_called" in vars(self)
            if is_made and name not in ("closed", "is_rehearsal", "last_report"):
                hint = "" if name in dir(self) else hint_at_attribute(name, dir(self), places=())
                if hasattr(self.properties, name) or name in ("num_losses", "verbosity"):
                    hint = f"; pass {name}=... to amp.initialize"
                if name in ("loss_scale", "loss_scaler", "scaler"):
                    hint += "; session.scalers[0].set_scale(...) changes the scale later"
                raise AmpAttributeError(f"session.{name} cannot be set{hint}")
            super().__setattr__(name, value)

    def __reduce__(self) -> NoReturn:
        raise AmpTypeError(
            "a session can be neither pickled nor copied: it belongs to the models and optimizers of "
            "one process. Save amp.state_dict(), model.state_dict() and optimizer.state_dict(); in "
            "another process, call amp.initialize and load them"
        )

    # Training.

    def watch_forwards(self, model: nn.Module) -> Callable[[], object]:
        """Prepare each forward of a model, and live as long as it; return a function that ends both."""
        if isinstance(self.casts, CastOps):  # which needs no hook: the model's class begins the casts
            cls: Any = type(model)  # a class that was made for this model
            cls._amp_session = self
            return functools.partial(setattr, cls, "_amp_session", None)
        return model.register_forward_pre_hook(_BeforeForward(self), prepend=True).remove

    def scale_loss(
        self,
        loss: Tensor,
        optimizers: Optimizer | Sequence[Optimizer] | None = None,
        loss_id: int = 0,
        model: Any = None,
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> AbstractContextManager[Tensor]:
        """Scale a loss for its backward, and unscale the gradients after it; see `amp.scale_loss`."""
        if self.closed:
            self._check_open()
        if not (isinstance(loss, Tensor) and loss.is_floating_point()):
            arguments.check_loss(loss)
        if not self.properties.enabled:
            return nullcontext(loss)
        is_there = type(loss_id) is int and 0 <= loss_id < len(self.scalers)
        scaler = self.scalers[loss_id] if is_there else self._scaler(loss_id)
        if loss.is_meta or loss.is_quantized:
            scaler.check_loss(loss)
        for strategy in self.strategies if loss.dtype in LOW_PRECISION else ():
            strategy.check_loss(loss)
        # An optimizer may belong to another session: its gradients are unscaled all the same.
        own = getattr(optimizers, ATTACHED, None)
        given = arguments.attached_of_a_loss(optimizers) if own is None else [own]
        in_fp8 = [each.owner.fp8 for each in given if each.owner.fp8 is not None]
        histories = list(dict.fromkeys(x.history for x in in_fp8 if x.history is not None))
        block = Block(scaler, [each.gradients for each in given], histories)
        if delay_unscale or delay_overflow_check:
            delay_unscale = truth_of("delay_unscale", delay_unscale)
            delay_overflow_check = truth_of("delay_overflow_check", delay_overflow_check)
        update = not delay_overflow_check
        return block.around_backward(self, loss, given, delay=delay_unscale, update=update)

    def set_fp4_forward(self, forward: str) -> None:
        """Compute outputs of layers in `fp4`, or from the next forward on in half precision, `high`.

        Raises AmpRuntimeError if there are no layers in FP4; see docs/fp4.md. The host does not wait.
        """
        self._check_open()
        set_forward(self.fp8, forward)

    def loss_scale(self, loss_id: int = 0) -> float:
        """Return the current loss scale. The host waits for the device."""
        scale = self._scaler(loss_id).loss_scale()
        self._note_that_scripts_read(scale)
        return scale

    def _note_that_scripts_read(self, *scales: float) -> None:
        for misuse in filter(None, [attached.misuse for attached in self.attached]):
            for scale in scales:
                misuse.scale_is_read(scale)

    def _scaler(self, loss_id: int) -> LossScaler:
        return self.scalers[arguments.number_of_loss(loss_id, len(self.scalers))]

    def learn(self, scaler: LossScaler, wait: bool = False) -> None:
        """Read the updates of a scaler that have reached the host, log overflows, and tell observers.

        Args:
            scaler: a scaler of this session.
            wait: whether to wait for the others. If not, only an observer may make the host wait.
        """
        recorder, told = scaler.recorder, (*everywhere, *self.observers)
        until = max([observer.must_know(scaler) for observer in told], default=-1)
        rows = recorder.learn(wait, until)
        for observer in told:
            observer.verdicts(self, scaler, rows)
        moves = "reducing loss scale to %s" if scaler.config.dynamic else "stays at %s"
        for row in rows:
            if row.overflow:
                message = f"Gradient overflow.  Skipping step, loss scaler %d {moves}"
                self.log(logging.WARNING, message, scaler.loss_id, row.next_scale)
        if recorder.streak is not None:
            recorder.warn_if_endless(self.properties.diagnose is not None)

    def history(self, wait: bool = True) -> list[Transition]:
        """Return the last updates of the loss scalers; see `amp.history`.

        With `wait`, the host waits for those that have not reached it yet.
        """
        for scaler in self.scalers:
            self.learn(scaler, truth_of("wait", wait))
        return [row for scaler in self.scalers for row in scaler.recorder.history()]

    # Saving.

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the state for a checkpoint; see `amp.state_dict`."""
        if not self.properties.enabled:
            return OrderedDict()
        state = checkpoint.save(self)
        self._note_that_scripts_read(
            *(state[f"loss_scaler{i}"]["loss_scale"] for i in range(len(self.scalers)))
        )
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a saved state; see `amp.load_state_dict`."""
        checkpoint.restore(checkpoint.read(state_dict), self)

    # Questions about the session.

    def live_models(self) -> list[nn.Module]:
        """Return the models that were prepared and still exist."""
        return [model for reference in self.models if (model := reference()) is not None]

    def named_parameters(self) -> dict[tuple[int, str], Tensor]:
        """Return the parameters of all models, each by the number of its model and its name in it."""
        return {
            (i, name): parameter
            for i, model in enumerate(self.live_models())
            for name, parameter in model.named_parameters()
        }

    def _check_open(self) -> None:
        if self.closed:
            raise AmpRuntimeError("this session was closed; make a new one with amp.initialize")

    def log(self, level: int, message: str, *args: object) -> None:
        """Log on rank 0, unless `verbosity` is 0."""
        if self._verbosity and distributed.rank() == 0:
            logger.log(level, message, *args)


class _BeforeForward:
    """A forward pre-hook that prepares a forward, without a host sync, and keeps the session alive.

    In a copy of the model it does nothing.
    """

    def __init__(self, session: Session | None = None) -> None:
        self._session = session

    def __call__(self, module: nn.Module, args: object) -> None:
        session = self._session
        if session is None or torch.compiler.is_compiling():
            return
        if session.casts.live and not (forwards.are_running or forwards.casts is not None):
            active.activate(session.casts)
        if any(map(torch.is_autocast_enabled, DEVICE_TYPES)):
            for strategy in session.strategies[:1]:  # the same check in all
                strategy.check_region()
        for attached in session.attached if session.properties.master_weights else ():
            if not attached.step.is_running:  # it runs a closure, and writes masters before that
                attached.gradients.reconcile("forward")

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _BeforeForward, ()
