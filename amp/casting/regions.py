"""Where functions cast their arguments: in which threads, and inside and outside of a model's forward.

Whether functions cast is kept in torch.autocast's own state, per thread and device type. A model's
forward runs in torch.autocast regions, so any code that asks torch whether autocast is on (recurrent
layers, `torch.utils.checkpoint`, `custom_fwd`, other people's kernels) gets the right answer, and
torch's weight cache lives exactly as long as the forward. Outside a forward, functions cast on their
own, unless the thread is in a region with `enabled=False`. torch does not distinguish such a region
from no region; `_OFF` does.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
import torch.fx.experimental.proxy_tensor
import torch.utils.checkpoint
from torch import Tensor, nn, overrides

from amp import active
from amp.active import Caster
from amp.casting.cast_cache import forget_casts, forwards, give_torchs_cache, nesting, take_torchs_cache
from amp.casting.subclassing import subclass_of, swap_classes
from amp.dtypes import CASTABLE
from amp.interrupts import followed_by
from amp.patching import Patch, around
from amp.torch_versions import CASTS_LOSE_GRADIENTS, accelerator_type

_OFF = "ipu"
"""The flag "casts are off in this thread": the autocast flag of a device type that no tensor is on.

So the flag is thread-local, autograd's threads inherit it, and Dynamo guards on it, even for a function
such as `lambda x: x @ w`, in which Dynamo sees none of our code.
"""

_accelerator = accelerator_type()
DEVICE_TYPES = ("cpu",) if _accelerator is None else ("cpu", _accelerator)
"""The device types whose tensors are cast: the CPU, and the accelerator that torch is built for."""


P = ParamSpec("P")
T = TypeVar("T")
Function = Callable[..., Any]

_internals: Any = torch._C  # its stubs lack the functions used here
_NO_CASTS = {_OFF: True, **dict.fromkeys(DEVICE_TYPES, False)}


# Whether functions cast.


def casts(caster: Caster, device_type: str) -> bool:
    """Whether the functions of `caster` cast tensors of a device type at this point, in this thread."""
    if not caster.live:
        return False
    is_eager = not torch.compiler.is_dynamo_compiling()
    if is_eager and (_is_in_op() or _is_recorded() or not active.applies(caster)):
        return False
    if device_type in DEVICE_TYPES and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type) is caster.dtype
    if torch.is_autocast_enabled(_OFF) or (is_eager and _is_in_worker(caster)):
        return False
    return not caster.device_types or device_type in caster.device_types


def cast_dtype(device_type: str) -> torch.dtype | None:
    """Return the half precision that functions cast to at this point; None where they do not cast."""
    caster = active.caster_here()
    return caster.dtype if caster is not None and casts(caster, device_type) else None


def _is_in_worker(caster: Caster) -> bool:
    """Whether this process is a worker, which may have been forked with the patches of its parent.

    A forked process that has called a model of the session is no worker: it trains or evaluates the
    model, so functions cast outside of the forward too. Workers of a DataLoader never cast there.
    """
    return caster.is_inherited or torch.utils.data.get_worker_info() is not None


def _is_in_op() -> bool:
    """Whether the caller is inside an op: a decomposition, a meta function, a dispatch mode."""
    key = _internals.DispatchKey.PythonTLSSnapshot
    return bool(_internals._dispatch_tls_is_dispatch_key_excluded(key))


def _is_recorded() -> bool:
    """Whether the caller is in an autocast region that `torch.export` records but does not enter.

    The exported program enters the region when it runs, and casts then.
    """
    if not _internals._is_torch_function_mode_enabled():
        return False
    modes: list[Any] = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(getattr(mode, "enter_autocast_nodes", None) for mode in modes)


class _Flags:
    """Sets torch's autocast flags, by device type, inside the block."""

    def __init__(self, values: dict[str, bool]) -> None:
        self._values = values
        self._changed: list[tuple[str, bool]] = []

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
    """Context manager in which no function casts its arguments, in this thread.

    Blocks may nest, an exception ends them like a normal exit, and compiled code may contain a block or
    be called in one. A backward in the block does not cast either, in autograd's threads. Where no
    session casts functions, the block has no effect.
    """
    if torch.compiler.is_compiling():  # Dynamo traces regions; it traces flags only since torch 2.13
        with torch.autocast("cpu", enabled=False), torch.autocast(DEVICE_TYPES[-1], enabled=False):
            yield
    else:
        flags = _Flags(_NO_CASTS)
        try:
            with flags:
                yield
        finally:  # again: an interrupt may come between the end of the block and `__exit__`
            flags.__exit__()


