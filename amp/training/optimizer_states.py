"""Checks of an optimizer's state dict before torch loads it: groups, settings, numbers, moments.

torch loads a wrong state dict without a check, and fails in the next step, or never.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from amp.errors import AmpValueError, brief
from amp.state_checks import LARGEST_COUNT, StateChecks, all_or_nothing, as_dict, as_float, as_plain
from amp.training.wrapped_optimizers import inherits

_FLAGS = ("foreach", "fused", "maximize", "capturable", "differentiable")
"""Settings that are a bool, or None."""


_MOMENTS = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "SparseAdam"), ("exp_avg", "exp_avg_sq")),
    "Adadelta": ("square_avg", "acc_delta"),
    "Adagrad": ("sum",),
    "Adamax": ("exp_avg", "exp_inf"),
    "ASGD": ("ax",),
    "RMSprop": ("square_avg",),
    "Rprop": ("prev", "step_size"),
}
"""The entries that torch's optimizers need of each parameter that has any."""


def structure_of(
    checks: StateChecks, optimizer: Any, state_dict: Any, may_have_others: bool = False
) -> tuple[dict[str, Any], dict[Any, Tensor]]:
    """Return a copy of a state dict with a checked structure, and the parameters by its keys.

    The copy may be changed: it, its groups and the entries of parameters are new, plain dicts.

    Args:
        checks: of the state dict.
        optimizer: that is to load it.
        state_dict: the state dict.
        may_have_others: whether it may have state that belongs to no parameter of the groups.

    Raises:
        AmpTypeError, AmpValueError: it is not a state dict of an optimizer with these groups.
    """
    kind = type(optimizer).__name__
    own = as_dict(state_dict, f"what {kind}.state_dict() returns")
    groups = optimizer.param_groups
    expected = f"a list of {len(groups)} groups, as this {kind} has"
    holders = [key for key, x in own.items() if isinstance(x, Mapping) and "param_groups" in x]
    if "param_groups" not in own and (holders or "loss_scaler0" in own):
        is_ours = not holders
        what = "what amp.state_dict() returned" if is_ours else "a whole checkpoint"
        part = "it to amp.load_state_dict" if is_ours else f"checkpoint[{brief(holders[0])}]"
        raise AmpValueError(f"{kind}.load_state_dict got {what}: pass {part}. Nothing was loaded")
    saved = dict(enumerate(checks.items(own, "param_groups", "state_dict", expected, len(groups))))
    found: dict[Any, Tensor] = {}
    for i, known in enumerate(groups):
        path = f"state_dict['param_groups'][{i}]"
        group = saved[i] = checks.mapping(saved, i, "state_dict['param_groups']", "a mapping")
        count = len(known["params"])
        expected = f"a list of {count} numbers, one for each parameter of this {kind}'s group"
        keys = checks.items(group, "params", path, expected, count)
        for key, parameter in zip(keys, known["params"], strict=True):
            if not isinstance(key, (int, str)) or key in found:
                checks.fail(path, "params", f"{brief(key)} is no number, or is there twice", expected)
            found[key] = parameter
    state = checks.mapping(state_dict, "state", "state_dict", "a mapping from parameters to entries")
    for key in state:
        if key in found:
            state[key] = checks.mapping(state, key, "state_dict['state']", "a mapping")
        elif not may_have_others:
            known = brief(list(found))
            checks.fail("state_dict", "state", f"{brief(key)} is of no group", f"only {known}")
    return {**own, "param_groups": list(saved.values()), "state": state}, found


