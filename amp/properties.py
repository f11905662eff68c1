"""What an opt level resolves to: two frozen value objects, each checked as a whole.

Because the whole object is checked, and not one field after another as in apex, no legal
combination depends on the order in which its parts were given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, SupportsFloat, TypedDict, cast, get_args

import torch

from amp.dtypes import LOW_PRECISION, dtype_name, is_none, parse_dtype
from amp.errors import (
    AmpAssertionError,
    AmpRuntimeError,
    AmpTypeError,
    AmpValueError,
    did_you_mean,
)
from amp.rules import Rule, parse_rules

LeanMasters = Literal["split16", "kahan"]
"""How FP32 masters may be kept in 16 bits beside the weights; see `amp.kernels.split`."""

BY_OP_LEVELS = ("O1", "O4")
"""The levels that cast function by function and leave the model alone."""

SMALLEST_SCALE = 2.0**-126
"""FP32's smallest normal number: no loss scale goes below it, so none is ever 0 or a denormal."""

LARGEST_SCALE = 2.0**126
"""The reciprocal of `SMALLEST_SCALE`: growth stops here, so that no inverse is a denormal."""

_LARGEST_FLOAT32 = (2 - 2.0**-23) * 2.0**127


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """How the loss scale starts and moves.

    Attributes:
        mode: `dynamic` follows overflows; `static` stays at `init` and looks at no gradient.
        init: the first scale.
        growth_factor: what the scale is multiplied by after `growth_interval` good iterations.
        backoff_factor: what the scale is multiplied by after an overflow.
        growth_interval: good iterations in a row before the scale grows.
        hysteresis: overflows since the last growth that are needed before the scale backs off.
            Every overflow skips its step, whether the scale backs off or not.
        consecutive_hysteresis: whether a good iteration gives the spent hysteresis back.
        min: the floor of the scale; `None` means FP32's smallest normal number.
        max: the ceiling of the scale.
        overflow_patience: overflows in a row, the scale being at its floor or below 1, after which
            a warning says what to look at.
    """

    mode: Literal["dynamic", "static"] = "dynamic"
    init: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    min: float | None = None
    max: float = 2.0**24
    overflow_patience: int = 50

    def __post_init__(self) -> None:
        if self.mode not in ("dynamic", "static"):
            raise AmpValueError(f"mode={self.mode!r} is not one of dynamic, static")
        for name in ("init", "growth_factor", "backoff_factor", "max"):
            _set(self, name, parse_positive(name, getattr(self, name)))
        if self.min is not None:
            _set(self, "min", parse_positive("min", self.min))
        for name in ("growth_interval", "hysteresis", "overflow_patience"):
            _set(self, name, _positive_integer(name, getattr(self, name)))
        _set(
            self,
            "consecutive_hysteresis",
            parse_bool("consecutive_hysteresis", self.consecutive_hysteresis),
        )
        if self.growth_factor < 1:
            raise AmpValueError(f"growth_factor={self.growth_factor} must be at least 1")
        if self.backoff_factor > 1:
            raise AmpValueError(f"backoff_factor={self.backoff_factor} must be at most 1")
        if self.floor > self.max:
            raise AmpValueError(f"min={self.min} is above max={self.max}")

    @property
    def dynamic(self) -> bool:
        """Whether gradients are checked and the scale moves."""
        return self.mode == "dynamic"

    @property
    def floor(self) -> float:
        """The lowest scale that can be reached."""
        return SMALLEST_SCALE if self.min is None else self.min

    @property
    def start(self) -> float:
        """The first scale. As in apex, `max` caps a dynamic one and `min` does not raise it."""
        return min(self.init, self.max) if self.dynamic else self.init


def _set(instance: object, name: str, value: object) -> None:
    """Normalize one field of a frozen dataclass while it is being made."""
    object.__setattr__(instance, name, value)


