"""Conversion and checks of state dicts, `torch.optim`'s and apex's too, for a fused optimizer."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp.distributed import shard_like
from amp.errors import AmpValueError, brief, first_few
from amp.kernels.interrupts import at_once
from amp.kernels.tensor_lists import local, slices
from amp.lazy import kernels
from amp.profiles.properties import STATE_DTYPES
from amp.state_checks import LARGEST_COUNT, StateChecks
from amp.training.optimizer_states import check_settings, structure_of

if TYPE_CHECKING:
    from amp.optimizers.fused import FusedOptimizer


def as_own_state(optimizer: FusedOptimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checked state dict, with the names and groups of a fused optimizer, and its moments.

    Those of an optimizer that packs moments are packed. The host waits once for each device.

    Raises:
        AmpTypeError, AmpValueError: it is another optimizer's, or an entry is not what it should be.
    """
    checks = StateChecks()
    own, parameter_of = structure_of(checks, optimizer, state_dict)
    state = own["state"]
    for i, group in enumerate(own["param_groups"]):
        path = f"state_dict['param_groups'][{i}]"
        group["fused"] = True
        _require(optimizer, f"group {i}", ("params", *optimizer._required), group)
        for name, value in optimizer.defaults.items():
            group.setdefault(name, value)
        _check_group(checks, optimizer, group, path)
        optimizer._from_group(group, state)
        steps = group.pop("step", None)  # apex counts the steps of a group
        if steps is None:
            steps = optimizer._uncounted_steps
        for key in group["params"]:
            entry = {name: v for name, v in state.pop(key, {}).items() if v is not None}
            if not entry:
                continue
            entry = state[key] = {"step": steps, **entry}
            there = [name for name, value in entry.items() if value is not None]
            names = "step", *optimizer._moments(group), *optimizer._scalars
            _require(optimizer, f"the state of parameter {key}", names, there)
            _check_entry(checks, optimizer, entry, f"state_dict['state'][{key!r}]", parameter_of[key])
    checks.finish()
    if optimizer.kept_dtype is torch.int16:
        for key, entry in state.items():
            pack_moments(entry, parameter_of[key], like=parameter_of[key])
    return own


def _check_group(
    checks: StateChecks, optimizer: FusedOptimizer, group: dict[str, Any], path: str
) -> None:
    """Check the settings of a saved group, one by one and then together."""
    check_settings(checks, group, path, optimizer.defaults, optimizer.defaults)
    for name in optimizer._ranges:
        checks.scalar(group, name, path, low=0.0)
    if group["max_grad_norm"] is not None:
        checks.scalar(group, "max_grad_norm", path, low=0.0)
    if group["state_dtype"] not in (None, *STATE_DTYPES):
        expected = "torch.bfloat16, 'packed16' or None"
        checks.fail(path, "state_dtype", brief(group["state_dtype"]), expected)
    checks.count(group, "seed", path, 2**53)
    if group.get("step") is not None:
        checks.scalar(group, "step", path, 0, LARGEST_COUNT, is_whole=True)
    optimizer._check_group(group)


def _check_entry(
    checks: StateChecks, optimizer: FusedOptimizer, entry: dict[str, Any], path: str, parameter: Tensor
) -> None:
    """Check the saved state of a parameter; replace its tensors by copies, but for those to pack."""
    moments, is_packed = optimizer._moments(), optimizer.kept_dtype is torch.int16
    for name in entry:
        if name == "step" or name in optimizer._scalars:
            number = checks.scalar(entry, name, path, 0, is_whole=name == "step")
            number = torch.as_tensor(number, dtype=torch.float32, device=parameter.device)
            entry[name] = number.reshape(())
        elif name in moments:
            low = -math.inf if moments[name].is_signed else 0.0
            dtype = torch.float32 if is_packed else optimizer.kept_dtype or parameter.dtype
            kind: Any = {"may_be_inf": low == 0.0, "copies": not is_packed}
            entry[name] = checks.tensor_like(entry, name, path, parameter, dtype, low, **kind)
        else:
            known = ", ".join(("step", *moments, *optimizer._scalars))
            kind = type(optimizer).__name__
            checks.fail(path, name, f"{kind} has no such entry", f"only {known}, as {kind} has saved")


PACKED = "moments"
"""The entry of a parameter's state that has both moments of Adam in words of 16 bits."""
_BOTH = "exp_avg", "exp_avg_sq"


def pack_moments(entry: dict[str, Any], parameter: Tensor, like: Tensor | None = None) -> None:
    """Replace both moments of a parameter, if it has any, by packed ones, int16. No host sync.

    Args:
        entry: the state of the parameter.
        parameter: the parameter.
        like: has the device and the strides of what is made; None for those of the moments.
    """
    if _BOTH[0] in entry:
        both = [local(entry[name]) for name in _BOTH]
        like = both[0] if like is None else local(like)
        shape = both[0] if 0 in like.stride() else like  # a lean master is one number, expanded
        words = torch.empty_like(shape, dtype=torch.int16, device=like.device, requires_grad=False)
        for part, *values in slices(words, *both):  # which may come from another device
            kernels.moments.pack(*[[x.to(part.device)] for x in values], [part])
        _replace(entry, _BOTH, {PACKED: shard_like(words, parameter)})


def unpack_moments(entry: dict[str, Any], parameter: Tensor, dtype: torch.dtype) -> None:
    """Replace packed moments of a parameter, if it has any, by two in a dtype. No host sync."""
    if PACKED in entry:
        words = local(entry[PACKED])
        both = [torch.empty_like(words, dtype=dtype) for _ in _BOTH]
        kernels.moments.unpack([words], *[[x] for x in both])
        moments = {name: shard_like(x, parameter) for name, x in zip(_BOTH, both, strict=True)}
        _replace(entry, [PACKED], moments)


def _replace(entry: dict[str, Any], old: Iterable[str], new: dict[str, Any]) -> None:
    """Replace entries at once, so that a lack of memory or an interrupt loses nothing."""
    at_once(functools.partial(entry.update, new), *(functools.partial(entry.pop, x) for x in old))


def _require(optimizer: FusedOptimizer, what: str, names: Iterable[str], found: Iterable[str]) -> None:
    if missing := set(names).difference(found):
        raise AmpValueError(
            f"{what} in the state dict has no {', '.join(sorted(missing))}, only "
            f"{first_few(found)}: it is not a {type(optimizer).__name__}'s. Load it into an "
            "optimizer of the class that saved it"
        )
