"""Where functions cast their arguments, and who keeps the casts of weights: the state of each thread.

Whether functions cast is kept in torch.autocast's own state, per thread and device type. A model's
forward runs in torch.autocast regions, so any code that asks torch whether autocast is on (recurrent
layers, `torch.utils.checkpoint`, `custom_fwd`, other people's kernels) gets the right answer, and
torch's weight cache lives exactly as long as the forward. Outside a forward, functions cast on their
own, unless the thread is in a region with `enabled=False`. torch does not distinguish such a region
from no region; `OFF` does.

torch has one cache of casts for all threads, and empties it when any thread leaves an outermost region.
Another thread that uses a weight twice would then cast it twice, and sum its gradients in another
dtype. So only one thread at a time uses torch's cache, and a forward that finds it taken keeps its own
casts.
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, _GeneratorContextManager, contextmanager
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import Tensor, nn, overrides

from amp import active
from amp.active import Caster
from amp.casting.hints import add_hint
from amp.casting.subclassing import subclass_of, swap_classes
from amp.torch_versions import CASTS_LOSE_GRADIENTS, accelerator_type

OFF = "ipu"
"""The flag "casts are off in this thread": the autocast flag of a device type that no tensor is on.

So the flag is thread-local, autograd's threads inherit it, and Dynamo guards on it, even for a function
such as `lambda x: x @ w`, in which Dynamo sees none of our code.
"""

_accelerator = accelerator_type()
DEVICE_TYPES = ("cpu",) if _accelerator is None else ("cpu", _accelerator)
"""The device types whose tensors are cast: the CPU, and the accelerator that torch is built for."""

_FLAGS = (OFF, *DEVICE_TYPES)
_NO_CASTS = (True, *(False for _ in DEVICE_TYPES))


P = ParamSpec("P")
T = TypeVar("T")
Function = Callable[..., Any]

_internals: Any = torch._C  # its stubs lack the functions used here
_NESTING = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
"""Functions of torch that tell in how many regions a thread is, when one is entered or left.

They are called by one `map`, so that no interrupt comes between.
"""


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
    if torch.is_autocast_enabled(OFF) or (is_eager and _is_in_worker(caster)):
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


def are_off() -> bool:
    """Whether no function casts in this thread, whatever the device type of its tensors."""
    return torch.is_autocast_enabled(OFF) and not any(map(torch.is_autocast_enabled, DEVICE_TYPES))


@overload
def disable_casts(function: None = None) -> _GeneratorContextManager[None]: ...


@overload
def disable_casts(function: Callable[P, T]) -> Callable[P, T]: ...


def disable_casts(function: Any = None) -> Any:
    """Context manager, or decorator of a function, in which no function casts its arguments.

    It is so in this thread. Blocks may nest, an exception ends them like a normal exit, and compiled
    code may contain a block or be called in one. A backward in the block does not cast either, in
    autograd's threads. Where no session casts functions, the block has no effect.

    Args:
        function: the function, for `@amp.disable_casts` without parentheses.
    """
    return _disabled_casts() if function is None else _disabled_casts()(function)


@contextmanager
def _disabled_casts() -> Iterator[None]:
    if torch.compiler.is_compiling():  # Dynamo traces regions; it traces flags only since torch 2.13
        with torch.autocast("cpu", enabled=False), torch.autocast(DEVICE_TYPES[-1], enabled=False):
            yield
    else:
        before, is_over = tuple(map(torch.is_autocast_enabled, _FLAGS)), False
        try:
            try:
                tuple(map(torch.set_autocast_enabled, _FLAGS, _NO_CASTS))
                yield
            finally:
                tuple(map(torch.set_autocast_enabled, _FLAGS, before))
                is_over = True
        finally:
            if not is_over:  # an interrupt has come before the flags were put back
                tuple(map(torch.set_autocast_enabled, _FLAGS, before))


def same_casts() -> Callable[[], AbstractContextManager[None]]:
    """Return a factory of context managers that restore whether functions cast at this call."""
    flags = tuple(map(torch.is_autocast_enabled, _FLAGS))

    @contextmanager
    def as_it_was() -> Iterator[None]:
        before = tuple(map(torch.is_autocast_enabled, _FLAGS))
        try:
            tuple(map(torch.set_autocast_enabled, _FLAGS, flags))
            yield
        finally:
            tuple(map(torch.set_autocast_enabled, _FLAGS, before))

    return as_it_was


# The casts of weights.


class _Token:
    """An object that lives as long as its thread."""

    def __del__(self, deactivate: Callable[[], None] = active.deactivate) -> None:
        deactivate()


def _free(thread: weakref.ref[_Token]) -> None:
    """Release torch's cache of a thread that ended without releasing it, because of an interrupt."""
    if _holder.get("thread") is thread:
        torch.clear_autocast_cache()
        _holder.clear()


