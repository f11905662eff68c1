"""What the optimizers of `torch.optim` keep for a parameter, and how a saved state is checked."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp.errors import brief
from amp.state_checks import FLOAT32_MAX, LARGEST_COUNT, StateChecks

Check = Callable[[StateChecks, dict[Any, Any], str, Tensor, Mapping[str, Any], Any], None]
"""Checks the entries of a parameter, and exchanges tensors for copies: the entries, their path, the
parameter, its saved group, and the optimizer."""


def check_of(cls: type) -> Check | None:
    """Return the check for an optimizer of torch itself; None for any other class, subclasses too."""
    if getattr(torch.optim, cls.__name__, None) is not cls:
        return None
    return _check_entry if cls.__name__ in _ENTRIES else _OTHERS.get(cls.__name__)


_WHOLE = {"history_size": 10**6, "ns_steps": 99, "max_iter": LARGEST_COUNT, "max_eval": LARGEST_COUNT}
"""Settings that are whole numbers, and how large they may be."""


def check_group(
    checks: StateChecks, cls: type, group: dict[str, Any], path: str, parameters: Sequence[Tensor]
) -> None:
    """Check the settings of a saved group: by the constructor of the class, and what only steps tell.

    The types of settings have been checked.
    """
    names = inspect.signature(cls).parameters.keys() & group.keys() - {"params"}
    for name in names & _WHOLE.keys():
        group[name] = checks.count(group, name, path, _WHOLE[name])
        if name == "history_size" and not group[name]:
            checks.fail(path, name, "0", "a whole number of at least 1")
    if group.get("line_search_fn") not in (None, "strong_wolfe"):
        checks.fail(path, "line_search_fn", brief(group["line_search_fn"]), "'strong_wolfe' or None")
    if group.get("capturable") and any(p.device.type == "cpu" for p in parameters):
        checks.fail(path, "capturable", "True", "False, as parameters are on the CPU")
    stand_ins = [
        torch.empty(0, 0, dtype=dtype, device=device)
        for dtype, device in dict.fromkeys((p.dtype, p.device) for p in parameters)
    ]
    try:
        cls(stand_ins or [torch.empty(0, 0)], **{name: group[name] for name in names})
    except Exception as error:
        found = f"torch.optim.{cls.__name__} says: {brief(str(error))}"
        checks.fail(path, "settings", found, "what it takes")


def complete_momenta(
    checks: StateChecks, state: dict[Any, Any], group: Mapping[str, Any], found: Mapping[Any, Tensor]
) -> None:
    """Give parameters of a fused SGD the momentum 0, where only others have one.

    torch's step wants all or none. What moves a parameter first, with 0 and without dampening, is its
    gradient, as it is without momentum.
    """
    if not (group.get("fused") and group["momentum"]):
        return
    missing = [key for key in group["params"] if state.get(key, {}).get("momentum_buffer") is None]
    missing = [key for key in missing if found[key].requires_grad]
    if len(missing) == sum(found[key].requires_grad for key in group["params"]):
        return
    for key in missing:
        if group["dampening"]:
            path = f"state_dict['state'][{brief(key)}]"
            expected = "that of each parameter of a group with fused=True and dampening, or of none"
            checks.fail(path, "momentum_buffer", "it is missing", expected)
        state.setdefault(key, {})["momentum_buffer"] = torch.zeros_like(found[key], requires_grad=False)


class _Entries(NamedTuple):
    """The names in the state of a parameter."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