def parse_number(name: str, value: object) -> float:
    """Return `value` as a float; strings such as `"128.0"` are read.

    Raises:
        AmpValueError: it is not a number.
    """
    if isinstance(value, (str, SupportsFloat)):  # NumPy's numbers and 0-dim tensors too
        try:
            return float(value)
        except (ValueError, RuntimeError):
            pass
    raise AmpValueError(f"{name}={value!r} is not a number")


def parse_positive(name: str, value: object) -> float:
    """Return `value` as a float that a loss scale can be.

    Raises:
        AmpValueError: it is not one.
    """
    number = parse_number(name, value)
    if not SMALLEST_SCALE <= number <= _LARGEST_FLOAT32:
        hint = "; DeepSpeed's 0 is 'dynamic' here" if name == "loss_scale" and number == 0 else ""
        raise AmpValueError(f"{name}={value!r} must be a finite number above 0{hint}")
    return number


def _positive_integer(name: str, value: object) -> int:
    number = parse_number(name, value)
    if isinstance(value, bool) or not number >= 1 or number != math.floor(number):
        raise AmpValueError(f"{name}={value!r} must be an integer of at least 1")
    return int(number)


_TRUE = frozenset({"true", "yes", "on"})
_FALSE = frozenset({"false", "no", "off"})


