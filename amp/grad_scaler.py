"""`GradScaler`: the face that `torch.amp` gave loss scaling, on this library's scaler and kernels.

It is torch's class by inheritance, and what scripts and libraries call and override is there: the
stages of an optimizer, `_unscale_grads_`, `_maybe_opt_step`, `grad_scale` and `found_inf` for fused
optimizers. The scale is a `LossScaler`'s.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from amp import active
from amp.casting.fp8_history import AmaxHistory
from amp.casting.sharded import is_of_fsdp1
from amp.distributed import (
    ProcessGroup,
    as_process_groups,
    groups_of_meshes,
    place_gradients,
    reduce_largest,
    world_size,
)
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
from amp.observers import watching
from amp.profiles.keys import LARGEST_SCALE, parse_positive
from amp.profiles.loss_scaling import LossScaling
from amp.state_checks import StateChecks, as_dict, as_plain
from amp.training.host_copies import HostCopies
from amp.training.scaler import LossScaler

Init = TypeVar("Init", bound=Callable[..., None])

_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")
_BEYOND_TORCH = ("hysteresis_left", "overflows_in_a_row")
"""What a state dict holds of the scaler's state besides torch's entries, each after an underscore."""


def _setting(name: str) -> Any:
    """Return a property for a number of the scaler's configuration."""

    def read(self: _TorchInternals) -> Any:
        return getattr(self._scaler.config, name)

    def write(self: _TorchInternals, value: Any) -> None:
        if self._enabled:
            self._scaler.config = _configured(self._scaler.config, **{name: value})

    return property(read, write)


