"""The wrappers that cast the arguments of torch's functions at O1 and O4.

A wrapper casts the arguments that have another dtype and calls the original. Autograd sees ordinary
casts, so gradients have the dtype of the leaves. `regions` decides where functions cast. In a model's
forward, wrappers leave the ops that torch.autocast casts to torch.autocast: it is faster, and caches
the casts of weights.
"""

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from amp import active
from amp.active import Caster
from amp.casting.policy import OpRule
from amp.casting.regions import (
    DEVICE_TYPES,
    Function,
    are_off,
    call_without_casts,
    casts,
    disable_casts,
    forwards,
)
from amp.dtypes import CASTABLE, LOW_PRECISION, SCALABLE
from amp.errors import AmpNotImplementedError

_SCALARS = frozenset({type(None), bool, int, float, str, torch.Size})
"""The types of arguments that are never cast."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def call_with_casts(
    caster: Caster, rule: OpRule, original: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `original`, with its arguments cast by `rule` if `caster` casts at this point."""
    if not torch.compiler.is_dynamo_compiling() and are_off():  # as in the optimizer's step
        return original(*args, **kwargs)
    if kwargs and kwargs.get("out") is not None:  # it has a dtype already
        return call_without_casts(original, args, kwargs)
    if kwargs and rule.category == "float" and kwargs.get("dtype") is not None:
        return original(*args, **kwargs)
    kind = _device_type(args, kwargs)
    if not casts(caster, kind):
        return original(*args, **kwargs)
    on_gpu = rule.category == "recurrent" and kind != "cpu" and kind in DEVICE_TYPES
    if on_gpu and caster.dtype is torch.float16:
        with torch.autocast(kind, caster.dtype):  # casts weights into one buffer, which cuDNN needs
            return original(*args, **kwargs)
    if rule.category == "native" and not torch.compiler.is_dynamo_compiling():
        args, kwargs = _with_kept_casts(caster.dtype, args, kwargs)
    dtype = _dtype_for(caster.dtype, rule, args, kwargs)
    if dtype is not None:
        args, kwargs = _cast_to(dtype, args, kwargs)
    if on_gpu:  # with cuDNN, torch.autocast casts to float16, whatever its own dtype is
        with disable_casts(), torch.backends.cudnn.flags(enabled=False):
            return original(*args, **kwargs)
    if not rule.closed:
        return original(*args, **kwargs)
    return call_without_casts(original, args, kwargs)


def make_wrapper(caster: Caster, rule: OpRule, original: Function) -> Function:
    """Return the wrapper that replaces `original` while `caster` is live.

    It makes two cheap checks first: whether torch.autocast casts here, and whether all tensors have the
    right dtype already.
    """
    # Rules that do not cast down leave float32 tensors alone.
    right = caster.dtype if rule.category in ("native", "half") else torch.float32

    def slow(*args: Any, **kwargs: Any) -> Any:
        return call_with_casts(caster, rule, original, args, kwargs)

    def nothing_to_cast(*args: Any, **kwargs: Any) -> Any:
        for value in args:
            kind = type(value)
            if kind is Tensor or kind is nn.Parameter:
                if value.dtype is not right:
                    return slow(*args, **kwargs)
            elif kind not in _SCALARS and not (kind is tuple and value and type(value[0]) is int):
                return slow(*args, **kwargs)
        if not kwargs:
            return original(*args)
        for value in kwargs.values():
            if type(value) not in _SCALARS:
                return slow(*args, **kwargs)
        return original(*args, **kwargs)

    def native(*args: Any, **kwargs: Any) -> Any:
        if forwards.are_running and "out" not in kwargs:
            return original(*args, **kwargs)
        return nothing_to_cast(*args, **kwargs)

    def float_along_dim(self: Tensor, dim: Any, dtype: torch.dtype | None = None) -> Any:
        # The loop over arguments would make a small softmax a tenth slower.
        if self.dtype is right and dtype is None:
            return original(self, dim)
        return slow(self, dim, dtype=dtype)

    def unless_compiled(*args: Any, **kwargs: Any) -> Any:
        # Inductor's code has made its casts.
        is_compiled = "extern_kernels" in sys._getframe(1).f_globals
        return original(*args, **kwargs) if is_compiled else slow(*args, **kwargs)

    if rule.op == "torch.convolution":
        return unless_compiled
    if rule.category == "native":
        return native
    if rule.category in ("recurrent", "sequence") or rule.closed:
        return slow
    is_softmax = rule.op in ("torch.Tensor.softmax", "torch.Tensor.log_softmax")
    return float_along_dim if is_softmax else nothing_to_cast


