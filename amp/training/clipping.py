"""Patches of functions that clip gradients, so that they clip unscaled ones, and those of masters.

Before torch 2.10, the gradient of a 16-bit parameter with a master is in the master's `.grad` alone
between a block and the step: `clip_grad_norm_(model.parameters(), 1.0)` would find nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from amp import active
from amp.errors import warn
from amp.kernels.host_lists import grads_of, have_grads
from amp.patching import Patch, Patches, around, modules_of_others, show_patched
from amp.torch_versions import HAS_GRAD_DTYPE
from amp.training.gradients import Gradients, State
from amp.undo import Undo

Original = Callable[..., Any]
"""A function that is patched, as it was before."""


def _attached_of(parameters: Iterable[Tensor]) -> list[Any]:
    """Return the `AttachedOptimizer`s in open sessions that have one of the parameters.

    Without parameters, return all: the caller may have chosen by `.grad`.
    """
    ids = set(map(id, parameters))
    return [
        attached
        for session in active.open_sessions()
        for attached in session.attached
        if not ids or not ids.isdisjoint(attached.gradients.parameters.ids)
    ]


def patch_clipping(undo: Undo, has_masters: bool) -> None:
    """Make functions that clip use unscaled gradients, and those of masters, until `undo`.

    The functions are torch's, and those of loaded packages. Modules that imported one by name get the
    patched one too.
    """
    patches = Patches()
    shown: dict[int, tuple[Any, str, Any]] = {}

    def show() -> None:
        for module in modules_of_others() if shown else ():
            show_patched(module, shown)

    def take_back() -> None:  # once: the garbage collector calls it too
        patches.undo()
        show()
        shown.clear()

    undo.always(take_back)
    for patch in (*PATCHES, *PATCHES_WITH_MASTERS) if has_masters and not HAS_GRAD_DTYPE else PATCHES:
        for target in patch.targets()[:1]:
            before = getattr(target, patch.name)
            patches.install([patch])
            for each in (before, getattr(target, patch.name)):
                shown.setdefault(id(each), (target, patch.name, each))
    show()


def _clip(name: str, original: Original, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """Clip the gradients of masters instead of parameters that have one."""
    return original(_stepped_for(parameters, name) or parameters, *args, **kwargs)


def _stepped_for(parameters: Any, name: str) -> list[Tensor]:
    """Return masters instead of parameters that have one, with unscaled gradients."""
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    found = [attached.gradients for attached in _attached_of(given)]
    if not HAS_GRAD_DTYPE:
        _warn_if_chosen_by_gradient(given, found, name)
    master_of: dict[int, Tensor] = {}
    for gradients in found if given else ():
        own, block = gradients.parameters, gradients.open_block
        if block is None:
            gradients.finish_delayed()
            gradients.reconcile()
            master_of |= zip(map(id, own.models), own.masters, strict=True)
        elif have_grads(own.masters) or not block.scaler.config.is_identity:
            # Else backward adds to the whole gradient, unscaled.
            warn(
                f"{name} was called inside amp.scale_loss, where gradients are multiplied by the loss "
                "scale, and those of earlier blocks are set aside: it does not clip the gradients of "
                "the step. Call it after the block"
            )
    return [master_of.get(id(parameter), parameter) for parameter in given]


def _warn_if_chosen_by_gradient(
    parameters: Sequence[Tensor], found: Iterable[Gradients], name: str
) -> None:
    """Warn of `[p for p in model.parameters() if p.grad is not None]`, which finds no masters."""
    ids = set(map(id, parameters))
    for gradients in found:
        own = gradients.parameters
        with_grads = {id(p) for p in own.unmastered if p.grad is not None}
        left_out = {*map(id, own.models), *map(id, own.masters)}
        is_about_them = not ids or bool(with_grads and with_grads <= ids)
        if is_about_them and ids.isdisjoint(left_out) and _are_in_masters(gradients):
            warn(
                f"{name} was given {len(parameters)} parameters, and not the "
                f"{len(own.masters)} in 16 bits, whose own .grad is None between a block and the "
                "step. Do not choose parameters by `p.grad is not None`: pass model.parameters()"
            )


def _are_in_masters(gradients: Gradients) -> bool:
    """Whether masters have gradients for a step."""
    return not gradients.were_stepped and have_grads(gradients.parameters.masters)


def _total_norm(name: str, original: Original, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """Warn if gradients are scaled, or lack those of masters, and return their norm."""
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    ids = set(map(id, given))
    for gradients in [attached.gradients for attached in _attached_of(())]:
        own = gradients.parameters
        others, theirs = [set(map(id, grads_of(x))) for x in (own.unmastered, own.masters)]
        if ids and ids.isdisjoint(others | theirs):
            continue
        if gradients.state is State.DELAYED:
            warn(
                f"{name} was called while gradients are multiplied by the loss "
                "scale, which a block with delay_unscale=True, or a backward that did not reduce, has "
                "left. Leave delay_unscale out in the last block before the norm"
            )
        elif not HAS_GRAD_DTYPE and ids.isdisjoint(theirs) and _are_in_masters(gradients):
            warn(
                f"{name} was given {len(given)} gradients, and not those of "
                f"{len(own.masters)} parameters whose gradients are in their FP32 masters. Pass "
                "[p.grad for p in amp.master_params(optimizer) if p.grad is not None]"
            )
    return original(given, *args, **kwargs)


def clip_by_weights(name: str, original: Original, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """Do `_clip` for a function that reads weights too; masters have FP32 values meanwhile.

    Args:
        name: the function's name in messages.
        original: the function, which may read weights as well as gradients.
        parameters: of a model, or their masters.
        *args: further arguments of the function.
        **kwargs: likewise.
    """
    stepped = _stepped_for(parameters, name)
    with ExitStack() as in_float32:
        for masters in {attached.masters for attached in _attached_of(stepped)}:
            own = [each for each in stepped if masters.model(each) is not None]
            in_float32.enter_context(masters.as_float32(own))
        return original(stepped, *args, **kwargs)


def _norms(name: str, original: Original, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the norm of each gradient of a module, by the parameter's name."""
    named = dict(module.named_parameters())
    of_stepped = partial(zip, named, _stepped_for(named.values(), name), strict=True)
    return original(SimpleNamespace(named_parameters=of_stepped), *args, **kwargs)


