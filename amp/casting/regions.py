"""Where functions cast, and whose casts: in which threads, in a model's forward, outside of it.

torch.autocast's own state, per thread and device type, is the state here too. A model's forward runs
in torch.autocast regions, so whatever asks torch whether autocast is on (recurrent layers,
`torch.utils.checkpoint`, `custom_fwd`, other people's kernels) gets the right answer, and torch's
weight cache lives exactly as long as the forward. Outside a forward functions cast on their own,
unless the thread is in a region that says no. torch does not tell "in no region" from "in a region
with enabled=False"; `_OFF` does.

Where several sessions are open, the casts of a thread are those of the session whose model it called
last; see `caster_here`.
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.amp import autocast_mode
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode
from torch.utils.hooks import RemovableHandle

from amp.casting.subclassing import subclass_of, swap_classes
from amp.patching import Patches
from amp.torch_versions import CASTS_LOSE_GRADIENTS, accelerator_type

_OFF = "ipu"
"""Casts are off in this thread: kept as the autocast flag of a device type that no tensor is on.

So it is thread-local, autograd's threads inherit it, and Dynamo guards it, also for a function such
as `lambda x: x @ w`, in which it sees nothing of ours to guard.
"""

_accelerator = accelerator_type()
DEVICE_TYPES = ("cpu",) if _accelerator is None else ("cpu", _accelerator)
"""The device types whose tensors are cast: the CPU, and the accelerator that torch is built for."""


Function = Callable[..., Any]

_internals: Any = torch._C  # which has no types for what is asked of it here
_NO_CASTS = {_OFF: True, **dict.fromkeys(DEVICE_TYPES, False)}


class Caster(Protocol):
    """What casts functions: see `amp.casting.by_op.CastOps`."""

    dtype: torch.dtype
    live: bool
    device_types: set[str]


live_casters: list[Any] = []
"""The casters of open sessions, newest last."""


def newest_caster() -> Any:
    """Return the caster of the newest session that casts functions, or None."""
    return live_casters[-1] if live_casters else None


# Whose casts.


class Bystander:
    """Stands for a session that casts no functions: in a thread that calls its model, none cast.

    Attributes:
        live: whether the session is open, and casts are not what a later `amp.initialize` says.
    """

    def __init__(self) -> None:
        self.live = True


opening = threading.RLock()
"""Held by a thread that patches functions for a session, or gives them back."""

_bystanders: weakref.WeakSet[Bystander] = weakref.WeakSet()
_CALLED_LAST = "amp: whose model this thread called last"


class _Sessions:
    """Whether there are several sessions, which threads have to be asked about."""

    are_several = False

    @classmethod
    def count(cls) -> None:
        """Count them anew."""
        cls.are_several = len(live_casters) + len(_bystanders) > 1


def call_model_of(session: Caster | Bystander) -> None:
    """Let functions cast in this thread as a session says, until it calls another one's model.

    torch keeps this for the thread, and autograd's threads inherit it with a backward.
    """
    _internals._stash_obj_in_tls(_CALLED_LAST, session)


def _called_last() -> Any:
    """Return what stands for the session whose model this thread called last, or None."""
    if not _internals._is_key_in_tls(_CALLED_LAST):
        return None
    session = _internals._get_obj_in_tls(_CALLED_LAST)
    return session if session is not None and session.live else None


def caster_here() -> Any:
    """Return the caster that applies in this thread, or None.

    It is that of the session whose model the thread has called last, or the newest one where it has
    called none. Compiled code has the newest one's casts: Dynamo guards no variable of a thread.
    """
    if torch.compiler.is_dynamo_compiling() or not _Sessions.are_several:
        return newest_caster()
    session = _called_last()
    if session is None:
        return newest_caster()
    return None if isinstance(session, Bystander) else session


def _applies(caster: Caster) -> bool:
    """Whether this thread has not called a model of another session than the caster's."""
    if not _Sessions.are_several:
        return True
    session = _called_last()
    return session is None or session is caster


def stand_by() -> Bystander:
    """Return what stands for a session that casts no functions."""
    bystander = Bystander()
    _bystanders.add(bystander)
    _Sessions.count()
    return bystander


def stand_aside(bystander: Bystander) -> None:
    """Forget what `stand_by` returned. Idempotent."""
    bystander.live = False
    _bystanders.discard(bystander)
    _Sessions.count()


