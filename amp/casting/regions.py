"""Where functions cast: in which threads, in a model's forward, outside of it, and where not.

torch.autocast's own state, per thread and device type, is the state here too. A model's forward runs
in torch.autocast regions, so whatever asks torch whether autocast is on (recurrent layers,
`torch.utils.checkpoint`, `custom_fwd`, other people's kernels) gets the right answer, and torch's
weight cache lives exactly as long as the forward. Outside a forward functions cast on their own,
unless the thread is in a region that says no. torch does not tell "in no region" from "in a region
with enabled=False"; `_OFF` does.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch import nn
from torch.amp import autocast_mode
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode
from torch.utils.hooks import RemovableHandle

from amp.patching import Patches

_OFF = "ipu"
"""Casts are off in this thread: kept as the autocast flag of a device type that no tensor is on.

So it is thread-local, autograd's threads inherit it, and Dynamo guards it, also for a function such
as `lambda x: x @ w`, in which it sees nothing of ours to guard.
"""

_accelerator = torch.accelerator.current_accelerator()
DEVICE_TYPES = ("cpu",) if _accelerator is None else ("cpu", _accelerator.type)
"""The device types whose tensors are cast: the CPU, and the accelerator that torch is built for."""


Function = Callable[..., Any]

_internals: Any = torch._C  # which has no types for what is asked of it here
_NO_CASTS = {_OFF: True, **dict.fromkeys(DEVICE_TYPES, False)}


class Caster(Protocol):
    """What casts functions: see `amp.casting.by_op.CastOps`."""

    dtype: torch.dtype
    live: bool


live_casters: list[Any] = []
"""The casters of open sessions, newest last."""


def newest_caster() -> Any:
    """Return the caster that applies, the newest one, or None."""
    return live_casters[-1] if live_casters else None


def casts(caster: Caster, device_type: str) -> bool:
    """Whether the functions of `caster` cast tensors of a device type, here and now."""
    if not caster.live or (not torch.compiler.is_dynamo_compiling() and _is_in_op()):
        return False
    if device_type in DEVICE_TYPES and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type) is caster.dtype
    return not torch.is_autocast_enabled(_OFF)


def _is_in_op() -> bool:
    """Whether the caller is inside an op: a decomposition, a meta function, a dispatch mode."""
    key = _internals.DispatchKey.PythonTLSSnapshot
    return bool(_internals._dispatch_tls_is_dispatch_key_excluded(key))


class _Flags:
    """Runs the block with some values of torch's autocast flags, by device type."""

    def __init__(self, values: dict[str, bool]) -> None:
        self._values = values

    def __enter__(self) -> None:
        values = self._values.items()
        self._changed = [(kind, on) for kind, on in values if torch.is_autocast_enabled(kind) is not on]
        for kind, on in self._changed:
            torch.set_autocast_enabled(kind, on)

    def __exit__(self, *exception: object) -> None:
        for kind, on in self._changed:
            torch.set_autocast_enabled(kind, not on)


@contextmanager
def disable_casts() -> Iterator[None]:
    """Run the block with no function casting its arguments, in this thread.

    Blocks may nest, an exception ends them like a normal exit, and compiled code may hold one or be
    called in one. A backward in the block casts nothing either, in autograd's threads. Where no
    session casts functions, nothing happens.
    """
    if torch.compiler.is_compiling():  # Dynamo follows regions, and before torch 2.13 no flags
        with torch.autocast("cpu", enabled=False), torch.autocast(DEVICE_TYPES[-1], enabled=False):
            yield
    else:
        with _Flags(_NO_CASTS):
            yield


def same_casts() -> Callable[[], AbstractContextManager[None]]:
    """Return a function whose context managers make functions cast, or not, as they do at this call."""
    state = {kind: torch.is_autocast_enabled(kind) for kind in (_OFF, *DEVICE_TYPES)}
    return functools.partial(_Flags, state)


def plain_torch() -> AbstractContextManager[None]:
    """Run the block with `_OFF` unset: some of torch asks whether any device type has autocast on."""
    return _Flags({_OFF: False})


# Forwards.