def make_choosing(place: tuple[int, str], newest: Function, original: Function) -> Function:
    """Return a function that calls the wrapper of the thread's session, where there are several.

    Args:
        place: the id of the module or class that holds the function, and the function's name there.
        newest: the wrapper of the newest session, which compiled code calls.
        original: the function that is called if the thread's session has no wrapper.
    """

    def choosing(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return newest(*args, **kwargs)
        caster = active.caster_here()
        wrapper = original if caster is None else caster.wrappers.get(place, original)
        return wrapper(*args, **kwargs)

    return choosing


def _dtype_for(
    half: torch.dtype, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.dtype | None:
    """Return the dtype that a rule casts arguments to, or None if it does not cast them."""
    match rule.category:
        case "native" | "half" | "recurrent":
            return half
        case "float":
            return torch.float32
        case "promote":
            return _widest([*args, *kwargs.values()])
        case "sequence":
            return _widest(args[:1])
        case "padding":
            mode = args[2] if len(args) > 2 else kwargs.get("mode")
            return torch.float32 if mode in ("reflect", "replicate") else None  # repeats values
        case "banned":
            for tensor in _tensors([*args, *kwargs.values()]):
                if tensor.dtype in LOW_PRECISION:
                    raise AmpNotImplementedError(
                        f"{rule.op} was given a {tensor.dtype} tensor: {rule.note}."
                    )
        case "in_place":
            for target in _tensors(args[:1]):
                if target.dtype in CASTABLE:
                    return target.dtype
        case "in_place_float":
            for target in _tensors(args[:1]):
                if target.dtype in LOW_PRECISION:
                    raise AmpNotImplementedError(
                        f"{rule.name} runs in FP32 and cannot write to a {target.dtype} tensor in "
                        f"place. Call {rule.name[:-1]}, which returns an FP32 tensor, or use "
                        "amp.disable_casts() around it."
                    )
    return rule.dtype


def _widest(values: Any) -> torch.dtype | None:
    """Return the widest dtype of the floating tensors in `values`, or None if all have one dtype."""
    dtypes = {tensor.dtype for tensor in _tensors(values) if tensor.is_floating_point()}
    if len(dtypes) < 2 or not dtypes <= SCALABLE:
        return None
    return functools.reduce(torch.promote_types, dtypes)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in `value`, also in nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _device_type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the device type of the first tensor, or `"cpu"` if there is none."""
    for value in args:
        if isinstance(value, Tensor):
            return value.device.type
    for tensor in _tensors([*args, *kwargs.values()]):
        return tensor.device.type
    return "cpu"


def _cast_to(dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.dtype is not dtype and value.dtype in CASTABLE:
                return value.to(dtype)
        elif isinstance(value, list):
            return [convert(item) for item in value]
        elif type(value) is tuple:
            return tuple([convert(item) for item in value])
        return value

    args = tuple([convert(value) for value in args])
    return args, {key: convert(value) for key, value in kwargs.items()} if kwargs else kwargs


def _with_kept_casts(dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Cast each weight once in a forward, while another thread uses torch's own cache.

    As with torch's cache, the gradients of a weight that is used twice add up in `dtype`, and are cast
    once.
    """
    kept = forwards.casts
    if kept is None or not torch.is_grad_enabled():
        return args, kwargs

    def convert(value: Any) -> Any:
        is_leaf = isinstance(value, Tensor) and value.requires_grad and value.is_leaf
        if not is_leaf or value._is_view() or value.dtype is not torch.float32:
            return value
        if id(value) not in kept:
            kept[id(value)] = value, value.to(dtype)
        return kept[id(value)][1]

    return tuple([convert(value) for value in args]), {k: convert(v) for k, v in kwargs.items()}
