"""What `amp.state_dict()` holds: apex's format, and what an exact resume needs besides.

    {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 12, ...}, ..., "opt_level": "O2"}

Plain values only, so that `torch.load(weights_only=True)` reads it. The master weights are in the
model's state dict, which holds FP32 values at every level.
"""

import math
import re
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from amp.casting import strategies
from amp.errors import AmpRuntimeError, AmpTypeError, AmpValueError, AmpWarning
from amp.training.scaler import LossScaler

_SCALER_KEY = re.compile(r"loss_scaler(\d+)")
_LEVEL_KEY = "opt_level"


def save(scalers: Sequence[LossScaler], opt_level: str | None) -> OrderedDict[str, Any]:
    """Return the state of the scalers. The host waits for the device."""
    state: OrderedDict[str, Any] = OrderedDict(
        (f"loss_scaler{i}", scaler.state_dict()) for i, scaler in enumerate(scalers)
    )
    state[_LEVEL_KEY] = opt_level
    return state


def check(state: object) -> None:
    """Raise an AmpError unless `state` is a state dict of ours or of apex's."""
    if not isinstance(state, Mapping):
        raise AmpTypeError(
            f"expected what amp.state_dict() returns, a dict, and got a {type(state).__name__}"
        )
    others = {_LEVEL_KEY, *(each.state_key for each in strategies.STRATEGIES if each.state_key)}
    unexpected = [key for key in state if not _SCALER_KEY.fullmatch(str(key)) and key not in others]
    if unexpected:
        names = ", ".join(f'"{key}"' for key in unexpected)
        raise AmpRuntimeError(
            f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {names}. "
            'Pass what amp.state_dict() returned, such as checkpoint["amp"].'
        )
    for strategy in strategies.STRATEGIES:
        if strategy.state_key in state and (problem := strategy.check_state(state[strategy.state_key])):
            raise AmpValueError(f"state_dict['{strategy.state_key}'] has no usable {problem}")
    for key, entry in state.items():
        numbers = entry if isinstance(entry, Mapping) else {}
        optional = {"hysteresis_left", "overflows_in_a_row"} & numbers.keys()
        for name in ("loss_scale", "unskipped", *optional) if key not in others else ():
            value: Any = numbers.get(name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 <= value < math.inf:
                raise AmpValueError(
                    f"state_dict['{key}'] has no usable '{name}': {entry!r}; expected a mapping with "
                    "numbers for loss_scale and unskipped"
                )


def load(state: Mapping[str, Any], scalers: Sequence[LossScaler], opt_level: str | None) -> None:
    """Put a checked state into the scalers, each by its number, and warn of what differs."""
    entries = {
        int(match[1]): entry
        for key, entry in state.items()
        if (match := _SCALER_KEY.fullmatch(str(key)))
    }
    message = f"the state_dict contains {len(entries)} loss scalers, and num_losses is {len(scalers)}"
    if surplus := [f"loss_scaler{i}" for i in sorted(entries) if i >= len(scalers)]:
        message += f"; skipping {', '.join(surplus)}"
    if missing := [f"loss_scaler{i}" for i in range(len(scalers)) if i not in entries]:
        message += f"; {', '.join(missing)} start anew"
    if len(entries) != len(scalers):
        warnings.warn(message, AmpWarning, stacklevel=3)
    saved_level = state.get(_LEVEL_KEY, opt_level)
    if saved_level != opt_level:
        warnings.warn(
            f"the state_dict was saved at opt_level {saved_level}, and this session runs at "
            f"{opt_level}; weights and optimizer state carry over, and a loss scale does where both "
            "levels scale dynamically",
            AmpWarning,
            stacklevel=3,
        )
    for i, scaler in enumerate(scalers):
        if i in entries:
            scaler.load_state_dict(entries[i])