class _Forwards(threading.local):
    """Whether this thread is in the forward of a session's model, and where casts are cached there.

    Attributes:
        are_running: whether the thread is in a forward in which torch casts and caches.
        casts: weights and their casts, by id, in a forward in which patched functions cast; else None.
        thread: a reference that identifies this thread, and dies with it.
    """

    are_running = False
    casts: dict[int, tuple[Tensor, Tensor]] | None = None

    def __init__(self) -> None:
        token = _Token()
        self.thread = weakref.ref(token, _free)
        self._token = token  # last: `_free` is not called if this object and the reference die together

    @property
    def have_torchs_cache(self) -> bool:
        """Whether this thread holds torch's cache."""
        return _holder.get("thread") is self.thread

    def is_in_one(self) -> bool:
        """Whether the thread is in the forward of a session's model."""
        return self.are_running or self.casts is not None


forwards = _Forwards()

_holder: dict[str, weakref.ref[_Token]] = {}
"""The thread that holds torch's cache, if one does.

One call of `setdefault` both takes the cache and tells who holds it: no interrupt can come between.
"""


def take_torchs_cache() -> bool:
    """Take torch's cache for this thread if it is free; return whether this thread holds it."""
    thread = forwards.thread
    return _holder.setdefault("thread", thread) is thread


def give_torchs_cache() -> None:
    """Release torch's cache, if this thread holds it."""
    if _holder.get("thread") is forwards.thread:
        _holder.clear()


def forget_casts() -> None:
    """Forget the cached casts of this thread."""
    thread = forwards.thread
    had_torchs_cache = _holder.get("thread") is thread
    if forwards.casts is not None:
        forwards.casts.clear()
    if _holder.setdefault("thread", thread) is thread:
        try:
            torch.clear_autocast_cache()
        finally:
            if not had_torchs_cache:
                _holder.clear()
    else:
        _, depth = map(operator.call, _NESTING)
        if depth and torch.is_autocast_cache_enabled():  # in a region older than any session
            torch.clear_autocast_cache()


# The state of a thread.


