"""The loss scaler: one state machine, with its state in one small tensor on the loss's device.

Static scaling and no scaling are the same class with a scale that never moves, so no caller has to ask
which kind it has. `checks` says for each optimizer whether gradients are checked.

The host learns of an overflow in two ways: from a `Verdict`, for which it waits, and from a
`Transition`, which arrives later without waiting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from amp.distributed import ProcessGroup, without_contained
from amp.dtypes import LOW_PRECISION
from amp.errors import AmpAttributeError, AmpTypeError, AmpValueError
from amp.lazy import kernels
from amp.profiles.keys import parse_positive
from amp.profiles.loss_scaling import LossScaling
from amp.state_checks import StateChecks
from amp.training.recorder import (
    FOUND_INF,
    GOOD_STEPS,
    INVERSE,
    SCALE,
    STATE_SIZE,
    UPDATES,
    FlightRecorder,
    Names,
)

if TYPE_CHECKING:
    from amp.kernels.launch_plans import BadSteps


LARGEST_STATE_COUNT = 2**24
"""Counts in the state are exact up to this number, and do not go beyond it."""


class ScaleSnapshot(NamedTuple):
    """The scale that a loss was scaled by, float32 `[]`, and its inverse, float32 `[1]`.

    The scale may have changed since; `version` is the scaler's version at that time.
    """

    scaler: LossScaler
    version: int
    scale: Tensor
    inv_scale: Tensor

    def is_current(self, scaler: LossScaler) -> bool:
        """Whether a loss scaled by `scaler` now would have this same scale. No host sync."""
        if self.scaler.config.is_identity and scaler.config.is_identity:
            return True
        return self.scaler is scaler and self.version == scaler.version


class ScalerState(NamedTuple):
    """A saved state of a scaler, whose entries have been checked: apex's two, and our own.

    Attributes:
        loss_scale: the scale.
        unskipped: how many good steps there were since it moved.
        dynamic: whether it moves; None if the state does not say so, as apex's.
        hysteresis_left: how many more overflows it takes before it backs off; the most possible, if the
            state does not say so.
        overflows_in_a_row: how many there were.
    """

    loss_scale: float
    unskipped: int
    dynamic: bool | None
    hysteresis_left: int
    overflows_in_a_row: int


def read_state(state: Mapping[str, Any], path: str) -> ScalerState:
    """Return a saved state, ours or apex's.

    Args:
        state: what `LossScaler.state_dict` returns.
        path: the state's name in errors.

    Raises:
        AmpValueError: an entry is missing, unknown, or not what it should be.
    """
    checks, keys = StateChecks(), ScalerState._fields
    scale = checks.number(state, "loss_scale", path, low=0.0)
    for key in state:
        if key not in keys:
            checks.fail(path, key, "no loss scaler has it", f"only {', '.join(keys)}")
    dynamic = checks.flag(state, "dynamic", path) if "dynamic" in state else None
    most = LARGEST_STATE_COUNT
    good_steps = min(checks.count(state, "unskipped", path), most)
    left = checks.count(state, "hysteresis_left", path) if "hysteresis_left" in state else most
    overflows = checks.count(state, "overflows_in_a_row", path) if "overflows_in_a_row" in state else 0
    return ScalerState(scale, good_steps, dynamic, left, min(overflows, most))


class LossScaler:
    """Scales one loss and follows the overflows of its gradients.

    Attributes:
        config: how the scale starts and moves.
        loss_id: its number in the session.
        process_groups: the process groups whose ranks skip a step together.
        version: counts the times that the scale may have changed. It shows, without asking the device,
            whether two losses share one scale.
        updates: how often it was updated.
        recorder: the recent updates, as far as they have reached the host.
        device: the device of the scale, which is that of the last loss.
        is_on_host: whether the host reads the scale without waiting for a device.
        scale_on_device: the scale, float32 `[]`: a view that changes with it.
        found_inf: the flag that checks set, float32 `[1]`; None for a scaler that checks nothing.
    """

    def __init__(
        self, config: LossScaling, loss_id: int = 0, process_groups: Sequence[ProcessGroup] = ()
    ) -> None:
        self.config = config
        self.loss_id = loss_id
        self.process_groups = tuple(process_groups)
        self._known_groups: tuple[tuple[ProcessGroup, ...], list[ProcessGroup]] = ((), [])
        self.version = 0
        self._state = torch.zeros(STATE_SIZE, dtype=torch.float32, device="cpu")
        self._keep_on(self._state.device)
        self.updates = 0
        self.recorder = FlightRecorder(loss_id, config.overflow_patience, config.start)
        self._set(config.start, 0, config.hysteresis)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):  # else `scaler.scale = 1024.0` would do nothing
            raise AmpAttributeError(f"scaler.{name} is a method; scaler.set_scale(x) changes the scale")
        super().__setattr__(name, value)

    def process_groups_with(self, others: Iterable[ProcessGroup]) -> list[ProcessGroup]:
        """Return the groups whose ranks agree on an overflow, given those of the gradients."""
        groups = tuple(dict.fromkeys((*self.process_groups, *others)))
        if groups != self._known_groups[0]:
            self._known_groups = groups, without_contained(groups)
        return self._known_groups[1]

    def scale(self, loss: Tensor) -> Tensor:
        """Return `loss * scale`, float32 for a 16-bit loss. The host does not wait for the device."""
        self.check_loss(loss)
        return self.scale_and_remember(loss)[0]

    def scale_and_remember(self, loss: Tensor) -> tuple[Tensor, ScaleSnapshot]:
        """Return `loss * scale`, float32 for a 16-bit loss, and that scale. No host sync."""
        wide = loss.float() if loss.dtype in LOW_PRECISION else loss
        if self.device != loss.device and (self.config.check or not self.config.is_identity):
            self._keep_on(loss.device)
        used = self.scale_now()
        # A graph made inside the block may be used after the scale has moved: it gets the copy.
        return (wide if self.config.is_identity else wide * used.scale), used

    def check_loss(self, loss: Tensor) -> None:
        """Raise AmpTypeError for a meta or quantized loss, which cannot be scaled."""
        is_used = self.config.check or not self.config.is_identity
        if is_used and (loss.device.type == "meta" or loss.is_quantized):
            where = (
                "is quantized" if loss.is_quantized else "is on the device meta, which has no values"
            )
            raise AmpTypeError(
                f"a loss that {where}, cannot be scaled. Compute it from a model and inputs that have "
                "floating-point values"
            )

    def _keep_on(self, device: torch.device) -> None:
        """Move the state to a device, and make the views of it that each step uses."""
        self.device = device
        self._state = self._state.to(device)
        self.is_on_host = kernels.backend.is_on_host(self._state)
        self.scale_on_device = self._state[SCALE]
        self._inv_scale = self._state[INVERSE : INVERSE + 1]
        one = torch.ones(1, dtype=torch.float32, device=device)  # not to be written
        self._ones = one[0], one
        self.found_inf = self._state[FOUND_INF : FOUND_INF + 1] if self.config.check else None
        self._updates_on_device = self._state[UPDATES : UPDATES + 1]

    @property
    def good_steps_on_device(self) -> Tensor:
        """How many good steps there were since the scale last moved, int32 `[]`."""
        return self._state[GOOD_STEPS].int()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._keep_on(self.device)  # pickle has made separate tensors of the views

    def set_scale(self, scale: float | Tensor) -> None:
        """Set the scale alone. The host waits only if a static scaler gets a device tensor.

        Args:
            scale: a number, or a tensor of one element; a dynamic scaler does not check its value on a
                device.

        Raises:
            AmpValueError: it is not a valid scale.
        """
        if isinstance(scale, Tensor):
            is_plain = scale.layout is torch.strided and not scale.is_meta
            is_real = not (scale.dtype.is_complex or scale.is_quantized)
            if scale.numel() != 1 or scale.requires_grad or not (is_plain and is_real):
                raise AmpValueError(
                    f"the new scale is a {scale.dtype} tensor of shape {tuple(scale.shape)}"
                    f"{' that requires a gradient' if scale.requires_grad else ''}; give a number or a "
                    "tensor of one element that requires none"
                )
            if scale.device.type == "cpu" or not self.config.dynamic:
                scale = scale.item()
        if isinstance(scale, Tensor):
            self.scale_on_device.copy_(scale.detach().reshape(()), non_blocking=True)
        else:
            scale = self.recorder.scale = parse_positive("scale", scale)
            if not self.config.dynamic:
                self.config = dataclasses.replace(self.config, init=scale)
            self.scale_on_device.fill_(scale)
        self.version += 1
        self._inv_scale.copy_(kernels.update_scale.inverse(self.scale_on_device))

    def scale_now(self) -> ScaleSnapshot:
        """Return the current scale, for the gradients of a loss that is scaled now."""
        if self.config.is_identity:
            return ScaleSnapshot(self, self.version, *self._ones)
        return ScaleSnapshot(self, self.version, self.scale_on_device.clone(), self._inv_scale.clone())

    def checks(self, skips_on_device: Callable[[], bool]) -> bool:
        """Whether an optimizer's gradients are checked.

        Args:
            skips_on_device: returns whether it skips a step on the device by itself.
        """
        check = self.config.check
        return bool(check) and (check is True or self.is_on_host or skips_on_device())

    def update(self, norm: Tensor | None = None, found: Tensor | None = None) -> None:
        """Move the scale, by the checks since the last update. No host sync.

        Args:
            norm: the norm of the unscaled gradients, float32 of one element, for the recorder.
            found: float32 `[1]`, gets what the checks have found.
        """
        config = self.config
        number = self.updates
        self.version += 1
        on_host = kernels.update_scale.update_scale(
            self._state,
            growth_factor=config.growth_factor if config.dynamic else 1.0,
            backoff_factor=config.backoff_factor if config.dynamic else 1.0,
            growth_interval=config.growth_interval,
            hysteresis=config.hysteresis,
            reset_each_step=config.consecutive_hysteresis,
            floor=config.floor,
            ceiling=max(config.max, config.start),
            found=found,
        )
        self.updates = number + 1
        if config.check:
            state = on_host or self._state
            if norm is not None:
                state = torch.cat([self._state, norm.reshape(1)])
            self.recorder.states.send(state, number)

    def forget_check(self) -> None:
        """Forget the checks since the last update, after an error or an interrupt."""
        self._state[FOUND_INF].zero_()
        self._updates_on_device.fill_(self.updates)

    def bad_steps_of(self, parameters: Sequence[Tensor], names: Names) -> BadSteps:
        """Return where a kernel logs which gradients are bad; the host reads it later.

        Args:
            parameters: of the model, the same list each time.
            names: returns the names of parameters.
        """
        log = self.recorder.log_of(parameters, names)
        bad_steps: BadSteps = kernels.launch_plans.BadSteps(log, self._updates_on_device)
        return bad_steps

    def loss_scale(self) -> float:
        """Return the current scale. The host waits for the device."""
        return float(self._state[SCALE])

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the current state. No host sync."""
        before, numbers, scale = dict(vars(self)), self._state.clone(), self.recorder.scale

        def put_back() -> None:
            vars(self).update(before, version=self.version + 1)
            self._state.copy_(numbers)
            self.recorder.scale = scale

        return put_back

    def state_dict(self) -> dict[str, Any]:
        """Return apex's two entries, and others for an exact resume. The host waits."""
        scale, _, good, left, _, overflows, _ = self._state.tolist()
        state = ScalerState(scale, int(good), self.config.dynamic, int(left), int(overflows))
        return state._asdict()

    def load_state_dict(self, state: Mapping[str, Any], path: str = "state_dict") -> None:
        """Go on from a saved state, ours or apex's; see `restore`. `path` is its name in errors.

        Raises:
            AmpValueError: an entry is not valid. Nothing has been changed then.
        """
        self.restore(read_state(state, path))

    def restore(self, saved: ScalerState) -> None:
        """Go on from a state.

        A static scaler keeps the scale it was configured with, and a dynamic one does not take over
        the scale of a static one. A scale outside `min` and `max`, such as the 0 that apex could reach,
        is clamped to them.
        """
        config = self.config
        if saved.dynamic in (None, config.dynamic):
            scale = max(saved.loss_scale if config.dynamic else config.init, config.floor)
            left = min(saved.hysteresis_left, config.hysteresis)
            ceiling = max(config.max, config.start)
            self._set(min(scale, ceiling), saved.unskipped, left, saved.overflows_in_a_row)

    def _set(self, scale: float, good: int, left: int, overflows: int = 0) -> None:
        self.version += 1
        values = [scale, 1.0 / scale, good, left, 0.0, overflows, self.updates]
        self.recorder.scale = scale
        self._state.copy_(torch.tensor(values, dtype=torch.float32, device="cpu"))