def parse_bool(name: str, value: object) -> bool:
    """Return `value` as a bool; `"True"`, `"no"`, `"off"` and their like are read.

    Raises:
        AmpValueError: it is something else.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        word = value.strip().lower()
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
    raise AmpValueError(f"{name}={value!r} is not one of True, False")


def _parse_optional_bool(name: str, value: object) -> bool | None:
    return None if is_none(value) else parse_bool(name, value)


# DeepSpeed's, Megatron's, torch.amp's and apex's names for the same things.
_SCALING_ALIASES = {
    "init_scale": "init",
    "initial_loss_scale": "init",
    "scale_factor": "growth_factor",
    "scale_window": "growth_interval",
    "loss_scale_window": "growth_interval",
    "min_loss_scale": "min",
    "max_loss_scale": "max",
    "delayed_shift": "hysteresis",
}
_SCALING_FIELDS = tuple(f.name for f in fields(LossScaling))
_SCALING_KEYS = (*_SCALING_FIELDS, *_SCALING_ALIASES, "initial_scale_power", "loss_scale")


def parse_loss_scale(value: object) -> LossScaling:
    """Return the loss scaling that `value` asks for.

    Args:
        value: `"dynamic"`, a number, a string holding a number, a mapping with the fields of
            `LossScaling` (or DeepSpeed's, Megatron's and torch.amp's names for them), or a
            `LossScaling`.

    Raises:
        AmpValueError: a word other than `dynamic`, or a number that cannot be a scale.
        AmpTypeError: another type, or a mapping with an unknown key.
    """
    if isinstance(value, LossScaling):
        return value
    if isinstance(value, Mapping):
        return _loss_scaling_from_mapping(value)
    if isinstance(value, str) and value == "dynamic":
        return LossScaling()
    if isinstance(value, (str, SupportsFloat)):
        try:
            return LossScaling(mode="static", init=parse_positive("loss_scale", value))
        except AmpValueError as error:
            raise AmpValueError(f"{error}; allowed: 'dynamic', a number, or a mapping") from None
    raise AmpTypeError(
        f"loss_scale={value!r} is a {type(value).__name__}; allowed: 'dynamic', a number, or a mapping"
    )


def _loss_scaling_from_mapping(mapping: Mapping[Any, Any]) -> LossScaling:
    found: dict[str, Any] = {}
    spelled: dict[str, str] = {}

    def put(name: str, key: str, value: Any) -> None:
        if name in found:
            raise AmpValueError(
                f"loss_scale has both '{spelled[name]}' and '{key}', which are one thing; keep one"
            )
        found[name], spelled[name] = value, key

    for key, value in mapping.items():
        name = str(key).replace("-", "_")
        if name == "initial_scale_power":
            put("init", str(key), math.ldexp(1.0, min(_positive_integer(str(key), value), 1000)))
        elif name == "loss_scale":
            # DeepSpeed: 0 means dynamic. Megatron: None does.
            if is_none(value) or value == "dynamic" or parse_number(str(key), value) == 0:
                put("mode", str(key), "dynamic")
            else:
                put("mode", str(key), "static")
                put("init", str(key), value)
        elif name in _SCALING_FIELDS or name in _SCALING_ALIASES:
            if value is None and _SCALING_ALIASES.get(name, name) != "min":
                continue
            put(_SCALING_ALIASES.get(name, name), str(key), value)
        else:
            raise AmpTypeError(
                f"loss_scale has no key '{key}'; allowed: {', '.join(_SCALING_FIELDS)}"
                f"{did_you_mean(name, _SCALING_KEYS)}"
            )
    if found.get("mode") == "static":
        idle = [spelled[name] for name in found if name not in ("mode", "init")]
        if "init" not in found:
            raise AmpValueError("loss_scale has mode: static and no init; give the scale as init")
        if idle:
            raise AmpValueError(f"loss_scale has mode: static, where {', '.join(idle)} does nothing")
    return LossScaling(**found)


@dataclass(frozen=True, kw_only=True)
class Properties:
    """Everything that an opt level decides, as `amp.load_profile` shows it.

    Attributes:
        opt_level: the level this derives from, `"O0"` to `"O5"`, or `None` for a profile of its own.
        brief: one line that says what it is.
        enabled: `False` makes `initialize` and `scale_loss` do nothing.
        cast_model_type: the dtype of the model's weights and inputs; `None` or `False` for no cast.
        patch_torch_functions: whether torch's functions cast their arguments.
        patch_torch_functions_type: the dtype of the ops that gain from half precision.
        keep_batchnorm_fp32: whether norms with running statistics stay FP32 in a cast model.
        keep_norm_fp32: whether all norms do: Layer-, Group-, RMS- and InstanceNorm too.
        master_weights: whether the optimizer steps FP32 copies of 16-bit weights; `"split16"` and
            `"kahan"` keep what the copies have more than the weights, in 16 bits.
        state_dtype: the dtype of a fused optimizer's moments; `None` for that of what it steps.
        loss_scaling: how the loss scale starts and moves.
        cast_model_outputs: the dtype of the model's outputs; `None` for FP32 where the model is cast.
        rules: a user's own rules for ops (O1, O4) and modules, later ones on top.
    """

    opt_level: str | None = None
    brief: str = ""
    enabled: bool = True
    cast_model_type: torch.dtype | Literal[False] | None = None
    patch_torch_functions: bool = False
    patch_torch_functions_type: torch.dtype | None = None
    keep_batchnorm_fp32: bool | None = None
    keep_norm_fp32: bool | None = None
    master_weights: bool | LeanMasters | None = None
    state_dtype: torch.dtype | None = None
    loss_scaling: LossScaling = LossScaling(mode="static", init=1.0)
    cast_model_outputs: torch.dtype | None = None
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        _check_combination(self)

    @property
    def loss_scale(self) -> float | Literal["dynamic"]:
        """The loss scale as apex wrote it: `"dynamic"` or a number."""
        return "dynamic" if self.loss_scaling.dynamic else self.loss_scaling.init

    def describe(self) -> str:
        """Return one line per property, for people."""
        rows: dict[str, object] = {f.name: getattr(self, f.name) for f in fields(self)}
        del rows["brief"], rows["loss_scaling"]
        rows["loss_scale"] = self.loss_scale
        del rows["rules"]
        if self.rules:
            rows["rules"] = "; ".join(map(str, self.rules))
        return "\n".join(
            f"{name:26} : {dtype_name(value) if isinstance(value, torch.dtype) else value}"
            for name, value in rows.items()
        )


def _misfit(name: str, value: object, where: str, why: str) -> AmpRuntimeError:
    shown = dtype_name(value) if isinstance(value, torch.dtype) else value
    error = AmpRuntimeError(f"{name}={shown} does not fit {where}: {why}")
    error.property_name = name
    return error


def _check_combination(p: Properties) -> None:
    where = p.opt_level or "a profile with patch_torch_functions"
    if p.opt_level in BY_OP_LEVELS or (p.opt_level is None and p.patch_torch_functions):
        _check_by_op(p, where)
        return
    remedy = "only O1 and O4 cast functions. Take opt_level='O1' (float16) or 'O4' (bfloat16) instead."
    if p.patch_torch_functions:
        raise _misfit("patch_torch_functions", True, where, remedy)
    if p.patch_torch_functions_type is not None:
        raise _misfit("patch_torch_functions_type", p.patch_torch_functions_type, where, remedy)
    for rule in p.rules:
        if rule.kind == "op":
            raise _misfit("rules", rule, where, remedy)
        if rule.dtype is None:
            remedy = "a module's weights have to have some dtype. Say float32, float16 or bfloat16."
            raise _misfit("rules", rule, where, remedy)


def _check_by_op(p: Properties, where: str) -> None:
    if p.cast_model_type not in (None, False, torch.float32):
        remedy = "weights stay FP32 there. Take opt_level='O2' (float16) or 'O5' (bfloat16) instead."
        raise _misfit("cast_model_type", p.cast_model_type, where, remedy)
    if p.keep_batchnorm_fp32 is not None:
        remedy = "batch norm is FP32 there already. Leave it out."
        raise _misfit("keep_batchnorm_fp32", p.keep_batchnorm_fp32, where, remedy)
    if p.keep_norm_fp32 is not None:
        remedy = "norms are FP32 there already. Leave it out."
        raise _misfit("keep_norm_fp32", p.keep_norm_fp32, where, remedy)
    if p.master_weights is not None:
        remedy = "the weights are FP32 themselves there. Leave it out, or take opt_level='O2' or 'O5'."
        raise _misfit("master_weights", p.master_weights, where, remedy)
    dtype = p.patch_torch_functions_type
    expected = {"O1": torch.float16, "O4": torch.bfloat16}.get(p.opt_level or "", dtype)
    if dtype not in (None, expected):
        remedy = "take O1 for float16 and O4 for bfloat16."
        raise _misfit("patch_torch_functions_type", dtype, where, remedy)
    if p.patch_torch_functions and dtype not in LOW_PRECISION:
        remedy = "say float16 or bfloat16."
        raise _misfit("patch_torch_functions_type", dtype, where, remedy)
    for rule in p.rules:
        if rule.kind == "module" and rule.dtype is not torch.float32:
            remedy = "weights are FP32 there, so modules can be cast to float32 only; ops to anything."
            raise _misfit("rules", rule, where, remedy)


class Overrides(TypedDict, total=False):
    """What a caller may set on top of a profile; `None` stands for "not given"."""

    enabled: bool
    cast_model_type: torch.dtype | str | Literal[False] | None
    patch_torch_functions: bool | str | None
    patch_torch_functions_type: torch.dtype | str | None
    keep_batchnorm_fp32: bool | str | None
    keep_norm_fp32: bool | str | None
    master_weights: bool | str | None
    state_dtype: torch.dtype | str | None
    loss_scale: float | str | Mapping[str, Any] | LossScaling | None
    cast_model_outputs: torch.dtype | str | None
    rules: Sequence[Mapping[str, Any] | Rule] | None
    min_loss_scale: float | None
    max_loss_scale: float | None


PROPERTY_KEYS = (
    "cast_model_type",
    "patch_torch_functions",
    "patch_torch_functions_type",
    "keep_batchnorm_fp32",
    "keep_norm_fp32",
    "master_weights",
    "state_dtype",
    "loss_scale",
    "cast_model_outputs",
    "rules",
)
"""What a YAML profile may set, besides `extends` and `brief`."""

OVERRIDE_KEYS = ("enabled", *PROPERTY_KEYS, "min_loss_scale", "max_loss_scale")


def parse_property(name: str, value: object) -> dict[str, Any]:
    """Turn one entry of a profile or one override into fields of `Properties`.

    Raises:
        AmpValueError, AmpTypeError, AmpAssertionError: the value is not one that `name` takes.
    """
    if name == "loss_scale":
        return {"loss_scaling": parse_loss_scale(value)}
    if name == "cast_model_type":
        if is_none(value):
            return {name: None}
        if value is False or (isinstance(value, str) and value.strip().lower() in _FALSE):
            return {name: False}
        return {name: _named_dtype(name, value)}
    if name in ("patch_torch_functions_type", "cast_model_outputs"):
        return {name: None if is_none(value) else _named_dtype(name, value)}
    if name == "keep_batchnorm_fp32":
        try:
            return {name: _parse_optional_bool(name, value)}
        except AmpValueError as error:
            raise AmpAssertionError(f"{error}, None") from None
    if name == "keep_norm_fp32":
        return {name: _parse_optional_bool(name, value)}
    if name == "master_weights":
        return {name: _parse_masters(value)}
    if name == "state_dtype":
        return {name: _parse_state_dtype(value)}
    if name == "patch_torch_functions":
        return {name: bool(_parse_optional_bool(name, value))}
    if name == "enabled":
        return {name: parse_bool(name, value)}
    if name == "rules":
        return {name: parse_rules(value)}
    raise AmpTypeError(
        f"there is no property '{name}'; allowed: {', '.join(OVERRIDE_KEYS)}"
        f"{did_you_mean(name, OVERRIDE_KEYS)}"
    )


def _parse_masters(value: object) -> bool | LeanMasters | None:
    word = value.strip().lower() if isinstance(value, str) else value
    if word == "float32":
        return True
    for kind in get_args(LeanMasters):
        if word == kind:
            return cast("LeanMasters", kind)
    try:
        return _parse_optional_bool("master_weights", value)
    except AmpValueError:
        raise AmpValueError(
            f"master_weights={value!r} is not one of True, False, float32, split16, kahan"
            f"{did_you_mean(str(value), ('float32', *get_args(LeanMasters)))}"
        ) from None


def _parse_state_dtype(value: object) -> torch.dtype | None:
    dtype = None if is_none(value) else _named_dtype("state_dtype", value)
    if dtype not in (None, torch.bfloat16, torch.float32):
        raise AmpValueError(
            f"state_dtype={value!r} is not one of bfloat16, and float32 or None for the dtype of what "
            "the optimizer steps"
        )
    return torch.bfloat16 if dtype is torch.bfloat16 else None


def _named_dtype(name: str, value: object) -> torch.dtype:
    try:
        return parse_dtype(value)
    except (AmpValueError, AmpTypeError) as error:
        raise type(error)(f"{name}: {error}") from None


def override(properties: Properties, overrides: Mapping[str, Any]) -> Properties:
    """Return `properties` with every override that is not None applied, checked as a whole.

    `rules` come on top of the profile's; `min_loss_scale` and `max_loss_scale` bound whatever loss
    scaling results.

    Raises:
        AmpRuntimeError: the result does not fit together.
        AmpValueError, AmpTypeError, AmpAssertionError: a value is not one that its key takes.
    """
    changes: dict[str, Any] = {}
    bounds: dict[str, Any] = {}
    for name, value in overrides.items():
        if value is None:
            continue
        if name in ("min_loss_scale", "max_loss_scale"):
            bounds[name.removesuffix("_loss_scale")] = parse_positive(name, value)
        else:
            changes.update(parse_property(name, value))
    if "rules" in changes:
        changes["rules"] = properties.rules + changes["rules"]
    if bounds:
        changes["loss_scaling"] = replace(
            changes.get("loss_scaling", properties.loss_scaling), **bounds
        )
    return replace(properties, **changes)