_ENTRIES: dict[str, _Entries] = {
    # Fused counterparts count the steps of SGD, too.
    "SGD": _Entries((), ("momentum_buffer", "step")),
    "Adam": _Entries(("step", "exp_avg", "exp_avg_sq"), ("max_exp_avg_sq",)),
    "AdamW": _Entries(("step", "exp_avg", "exp_avg_sq"), ("max_exp_avg_sq",)),
    "NAdam": _Entries(("step", "mu_product", "exp_avg", "exp_avg_sq")),
    "RAdam": _Entries(("step", "exp_avg", "exp_avg_sq")),
    "Adamax": _Entries(("step", "exp_avg", "exp_inf")),
    "Adadelta": _Entries(("step", "square_avg", "acc_delta")),
    "Adagrad": _Entries(("step", "sum")),
    "RMSprop": _Entries(("step", "square_avg"), ("momentum_buffer", "grad_avg")),
    "Rprop": _Entries(("step", "prev", "step_size")),
    "ASGD": _Entries(("step", "eta", "mu", "ax")),
    "SparseAdam": _Entries(("step", "exp_avg", "exp_avg_sq")),
    "Muon": _Entries(("momentum_buffer",)),
}
_NUMBERS = ("step", "mu_product", "eta", "mu")
_AT_LEAST_0 = (
    *("exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "acc_delta", "sum", "step_size"),
    *("mu_product", "eta", "mu"),
)
"""Entries that are no moments but numbers; and those whose values are never negative.

The latter may be inf, as squares in float16 are now and then: such a weight stays what it is.
"""


def _check_entry(
    checks: StateChecks,
    entry: dict[Any, Any],
    path: str,
    parameter: Tensor,
    group: Mapping[str, Any],
    optimizer: Any,
) -> None:
    """Check the state of a parameter of an optimizer that is in the table."""
    entries = _ENTRIES[type(optimizer).__name__]
    names = {*entries.required, *entries.optional}
    required = {*entries.required}
    required |= {"max_exp_avg_sq"} if group.get("amsgrad") else set()
    required |= {"grad_avg"} if group.get("centered") else set()
    if "square_avg" in names and group.get("momentum"):
        required |= {"momentum_buffer"}
    _check_names(checks, entry, path, names)
    for name in required | entry.keys():
        low = 0.0 if name in _AT_LEAST_0 else -math.inf
        if name == "step":
            entry[name] = checks.scalar(entry, name, path, 0, LARGEST_COUNT, is_whole=True)
            if entries is not _ENTRIES["SparseAdam"] and not isinstance(entry[name], Tensor):
                # Some of torch's look at the first parameter's only.
                entry[name] = torch.tensor(float(entry[name]), dtype=torch.float32, device="cpu")
        elif name in _NUMBERS:
            entry[name] = checks.scalar(entry, name, path, max(low, -FLOAT32_MAX))
        elif name in required or entry[name] is not None:
            entry[name] = checks.tensor_like(
                entry, name, path, parameter, low=low, may_be_inf=low == 0.0
            )


def _check_names(checks: StateChecks, entry: Mapping[Any, Any], path: str, names: Set[str]) -> None:
    for name in entry:
        if name not in names:
            checks.fail(
                path, name, "this optimizer has no such entry", f"only {', '.join(sorted(names))}"
            )


def _check_adafactor(
    checks: StateChecks,
    entry: dict[Any, Any],
    path: str,
    parameter: Tensor,
    group: Mapping[str, Any],
    optimizer: Any,
) -> None:
    """Check what Adafactor keeps: the variance, or factors of it for rows and columns."""
    shape = list(parameter.shape)
    shapes = {"variance": shape}
    if len(shape) > 1:
        shapes = {"row_var": [*shape[:-1], 1], "col_var": [*shape[:-2], 1, shape[-1]]}
    _check_names(checks, entry, path, {"step", *shapes})
    entry["step"] = checks.scalar(entry, "step", path, 0, LARGEST_COUNT, is_whole=True)
    for name, each in shapes.items():
        entry[name] = checks.tensor_like(
            entry, name, path, parameter, low=0.0, may_be_inf=True, shape=each
        )


def _check_lbfgs(
    checks: StateChecks,
    entry: dict[Any, Any],
    path: str,
    parameter: Tensor,
    group: Mapping[str, Any],
    optimizer: Any,
) -> None:
    """Check what LBFGS keeps, once for all parameters: flat vectors, and numbers."""
    history = group["history_size"]
    vectors, lists = ("d", "prev_flat_grad"), ("old_dirs", "old_stps", "ro", "al")
    numbers, counts = ("t", "prev_loss", "H_diag"), ("func_evals", "n_iter")
    _check_names(checks, entry, path, {*vectors, *lists, *numbers, *counts})
    taken = [checks.count(entry, name, path) for name in counts][-1]
    if not taken and entry.keys() == set(counts):
        return
    flat = [sum(p.numel() for p in optimizer.param_groups[0]["params"])]
    for name in vectors:
        entry[name] = checks.tensor_like(entry, name, path, parameter, shape=flat)
    for name in numbers:
        entry[name] = checks.scalar(entry, name, path)
    length = len(checks.items(entry, "old_dirs", path, "a list of vectors"))
    for name in lists[:3]:
        items = checks.items(entry, name, path, f"a list of {length}, at most {history}", length)
        if length > history:
            checks.fail(path, name, brief(items), f"at most {history}, the history_size")
        shape = None if name == "ro" else flat
        entry[name] = _copied_items(checks, items, f"{path}['{name}']", parameter, shape)
    if "al" in entry:
        items = checks.items(entry, "al", path, f"a list of {history}", history)
        entry["al"] = _copied_items(checks, items, f"{path}['al']", parameter, None)


def _copied_items(
    checks: StateChecks, items: Any, path: str, parameter: Tensor, shape: list[int] | None
) -> list[Any]:
    """Return copies of vectors of a shape; or of numbers, or None in their place."""
    numbered = dict(enumerate(items))
    for i, item in numbered.items():
        if isinstance(item, Tensor) and item.dim() != (shape is not None):
            checks.fail(path, i, brief(item), "a number" if shape is None else "a vector")
        if shape is not None:
            numbered[i] = checks.tensor_like(numbered, i, path, parameter, shape=shape)
        elif item is not None or not path.endswith("['al']"):
            numbered[i] = checks.scalar(numbered, i, path)
    return list(numbered.values())


_OTHERS: dict[str, Check] = {"Adafactor": _check_adafactor, "LBFGS": _check_lbfgs}
