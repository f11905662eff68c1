"""`GradScaler`: the interface of `torch.amp.GradScaler`, on this library's scaler and kernels.

It is a subclass of torch's class, so it has what scripts and libraries call and override: the stages of
an optimizer, `_unscale_grads_`, `_maybe_opt_step`, and `grad_scale` and `found_inf` for fused
optimizers. A `LossScaler` holds the scale.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from amp import active, distributed
from amp.casting.fp8_history import AmaxHistory
from amp.casting.sharded import is_of_fsdp1
from amp.dtypes import LOW_PRECISION, SCALABLE
from amp.errors import (
    AmpAssertionError,
    AmpRuntimeError,
    AmpTypeError,
    AmpValueError,
    brief,
    first_few,
    truth_of,
    warn,
)
from amp.lazy import kernels
from amp.observers import everywhere
from amp.other_names import names_keywords
from amp.profiles.keys import LARGEST_SCALE, parse_positive
from amp.profiles.loss_scaling import LossScaling
from amp.state_checks import StateChecks, as_dict
from amp.training.attached_optimizer import AttachedOptimizer
from amp.training.recorder import HostCopies
from amp.training.scaler import LossScaler

Init = TypeVar("Init", bound=Callable[..., None])

_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")
_BEYOND_TORCH = ("hysteresis_left", "overflows_in_a_row")
"""The entries of the scaler's state that a state dict holds besides torch's entries. There, their names
begin with an underscore."""


def _setting(name: str) -> Any:
    """Return a settable property: a number in the scaler's configuration."""

    def write(self: GradScaler, value: Any) -> None:
        if self._enabled:
            self._scaler.config = _configured(self._scaler.config, **{name: value})

    return property(operator.attrgetter(f"_scaler.config.{name}"), write)


def _in_either_order(init: Init) -> Init:
    """Let `__init__` also take positional arguments in the order of `torch.cuda.amp.GradScaler`."""

    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        if args and not isinstance(args[0], (str, torch.device)):  # there, no device comes first
            args = (kwargs.pop("device", "cuda"), *args)
        init(self, *args, **kwargs)

    return wrapper  # type: ignore[return-value]


