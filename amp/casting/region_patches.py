"""Replacements in torch by a session that casts functions, besides those of the op tables.

They are the places where torch enters, leaves, records, or passes on its autocast state: regions,
checkpoints, hooks of saved tensors, `torch.export`, DataParallel's threads. `regions` has the state
itself.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.fx.experimental.proxy_tensor
import torch.utils.checkpoint
from torch import Tensor, nn

from amp import active
from amp.casting.regions import (
    DEVICE_TYPES,
    OFF,
    Function,
    call_without_casts,
    cast_dtype,
    forget_casts,
    forwards,
    give_torchs_cache,
    is_available,
    take_torchs_cache,
)
from amp.dtypes import CASTABLE
from amp.patching import Patch, around

_internals: Any = torch._C  # its stubs lack the functions used here


def turn_on() -> None:
    """Turn casts on in this thread, outside of regions; but not in hooks that were entered before."""
    torch.set_autocast_enabled(OFF, False)
    entered = []
    while (hooks := _internals._autograd._top_saved_tensors_default_hooks(True)) is not None:
        entered.append(hooks)
        _internals._autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(entered):
        _internals._autograd._push_saved_tensors_default_hooks(_as_it_is(pack), unpack)


def _enter(original: Function, region: Any) -> Any:
    """Enter a torch.autocast region. In a region that is not ours, only torch.autocast casts."""
    region._amp_was_off = was_off = torch.is_autocast_enabled(OFF)
    region._amp_had_cache = forwards.have_torchs_cache
    region._amp_has_cache = forwards.casts is None and take_torchs_cache()
    result = original(region)
    if not region._amp_has_cache:
        torch.set_autocast_cache_enabled(False)
    caster = active.caster_here()
    if caster is not None:
        ours = region._enabled and region.fast_dtype is caster.dtype
        foreign = not ours and region.device in DEVICE_TYPES and is_available(region.device)
        torch.set_autocast_enabled(OFF, was_off or foreign)
    if region.fast_dtype is not region.prev_fastdtype:
        forget_casts()  # torch does not check the dtype of cached casts
    return result


def _exit(original: Function, region: Any, *exception: Any) -> Any:
    """Exit a torch.autocast region."""
    was_off = getattr(region, "_amp_was_off", None)  # None: entered before the session
    if was_off is not None:
        torch.set_autocast_enabled(OFF, was_off)
    if region.fast_dtype is not region.prev_fastdtype:
        forget_casts()
    has_cache = getattr(region, "_amp_has_cache", True)
    if not has_cache:  # else torch would empty the other thread's cache
        torch.autocast_increment_nesting()
    try:
        return original(region, *exception)
    finally:
        if not has_cache:
            torch.autocast_decrement_nesting()
        elif not getattr(region, "_amp_had_cache", True):
            torch.clear_autocast_cache()
            give_torchs_cache()


def _record(original: Function, mode: Any, *args: Any, **kwargs: Any) -> Any:
    """Record a function for `torch.export`, with casts off where the recorded region says so."""
    is_off = bool(mode.enter_autocast_nodes) or torch.is_autocast_enabled(OFF)
    return _call_with_flag(is_off, original, mode, *args, **kwargs)


def _autocast_kwargs(original: Function, device_type: str = "cuda") -> Any:
    """Return the autocast state for activation checkpoints, so that they recompute like the forward."""
    states = original(device_type)
    for kind, state in zip((device_type, "cpu"), states, strict=True):
        dtype = cast_dtype(kind) if kind in DEVICE_TYPES else None
        if state is not None and dtype is not None:
            state |= {"enabled": True, "dtype": dtype}
    return states


def _make_hooks(original: Function, hooks: Any, pack: Function, unpack: Function) -> None:
    """Pack tensors without casts: `save_on_cpu` calls `Tensor.cpu`, whose tensor a rule casts."""
    original(hooks, _as_it_is(pack), unpack)


def _as_it_is(pack: Function) -> Function:
    return lambda tensor: call_without_casts(pack, (tensor,), {})


def _check_rnn_input(
    original: Function, module: nn.RNNBase, input: Tensor, batch_sizes: Tensor | None
) -> None:
    """Check an input, but not that its dtype is that of the weights: both will be cast."""
    weight, is_cast = module._flat_weights[0], cast_dtype(input.device.type) is not None
    if is_cast and isinstance(weight, Tensor) and input.dtype in CASTABLE:
        input = torch.empty_like(input, dtype=weight.dtype, device="meta")
    # `check_input` asks whether autocast is on for any device type.
    _call_with_flag(False, original, module, input, batch_sizes)


def _call_with_flag(is_off: bool, function: Function, *args: Any, **kwargs: Any) -> Any:
    """Call a function with the flag `OFF` on or off."""
    was_off = torch.is_autocast_enabled(OFF)
    try:
        torch.set_autocast_enabled(OFF, is_off)
        return function(*args, **kwargs)
    finally:
        torch.set_autocast_enabled(OFF, was_off)


def _parallel_apply(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Run DataParallel's threads with the casts of this thread."""
    with ExitStack() as regions:
        for kind in filter(is_available, DEVICE_TYPES):
            if (dtype := cast_dtype(kind)) is not None:
                regions.enter_context(torch.autocast(kind, dtype))
        return original(*args, **kwargs)


_UNSEEN = "functions would cast where a region says no, or not cast where it says yes"
PATCHES = (
    Patch(("torch.amp.autocast_mode.autocast",), "__enter__", around(_enter), _UNSEEN),
    Patch(("torch.amp.autocast_mode.autocast",), "__exit__", around(_exit), _UNSEEN),
    Patch(
        ("torch.fx.experimental.proxy_tensor.PreDispatchTorchFunctionMode",),
        "__torch_function__",
        around(_record),
        "an exported program would have other casts than the model",
    ),
    Patch(
        ("torch.utils.checkpoint",),
        "_get_autocast_kwargs",
        around(_autocast_kwargs),
        "a checkpoint would recompute without the casts of the forward",
    ),
    Patch(
        ("torch.nn.parallel.data_parallel.DataParallel",),
        "parallel_apply",
        around(_parallel_apply),
        "threads of DataParallel would not cast",
    ),
    Patch(
        ("torch.autograd.graph.saved_tensors_hooks",),
        "__init__",
        around(_make_hooks),
        "what a backward needs would come back in another dtype",
    ),
    Patch(
        ("torch.nn.modules.rnn.RNNBase",),
        "check_input",
        around(_check_rnn_input),
        "not silent: it would refuse an input whose dtype is not the weights', though both are cast",
    ),
)
