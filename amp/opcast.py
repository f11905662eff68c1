"""O1 and O4: torch's functions cast their own arguments.

`OpCaster.install` replaces the functions of an `OpPolicy` by wrappers, process-wide, and `close`
gives the originals back. A wrapper casts what is not in the right dtype already and calls the
original: autograd sees ordinary casts, so gradients come back in the dtype of the leaves.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from amp.dtypes import CASTABLE, LOW_PRECISION
from amp.errors import AmpNotImplementedError
from amp.patching import Patches
from amp.policy import OpPolicy, OpRule

logger = logging.getLogger("amp")

Function = Callable[..., Any]


class _Switch(threading.local):
    """How many blocks have switched casts off: in the process, and in this thread alone."""

    off_in_process = 0
    off_in_thread = 0
    lock = threading.Lock()


_switch = _Switch()


@contextmanager
def disable_casts() -> Iterator[None]:
    """Run the block with no function casting its arguments, in this thread and all others.

    Blocks may nest, and an exception ends them like a normal exit. Where no session casts
    functions, nothing happens.
    """
    _count_in_process(1)
    try:
        yield
    finally:
        _count_in_process(-1)


def _count_in_process(change: int) -> None:
    with _Switch.lock:
        _Switch.off_in_process += change


@contextmanager
def disable_casts_in_thread() -> Iterator[None]:
    """Run the block with no function casting its arguments in this thread: it is not the model's."""
    _switch.off_in_thread += 1
    try:
        yield
    finally:
        _switch.off_in_thread -= 1


@contextmanager
def restore_casts_in_thread() -> Iterator[None]:
    """Run the block as if one `disable_casts_in_thread` around it were not there."""
    _switch.off_in_thread -= 1
    try:
        yield
    finally:
        _switch.off_in_thread += 1


class WeightCache(threading.local):
    """Casts of parameters, kept while a model's forward runs, so that a weight used twice is cast once.

    Nothing outlives the outermost forward of a session's model in its thread, and a cast is found
    again only for the same parameter, version, storage, grad mode and `requires_grad`. So no optimizer
    step, `load_state_dict` or EMA swap can leave a stale weight here, and none is held during backward.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.casts: dict[tuple[Any, ...], Tensor] = {}

    def enter(self) -> None:
        """A forward begins."""
        self.depth += 1

    def leave(self) -> None:
        """A forward ends; the outermost one takes the casts with it."""
        self.depth = max(self.depth - 1, 0)
        if self.depth == 0:
            self.casts.clear()

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `tensor` in `dtype`, from the cache if it is a parameter cast before."""
        if (
            not self.depth
            or not isinstance(tensor, nn.Parameter)
            or tensor.is_inference()
            or torch.compiler.is_compiling()
        ):
            return tensor.to(dtype)
        state = (tensor._version, tensor.data_ptr(), tensor.requires_grad, torch.is_grad_enabled())
        key = (tensor, dtype, state)
        found = self.casts.get(key)
        if found is None:
            found = self.casts[key] = tensor.to(dtype)
        return found


class _ForwardScope:
    """Two hooks that tell a `WeightCache` when a forward begins and ends.

    A deep copy of the model shares the cache; a pickled one has none.
    """

    def __init__(self, cache: WeightCache | None = None) -> None:
        self.cache = cache

    def before(self, module: nn.Module, args: Any) -> None:
        if self.cache is not None:
            self.cache.enter()

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.cache is not None:
            self.cache.leave()

    def __deepcopy__(self, memo: dict[int, Any]) -> _ForwardScope:
        return _ForwardScope(self.cache)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_ForwardScope, ())


class OpCaster:
    """The patched functions of one session."""

    def __init__(self, policy: OpPolicy) -> None:
        self.policy = policy
        self.cache = WeightCache()
        self.live = False
        self._patches = Patches()

    def install(self) -> None:
        """Patch every function of the policy. What this torch lacks is named in the log."""
        missing = []
        self.live = True
        for rule in self.policy.rules:
            target = _resolve(rule.place)
            if hasattr(target, rule.name):
                self._patches.wrap(target, rule.name, functools.partial(_make_wrapper, self, rule))
            else:
                missing.append(f"{rule.place}.{rule.name}")
            if rule.category in ("half", "float", "promote") and not rule.name.startswith("__"):
                self._install_in_place(rule, target)
        self._patches.wrap(nn.RNNBase, "check_input", functools.partial(_make_rnn_check, self))
        if missing:
            logger.warning("torch %s has no %s", torch.__version__, ", ".join(missing))

    def _install_in_place(self, rule: OpRule, target: Any) -> None:
        """Patch `name_`, which cannot change the dtype of the tensor it writes to."""
        name = f"{rule.name}_"
        if not hasattr(target, name) or rule.place == "torch.nn.functional":
            return
        make = _make_in_place_refusal if rule.category == "float" else _make_in_place_match
        self._patches.wrap(target, name, functools.partial(make, self))

    def watch(self, model: nn.Module) -> list[RemovableHandle]:
        """Let the casts of the model's parameters be shared within each of its forwards."""
        scope = _ForwardScope(self.cache)
        return [
            model.register_forward_pre_hook(scope.before),
            model.register_forward_hook(scope.after, always_call=True),
        ]

    def is_casting(self) -> bool:
        """Whether functions cast their arguments now, in this thread."""
        return self.live and not (_switch.off_in_process or _switch.off_in_thread)

    def close(self) -> None:
        """Give every function back. Idempotent."""
        self.live = False
        self._patches.undo()