class _TorchInternals(torch.amp.GradScaler):
    """What torch's methods, subclasses of torch's class and pickles read and write."""

    _scaler: LossScaler
    _has_scaled: bool
    _skipped: weakref.WeakKeyDictionary[Any, bool | list[Tensor] | HostCopies]

    @property
    def _scale(self) -> Tensor | None:  # type: ignore[override]
        return self._scaler.scale_on_device if self._has_scaled else None

    @property
    def _growth_tracker(self) -> Tensor | None:  # type: ignore[override]
        return self._scaler.good_steps_on_device if self._has_scaled else None

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        """Begin with the first scale and growth tracker, which a subclass may have set until now."""
        first = {"loss_scale": self._init_scale, "unskipped": self._init_growth_tracker}
        state = self._scaler.state_dict()
        if first.items() - state.items():
            self._scaler.load_state_dict({**state, **first})
        self._has_scaled = True

    _growth_factor, _backoff_factor, _growth_interval = map(_setting, _SETTINGS)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        if not self._has_scaled:
            raise AmpAssertionError(
                f"GradScaler.{funcname} was called before GradScaler.scale: no gradient is scaled yet. "
                "Call scaler.scale(loss).backward() first"
            )
        return self._scaler.scale_on_device, self._scaler.good_steps_on_device

    def _begin_iteration(self) -> None:
        self._per_optimizer_states: dict[int, dict[str, Any]]
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale an optimizer's gradients where they are, and report an overflow. No host sync.

        Float16 ones too, whatever `allow_fp16` says: scripts replace this method to pass True.
        """
        grads, groups = _gradients(optimizer), self._scaler.groups_with(_groups(optimizer))
        if not grads and not groups:
            return {}
        flag = found_inf.reshape(1)
        if grads:
            _tell(grads, inv_scale)
            kernels.unscale.unscale(grads, grads, inv_scale.reshape(1), flag)
        reduce_largest([flag], groups)
        return {found_inf.device: found_inf}

    def _check_inf_per_device(self, optimizer: Any) -> dict[str, Any]:
        """Check an optimizer's gradients, which it will unscale itself. No host sync."""
        grads, groups = _gradients(optimizer), self._scaler.groups_with(_groups(optimizer))
        found: dict[Any, Tensor] = {}
        if grads or groups:
            flag = torch.zeros(1, dtype=torch.float32, device=self._scaler.device)
            if grads:
                inv_scale = self._scaler.scale_now().inv_scale
                _tell(grads, inv_scale)
                kernels.unscale.check(grads, inv_scale, flag)
            reduce_largest([flag], groups)
            found = {flag.device: flag.reshape(())}
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return found

    def _maybe_opt_step(
        self, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        found = optimizer_state["found_inf_per_device"].values()
        skips = self._skipped[optimizer] = any(x.item() > 0 for x in found)
        return None if skips else optimizer.step(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        if self._per_optimizer_states:
            raise AmpAssertionError(
                "a GradScaler is pickled or copied between step and update, when it knows of gradients "
                "that the copy would not. Call scaler.update() before"
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


def _in_either_order(init: Init) -> Init:
    """Let `__init__` take positional arguments in the order of `torch.cuda.amp.GradScaler` too."""

    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        if args and not isinstance(args[0], (str, torch.device)):  # that order has no device
            args = (kwargs.pop("device", "cuda"), *args)
        init(self, *args, **kwargs)

    return wrapper  # type: ignore[return-value]


class GradScaler(_TorchInternals):
    """A drop-in for `torch.amp.GradScaler` and the older `torch.cuda.amp.GradScaler`.

    It takes what torch's takes, in the order of either, and gives the same scales. Besides, gradients
    may be float16 and bfloat16, a gradient that becomes inf by unscaling is noticed, the scale stays
    within bounds, hysteresis can tolerate single overflows, and `step_was_skipped` tells whether a step
    was skipped.

    Args:
        device: the type of the devices that train; "cuda" without a GPU disables the scaler and warns.
            If the first positional argument is a number, it is `init_scale`, and the others follow it.
        init_scale: the first scale.
        growth_factor: above 1; what the scale is multiplied by after `growth_interval` good updates.
        backoff_factor: below 1; what the scale is multiplied by after an overflow.
        growth_interval: good updates in a row before the scale grows.
        enabled: False makes every method do nothing but step, and no number is looked at.
        min_scale: the floor of the scale; None is 2**-126, FP32's smallest normal number.
        max_scale: the ceiling of the scale; None is 2**126, whose inverse is that, or `init_scale` if
            that is larger.
        hysteresis: overflows since the last growth that are needed before the scale backs off.

    Raises:
        AmpValueError: a number that is not in its range.
    """

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
        self._device = torch.device(device).type  # type: ignore[arg-type]
        self._enabled = truth_of("enabled", enabled)
        if self._enabled and self._device == "cuda" and not torch.cuda.is_available():
            warn(
                "GradScaler is for CUDA, and there is no GPU: it is disabled. On a CPU, "
                "GradScaler('cpu') scales."
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
            outputs: a tensor, or an iterable or mapping of such, nested as you like. Lists, tuples,
                named tuples and dicts come back as what they are, other iterables as iterators.

        Raises:
            AmpTypeError: a tensor has no values, or is quantized.
            AmpValueError: something else, or what holds itself.
        """
        if not self._enabled:
            return outputs
        try:
            return _scaled(self._scale_loss, outputs)
        except RecursionError:
            raise AmpValueError(
                f"GradScaler.scale got {brief(outputs)}, which is nested too deeply, or holds itself"
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

        The host waits once for 4 bytes, unless the optimizer skips on the device (torch's with
        `fused=True`, those of `amp.optimizers`).

        Returns:
            What `optimizer.step` returned; None after a skip.

        Raises:
            AmpRuntimeError: it was stepped since the last `update`, or a closure was given.
            AmpAssertionError: nothing was scaled yet, or none of its parameters has a gradient.
            AmpTypeError: it is no optimizer.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)  # type: ignore[no-any-return]
        if "closure" in kwargs or any(map(callable, args)):
            raise AmpRuntimeError(
                "Closure use is not currently supported if GradScaler is enabled: a closure makes new "
                "gradients inside the step, after they were unscaled. Run backward before "
                "scaler.step(optimizer), or use amp.initialize, whose optimizers take closures"
            )
        _check_optimizer("step", optimizer)
        self._check_scale_growth_tracker("step")
        if all(p.grad is None for p in _parameters(optimizer)) and not _groups(optimizer):
            raise AmpAssertionError(
                f"{type(optimizer).__name__} was stepped, and none of its parameters has a gradient. "
                "Call backward on a loss that depends on them before, or leave the step out"
            )
        result = super().step(optimizer, *args, **kwargs)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            self._skipped[optimizer] = list(self._found_inf_per_device(optimizer).values())
        return result

    def unscale_(self, optimizer: Any) -> None:
        """Unscale an optimizer's gradients, as to clip them before its `step`. No host sync.

        Raises:
            RuntimeError: that was done since the last `update`, or it was stepped.
            AmpAssertionError: nothing was scaled yet.
            AmpTypeError: it is no optimizer.
        """
        if self._enabled:
            _check_optimizer("unscale_", optimizer)
        super().unscale_(optimizer)

    def step_was_skipped(self, optimizer: Any, wait: bool = True) -> bool | None:
        """Whether the last `step` of an optimizer was skipped.

        Args:
            optimizer: that was stepped.
            wait: for the device, where an optimizer skips there. Otherwise the first call sends for
                the answer, and it is None until that has come; the host never waits then. While a CUDA
                graph is captured it is None either way.

        Raises:
            AmpRuntimeError: the optimizer has not been stepped.
            AmpTypeError: it is no optimizer.
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
            if kernels.tables.stream_of(self._scaler.device) is None:
                return None  # a graph is captured: what is found then is found by each replay
            found, skipped = skipped, HostCopies()
            skipped.send(torch.stack([x.reshape(()).to(self._scaler.device) for x in found]))
            self._skipped[optimizer] = skipped
        if isinstance(skipped, HostCopies):
            arrived = [values for _, values in skipped.arrived(wait)]
            if not arrived:
                return None
            skipped = self._skipped[optimizer] = any(value > 0 for value in arrived[0])
        return skipped

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale by what the optimizers' gradients were, or to a new scale. No host sync.

        Args:
            new_scale: a number, or a tensor of one element, which is not looked at if it lies on a
                device. How many good updates there were is not forgotten.

        Raises:
            AmpAssertionError: nothing was scaled yet, or no optimizer was stepped or unscaled since the
                last `update`.
            AmpValueError: the new scale is no finite number above 0, or has several elements.
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
                    "last update. Call scaler.step(optimizer) before"
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
        """Return torch's five entries, and what the hysteresis needs; `{}` where disabled.

        The host waits for the device.
        """
        if not self._enabled:
            return {}
        ours = self._scaler.state_dict()
        return {**super().state_dict(), **{f"_{name}": ours[name] for name in _BEYOND_TORCH}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, torch's or this class's. A scale out of bounds is brought within them.

        Raises:
            AmpRuntimeError: it is empty, as that of a disabled scaler is.
            AmpValueError: an entry is missing, or not in its range. Nothing has been changed then.
        """
        if not self._enabled:
            return
        state_dict = as_dict(state_dict, "what GradScaler.state_dict() returns")
        if not state_dict:
            raise AmpRuntimeError(
                "the state dict is empty: it was saved from a GradScaler that was disabled. Save one "
                "from an enabled scaler, or leave load_state_dict out"
            )
        missing = [name for name in ("scale", *_SETTINGS, "_growth_tracker") if name not in state_dict]
        if missing:
            raise AmpValueError(
                f"the state dict has no {', '.join(missing)}, only {first_few(state_dict)}: it is no "
                "GradScaler's"
            )
        checks = StateChecks()
        for name in _SETTINGS:
            checks.number(state_dict, name, "the state dict")
        checks.number(state_dict, "scale", "the state dict", low=0.0)
        checks.count(state_dict, "_growth_tracker", "the state dict")
        settings = {name: as_plain(state_dict[name]) for name in _SETTINGS}
        config = _configured(self._scaler.config, **settings)
        state = {"loss_scale": state_dict["scale"], "unskipped": state_dict["_growth_tracker"]}
        ours = {name: state_dict[f"_{name}"] for name in _BEYOND_TORCH if f"_{name}" in state_dict}
        self._scaler.load_state_dict(state | ours, "the state dict")
        self._scaler.config = config
        loaded = self._scaler.state_dict()
        self._init_scale, self._init_growth_tracker = loaded["loss_scale"], loaded["unskipped"]


def _scaled(scale: Callable[[Tensor], Tensor], outputs: Any) -> Any:
    """Return a tensor scaled, or what holds tensors with those scaled."""
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


def _tell(grads: Sequence[Tensor], inv_scale: Tensor) -> None:
    for observer in watching():
        observer.unscaling(grads, inv_scale)


def _configured(config: LossScaling, **changes: Any) -> LossScaling:
    """Return a changed configuration, whose factors make the scale grow and shrink as torch's do."""
    growth, backoff = changes.get("growth_factor", 2.0), changes.get("backoff_factor", 0.5)
    if not isinstance(growth, (int, float)) or not 1 < growth < torch.inf:
        raise AmpValueError(f"growth_factor={brief(growth)} must be a finite number above 1")
    if not isinstance(backoff, (int, float)) or not 0 < backoff < 1:
        raise AmpValueError(f"backoff_factor={brief(backoff)} must be a number between 0 and 1")
    return dataclasses.replace(config, **changes)


def _check_optimizer(method: str, optimizer: Any) -> None:
    """Raise AmpTypeError unless it has what all optimizers have."""
    if not hasattr(optimizer, "param_groups"):
        raise AmpTypeError(f"GradScaler.{method} takes an optimizer, and got {brief(optimizer)}")


def _histories() -> list[AmaxHistory]:
    """Return what FP8 layers of open sessions remember: a GradScaler belongs to no session."""
    return [each for session in active.open_sessions() if (each := session.amax_history) is not None]


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _groups(optimizer: Any) -> list[ProcessGroup]:
    """Return the process groups whose ranks have parts of an optimizer's parameters.

    Parameters of FSDP's first version do not know theirs: as torch's `ShardedGradScaler` does for them,
    all ranks decide together.
    """
    parameters = _parameters(optimizer)
    groups = groups_of_meshes(parameters)
    if world_size() > 1 and any(map(is_of_fsdp1, parameters)):
        groups += as_process_groups(torch.distributed.group.WORLD)
    return groups


def _gradients(optimizer: Any) -> list[Tensor]:
    """Return the gradients of an optimizer's parameters.

    Sparse 16-bit gradients are coalesced, since their sums may overflow, and those of DTensors summed
    over their ranks. Nothing has been changed when a gradient that cannot be unscaled is refused.
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
    place_gradients(params)
    for parameter in params:
        if parameter.grad.is_sparse and parameter.grad.dtype in LOW_PRECISION:
            parameter.grad = parameter.grad.coalesce()
    return [parameter.grad for parameter in params]
