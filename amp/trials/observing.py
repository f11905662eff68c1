"""Observing a training run: its losses, gradients, skipped steps, time and memory.

A `RunObserver` is called when a session scales a loss and when an optimizer steps. It changes no values
of the run, and its own time is not counted as the run's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from amp.casting.cast_hooks import cast_inputs_to
from amp.diagnosis.diagnose import prefixed
from amp.names import unwrapped_name
from amp.observers import Observer, observing
from amp.session import Session
from amp.training.attached_optimizer import AttachedOptimizer
from amp.training.blocks import Block
from amp.training.gradients import State
from amp.trials.activation_memory import Activations, size_of

ModuleGradients = dict[str, list[Tensor]]
"""The unscaled gradients of each module's own parameters, on the host, by the module's name."""


@dataclass(frozen=True)
class Trial:
    """The description of one run to make.

    Attributes:
        level: a level, an alias, or a path to a YAML profile.
        steps: how many optimizer steps to make.
        seed: the seed of all random number generators.
        in_float64: whether the model and its inputs are cast to FP64, for a reference.
        scales: the initial loss scales of all sessions, in order; empty uses those of the profile.
    """

    level: Any
    steps: int
    seed: int = 0
    in_float64: bool = False
    scales: tuple[float, ...] = ()


@dataclass
class Record:
    """The measurements of a run.

    Attributes:
        device: the type of the weights' device: `cpu`, `cuda`.
        has_bfloat16: whether the device computes in bfloat16 without emulation.
        losses: by the name of the loss, for each step the sum over its `scale_loss` blocks.
        skipped: for each step, whether an optimizer skipped it.
        first: the gradients of the first step, after clipping.
        still: for each step that was not skipped, the fraction of weights, or of masters if there are
            any, that it did not change although their gradient is not 0.
        seconds: the time of each step but the first, without the observer's own time.
        memory: bytes: `weights` with masters, `gradients`, `optimizer_state`, `activations` (the most
            that autograd saved in the first step; not on a GPU) and `peak` (of the second step, on a
            GPU).
        scales: the loss scales after every optimizer had made a step that was not skipped, or at the
            end; see `Trial`.
        small: a sentence on layers that are too small to gain in FP8, or an empty string.
    """

    device: str = "cpu"
    has_bfloat16: bool = False
    losses: dict[str, list[float]] = field(default_factory=dict)
    skipped: list[bool] = field(default_factory=list)
    first: ModuleGradients = field(default_factory=dict)
    still: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    scales: tuple[float, ...] = ()
    small: str = ""


@dataclass(eq=False)
class _Log:
    """The notes on one optimizer.

    Attributes:
        attached: the optimizer.
        sums: the sums of losses by `loss_id`, over the blocks since the last step.
        losses: those of each step, by `loss_id`.
        skipped: for each step, whether it was skipped.
        before: parameters, their values before the present step, and where their gradients are not 0;
            None if it is not to be seen which of them stand still.
    """

    attached: AttachedOptimizer
    sums: dict[int, Tensor] = field(default_factory=dict)
    losses: dict[int, list[Tensor]] = field(default_factory=dict)
    skipped: list[bool] = field(default_factory=list)
    before: list[tuple[Tensor, Tensor, Tensor]] | None = None

    @property
    def steps(self) -> int:
        return len(self.skipped)


class RunObserver(Observer, AbstractContextManager["RunObserver"]):
    """Watches the sessions of this process inside a `with` block.

    Steps are counted by the first optimizer that is given to `initialize`. The run is complete when all
    optimizers that step have made `trial.steps` steps, or when the first one begins another step.

    Args:
        trial: the run.
        when_complete: called when the run is complete; it may raise, out of `optimizer.step`.
    """

    def __init__(self, trial: Trial, when_complete: Callable[[], None] = lambda: None) -> None:
        self.trial, self.last_step = trial, trial.steps
        self.is_complete = False
        self._when_complete = when_complete
        self._open, self._measuring = ExitStack(), ExitStack()
        self._sessions: list[Session] = []
        self._logs: dict[int, _Log] = {}  # by the id of the optimizer; the first one counts the steps
        self._stepping: set[int] = set()  # the ids of optimizers in their step
        self._record = Record()
        self._clock = _Clock()

    def __enter__(self) -> RunObserver:
        self._open.enter_context(observing(self))
        return self

    def __exit__(self, *exception: object) -> None:
        self._measuring.close()
        self._open.close()

    @property
    def has_begun(self) -> bool:
        """Whether `initialize` was given an optimizer, and is enabled."""
        return bool(self._logs)

    @property
    def steps(self) -> int:
        """The most steps that an optimizer has made."""
        return max((log.steps for log in self._logs.values()), default=0)

    def seen(self) -> Record:
        """Return the measurements so far. The host waits for the device."""
        logs, record = self._logs.values(), self._record
        steps = min(self.trial.steps, self.steps)
        losses = self._named_losses()
        record.losses = {x: [loss.item() for loss in values[:steps]] for x, values in losses.items()}
        record.skipped = [any(log.skipped[i : i + 1] == [True] for log in logs) for i in range(steps)]
        record.scales = record.scales or self._scales()
        return record

    def _named_losses(self) -> dict[str, list[Tensor]]:
        found = [(i, *each) for i, log in enumerate(self._logs.values()) for each in log.losses.items()]
        ids = [loss_id for _, loss_id, _ in found]
        named = {}
        for i, loss_id, losses in found:
            name = "loss" if len(found) == 1 else f"loss {loss_id}"
            named[name if ids.count(loss_id) == 1 else f"{name} of optimizer {i}"] = losses
        return named

    # Events of sessions and optimizers.

    def initialize_begins(self, session: Session, models: Sequence[nn.Module]) -> None:
        """Cast the model to FP64, for a reference."""
        for model in models if self.trial.in_float64 else ():
            model.double()
            self._open.callback(cast_inputs_to(model, torch.float64))

    def initialize_ends(
        self, session: Session, models: Sequence[nn.Module], optimizers: Sequence[Any]
    ) -> None:
        """Begin to measure when there is an optimizer."""
        if session not in self._sessions:
            given = self.trial.scales[len(self._scales()) :]
            for scaler, scale in zip(session.scalers, given, strict=False):
                if scaler.config.dynamic:
                    scaler.set_scale(scale)
            self._sessions.append(session)
        if session.fp8 is not None:
            self._record.small = session.fp8.small_said
        had_begun = self.has_begun
        for attached in filter(None, map(AttachedOptimizer.of, optimizers)):
            self._logs.setdefault(id(attached), _Log(attached))
        if self.has_begun and not had_begun:
            self._begin(list(session.named_parameters().values()))

    def _begin(self, parameters: list[Tensor]) -> None:
        self._record.device = parameters[0].device.type if parameters else "cpu"
        if self._record.device == "cuda":
            self._record.has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            activations = Activations(parameters)
            self._measuring.callback(lambda: self._add_memory("activations", activations.most))
            self._measuring.enter_context(saved_tensors_hooks(activations.pack, activations.unpack))
        self._clock.start(self._record.device)

    def block_entered(
        self, session: Session, block: Block, loss: Tensor, attached: Sequence[AttachedOptimizer]
    ) -> None:
        """Note the loss."""
        log, loss_id = self._logs.get(id(attached[0])), block.scaler.loss_id
        if log is not None:
            value = loss.detach().double().sum()
            log.sums[loss_id] = log.sums[loss_id] + value if loss_id in log.sums else value

    def step_begins(self, attached: AttachedOptimizer, closure: Callable[[], Any] | None) -> Any:
        """Note gradients and weights, or return a closure that notes gradients."""
        log = self._logs.get(id(attached))
        if log is None or attached.gradients.state is State.OPEN:  # the call will be refused
            return closure
        if self.is_complete or (self._is_first(log) and log.steps == self.trial.steps):
            self._complete()
        self._stepping.add(id(attached))
        if closure is not None:
            return self._look_into(closure, log)
        with self._clock.stopped():
            self._look_before(log)
        return None

    def step_ends(self, attached: AttachedOptimizer) -> None:
        """Note what the step did, and whether the run is complete."""
        log, record = self._logs.get(id(attached)), self._record
        if log is None or id(attached) not in self._stepping:
            return
        self._stepping.remove(id(attached))
        if self._is_first(log):
            seconds = self._clock.lap()
            record.seconds += [seconds] * bool(log.steps)
            if log.steps == 1 and record.device == "cuda":
                record.memory["peak"] = torch.cuda.max_memory_allocated()
        with self._clock.stopped():
            self._look_after(log)
        if all(each.steps >= self.trial.steps for each in self._logs.values() if each.steps):
            self._complete()

    def _is_first(self, log: _Log) -> bool:
        return log is next(iter(self._logs.values()))

    def _complete(self) -> None:
        self.is_complete = True
        self._when_complete()

    # Notes.

    def _look_before(self, log: _Log) -> None:
        """Note the gradients of this step, after unscaling and clipping, and the weights."""
        attached, trained = log.attached, self._note_gradients(log)
        if log.steps == 0:
            self._add_memory("gradients", size_of(trained.values()))
        is_idle = all(float(group.get("lr", 1.0)) == 0.0 for group in attached.optimizer.param_groups)
        is_measured = self._record.device == "cuda" and log.steps == 1  # a copy would raise its peak
        log.before = None
        if not (is_idle or is_measured):
            log.before = [
                (parameter, _value(attached, parameter).clone(), (grad != 0) & grad.isfinite())
                for parameter, grad in trained.items()
            ]

    def _look_into(self, closure: Callable[[], Any], log: _Log) -> Callable[[], Any]:
        """Return a closure that notes gradients at its first evaluation in a step only."""
        evaluated = False

        def watched() -> Any:
            nonlocal evaluated
            sums = dict(log.sums)
            result = closure()
            if evaluated:
                log.sums = sums
            elif log.attached.gradients.state is not State.OPEN:
                with self._clock.stopped():
                    self._note_gradients(log)
            evaluated = True
            return result

        return watched

    def _note_gradients(self, log: _Log) -> dict[Tensor, Tensor]:
        """Keep the gradients of the first step; return parameters with theirs, scaled or not."""
        gradients, masters = log.attached.gradients, log.attached.masters
        gradients.finish_delayed()
        gradients.reconcile()
        trained = {parameter: _dense(grad) for parameter, grad in gradients.grads_for_step()}
        kept = gradients.deferral.kept
        inv_scale = 1.0 if kept is None or kept.inv_scale is None else float(kept.inv_scale)
        for parameter, name in self._names() if log.steps == 0 else ():
            if parameter in trained:
                grad, is_scaled = trained[parameter].cpu(), masters.pair(parameter) is not None
                value = grad.float() * inv_scale if is_scaled else grad.clone()
                self._record.first.setdefault(name, []).append(value)
        return trained

    def _names(self) -> Iterator[tuple[Tensor, str]]:
        """Yield the parameters of all models, each with the name of the module that owns it."""
        models = [model for session in self._sessions for model in session.live_models()]
        for prefix, model in prefixed(models).items():
            for name, parameter in model.named_parameters():
                module = unwrapped_name(name).rpartition(".")[0] or type(model).__name__
                yield parameter, prefix + module

    def _look_after(self, log: _Log) -> None:
        """Note what the step did."""
        record, attached = self._record, log.attached
        if log.steps == 0:
            self._note_weights(log)
            self._measuring.close()
        if log.steps == 1 and record.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for loss_id, value in log.sums.items():
            log.losses.setdefault(loss_id, []).append(value)
        log.skipped.append(attached.step.was_skipped)
        if log.before is not None and not log.skipped[-1]:
            moving = sum(int(moves.sum()) for *_, moves in log.before)
            still = [((_value(attached, x) == value) & moves).sum() for x, value, moves in log.before]
            record.still.append(sum(map(int, still)) / max(moving, 1))
        log.sums, log.before = {}, None
        if not record.scales and all(False in each.skipped for each in self._logs.values()):
            record.scales = self._scales()

    def _scales(self) -> tuple[float, ...]:
        return tuple(each.loss_scale() for one in self._sessions for each in one.scalers)

    def _note_weights(self, log: _Log) -> None:
        """Note the bytes of weights, masters and optimizer state."""
        attached, masters = log.attached, log.attached.gradients.parameters.masters
        if self._is_first(log):
            models = attached.owner.live_models()
            held = (x for model in models for x in (*model.parameters(), *model.buffers()))
            self._add_memory("weights", size_of(held))
        halves = attached.masters.low_halves(masters) or []
        self._add_memory("weights", size_of([*masters, *halves]))
        state = tree_leaves([*attached.optimizer.state.values()])
        self._add_memory("optimizer_state", size_of(x for x in state if isinstance(x, Tensor)))

    def _add_memory(self, part: str, size: int) -> None:
        self._record.memory[part] = self._record.memory.get(part, 0) + size


class _Clock:
    """The time of a run, without the time of its observer."""

    def start(self, device: str) -> None:
        """Start the clock, on a type of device."""
        self._device = device
        self._began = self._now()

    def lap(self) -> float:
        """Return the seconds since the last call or the start. On a GPU the host waits for it."""
        before, self._began = self._began, self._now()
        return self._began - before

    def _now(self) -> float:
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Exclude the time of the block, and run it without autograd."""
        began = self._now()
        try:
            with torch.no_grad():
                yield
        finally:
            self._began += self._now() - began


def _value(attached: AttachedOptimizer, parameter: Tensor) -> Tensor:
    """Return the values of a parameter: those in FP32 of its master, if it has one."""
    pair = attached.masters.pair(parameter)
    return parameter.detach() if pair is None else pair.values()


def _dense(grad: Tensor) -> Tensor:
    return grad if grad.layout is torch.strided else grad.to_dense()
