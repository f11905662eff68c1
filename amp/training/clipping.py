"""torch's functions that clip gradients, led to where the gradients of a session's parameters are.

Between a block and the step, the gradient of a 16-bit parameter with a master is in the master's
`.grad`, and its own `.grad` is None: `clip_grad_norm_(model.parameters(), 1.0)` would find nothing.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from amp.errors import AmpWarning
from amp.masters.parameter import stored_grad
from amp.patching import Patches, modules_of_others, show_patched
from amp.training.gradients import Gradients, State
from amp.undo import Undo
from amp.weak import members

_OF_PARAMETERS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
_OF_GRADIENTS = "get_total_norm"

_live: weakref.WeakSet[Gradients] = weakref.WeakSet()
"""The gradients of all optimizers that are in a session."""


def watch(gradients: Gradients) -> None:
    """Let torch's functions find these gradients."""
    _live.add(gradients)


def let_go(gradients: Gradients) -> None:
    """Forget what `watch` was told."""
    _live.discard(gradients)


def lead_to_masters(undo: Undo) -> None:
    """Let torch's functions that clip find gradients where they are, until `undo`.

    Modules that imported them by name find them too.
    """
    patches = Patches()
    shown: dict[int, tuple[Any, str, Any]] = {}

    def show() -> None:
        for module in modules_of_others():
            show_patched(module, shown)

    def take_back() -> None:
        patches.undo()
        show()

    undo.always(take_back)
    for place in (torch.nn.utils, clip_grad):
        for name in (*_OF_PARAMETERS, _OF_GRADIENTS):
            if hasattr(place, name):
                function = _total_norm if name == _OF_GRADIENTS else functools.partial(_clip, name)
                before = getattr(place, name)
                patches.surround(place, name, function)
                for each in (before, getattr(place, name)):
                    shown.setdefault(id(each), (place, name, each))
    show()


def _clip(name: str, original: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """Clip the gradients of what is stepped for the parameters."""
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    _warn_if_chosen_by_gradient(given, name)
    return original(_stepped_for(given, name) or parameters, *args, **kwargs)


def _stepped_for(parameters: Sequence[Tensor], name: str) -> list[Tensor]:
    """Return masters in place of parameters that have one, whose gradients are unscaled then."""
    ids = set(map(id, parameters))
    master_of: dict[int, Tensor] = {}
    for gradients in members(_live):
        lists = gradients.lists
        if ids.isdisjoint(map(id, lists.stepped)) and ids.isdisjoint(map(id, lists.models)):
            continue
        if gradients.state is State.OPEN:
            _warn_in_block(gradients, name)
            continue
        gradients.finish_delayed()
        gradients.gather_strays()
        master_of |= zip(map(id, lists.models), lists.masters, strict=True)
    return [master_of.get(id(parameter), parameter) for parameter in parameters]


def _warn_if_chosen_by_gradient(parameters: Sequence[Tensor], name: str) -> None:
    """Warn of `[p for p in model.parameters() if p.grad is not None]`, which leaves out all masters."""
    ids = set(map(id, parameters))
    for gradients in members(_live):
        lists = gradients.lists
        have_grads = {id(p) for p in lists.unmastered if p.grad is not None}
        left_out = {*map(id, lists.models), *map(id, lists.masters)}
        is_about_them = not ids or bool(have_grads and have_grads <= ids)
        if is_about_them and ids.isdisjoint(left_out) and _are_in_masters(gradients):
            warnings.warn(
                f"torch.nn.utils.{name} was given {len(parameters)} parameters, and not the "
                f"{len(lists.masters)} in 16 bits, whose own .grad is None between a block and the "
                "step. Do not choose parameters by `p.grad is not None`: pass model.parameters()",
                AmpWarning,
                stacklevel=4,
            )


def _are_in_masters(gradients: Gradients) -> bool:
    """Whether masters have gradients, or get them when somebody looks."""
    return gradients.state is State.HELD or bool(_grads_of(gradients.lists.masters))


def _warn_in_block(gradients: Gradients, name: str) -> None:
    if gradients.are_whole_in_block:
        return
    warnings.warn(
        f"torch.nn.utils.{name} was called inside amp.scale_loss, where gradients are multiplied by "
        "the loss scale, and those of earlier blocks are elsewhere: what it clips is not what will be "
        "stepped. Call it after the block",
        AmpWarning,
        stacklevel=5,
    )


def _total_norm(original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """Warn where a norm is asked of gradients that are scaled, or without those of masters."""
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    ids = set(map(id, given))
    for gradients in members(_live):
        lists = gradients.lists
        own, theirs = ({id(g) for g in _grads_of(p)} for p in (lists.unmastered, lists.masters))
        is_about_them = not ids or not ids.isdisjoint(own)
        if gradients.state is State.DELAYED and (is_about_them or not ids.isdisjoint(theirs)):
            warnings.warn(
                "torch.nn.utils.get_total_norm was called while gradients are multiplied by the loss "
                "scale, which a block with delay_unscale=True, or a backward that did not reduce, has "
                "left. Leave delay_unscale out in the last block before the norm",
                AmpWarning,
                stacklevel=3,
            )
        elif is_about_them and ids.isdisjoint(theirs) and _are_in_masters(gradients):
            warnings.warn(
                f"torch.nn.utils.get_total_norm was given {len(given)} gradients, and not those of "
                f"{len(lists.masters)} parameters whose gradients are in their FP32 masters. Pass "
                "[p.grad for p in amp.master_params(optimizer) if p.grad is not None]",
                AmpWarning,
                stacklevel=3,
            )
    return original(given, *args, **kwargs)


def _grads_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [grad for p in parameters if (grad := stored_grad(p)) is not None]