def same_casts() -> Callable[[], AbstractContextManager[None]]:
    """Return a factory of context managers that restore whether functions cast at this call."""
    state = {kind: torch.is_autocast_enabled(kind) for kind in (_OFF, *DEVICE_TYPES)}
    return functools.partial(_Flags, state)


# Forwards.


class ThreadState:
    """torch's state in this thread, saved so that it can be restored after any exception.

    `with` statements and hooks are not enough: an interrupt may come after a region is entered, and
    before the `with` statement or hook that would leave it.
    """

    def __init__(self) -> None:
        kinds = (_OFF, *DEVICE_TYPES)
        self._enabled = [(kind, torch.is_autocast_enabled(kind)) for kind in kinds]
        self._dtypes = [(kind, torch.get_autocast_dtype(kind)) for kind in DEVICE_TYPES]
        self._caches = torch.is_autocast_cache_enabled()
        self._depth = nesting()
        self._in_forward, self._casts = forwards.are_running, forwards.casts
        self._had_torchs_cache = forwards.have_torchs_cache
        self._has_grad = torch.is_grad_enabled()

    def around(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function, and restore the state; that of autograd only after an error."""
        has_returned = False

        def call() -> T:
            nonlocal has_returned
            result = function(*args, **kwargs)
            has_returned = True
            return result

        return followed_by(call, lambda: self.put_back(after_error=not has_returned))

    def put_back(self, after_error: bool = False) -> None:
        """Restore the state of autocast; after an error that of autograd too.

        May be called twice: the second call does the rest if an interrupt stopped the first.
        """
        if after_error:
            torch._C._set_grad_enabled(self._has_grad)
        for kind, enabled in self._enabled:
            torch.set_autocast_enabled(kind, enabled)
        for kind, dtype in self._dtypes:
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._caches)
        while nesting() > self._depth:
            torch.autocast_decrement_nesting()
        if not self._depth:
            forget_casts()
        if not (self._had_torchs_cache and self._depth):  # held outside of regions: by an interrupt
            give_torchs_cache()
        forwards.are_running, forwards.casts = self._in_forward, self._casts


@functools.cache
def _is_available(kind: str) -> bool:
    return kind == "cpu" or torch.accelerator.is_available()


def _enter_forward(module: nn.Module, dtype: torch.dtype) -> None:
    """Enter torch.autocast regions for all device types.

    A region around the forward is the user's and takes precedence, except in DataParallel's threads:
    there torch itself entered the region, in the default dtype.
    """
    in_thread_of_torch = getattr(module, "_is_replica", False)
    # Casts of a replica's weights are not cached: the weights are not leaves.
    if in_thread_of_torch or CASTS_LOSE_GRADIENTS or take_torchs_cache():
        forwards.are_running = True
    else:
        forwards.casts = {}
        torch.set_autocast_cache_enabled(False)
    off = torch.is_autocast_enabled(_OFF)
    torch.autocast_increment_nesting()
    if CASTS_LOSE_GRADIENTS:
        torch.set_autocast_cache_enabled(False)
    for kind in filter(_is_available, DEVICE_TYPES):
        enabled = torch.is_autocast_enabled(kind)
        if enabled if in_thread_of_torch else not (enabled or off):
            if torch.get_autocast_dtype(kind) is not dtype:
                forget_casts()  # torch does not check the dtype of cached casts
            torch.set_autocast_dtype(kind, dtype)
            torch.set_autocast_enabled(kind, True)


def call_without_casts(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with casts disabled; even an interrupt restores their state."""

    def call() -> Any:
        with disable_casts():
            return function(*args, **kwargs)

    return call() if torch.compiler.is_compiling() else ThreadState().around(call)


def _class_in_regions(base: Any, caster: Caster) -> Any:
    """Return a subclass of a model's class whose calls run in torch.autocast regions."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        is_plain = not caster.live or forwards.is_in_one() or torch.compiler.is_compiling()
        # Dynamo does not trace the flags, and torch.func's transforms ignore regions.
        if is_plain or _internals._functorch.peek_interpreter_stack() is not None:
            return base.__call__(self, *args, **kwargs)

        def call() -> Any:
            active.activate(caster)
            caster.is_inherited = False
            if not getattr(self, "_is_replica", False):  # DataParallel repeats amp's own region
                caster.check_region()
            first = itertools.islice(self.parameters(), 1)
            caster.device_types |= {parameter.device.type for parameter in first}
            _enter_forward(self, caster.dtype)
            return base.__call__(self, *args, **kwargs)

        return ThreadState().around(call)

    return subclass_of(base, __call__=__call__)


def watch(model: nn.Module, caster: Caster) -> Callable[[], None]:
    """Run the model's forwards in regions while the caster is live; return a function to undo it."""
    return swap_classes([model], functools.partial(_class_in_regions, caster=caster))


# Wrappers of torch's own functions.


def turn_on() -> None:
    """Turn casts on in this thread, outside of regions; but not in hooks that were entered before."""
    torch.set_autocast_enabled(_OFF, False)
    entered = []
    while (hooks := _internals._autograd._top_saved_tensors_default_hooks(True)) is not None:
        entered.append(hooks)
        _internals._autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(entered):
        _internals._autograd._push_saved_tensors_default_hooks(_as_it_is(pack), unpack)


def _enter(original: Function, region: Any) -> Any:
    """Enter a torch.autocast region. In a region that is not ours, only torch.autocast casts."""
    region._amp_was_off = was_off = torch.is_autocast_enabled(_OFF)
    region._amp_had_cache = forwards.have_torchs_cache
    region._amp_has_cache = forwards.casts is None and take_torchs_cache()
    result = original(region)
    if not region._amp_has_cache:
        torch.set_autocast_cache_enabled(False)
    caster = active.caster_here()
    if caster is not None:
        ours = region._enabled and region.fast_dtype is caster.dtype
        foreign = not ours and region.device in DEVICE_TYPES and _is_available(region.device)
        torch.set_autocast_enabled(_OFF, was_off or foreign)
    if region.fast_dtype is not region.prev_fastdtype:
        forget_casts()  # torch does not check the dtype of cached casts
    return result


def _exit(original: Function, region: Any, *exception: Any) -> Any:
    """Exit a torch.autocast region."""
    was_off = getattr(region, "_amp_was_off", None)  # None: entered before the session
    if was_off is not None:
        torch.set_autocast_enabled(_OFF, was_off)
    if region.fast_dtype is not region.prev_fastdtype:
        forget_casts()
    if not getattr(region, "_amp_has_cache", True):  # else torch would empty the other thread's cache
        torch.autocast_increment_nesting()
        try:
            return original(region, *exception)
        finally:
            torch.autocast_decrement_nesting()
    try:
        return original(region, *exception)
    finally:
        if not getattr(region, "_amp_had_cache", True):
            torch.clear_autocast_cache()
            give_torchs_cache()


def _record(original: Function, mode: Any, *args: Any, **kwargs: Any) -> Any:
    """Record a function for `torch.export`, with casts off where the recorded region says so."""
    with _Flags({_OFF: bool(mode.enter_autocast_nodes) or torch.is_autocast_enabled(_OFF)}):
        return original(mode, *args, **kwargs)


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
    with _Flags({_OFF: False}):  # `check_input` asks whether autocast is on for any device type
        original(module, input, batch_sizes)


def _parallel_apply(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Run DataParallel's threads with the casts of this thread."""
    with ExitStack() as regions:
        for kind in filter(_is_available, DEVICE_TYPES):
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
"""What a session that casts functions replaces, besides the functions of the op tables."""