def check_settings(
    checks: StateChecks,
    group: dict[str, Any],
    path: str,
    defaults: Mapping[str, Any],
    takes_tensors: Collection[str] = ("lr",),
) -> None:
    """Check that each setting of a group is of its default's kind: a bool, a number or several.

    NumPy numbers become Python numbers.

    Args:
        checks: of the state dict.
        group: a saved group.
        path: the group's name in errors.
        defaults: of the optimizer.
        takes_tensors: the settings that may be tensors of one element.
    """
    for name, default in defaults.items():
        if isinstance(default, (float, tuple)) and name not in group:
            expected = "a setting that this optimizer has; perhaps the state is another class's"
            checks.fail(path, name, "it is missing", expected)
    for name in defaults.keys() & group.keys():
        value, default = as_plain(group[name]), defaults[name]
        group[name] = value
        if name in _FLAGS or isinstance(default, bool):
            if value is not None or name not in ("foreach", "fused"):
                checks.flag(group, name, path)
        elif isinstance(default, (int, float, Tensor)):
            checks.scalar(group, name, path, takes_tensors=name in takes_tensors)
        elif isinstance(default, (list, tuple)):
            is_vector = isinstance(value, Tensor) and value.dim() == 1
            if not (is_vector or isinstance(value, (list, tuple))) or len(value) != len(default):
                checks.fail(path, name, brief(value), f"{len(default)} numbers")
            if not is_vector:  # torch treats 0 and 0.0 differently
                pairs = zip(value, default, strict=True)
                floats = [as_float(x) if type(x) is int and type(y) is float else x for x, y in pairs]
                group[name] = value = floats if isinstance(value, list) else tuple(floats)
            limits: Any = {"low": 0.0, "high": 1.0 - 1e-9} if name == "betas" else {}
            parts = dict(enumerate(value))
            for i, known in enumerate(default):
                if parts[i] is not None or known is not None:
                    takes = isinstance(known, Tensor)
                    checks.scalar(parts, i, f"{path}['{name}']", **limits, takes_tensors=takes)


def load(optimizer: Any, load_state_dict: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Check a state dict and let an optimizer load it, all of it or nothing.

    The user's pre-hooks, which may change the state dict, run before the checks. An optimizer class
    with its own `load_state_dict` does its own checks. The host waits once for each device.

    Raises:
        AmpError: the state dict is not valid. Nothing has been changed then.
    """
    if not inherits(optimizer, "load_state_dict"):
        with all_or_nothing(optimizer):
            return load_state_dict(*args, **kwargs)
    given: Any = args[0] if args else kwargs.get("state_dict")
    given = as_dict(given, f"what {type(optimizer).__name__}.state_dict() returns")
    # Tensors copied in inference mode could not be stepped outside of it.
    with all_or_nothing(optimizer), torch.inference_mode(False):
        handle = optimizer.register_load_state_dict_pre_hook(checked)
        try:
            return load_state_dict(given)
        finally:
            handle.remove()


def checked(optimizer: Any, state_dict: Any) -> dict[str, Any]:
    """Return a checked copy of a state dict, for torch to load.

    For torch's own optimizers, settings, steps, other numbers and tensors are checked too. For other
    classes, only the structure is: their entries may be anything.

    Raises:
        AmpTypeError, AmpValueError: an entry is not valid.
    """
    checks = StateChecks()
    is_torchs = getattr(torch.optim, type(optimizer).__name__, None) is type(optimizer)
    own, found = structure_of(checks, optimizer, state_dict, may_have_others=not is_torchs)
    if not is_torchs:
        return own
    for i, group in enumerate(own["param_groups"]):
        check_settings(checks, group, f"state_dict['param_groups'][{i}]", optimizer.defaults)
    has_one_shape = not isinstance(optimizer, (torch.optim.Adafactor, torch.optim.LBFGS))
    for key, entry in own["state"].items():
        path, parameter = f"state_dict['state'][{brief(key)}]", found[key]
        needed = _MOMENTS.get(type(optimizer).__name__, ()) if entry else ()
        for name in (*entry, *(each for each in needed if each not in entry)):
            value = entry.get(name)
            is_moment = isinstance(value, Tensor) and value.dim() > 0
            if name == "step":
                entry[name] = checks.scalar(entry, name, path, 0, LARGEST_COUNT, is_whole=True)
            elif name in needed or (is_moment and (has_one_shape or value.shape == parameter.shape)):
                entry[name] = checks.tensor_like(entry, name, path, parameter, may_be_inf=True)
            elif not is_moment and (isinstance(value, Tensor) or (has_one_shape and value is not None)):
                entry[name] = checks.scalar(entry, name, path)  # None is such as no momentum of SGD's
    checks.finish()
    return own