class _CallModel:
    """A forward pre-hook of a model of a session that casts no functions. A copy's does nothing."""

    def __init__(self, bystander: Bystander | None = None) -> None:
        self._bystander = bystander

    def __call__(self, module: nn.Module, args: object) -> None:
        bystander = self._bystander
        if torch.compiler.is_compiling() or bystander is None or not bystander.live:
            return
        if not forwards.is_in_one():
            call_model_of(bystander)

    def __deepcopy__(self, memo: object) -> _CallModel:
        return _CallModel()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (_CallModel, ())


def cast_nothing_after(model: nn.Module, bystander: Bystander) -> RemovableHandle:
    """Let a thread that calls the model cast no functions."""
    return model.register_forward_pre_hook(_CallModel(bystander), prepend=True)


# Whether casts.


def casts(caster: Caster, device_type: str) -> bool:
    """Whether the functions of `caster` cast tensors of a device type, here and now."""
    if not caster.live:
        return False
    if not torch.compiler.is_dynamo_compiling() and (_is_in_op() or not _applies(caster)):
        return False
    if device_type in DEVICE_TYPES and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type) is caster.dtype
    is_of_models = not caster.device_types or device_type in caster.device_types
    return is_of_models and not torch.is_autocast_enabled(_OFF) and not _is_in_worker()


def _is_in_worker() -> bool:
    """Whether this process loads data for another one, which has been forked with its patches."""
    return not torch.compiler.is_dynamo_compiling() and torch.utils.data.get_worker_info() is not None


def _is_in_op() -> bool:
    """Whether the caller is inside an op: a decomposition, a meta function, a dispatch mode."""
    key = _internals.DispatchKey.PythonTLSSnapshot
    return bool(_internals._dispatch_tls_is_dispatch_key_excluded(key))


class _Flags:
    """Runs the block with some values of torch's autocast flags, by device type."""

    def __init__(self, values: dict[str, bool]) -> None:
        self._values = values
        self._changed: list[tuple[str, bool]] = []

    def __enter__(self) -> None:
        values = self._values.items()
        self._changed = [(kind, on) for kind, on in values if torch.is_autocast_enabled(kind) is not on]
        try:
            for kind, on in self._changed:
                torch.set_autocast_enabled(kind, on)
        except BaseException:  # an interrupt, for which no `__exit__` is called
            self.put_back()
            raise

    def put_back(self) -> None:
        """Give the flags the values that they had. Idempotent."""
        for kind, on in self._changed:
            torch.set_autocast_enabled(kind, not on)

    def __exit__(self, *exception: object) -> None:
        self.put_back()


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
        flags = _Flags(_NO_CASTS)
        try:
            with flags:
                yield
        finally:  # an interrupt may come between the block and its `__exit__`
            flags.put_back()


def same_casts() -> Callable[[], AbstractContextManager[None]]:
    """Return a function whose context managers make functions cast, or not, as they do at this call."""
    state = {kind: torch.is_autocast_enabled(kind) for kind in (_OFF, *DEVICE_TYPES)}
    return functools.partial(_Flags, state)


def plain_torch() -> AbstractContextManager[None]:
    """Run the block with `_OFF` unset: some of torch asks whether any device type has autocast on."""
    return _Flags({_OFF: False})


# Forwards.


class _Forwards(threading.local):
    """Whether this thread is in the forward of a session's model, and who keeps casts of weights there.

    Attributes:
        are_running: whether it is in one in which torch casts.
        casts: in a forward in which patched functions cast: the weights and their casts, by id.
        have_torchs_cache: whether this thread is the one that torch keeps casts of weights for.
    """

    are_running = False
    casts: dict[int, tuple[Tensor, Tensor]] | None = None
    have_torchs_cache = False

    def is_in_one(self) -> bool:
        """Whether it is in any."""
        return self.are_running or self.casts is not None


forwards = _Forwards()

_torchs_cache = threading.Lock()
"""Held by the thread in whose outermost region torch keeps casts of weights.

torch has one cache for all threads, and whoever leaves an outermost region empties it. Another thread
whose weight is used twice would cast it twice then, and sum up the gradients in another dtype. So a
forward that finds the cache taken keeps its own casts.
"""


def _take_torchs_cache() -> bool:
    """Take torch's cache for this thread if no other has it, and return whether this one has it."""
    if not forwards.have_torchs_cache and _torchs_cache.acquire(blocking=False):
        forwards.have_torchs_cache = True
    return forwards.have_torchs_cache


