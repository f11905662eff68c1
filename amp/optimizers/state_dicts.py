"""State dicts of others, as a fused optimizer keeps its own: `torch.optim`'s, and apex's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp.errors import AmpValueError

if TYPE_CHECKING:
    from amp.optimizers.fused import FusedOptimizer


def as_own_state(optimizer: FusedOptimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with the names and the groups of an optimizer.

    Raises:
        AmpValueError: it is another optimizer's.
    """
    own: dict[str, Any] = dict(copy(state_dict))
    groups = own["param_groups"] = [{**group, "fused": True} for group in own["param_groups"]]
    state = own["state"] = {key: dict(entry) for key, entry in own["state"].items()}
    for i, group in enumerate(groups):
        _require(optimizer, f"group {i}", optimizer._required, group)
        of_group = {**optimizer.defaults, **group}
        optimizer._check_group(of_group)
        optimizer._from_group(group, state)
        steps = group.pop("step", None)  # apex counts the steps of a group
        for key in group["params"]:
            entry = {name: v for name, v in state.pop(key, {}).items() if v is not None}
            if not entry:
                continue
            taken = optimizer._steps_taken(entry) if steps is None else steps
            entry = state[key] = {"step": taken, **entry}
            there = {name: value for name, value in entry.items() if value is not None}
            names = {"step", *optimizer._moments(of_group), *optimizer._scalars}
            _require(optimizer, f"the state of parameter {key}", names, there)
            entry["step"] = as_tensor(entry["step"])
        for name, value in optimizer.defaults.items():
            group.setdefault(name, value)
    return own


def as_tensor(number: Any) -> Tensor:
    """Return a number as a float32 tensor, on the CPU if it is on no device."""
    if isinstance(number, Tensor):
        return number.to(torch.float32, copy=True)  # each parameter has its own
    return torch.tensor(number, dtype=torch.float32, device="cpu")


def _require(optimizer: FusedOptimizer, what: str, names: Set[str], found: Iterable[str]) -> None:
    if missing := names - set(found):
        raise AmpValueError(
            f"{what} in the state dict has no {', '.join(sorted(missing))}, only "
            f"{', '.join(map(str, found))}: it is not a {type(optimizer).__name__}'s. Load it into an "
            "optimizer of the class that saved it"
        )