class GradScaler(torch.amp.GradScaler):
    """A drop-in for `torch.amp.GradScaler` and the older `torch.cuda.amp.GradScaler`.

    It takes the arguments of torch's classes, in the order of either, and computes the same scales. It
    also takes float16 and bfloat16 gradients, notices a gradient that becomes inf by unscaling, keeps
    the scale within bounds, can tolerate single overflows (`hysteresis`), and tells whether a step was
    skipped (`step_was_skipped`).

    Args:
        device: the type of the devices that train. With "cuda" and no GPU, the scaler is disabled, with
            a warning. If the first positional argument is a number, it is `init_scale`, and the next
            ones are those after `init_scale`.
        init_scale: the first scale.
        growth_factor: the factor of the scale after `growth_interval` good updates, above 1.
        backoff_factor: the factor of the scale after an overflow, below 1.
        growth_interval: good updates in a row before the scale grows.
        enabled: False makes `step` only step, and every other method do nothing. The other arguments
            are not checked then.
        min_scale: the smallest scale; None is 2**-126, FP32's smallest normal number.
        max_scale: the largest scale; None is 2**126, the inverse of 2**-126, or `init_scale` if that is
            larger.
        hysteresis: how many overflows since the last growth it takes before the scale backs off.

    Raises:
        AmpValueError: a number is not in its range.
    """

    _scaler: LossScaler
    _has_scaled: bool
    _skipped: weakref.WeakKeyDictionary[Any, bool | list[Tensor] | HostCopies]

    @names_keywords
    @_in_either_order
    def __init__(
        self,
        device: str | torch.device | float = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
    ) -> None:
        self._device = _device_type(device)
        self._enabled = truth_of("enabled", enabled)
        if self._enabled and self._device == "cuda" and not torch.cuda.is_available():
            warn(
                "this GradScaler is for CUDA, and there is no GPU: it is disabled. To scale on a CPU, "
                "use GradScaler('cpu')."
            )
            self._enabled = False
        config = LossScaling()
        if self._enabled:
            init_scale = parse_positive("init_scale", init_scale)
            config = _configured(
                config,
                init=init_scale,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                growth_interval=growth_interval,
                hysteresis=hysteresis,
                min=min_scale,
                max=max(LARGEST_SCALE, init_scale) if max_scale is None else max_scale,
            )
        self._scaler = LossScaler(config)
        self._has_scaled = False
        self._init_scale: float = config.start
        self._init_growth_tracker: int = 0
        self._begin_iteration()
        self._skipped = weakref.WeakKeyDictionary()

    # Scaling.

    def scale(self, outputs: Any) -> Any:
        """Return outputs times the scale, float32 for 16-bit ones. The host does not wait.

        Args:
            outputs: a tensor, or an iterable or mapping of tensors, nested to any depth. Lists, tuples,
                named tuples and dicts keep their type; other iterables become iterators.

        Raises:
            AmpTypeError: a tensor has no values, or is quantized.
            AmpValueError: something in `outputs` is neither a tensor nor an iterable, or contains
                itself.
        """
        if not self._enabled:
            return outputs
        try:
            return _scaled(self._scale_loss, outputs)
        except RecursionError:
            raise AmpValueError(
                f"GradScaler.scale got {brief(outputs)}, which is nested too deeply, or contains "
                "itself: pass a loss, or a list of losses"
            ) from None

    def _scale_loss(self, loss: Tensor) -> Tensor:
        self._scaler.check_loss(loss)
        if not self._has_scaled:
            self._lazy_init_scale_growth_tracker(loss.device)
        for history in _histories():
            history.begin(self._scaler.scale_on_device.clone())
        return self._scaler.scale(loss)

    # The step.

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> float | None:
        """Unscale an optimizer's gradients, unless `unscale_` did, and step if they are finite.

        The host waits once for 4 bytes, unless the optimizer skips on the device. Torch's optimizers
        with `fused=True` and those of `amp.optimizers` do.

        Returns:
            The result of `optimizer.step`, or None if the step was skipped.

        Raises:
            AmpRuntimeError: the optimizer was stepped since the last `update`, or a closure was given.
            AmpAssertionError: nothing was scaled yet, or none of its parameters has a gradient.
            AmpTypeError: `optimizer` is not an optimizer.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)  # type: ignore[no-any-return]
        if "closure" in kwargs or any(map(callable, args)):
            raise AmpRuntimeError(
                "Closure use is not currently supported if GradScaler is enabled: a closure computes "
                "new gradients inside the step, and these would stay scaled. Run backward before "
                "scaler.step(optimizer), or use amp.initialize, whose optimizers take closures"
            )
        _check_optimizer("step", optimizer)
        self._check_scale_growth_tracker("step")
        if all(p.grad is None for p in _parameters(optimizer)) and not _groups(optimizer):
            remedy = "First call backward on a loss that depends on them, or leave out the step"
            attached = AttachedOptimizer.of(optimizer)
            if attached is not None and attached.gradients.parameters.masters:
                remedy = (
                    "Its FP32 masters get gradients by `with amp.scale_loss(loss, optimizer) as "
                    "scaled_loss: scaled_loss.backward()`. Leave the GradScaler out, and call "
                    "optimizer.step()"
                )
            raise AmpAssertionError(
                f"{type(optimizer).__name__} was stepped, and none of its parameters has a gradient. "
                f"{remedy}"
            )
        result = super().step(optimizer, *args, **kwargs)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            self._skipped[optimizer] = list(self._found_inf_per_device(optimizer).values())
        return result

    def unscale_(self, optimizer: Any) -> None:
        """Unscale an optimizer's gradients before its `step`, for example to clip them. No host sync.

        Raises:
            RuntimeError: they were unscaled, or the optimizer was stepped, since the last `update`.
            AmpAssertionError: nothing was scaled yet.
            AmpTypeError: `optimizer` is not an optimizer.
        """
        if self._enabled:
            _check_optimizer("unscale_", optimizer)
        super().unscale_(optimizer)

    def step_was_skipped(self, optimizer: Any, wait: bool = True) -> bool | None:
        """Whether the last `step` of an optimizer was skipped.

        Args:
            optimizer: an optimizer that was stepped.
            wait: whether the host waits for the device, if the optimizer skips on the device. With
                False, the first call requests the answer, and calls return None until it has arrived.
                While a CUDA graph is captured, the result is always None.

        Raises:
            AmpRuntimeError: the optimizer has not been stepped.
            AmpTypeError: `optimizer` is not an optimizer.
        """
        if not self._enabled:
            return False
        _check_optimizer("step_was_skipped", optimizer)
        skipped = self._skipped.get(optimizer)
        if skipped is None:
            raise AmpRuntimeError(
                f"this {type(optimizer).__name__} was not stepped by this GradScaler yet: call "
                "scaler.step(optimizer) first"
            )
        if isinstance(skipped, list):  # what was found, still on its devices
            if kernels.launch_plans.stream_of(self._scaler.device) is None:
                return None  # a graph is being captured: each replay will find out
            found, skipped = skipped, HostCopies()
            skipped.send(torch.stack([x.reshape(()).to(self._scaler.device) for x in found]))
            self._skipped[optimizer] = skipped
        if isinstance(skipped, HostCopies):
            arrived = [values for _, values in skipped.arrived(truth_of("wait", wait))]
            if not arrived:
                return None
            skipped = self._skipped[optimizer] = any(value > 0 for value in arrived[0])
        return skipped

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Let the scale grow, stay or back off, or set it to a new value. No host sync.

        Args:
            new_scale: a number, or a tensor of one element, whose value is not checked if it is on a
                device other than the CPU. The count of good updates is kept.

        Raises:
            AmpAssertionError: nothing was scaled yet, or no optimizer was stepped or unscaled since the
                last `update`.
            AmpValueError: the new scale is not a finite number above 0, or has several elements.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._scaler.set_scale(new_scale)
            if not self._has_scaled:
                self._init_scale = self._scaler.loss_scale()
        else:
            scale, _ = self._check_scale_growth_tracker("update")
            found = [
                x.reshape(()).to(scale.device, non_blocking=True)
                for state in self._per_optimizer_states.values()
                for x in state["found_inf_per_device"].values()
            ]
            if not found:
                raise AmpAssertionError(
                    "GradScaler.update was called, and no optimizer was stepped or unscaled since the "
                    "last update. Call scaler.step(optimizer) first"
                )
            flag = self._scaler.found_inf
            assert flag is not None
            flag.copy_(torch.stack(found).max())
            for history in _histories():
                history.share(self._scaler.process_groups)
                history.end()
            self._scaler.update()
            self._scaler.recorder.learn()
            self._scaler.recorder.warn_if_endless()
        self._begin_iteration()

    # Saving.

    def state_dict(self) -> dict[str, Any]:
        """Return torch's five entries and those of the hysteresis, or `{}` if the scaler is disabled.

        The host waits for the device.
        """
        if not self._enabled:
            return {}
        ours = self._scaler.state_dict()
        return {**super().state_dict(), **{f"_{name}": ours[name] for name in _BEYOND_TORCH}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of torch's class or of this one. A scale out of bounds is clamped to them.

        Raises:
            AmpRuntimeError: the state is empty, because it was saved from a disabled scaler.
            AmpValueError: an entry is missing, or not in its range. Nothing is changed then.
        """
        if not self._enabled:
            return
        state_dict = as_dict(state_dict, "what GradScaler.state_dict() returns")
        if not state_dict:
            raise AmpRuntimeError(
                "the state dict is empty: it was saved from a GradScaler that was disabled. Save it "
                "from an enabled scaler, or leave out load_state_dict"
            )
        missing = [name for name in ("scale", *_SETTINGS, "_growth_tracker") if name not in state_dict]
        if missing:
            raise AmpValueError(
                f"the state dict has no {', '.join(missing)}, only {first_few(state_dict)}: it is not "
                "a GradScaler's: pass what scaler.state_dict() returned"
            )
        checks = StateChecks()
        settings = {name: checks.number(state_dict, name, "the state dict") for name in _SETTINGS}
        checks.number(state_dict, "scale", "the state dict", low=0.0)
        checks.count(state_dict, "_growth_tracker", "the state dict")
        config = _configured(self._scaler.config, **settings)
        state = {"loss_scale": state_dict["scale"], "unskipped": state_dict["_growth_tracker"]}
        ours = {name: state_dict[f"_{name}"] for name in _BEYOND_TORCH if f"_{name}" in state_dict}
        self._scaler.load_state_dict(state | ours, "the state dict")
        self._scaler.config = config
        loaded = self._scaler.state_dict()
        self._init_scale, self._init_growth_tracker = loaded["loss_scale"], loaded["unskipped"]

    # The private names that torch's methods, subclasses and pickles use.

    @property
    def _scale(self) -> Tensor | None:  # type: ignore[override]
        return self._scaler.scale_on_device if self._has_scaled else None

    @property
    def _growth_tracker(self) -> Tensor | None:  # type: ignore[override]
        return self._scaler.good_steps_on_device if self._has_scaled else None

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        """Start from the first scale and growth tracker, which a subclass may have set before."""
        first = {"loss_scale": self._init_scale, "unskipped": self._init_growth_tracker}
        state = self._scaler.state_dict()
        if first.items() - state.items():
            self._scaler.load_state_dict({**state, **first})
        self._has_scaled = True

    _growth_factor, _backoff_factor, _growth_interval = map(_setting, _SETTINGS)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        if not self._has_scaled:
            raise AmpAssertionError(
                f"GradScaler.{funcname} was called before GradScaler.scale: no loss was scaled yet. "
                "Call scaler.scale(loss).backward() first"
            )
        return self._scaler.scale_on_device, self._scaler.good_steps_on_device

    def _begin_iteration(self) -> None:
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale an optimizer's gradients in place, and report an overflow. No host sync.

        Float16 gradients are unscaled even if `allow_fp16` is False. Scripts replace this method in
        torch's class to pass True.
        """
        return self._look_at_gradients(optimizer, inv_scale, found_inf, unscale=True)

    def _check_inf_per_device(self, optimizer: Any) -> dict[str, Any]:
        """Check the gradients of an optimizer that unscales them in its own step. No host sync."""
        inv_scale = self._scaler.scale_now().inv_scale
        found_inf = torch.zeros((), dtype=torch.float32, device=self._scaler.device)
        found = self._look_at_gradients(optimizer, inv_scale, found_inf, unscale=False)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return found

    def _look_at_gradients(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, unscale: bool
    ) -> dict[Any, Tensor]:
        """Unscale an optimizer's gradients, or only check them, and set `found_inf` on an overflow.

        Returns:
            `found_inf` by its device. An empty dict if this rank has no gradients, and there are no
            other ranks that may have some.
        """
        grads, groups = _gradients(optimizer), self._scaler.process_groups_with(_groups(optimizer))
        inv_scale, flag = inv_scale.reshape(1), found_inf.reshape(1)
        if grads:
            for observer in everywhere:
                observer.unscaling(grads, inv_scale)
            if unscale:
                kernels.unscale.unscale(grads, grads, inv_scale, flag)
            else:
                kernels.unscale.check(grads, inv_scale, flag)
        distributed.reduce_largest([flag], groups)
        return {found_inf.device: found_inf} if grads or groups else {}

    def _maybe_opt_step(
        self, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        found = optimizer_state["found_inf_per_device"].values()
        skips = self._skipped[optimizer] = any(x.item() > 0 for x in found)
        return None if skips else optimizer.step(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        if self._per_optimizer_states:
            raise AmpAssertionError(
                "a GradScaler cannot be pickled or copied between step and update: the copy would not "
                "know whether there was an overflow. Call scaler.update() first"
            )
        scaler = self._scaler
        return {
            **vars(self),
            "_scaler": (scaler.config, scaler.state_dict()),
            "_has_scaled": False,
            "_init_scale": self.get_scale(),
            "_init_growth_tracker": self._get_growth_tracker(),
            "_skipped": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        config, of_scaler = state["_scaler"]
        vars(self).update(state)
        self._scaler = LossScaler(config)
        self._scaler.load_state_dict(of_scaler)
        self._skipped = weakref.WeakKeyDictionary()


def _scaled(scale: Callable[[Tensor], Tensor], outputs: Any) -> Any:
    """Return a scaled tensor, or a copy of a container with scaled tensors."""
    if isinstance(outputs, Tensor):
        return scale(outputs)
    if isinstance(outputs, Mapping):
        items = ((key, _scaled(scale, value)) for key, value in outputs.items())
        return type(outputs)(items)  # type: ignore[call-arg]
    if not isinstance(outputs, Iterable) or isinstance(outputs, (str, bytes)):
        raise AmpValueError(
            f"GradScaler.scale got a {type(outputs).__name__}; "
            "give it a tensor or an iterable of tensors"
        )
    scaled = (_scaled(scale, value) for value in outputs)
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return type(outputs)(*scaled)
    return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled


def _device_type(device: Any) -> str:
    try:
        return torch.device(device).type
    except (ValueError, OverflowError) as error:
        raise AmpValueError(
            f"device={brief(device)} is not a device: {error}. Give its type, such as 'cuda' or 'cpu'"
        ) from None


def _configured(config: LossScaling, **changes: Any) -> LossScaling:
    """Return a changed configuration. Raise AmpValueError for factors that torch does not allow."""
    growth, backoff = changes.get("growth_factor", 2.0), changes.get("backoff_factor", 0.5)
    if not isinstance(growth, (int, float)) or not 1 < growth < torch.inf:
        raise AmpValueError(f"growth_factor={brief(growth)} must be a finite number above 1")
    if not isinstance(backoff, (int, float)) or not 0 < backoff < 1:
        raise AmpValueError(f"backoff_factor={brief(backoff)} must be a number between 0 and 1")
    return dataclasses.replace(config, **changes)


def _check_optimizer(method: str, optimizer: Any) -> None:
    """Raise AmpTypeError for something without the attribute `param_groups` of all optimizers."""
    if not hasattr(optimizer, "param_groups"):
        raise AmpTypeError(f"GradScaler.{method} takes an optimizer, and got {brief(optimizer)}")


def _histories() -> list[AmaxHistory]:
    """Return the amax histories of all open sessions, because a GradScaler belongs to no session."""
    in_fp8 = [session.fp8 for session in active.open_sessions() if session.fp8 is not None]
    return [each.history for each in in_fp8 if each.history is not None]


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _groups(optimizer: Any) -> list[distributed.ProcessGroup]:
    """Return the process groups whose ranks have parts of an optimizer's parameters.

    Parameters of FSDP1 do not know their group. For them all ranks decide together, as with torch's
    `ShardedGradScaler`.
    """
    parameters = _parameters(optimizer)
    groups = distributed.groups_of_meshes(parameters)
    if distributed.world_size() > 1 and any(map(is_of_fsdp1, parameters)):
        groups += distributed.as_process_groups(torch.distributed.group.WORLD)
    return groups


def _gradients(optimizer: Any) -> list[Tensor]:
    """Return the gradients of an optimizer's parameters.

    Sparse 16-bit gradients are coalesced, because the sums of duplicate entries may overflow. Gradients
    of DTensors are summed over their ranks. If a gradient cannot be unscaled, nothing is changed.
    """
    params = [parameter for parameter in _parameters(optimizer) if parameter.grad is not None]
    for i, parameter in enumerate(params):
        grad = parameter.grad
        if grad.dtype not in SCALABLE:
            raise AmpTypeError(
                f"a gradient of shape {tuple(grad.shape)} (number {i} of those of this "
                f"{type(optimizer).__name__}) is {grad.dtype} and cannot be unscaled: GradScaler takes "
                "float16, bfloat16, float32 and float64"
            )
    distributed.place_gradients(params)
    for parameter in params:
        if parameter.grad.is_sparse and parameter.grad.dtype in LOW_PRECISION:
            parameter.grad = parameter.grad.coalesce()
    return [parameter.grad for parameter in params]