def _resolve(place: str) -> Any:
    """Return the module or class of a dotted name."""
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError:
        parent, _, name = place.rpartition(".")
        return getattr(importlib.import_module(parent), name)


def _make_wrapper(caster: OpCaster, rule: OpRule, original: Function) -> Function:
    if rule.category == "half":
        dtype, cached = caster.policy.dtype, caster.cache.cast
        return _wrap(caster, original, lambda args, kwargs: _cast_to(dtype, cached, args, kwargs))
    if rule.category == "float":
        return _wrap(
            caster,
            original,
            lambda args, kwargs: _cast_to(torch.float32, Tensor.to, args, kwargs),
            leave_alone="dtype",
        )
    if rule.category == "promote":
        return _wrap(caster, original, _cast_to_widest)
    if rule.category == "sequence":
        return _wrap(caster, original, _cast_first_to_widest)
    return _wrap(caster, original, functools.partial(_refuse, rule))


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _wrap(
    caster: OpCaster,
    original: Function,
    convert: Callable[[tuple[Any, ...], dict[str, Any]], Arguments],
    leave_alone: str = "out",
) -> Function:
    """Return `original` with its arguments converted, except where the caller fixed the dtype."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _switch.off_in_process or _switch.off_in_thread or not caster.live:
            return original(*args, **kwargs)
        if kwargs and (kwargs.get("out") is not None or kwargs.get(leave_alone) is not None):
            return original(*args, **kwargs)
        args, kwargs = convert(args, kwargs)
        return original(*args, **kwargs)

    return wrapper


def _cast_to(
    dtype: torch.dtype,
    cast: Callable[[Tensor, torch.dtype], Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Arguments:
    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.dtype is not dtype and value.dtype in CASTABLE:
                return cast(value, dtype)
        elif type(value) in (list, tuple):
            return type(value)([convert(item) for item in value])
        return value

    args = tuple([convert(value) for value in args])
    return args, {key: convert(value) for key, value in kwargs.items()} if kwargs else kwargs


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in `value`, which may hold lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (list, tuple):
        for item in value:
            yield from _tensors(item)


def _cast_to_widest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    dtypes = {
        tensor.dtype
        for value in (*args, *kwargs.values())
        for tensor in _tensors(value)
        if tensor.is_floating_point()
    }
    if len(dtypes) < 2 or not dtypes <= CASTABLE | {torch.float64}:
        return args, kwargs
    widest = functools.reduce(torch.promote_types, dtypes)
    return _cast_to(widest, Tensor.to, args, kwargs)


def _cast_first_to_widest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    if args:
        return (*_cast_to_widest(args[:1], {})[0], *args[1:]), kwargs
    return args, kwargs


def _refuse(rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    for value in (*args, *kwargs.values()):
        for tensor in _tensors(value):
            if tensor.dtype in LOW_PRECISION:
                raise AmpNotImplementedError(
                    f"{rule.place}.{rule.name} was given a {tensor.dtype} tensor: {rule.advice}."
                )
    return args, kwargs


def _make_rnn_check(caster: OpCaster, original: Function) -> Function:
    """Return `RNNBase.check_input` for inputs whose dtype need not be the weights': both are cast."""

    @functools.wraps(original)
    def check_input(module: nn.RNNBase, input: Tensor, batch_sizes: Tensor | None) -> None:
        weight = module._flat_weights[0]
        if caster.is_casting() and isinstance(weight, Tensor) and input.dtype in CASTABLE:
            input = torch.empty_like(input, dtype=weight.dtype, device="meta")
        original(module, input, batch_sizes)

    return check_input


def _make_in_place_refusal(caster: OpCaster, original: Function) -> Function:
    def convert(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        target = args[0] if args else None
        if isinstance(target, Tensor) and target.dtype in LOW_PRECISION:
            name = original.__name__
            raise AmpNotImplementedError(
                f"{name} runs in FP32 and cannot write to a {target.dtype} tensor in place. "
                f"Call {name.removesuffix('_')}, which returns an FP32 tensor, or use "
                "amp.disable_casts() around it."
            )
        return args, kwargs

    return _wrap(caster, original, convert)


def _make_in_place_match(caster: OpCaster, original: Function) -> Function:
    def convert(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        target = args[0] if args else None
        if isinstance(target, Tensor) and target.dtype in CASTABLE:
            return _cast_to(target.dtype, Tensor.to, args, kwargs)
        return args, kwargs

    return _wrap(caster, original, convert)