def _give_torchs_cache() -> None:
    if forwards.have_torchs_cache:
        forwards.have_torchs_cache = False
        _torchs_cache.release()


def forget_casts() -> None:
    """Forget the casts of weights that are kept for this thread."""
    if forwards.casts is not None:
        forwards.casts.clear()
    if forwards.have_torchs_cache:
        torch.clear_autocast_cache()
    elif _take_torchs_cache():
        torch.clear_autocast_cache()
        _give_torchs_cache()
    elif _nesting() and torch.is_autocast_cache_enabled():  # in a region older than any session
        torch.clear_autocast_cache()


class ThreadState:
    """torch's state in this thread, to be put back after any exception.

    An interrupt may come where no `with` statement and no hook is told of it: between a region and the
    line that holds it open.
    """

    def __init__(self) -> None:
        kinds = (_OFF, *DEVICE_TYPES)
        self._enabled = [(kind, torch.is_autocast_enabled(kind)) for kind in kinds]
        self._dtypes = [(kind, torch.get_autocast_dtype(kind)) for kind in DEVICE_TYPES]
        self._caches = torch.is_autocast_cache_enabled()
        self._depth = _nesting()
        self._in_forward, self._casts = forwards.are_running, forwards.casts
        self._had_torchs_cache = forwards.have_torchs_cache
        self._has_grad = torch.is_grad_enabled()

    def put_back(self, after_error: bool = False) -> None:
        """Make the state of autocast what it was; after an error that of autograd, too.

        It may be called twice: the second call does what an interrupt has kept the first from.
        """
        if after_error:
            torch._C._set_grad_enabled(self._has_grad)
        for kind, enabled in self._enabled:
            torch.set_autocast_enabled(kind, enabled)
        for kind, dtype in self._dtypes:
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._caches)
        while _nesting() > self._depth:
            torch.autocast_decrement_nesting()
        if not self._depth:
            forget_casts()
        if not self._had_torchs_cache:
            _give_torchs_cache()
        forwards.are_running, forwards.casts = self._in_forward, self._casts


def _nesting() -> int:
    """Return how many regions this thread is in. torch tells it only to who enters or leaves one."""
    counts = map(operator.call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting))
    return tuple(counts)[1]  # both calls in one, which no interrupt divides


@functools.cache
def _is_available(kind: str) -> bool:
    return kind == "cpu" or torch.accelerator.is_available()


def _enter_forward(module: nn.Module, dtype: torch.dtype) -> None:
    """Do what entering torch.autocast regions for all device types does.

    A region around the forward is the user's, and wins. Only in DataParallel's threads it is torch's,
    which enters it in the default dtype.
    """
    in_thread_of_torch = getattr(module, "_is_replica", False)
    # Nothing is kept of the weights of replicas, which are no leaves.
    if in_thread_of_torch or CASTS_LOSE_GRADIENTS or _take_torchs_cache():
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
                forget_casts()  # torch does not look at the dtype of the casts that it keeps
            torch.set_autocast_dtype(kind, dtype)
            torch.set_autocast_enabled(kind, True)


