"""What `amp.state_dict()` contains: apex's entries, and others that an exact resume needs.

    {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 12, ...}, ..., "opt_level": "O2"}

It contains only plain values, so `torch.load(weights_only=True)` reads it. The master weights are in
the model's state dict, which has FP32 values at every level.
"""

import re
from collections import OrderedDict
from collections.abc import Iterator
from types import NoneType
from typing import Any, NamedTuple

from amp.casting import strategies
from amp.errors import AmpRuntimeError, brief, first_few, name_of, warn
from amp.state_checks import StateChecks, as_dict
from amp.training.scaler import ScalerState, read_state

_SCALER_KEY = re.compile(r"loss_scaler(0|[1-9][0-9]{0,8})")
_LEVEL_KEY = "opt_level"


def save(session: Any) -> OrderedDict[str, Any]:
    """Return the state of a session's scalers and strategies. The host waits for the device."""
    state: OrderedDict[str, Any] = OrderedDict(
        (f"loss_scaler{i}", scaler.state_dict()) for i, scaler in enumerate(session.scalers)
    )
    state[_LEVEL_KEY] = session.properties.opt_level
    for strategy in session.strategies:
        if strategy.state_key and (of_strategy := strategy.state_dict()):
            state[strategy.state_key] = of_strategy
    return state


class SavedState(NamedTuple):
    """A state dict whose entries have been checked, and copied.

    Attributes:
        scalers: the states of the scalers, by their numbers.
        has_level: whether it has the level at which it was saved.
        opt_level: that level.
        strategies: the states of strategies, by their keys.
    """

    scalers: dict[int, ScalerState]
    has_level: bool
    opt_level: str | None
    strategies: dict[str, Any]


def read(state: object) -> SavedState:
    """Return the checked content of a state dict of this library or of apex.

    Raises:
        AmpTypeError, AmpRuntimeError, AmpValueError: it is not such a state dict, or an entry is not
            valid.
    """
    state = as_dict(state, "what amp.state_dict() returns")
    strategy_of = {each.state_key: each for each in strategies.STRATEGIES if each.state_key}
    unexpected = [
        key for key in state if key not in strategy_of and key != _LEVEL_KEY and not _scaler_key(key)
    ]
    if unexpected:
        meant = 'Pass what amp.state_dict() returned, such as checkpoint["amp"].'
        if "_growth_tracker" in state:
            meant = "It is a GradScaler's: load it into amp.GradScaler, or pass initialize its scale."
        names = first_few(unexpected, lambda key: f'"{key}"' if name_of(key) is key else brief(key))
        raise AmpRuntimeError(
            f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {names}. {meant}"
        )
    level, checks = state.get(_LEVEL_KEY), StateChecks()
    if not isinstance(level, (str, NoneType)):
        checks.fail("state_dict", _LEVEL_KEY, brief(level), "the name of a level, or None")
    scalers: dict[int, ScalerState] = {}
    for key in state:
        if match := _scaler_key(key):
            entry = checks.mapping(state, key, "state_dict", "what a loss scaler's state_dict() is")
            scalers[int(match[1])] = read_state(entry, f"state_dict[{brief(key)}]")
    own: dict[str, Any] = {}
    for key, strategy in strategy_of.items():
        if key in state:
            entry = checks.mapping(state, key, "state_dict", "what amp.state_dict() has there")
            own[key] = strategy.checked_state(entry, f"state_dict['{key}']", checks)
    checks.finish()
    return SavedState(scalers, _LEVEL_KEY in state, level, own)


def _scaler_key(key: Any) -> re.Match[str] | None:
    return _SCALER_KEY.fullmatch(key) if isinstance(key, str) else None


def differences(saved: SavedState, count: int, opt_level: str | None) -> Iterator[str]:
    """Yield messages about a state that differs from its session, with `count` losses at a level."""
    entries = saved.scalers
    message = f"the state_dict contains {len(entries)} loss scalers, and num_losses is {count}"
    if surplus := [f"loss_scaler{i}" for i in sorted(entries) if i >= count]:
        message += f"; skipping {first_few(surplus)}: pass num_losses={len(entries)} to load all"
    if missing := [f"loss_scaler{i}" for i in range(count) if i not in entries]:
        message += f"; {first_few(missing)} start anew"
    if len(entries) != count:
        yield message
    if saved.has_level and saved.opt_level != opt_level:
        yield (
            f"the state_dict was saved at opt_level {saved.opt_level}, and this session runs at "
            f"{opt_level}; weights and optimizer state carry over, and the loss scale does if both "
            "levels scale dynamically"
        )


def restore(saved: SavedState, session: Any) -> None:
    """Load a saved state into a session, unless it is disabled, after warnings about what differs."""
    if not session.properties.enabled:
        return
    pairs = [(x, saved.strategies.get(x.state_key)) for x in session.strategies if x.state_key]
    of_strategies = [strategy.differences(state) for strategy, state in pairs]
    of_scalers = differences(saved, len(session.scalers), session.properties.opt_level)
    for message in (*of_scalers, *of_strategies):
        if message:  # before anything is changed: a warning may be an error
            warn(message)
    for i, scaler in enumerate(session.scalers):
        if i in saved.scalers:
            scaler.restore(saved.scalers[i])
    for strategy, state in pairs:
        strategy.load_state_dict(state)