class _Forwards(threading.local):
    """The forwards of sessions' models that this thread is in, outermost first."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.regions = ExitStack()

    def enter(self, module: nn.Module, caster: Caster) -> None:
        if self.modules and self.modules[0] is module:
            self.leave_all()  # an interrupt, which calls no hooks, ended its last forward
        self.modules.append(module)
        if len(self.modules) > 1:
            return
        # A region around the forward is the user's, and wins. Only in DataParallel's threads it is
        # torch's, which enters it in the default dtype.
        in_thread_of_torch = getattr(module, "_is_replica", False)
        off = torch.is_autocast_enabled(_OFF)
        for kind in filter(_is_available, DEVICE_TYPES):
            enabled = torch.is_autocast_enabled(kind)
            if enabled if in_thread_of_torch else not (enabled or off):
                self.regions.enter_context(torch.autocast(kind, caster.dtype))

    def leave(self, module: nn.Module) -> None:
        if self.modules and self.modules[-1] is module:
            self.modules.pop()
            if not self.modules:
                self.regions.close()

    def leave_all(self) -> None:
        self.modules.clear()
        self.regions.close()


forwards = _Forwards()


@functools.cache
def _is_available(kind: str) -> bool:
    return kind == "cpu" or torch.accelerator.is_available()


class _ForwardHooks:
    """A forward pre-hook and a forward hook: a model's forward runs in torch.autocast regions.

    A deep copy of the model has them too; a pickled one has hooks that do nothing.
    """

    def __init__(self, caster: Caster | None = None) -> None:
        self.caster = caster

    def before(self, module: nn.Module, args: Any) -> None:
        if self.caster is None or not self.caster.live or torch.compiler.is_compiling():
            return  # Dynamo follows each hook by itself, and would lose what one opens for another
        if _internals._functorch.peek_interpreter_stack() is None:
            forwards.enter(module, newest_caster())  # a transform of torch.func would ignore regions

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            forwards.leave(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ForwardHooks:
        return _ForwardHooks(self.caster)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_ForwardHooks, ())


def watch(model: nn.Module, caster: Caster) -> list[RemovableHandle]:
    """Let each forward of the model run in torch.autocast regions, while the caster is live."""
    hooks = _ForwardHooks(caster)
    return [
        model.register_forward_pre_hook(hooks.before, prepend=True),
        model.register_forward_hook(hooks.after, always_call=True),
    ]


def is_watched(module: nn.Module) -> bool:
    """Whether `watch` was called on the module, or on what it is a copy of."""
    owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    return any(isinstance(owner, _ForwardHooks) for owner in owners)


# What torch has to be told.


def open_for(caster: Caster, patches: Patches) -> None:
    """Make `caster` the newest, and let torch's own regions know of casts outside of them."""
    live_casters.append(caster)
    forwards.leave_all()
    torch.set_autocast_enabled(_OFF, False)
    for target, name, function in (
        (torch.autocast, "__enter__", functools.partial(_enter, caster)),
        (torch.autocast, "__exit__", _exit),
        (PreDispatchTorchFunctionMode, "__torch_function__", _record),
        (PreDispatchTorchFunctionMode, "__exit__", _end_recording),
        (torch.utils.checkpoint, "_get_autocast_kwargs", functools.partial(_autocast_kwargs, caster)),
        (nn.DataParallel, "parallel_apply", functools.partial(_parallel_apply, caster)),
    ):
        patches.surround(target, name, function)


def close_for(caster: Caster) -> None:
    """Forget `caster`, and end forwards that an interrupt left open in this thread."""
    if caster in live_casters:
        live_casters.remove(caster)
    forwards.leave_all()


def _enter(caster: Caster, original: Function, region: Any) -> Any:
    """Enter a torch.autocast region, and mark one that alone says what is cast in it."""
    region._amp_was_off = was_off = torch.is_autocast_enabled(_OFF)
    result = original(region)
    ours = region._enabled and region.fast_dtype is caster.dtype
    foreign = not ours and region.device in DEVICE_TYPES and _is_available(region.device)
    torch.set_autocast_enabled(_OFF, was_off or foreign)
    if region.fast_dtype is not region.prev_fastdtype:
        torch.clear_autocast_cache()  # it does not look at the dtype of the casts that it holds
    return result


def _exit(original: Function, region: Any, *exception: Any) -> Any:
    """Exit a torch.autocast region."""
    was_off = getattr(region, "_amp_was_off", None)  # None: entered before the session
    if was_off is not None:
        torch.set_autocast_enabled(_OFF, was_off)
    if region.fast_dtype is not region.prev_fastdtype:
        torch.clear_autocast_cache()
    return original(region, *exception)


def _end_recording(original: Function, mode: Any, *exception: Any) -> Any:
    """End what `_record` is part of: an error may have ended it in a region."""
    torch.set_autocast_enabled(_OFF, getattr(mode, "_amp_was_off", torch.is_autocast_enabled(_OFF)))
    return original(mode, *exception)


def _record(original: Function, mode: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Record a function for `torch.export.export(strict=True)`, regions among them.

    It does not enter the regions: in them casts are off, and the exported program enters them.
    """
    recorded = original(mode, function, *args, **kwargs)
    if function in (autocast_mode._enter_autocast, autocast_mode._exit_autocast):
        if not hasattr(mode, "_amp_was_off"):
            mode._amp_was_off = torch.is_autocast_enabled(_OFF)
        torch.set_autocast_enabled(_OFF, mode._amp_was_off or bool(mode.enter_autocast_nodes))
    return recorded


def _autocast_kwargs(caster: Caster, original: Function, device_type: str = "cuda") -> Any:
    """Return what checkpoints keep of autocast's state, so that they recompute as the forward did."""
    states = original(device_type)
    for kind, state in zip((device_type, "cpu"), states, strict=True):
        if state is not None and kind in DEVICE_TYPES and casts(caster, kind):
            state |= {"enabled": True, "dtype": caster.dtype}
    return states


def _parallel_apply(caster: Caster, original: Function, *args: Any, **kwargs: Any) -> Any:
    """Run DataParallel's threads, which are told whether this one casts."""
    with ExitStack() as regions:
        for kind in DEVICE_TYPES:
            if _is_available(kind) and casts(caster, kind):
                regions.enter_context(torch.autocast(kind, caster.dtype))
        return original(*args, **kwargs)
