"""`LossScaling`: how the loss scale starts, grows and backs off."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, SupportsFloat

from amp.errors import AmpValueError, did_you_mean
from amp.profiles import keys
from amp.profiles.keys import SMALLEST_SCALE, OneOf, key, or_none, parse_count, parse_positive


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """How the loss scale starts and moves; see docs/profiles.md.

    `hysteresis` counts overflows since the last growth: every overflow skips its step, whether the
    scale backs off or not. A `static` scale checks gradients only where `check` says so.

    Attributes:
        mode: dynamic, or static with `init` as the scale.
        init: first scale; `initial_scale_power` is its exponent of 2.
        growth_factor: factor after `growth_interval` good iterations.
        backoff_factor: factor after an overflow.
        growth_interval: good iterations in a row before growth.
        hysteresis: overflows since the last growth before the scale backs off.
        consecutive_hysteresis: a good iteration restores the full hysteresis.
        min: floor; none is 2^-126.
        max: ceiling.
        check: a step whose gradients have an inf or NaN is skipped. The default of a static scale is
            false; auto is true where the host need not wait for the check.
        overflow_patience: overflows in a row before a warning; below a scale of 1, three.

    Raises:
        AmpValueError: a field is not in its range, or two do not fit together.
    """

    mode: Literal["dynamic", "static"] = key("dynamic", OneOf("dynamic", "static"))
    init: float = key(2.0**16, parse_positive, aliases=("init_scale", "initial_loss_scale"))
    growth_factor: float = key(2.0, parse_positive, aliases=("scale_factor",))
    backoff_factor: float = key(0.5, parse_positive)
    growth_interval: int = key(2000, parse_count, aliases=("scale_window", "loss_scale_window"))
    hysteresis: int = key(1, parse_count, aliases=("delayed_shift",))
    consecutive_hysteresis: bool = key(False, OneOf(True, False))
    min: float | None = key(None, or_none(parse_positive), aliases=("min_loss_scale",))
    max: float = key(2.0**24, parse_positive, aliases=("max_loss_scale",))
    check: bool | Literal["auto"] | None = key(None, OneOf(True, False, "auto", None))
    overflow_patience: int = key(20, parse_count)

    def __post_init__(self) -> None:
        keys.parse_fields(self, SCALING_KEYS)
        if self.dynamic and self.check not in (None, True):
            raise AmpValueError(
                f"loss_scale has check: {self.check}, and a dynamic scale always checks; give "
                "mode: static with it"
            )
        object.__setattr__(self, "check", self.dynamic if self.check is None else self.check)
        if self.growth_factor < 1:
            raise AmpValueError(f"growth_factor={self.growth_factor} must be at least 1")
        if self.backoff_factor > 1:
            raise AmpValueError(f"backoff_factor={self.backoff_factor} must be at most 1")
        if self.floor > self.max:
            raise AmpValueError(f"min={self.min} is above max={self.max}")

    @functools.cached_property
    def dynamic(self) -> bool:
        """Whether the scale changes during training."""
        return self.mode == "dynamic"

    @functools.cached_property
    def is_identity(self) -> bool:
        """Whether scaling changes nothing."""
        return not self.dynamic and self.init == 1.0

    @functools.cached_property
    def floor(self) -> float:
        """The lowest possible scale."""
        return SMALLEST_SCALE if self.min is None else self.min

    @functools.cached_property
    def start(self) -> float:
        """The first scale. As in apex, `max` caps a dynamic scale, and `min` does not raise it."""
        return min(self.init, self.max) if self.dynamic else self.init


SCALING_KEYS = keys.keys_of(LossScaling)


def parse_loss_scale(name: str, value: object) -> LossScaling:
    """Return the loss scaling that `"dynamic"`, a number or a mapping asks for.

    A mapping has the keys of `LossScaling`, or DeepSpeed's, Megatron's and torch.amp's names for them.

    Raises:
        AmpValueError: a value that is not allowed, or a key that has no effect.
        AmpTypeError: a value of the wrong type, or an unknown key.
    """
    if isinstance(value, LossScaling):
        return value
    if isinstance(value, Mapping):
        return _from_mapping(value)
    if isinstance(value, str) and value == "dynamic":
        return LossScaling()
    allowed = "allowed: 'dynamic', a number, or a mapping"
    if not isinstance(value, (str, SupportsFloat)):
        raise keys.wrong_type(name, value, allowed)
    try:
        return LossScaling(mode="static", init=parse_positive(name, value))
    except AmpValueError as error:
        hint = did_you_mean(value, ["dynamic"]) if isinstance(value, str) else ""
        hint = "; did you mean 'dynamic'?" if value is True else hint
        raise AmpValueError(f"{error}; {allowed}{hint}") from None


def _from_mapping(mapping: Mapping[Any, Any]) -> LossScaling:
    found, spelled = keys.fields_of("loss_scale", mapping, _fields)
    scaling = LossScaling(**found)
    if scaling.mode == "static":
        takes = ("mode", "init", "check", *(["overflow_patience"] if scaling.check else []))
        idle = [spelled[name] for name in found if name not in takes]
        if "init" not in found:
            raise AmpValueError("loss_scale has mode: static and no init; give the scale as init")
        if idle:
            raise AmpValueError(f"loss_scale has mode: static, where {', '.join(idle)} does nothing")
    return scaling


def _fields(written: str, value: Any) -> dict[str, Any]:
    """Return the fields that an item of a mapping sets."""
    name = written.replace("-", "_")
    if name == "initial_scale_power":
        return {"init": math.ldexp(1.0, min(parse_count(written, value), 1000))}
    if name == "loss_scale":  # DeepSpeed: 0 means dynamic. Megatron: None does.
        is_word = keys.is_none(value) or keys.word_of(value) == "dynamic"
        if is_word or keys.parse_number(written, value) == 0:
            return {"mode": "dynamic"}
        return {"mode": "static", "init": value}
    found = keys.find_key(
        name, SCALING_KEYS, "loss_scale has no key", ("initial_scale_power", "loss_scale")
    )
    return {} if value is None else {found.field: value}