_SCALED = "scaled gradients would be clipped; before torch 2.10, those of masters be passed over"
_LOST = "gradients of masters would be passed over, and nothing be clipped"
_TORCH = "torch.nn.utils.clip_grad", "torch.nn.utils"
_TIMM = "timm.utils.agc", "timm.utils.clip_grad", "timm.utils"


def _patch(places: tuple[str, ...], name: str, function: Callable[..., Any], why: str = _LOST) -> Patch:
    return Patch(places, name, around(partial(function, f"{places[-1]}.{name}")), why)


PATCHES = (
    _patch(_TORCH, "clip_grad_norm_", _clip, _SCALED),
    _patch(_TORCH, "clip_grad_value_", _clip, _SCALED),
    _patch(_TORCH[1:], "get_total_norm", _total_norm, _SCALED),
)
"""The functions that are patched in a session with a loss scale; before torch 2.10 with masters too."""
PATCHES_WITH_MASTERS = (
    _patch(_TORCH[1:], "clip_grads_with_norm_", _clip),
    _patch(_TIMM, "adaptive_clip_grad", clip_by_weights),
    *(
        _patch((f"{package}.utilities.grads", f"{package}.utilities"), "grad_norm", _norms)
        for package in ("lightning.pytorch", "pytorch_lightning")
    ),
)
"""The functions that are patched besides in a session with masters, before torch 2.10."""