class ThreadState:
    """torch's state in this thread, saved so that it can be restored after any exception.

    `with` statements and hooks are not enough: an interrupt may come after a region is entered, and
    before the `with` statement or hook that would leave it.
    """

    def __init__(self) -> None:
        self._enabled = tuple(map(torch.is_autocast_enabled, _FLAGS))
        self._dtypes = tuple(map(torch.get_autocast_dtype, DEVICE_TYPES))
        self._caches = torch.is_autocast_cache_enabled()
        _, self._depth = map(operator.call, _NESTING)
        self._in_forward, self._casts = forwards.are_running, forwards.casts
        # Outside of regions only an interrupt leaves it held.
        self._had_torchs_cache = self._depth > 0 and forwards.have_torchs_cache
        self._has_grad = torch.is_grad_enabled()

    def around(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function, and restore the state if it raises."""
        try:
            try:
                return function(*args, **kwargs)
            except BaseException:
                self.put_back(after_error=True)
                raise
        except BaseException:  # again: an interrupt may have come before it was done
            self.put_back(after_error=True)
            raise

    def without_casts(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function in which no function casts. If it raises, `around` restores the state."""
        tuple(map(torch.set_autocast_enabled, _FLAGS, _NO_CASTS))
        result = function(*args, **kwargs)
        tuple(map(torch.set_autocast_enabled, _FLAGS, self._enabled))
        return result

    def put_back(self, after_error: bool = False) -> None:
        """Restore the state of autocast; after an error that of autograd too.

        May be called twice: the second call does the rest if an interrupt stopped the first.
        """
        if after_error:
            torch._C._set_grad_enabled(self._has_grad)
        tuple(map(torch.set_autocast_enabled, _FLAGS, self._enabled))
        tuple(map(torch.set_autocast_dtype, DEVICE_TYPES, self._dtypes))
        torch.set_autocast_cache_enabled(self._caches)
        _, depth = map(operator.call, _NESTING)
        for _ in range(depth - self._depth):
            torch.autocast_decrement_nesting()
        if not self._depth:
            forget_casts()
        if not self._had_torchs_cache:
            give_torchs_cache()
        forwards.are_running, forwards.casts = self._in_forward, self._casts


# Forwards.


@functools.cache
def is_available(kind: str) -> bool:
    """Whether there is a device of a type in `DEVICE_TYPES`."""
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
    off = torch.is_autocast_enabled(OFF)
    torch.autocast_increment_nesting()
    if CASTS_LOSE_GRADIENTS:
        torch.set_autocast_cache_enabled(False)
    for kind in filter(is_available, DEVICE_TYPES):
        enabled = torch.is_autocast_enabled(kind)
        if enabled if in_thread_of_torch else not (enabled or off):
            if torch.get_autocast_dtype(kind) is not dtype:
                forget_casts()  # torch does not check the dtype of cached casts
            torch.set_autocast_dtype(kind, dtype)
            torch.set_autocast_enabled(kind, True)


def call_without_casts(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with casts disabled; even an interrupt restores their state."""
    if torch.compiler.is_compiling():
        with disable_casts():
            return function(*args, **kwargs)
    state = ThreadState()
    return state.around(state.without_casts, function, *args, **kwargs)


def _first_parameter(module: nn.Module) -> Tensor | None:
    """Return the first parameter of a model, or None, sooner than its `parameters()` does."""
    todo, seen = [module], {module}  # a module may hold one that holds it
    while todo:
        each = todo.pop()
        for parameter in each._parameters.values():
            if parameter is not None:
                return parameter
        new = [child for child in each._modules.values() if child is not None and child not in seen]
        seen.update(new)
        todo += reversed(new)
    return None


def _class_in_regions(base: Any, caster: Caster) -> Any:
    """Return a subclass of a model's class whose calls run in torch.autocast regions."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        is_plain = not caster.live or forwards.is_in_one() or torch.compiler.is_compiling()
        # Dynamo does not trace the flags, and torch.func's transforms ignore regions.
        if is_plain or _internals._functorch.peek_interpreter_stack() is not None:
            return base.__call__(self, *args, **kwargs)

        state = ThreadState()

        def call() -> Any:
            active.activate(caster)
            caster.is_inherited = False
            is_in_region = any(map(torch.is_autocast_enabled, DEVICE_TYPES))
            if is_in_region and not getattr(self, "_is_replica", False):  # DataParallel repeats ours
                caster.check_region()
            if (first := _first_parameter(self)) is not None:
                caster.device_types.add(first.device.type)
            _enter_forward(self, caster.dtype)
            try:
                result = base.__call__(self, *args, **kwargs)
            except (RuntimeError, TypeError) as error:
                add_hint(error, self, was_cast=False)
                raise
            state.put_back()
            return result

        return state.around(call)

    return subclass_of(base, __call__=__call__)


def watch(model: nn.Module, caster: Caster) -> Callable[[], None]:
    """Run the model's forwards in regions while the caster is live; return a function to undo it."""
    return swap_classes([model], functools.partial(_class_in_regions, caster=caster))
