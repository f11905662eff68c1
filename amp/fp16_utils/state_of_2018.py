"""State dicts of the `FP16_Optimizer` of `apex.optimizers`, of 2018, and of `apex.contrib.optimizers`.

They have the scale and its counters as entries (`cur_scale`, `cur_iter`, `last_overflow_iter`), and
masters of all parameters: `fp32_groups`, a list for each group, or `fp32_groups_flat`, one flat tensor
for each group. With flat masters the inner optimizer has one parameter in each group, so that its
moments are flat too.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from amp.errors import brief, first_few
from amp.profiles.keys import LARGEST_SCALE, SMALLEST_SCALE
from amp.profiles.loss_scaling import LossScaling
from amp.state_checks import LARGEST_COUNT, StateChecks

_PATH, _INNER = "state_dict", "state_dict['optimizer_state_dict']"


def masters_of_2018(state_dict: Mapping[str, Any]) -> str | None:
    """Return the name of the masters in a state dict of one of these classes, None in any other."""
    return next((name for name in ("fp32_groups", "fp32_groups_flat") if name in state_dict), None)


def read_2018(
    checks: StateChecks,
    state_dict: Mapping[str, Any],
    groups: Sequence[Sequence[Tensor]],
    config: LossScaling,
) -> tuple[dict[str, Any], LossScaling]:
    """Return a state dict with the entries of today, and how its scale moves.

    Args:
        checks: the checks of the state dict.
        state_dict: as apex has saved it.
        groups: what the optimizer steps, group by group: masters, and parameters without a master.
        config: how the optimizer's scale moves; if it is static, it stays so.

    Raises:
        AmpValueError: an entry is not valid, or belongs to another optimizer.
    """
    scale = checks.number(state_dict, "cur_scale", _PATH, low=SMALLEST_SCALE)
    is_dynamic, good = checks.flag(state_dict, "dynamic_loss_scale", _PATH), 0
    if is_dynamic:
        factor = checks.number(state_dict, "scale_factor", _PATH, 1.0, LARGEST_SCALE)
        window = int(checks.number(state_dict, "scale_window", _PATH, 1, LARGEST_COUNT, is_whole=True))
        now = checks.count(state_dict, "cur_iter", _PATH)
        last = checks.number(state_dict, "last_overflow_iter", _PATH, -1, now, is_whole=True)
        good = int(now - last - 1) % window
        if config.dynamic:
            config = dataclasses.replace(
                config, growth_factor=factor, backoff_factor=1 / factor, growth_interval=window
            )
    scaler = {"loss_scale": scale, "unskipped": good}
    today = {**state_dict, "loss_scaler": scaler}
    if masters_of_2018(state_dict) == "fp32_groups_flat":
        today |= _without_flat(checks, state_dict, groups)
    return today, config


def _without_flat(
    checks: StateChecks, state_dict: Mapping[str, Any], groups: Sequence[Sequence[Tensor]]
) -> dict[str, Any]:
    """Return the masters and the inner optimizer's state, cut from flat tensors."""
    name, n = "fp32_groups_flat", len(groups)
    expected = f"a list of {n} flat tensors, as this optimizer has groups"
    flat = dict(enumerate(checks.items(state_dict, name, _PATH, expected, n)))
    inner = checks.mapping(state_dict, "optimizer_state_dict", _PATH, "the inner optimizer's state")
    old_groups = dict(
        enumerate(checks.items(inner, "param_groups", _INNER, f"a list of {n} groups", n))
    )
    old_state = checks.mapping(inner, "state", _INNER, "a dict")
    masters, new_groups, state, i = [], [], dict[int, dict[str, Any]](), 0
    for number, own in enumerate(groups):
        like = torch.empty(sum(p.numel() for p in own), device="meta")
        whole = checks.tensor_like(flat, number, f"{_PATH}['{name}']", like, copies=False)
        masters.append(_cut(whole, own))
        path = f"{_INNER}['param_groups']"
        group = checks.mapping(old_groups, number, path, "a dict")
        path, expected = f"{path}[{number}]", "a list of one number: of the flat parameter"
        (key,) = checks.items(group, "params", path, expected, 1)
        if not isinstance(key, int):
            checks.fail(path, "params", brief([key]), expected)
        places = range(i, i := i + len(own))
        new_groups.append({**group, "params": list(places)})
        if key not in old_state:
            continue
        entry = checks.mapping(old_state, key, f"{_INNER}['state']", "a dict")
        del old_state[key]
        moments = {
            moment: _cut(value, own)
            for moment, value in entry.items()
            if isinstance(value, Tensor) and value.shape == whole.shape and moment != "step"
        }
        for place in places:
            cut = {moment: pieces[place - places.start] for moment, pieces in moments.items()}
            state[place] = {**entry, **cut}
    if old_state:
        found = f"it has {first_few(list(old_state), brief)}"
        checks.fail(_INNER, "state", found, "states of the flat parameters in its param_groups")
    return {name: masters, "optimizer_state_dict": {"state": state, "param_groups": new_groups}}


def _cut(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return consecutive views of a flat tensor, with the shapes of others."""
    pieces = torch.split(flat.detach(), [tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