def call_without_casts(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function in which nothing casts; an interrupt, too, leaves casts as they were."""
    if torch.compiler.is_compiling():
        with disable_casts():
            return function(*args, **kwargs)
    before = ThreadState()
    try:
        try:
            with disable_casts():
                return function(*args, **kwargs)
        finally:
            before.put_back()
    finally:
        before.put_back()


def device_types_of(module: nn.Module) -> set[str]:
    """Return the device type of a module's parameters; empty if it has none."""
    first = next(module.parameters(), None)
    return set() if first is None else {first.device.type}


def _class_in_regions(base: Any, caster: Caster) -> Any:
    """Return a subclass of a model's class whose calls run in torch.autocast regions."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        is_plain = not caster.live or forwards.is_in_one() or torch.compiler.is_compiling()
        # Dynamo does not follow the flags, and a transform of torch.func ignores regions.
        if is_plain or _internals._functorch.peek_interpreter_stack() is not None:
            return base.__call__(self, *args, **kwargs)
        before = ThreadState()
        try:
            try:
                call_model_of(caster)
                caster.device_types |= device_types_of(self)
                _enter_forward(self, caster.dtype)
                return base.__call__(self, *args, **kwargs)
            except BaseException:
                before.put_back(after_error=True)
                raise
            finally:
                before.put_back()
        finally:
            before.put_back()

    return subclass_of(base, __call__=__call__)


def watch(model: nn.Module, caster: Caster) -> Callable[[], None]:
    """Let each forward of the model run in regions while the caster is live; return what undoes it."""
    return swap_classes({model: _class_in_regions(type(model), caster)})


def is_watched(module: nn.Module) -> bool:
    """Whether `watch` was called on the module, or on what it is a copy of."""
    return type(module).__call__ is not getattr(module, "_amp_plain_class", type(module)).__call__


# What torch has to be told.


def open_for(caster: Caster, patches: Patches) -> None:
    """Make `caster` the newest, and let torch's own regions know of casts outside of them."""
    live_casters.append(caster)
    _Sessions.count()
    _internals._stash_obj_in_tls(_CALLED_LAST, None)  # the newest one's casts apply, until a call
    torch.set_autocast_enabled(_OFF, False)
    for target, name, function in (
        (torch.autocast, "__enter__", _enter),
        (torch.autocast, "__exit__", _exit),
        (PreDispatchTorchFunctionMode, "__torch_function__", _record),
        (PreDispatchTorchFunctionMode, "__exit__", _end_recording),
        (torch.utils.checkpoint, "_get_autocast_kwargs", _autocast_kwargs),
        (nn.DataParallel, "parallel_apply", _parallel_apply),
        (torch.autograd.graph.saved_tensors_hooks, "__init__", _make_hooks),
    ):
        patches.surround(target, name, function)


def close_for(caster: Caster) -> None:
    """Forget `caster`."""
    if caster in live_casters:
        live_casters.remove(caster)
        _Sessions.count()


def _enter(original: Function, region: Any) -> Any:
    """Enter a torch.autocast region, and mark one that alone says what is cast in it."""
    region._amp_was_off = was_off = torch.is_autocast_enabled(_OFF)
    region._amp_had_cache = forwards.have_torchs_cache
    region._amp_has_cache = forwards.casts is None and _take_torchs_cache()
    result = original(region)
    if not region._amp_has_cache:
        torch.set_autocast_cache_enabled(False)
    caster = caster_here()
    if caster is not None:
        ours = region._enabled and region.fast_dtype is caster.dtype
        foreign = not ours and region.device in DEVICE_TYPES and _is_available(region.device)
        torch.set_autocast_enabled(_OFF, was_off or foreign)
    if region.fast_dtype is not region.prev_fastdtype:
        forget_casts()  # torch does not look at the dtype of the casts that it keeps
    return result


def _exit(original: Function, region: Any, *exception: Any) -> Any:
    """Exit a torch.autocast region."""
    was_off = getattr(region, "_amp_was_off", None)  # None: entered before the session
    if was_off is not None:
        torch.set_autocast_enabled(_OFF, was_off)
    if region.fast_dtype is not region.prev_fastdtype:
        forget_casts()
    if not getattr(region, "_amp_has_cache", True):  # torch empties it on leaving an outermost region
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
            _give_torchs_cache()


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


def _autocast_kwargs(original: Function, device_type: str = "cuda") -> Any:
    """Return what checkpoints keep of autocast's state, so that they recompute as the forward did."""
    states, caster = original(device_type), caster_here()
    for kind, state in zip((device_type, "cpu"), states, strict=True):
        if state is not None and kind in DEVICE_TYPES and caster is not None and casts(caster, kind):
            state |= {"enabled": True, "dtype": caster.dtype}
    return states


def _make_hooks(original: Function, hooks: Any, pack: Function, unpack: Function) -> None:
    """Let a hook pack tensors as they are: `save_on_cpu` calls `Tensor.cpu`, which a rule casts."""

    def pack_as_it_is(tensor: Any) -> Any:
        return call_without_casts(pack, (tensor,), {})

    original(hooks, pack_as_it_is, unpack)


def _parallel_apply(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Run DataParallel's threads, which are told whether this one casts."""
    caster = caster_here()
    with ExitStack() as regions:
        for kind in DEVICE_TYPES:
            if _is_available(kind) and caster is not None and casts(caster, kind):
                regions.enter_context(torch.autocast(kind, caster.dtype))
        return original(*args, **kwargs)
