"""How the loss scale starts and moves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, SupportsFloat

from amp.dtypes import is_none
from amp.errors import AmpTypeError, AmpValueError
from amp.profiles import keys
from amp.profiles.keys import SMALLEST_SCALE, key, parse_count, parse_number, parse_positive


def _parse_mode(name: str, value: object) -> str:
    if value not in ("dynamic", "static"):
        raise AmpValueError(f"{name}={value!r} is not one of dynamic, static")
    return str(value)


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """How the loss scale starts and moves; docs/profiles.md has the fields.

    `hysteresis` counts overflows since the last growth: every overflow skips its step, whether the
    scale backs off or not. A `static` scale looks at no gradient.

    Raises:
        AmpValueError: a field is not in its range, or two do not fit together.
    """

    mode: Literal["dynamic", "static"] = key("dynamic", _parse_mode, "or static, with `init` as scale")
    init: float = key(
        2.0**16, parse_positive, "first scale", aliases=("init_scale", "initial_loss_scale")
    )
    growth_factor: float = key(
        2.0, parse_positive, "factor after `growth_interval` good iterations", aliases=("scale_factor",)
    )
    backoff_factor: float = key(0.5, parse_positive, "factor after an overflow")
    growth_interval: int = key(
        2000, parse_count, "good iterations in a row", aliases=("scale_window", "loss_scale_window")
    )
    hysteresis: int = key(
        1,
        parse_count,
        "overflows since the last growth before it backs off",
        aliases=("delayed_shift",),
    )
    consecutive_hysteresis: bool = key(
        False, keys.parse_bool, "a good iteration gives the spent hysteresis back"
    )
    min: float | None = key(
        None, keys.optional(parse_positive), "floor; none is 2^-126", aliases=("min_loss_scale",)
    )
    max: float = key(2.0**24, parse_positive, "ceiling", aliases=("max_loss_scale",))
    overflow_patience: int = key(
        50, parse_count, "overflows in a row, at the floor or below 1, before a warning"
    )

    def __post_init__(self) -> None:
        for each in keys.keys_of(type(self)).values():
            parsed = each.parse(each.name, getattr(self, each.field))
            object.__setattr__(self, each.field, parsed)
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


SCALING_KEYS = keys.keys_of(LossScaling)
_OF_OTHERS = ("initial_scale_power", "loss_scale")


def parse_loss_scale(name: str, value: object) -> LossScaling:
    """Return the loss scaling that a word, a number or a mapping asks for.

    A mapping has the keys of `LossScaling`, or DeepSpeed's, Megatron's and torch.amp's names for them.

    Raises:
        AmpValueError: a word other than `dynamic`, or a number that cannot be a scale.
        AmpTypeError: another type, or a mapping with an unknown key.
    """
    if isinstance(value, LossScaling):
        return value
    if isinstance(value, Mapping):
        return _from_mapping(value)
    if value == "dynamic":
        return LossScaling()
    if isinstance(value, (str, SupportsFloat)):
        try:
            return LossScaling(mode="static", init=parse_positive(name, value))
        except AmpValueError as error:
            raise AmpValueError(f"{error}; allowed: 'dynamic', a number, or a mapping") from None
    raise AmpTypeError(
        f"{name}={value!r} is a {type(value).__name__}; allowed: 'dynamic', a number, or a mapping"
    )


def _from_mapping(mapping: Mapping[Any, Any]) -> LossScaling:
    found: dict[str, Any] = {}
    spelled: dict[str, str] = {}

    def put(name: str, written: str, value: Any) -> None:
        if name in found:
            raise AmpValueError(
                f"loss_scale has both '{spelled[name]}' and '{written}', which are one thing; keep one"
            )
        found[name], spelled[name] = value, written

    for written, value in mapping.items():
        name = str(written).replace("-", "_")
        if name == "initial_scale_power":
            put("init", str(written), math.ldexp(1.0, min(parse_count(str(written), value), 1000)))
        elif name == "loss_scale":
            # DeepSpeed: 0 means dynamic. Megatron: None does.
            if is_none(value) or value == "dynamic" or parse_number(str(written), value) == 0:
                put("mode", str(written), "dynamic")
            else:
                put("mode", str(written), "static")
                put("init", str(written), value)
        else:
            field = keys.find_key(name, SCALING_KEYS, "loss_scale has no key", _OF_OTHERS).field
            if value is not None or field == "min":
                put(field, str(written), value)
    if found.get("mode") == "static":
        idle = [spelled[name] for name in found if name not in ("mode", "init")]
        if "init" not in found:
            raise AmpValueError("loss_scale has mode: static and no init; give the scale as init")
        if idle:
            raise AmpValueError(f"loss_scale has mode: static, where {', '.join(idle)} does nothing")
    return LossScaling(**found)
