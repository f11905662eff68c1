"""Functions of torch that cast their own arguments.

`OpCaster.install` replaces the functions of an `OpPolicy` by wrappers, process-wide, and `close`
gives the originals back. A wrapper casts what is not in the right dtype already and calls the
original: autograd sees ordinary casts, so gradients come back in the dtype of the leaves. Where
functions cast is decided in `regions`. In a model's forward the ops that torch.autocast casts itself
are left to it: it is faster, and caches the casts of weights.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils.hooks import RemovableHandle

from amp.casting import regions
from amp.casting.policy import OpPolicy, OpRule, resolve
from amp.casting.regions import DEVICE_TYPES, Function, casts, disable_casts, forwards
from amp.dtypes import CASTABLE, LOW_PRECISION, dtype_name
from amp.errors import AmpNotImplementedError, AmpRuntimeError, AmpWarning
from amp.patching import Patches

_SCALARS = frozenset({type(None), bool, int, float, str, torch.Size})
"""Arguments in which there is nothing to cast."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class OpCaster:
    """The patched functions of one session."""

    def __init__(self, policy: OpPolicy) -> None:
        self.policy = policy
        self.dtype = policy.dtype
        self.live = False
        self._patches = Patches()
        # Originals and wrappers, by their ids: the function, its rule, and what holds it.
        self._functions: dict[int, tuple[Any, OpRule, Any]] = {}
        self._watched: list[weakref.ref[nn.Module]] = []

    def install(self, registered: Iterable[tuple[OpRule, Any]] = ()) -> None:
        """Patch every function of the policy, under every name that a loaded module has for it.

        A function that this torch lacks gets a warning. What was compiled before is compiled again.

        Args:
            registered: further rules, each with the module or class that holds its function.
        """
        missing = self.policy.missing()
        if missing:
            warnings.warn(
                f"torch {torch.__version__} has no {', '.join(missing)}: the rules for "
                f"{dtype_name(self.dtype)} that name them do nothing",
                AmpWarning,
                stacklevel=2,
            )
        self.live = True
        _introduce_dynamo()
        regions.open_for(self, self._patches)
        for rule in self.policy.rules:
            if rule.category != "calls" and rule.op not in missing:
                self.patch(rule, resolve(rule.place))
        self._patches.surround(nn.RNNBase, "check_input", functools.partial(_check_rnn_input, self))
        self._patches.surround(torch.jit, "script", functools.partial(_script, self._patches))
        for rule, target in registered:
            self.patch(rule, target)
        self.replace_names()
        _forget_compiled()

    def patch(self, rule: OpRule, target: Any) -> None:
        """Patch one function of `target`, and its in-place form."""
        shown = getattr(target, rule.name)  # the original, or an older caster's wrapper
        attribute = inspect.getattr_static(target, rule.name, None)

        def make(function: Function) -> Any:
            if isinstance(attribute, classmethod):
                return classmethod(_make_wrapper(self, rule, attribute.__func__))
            wrapper = _make_wrapper(self, rule, function)
            return staticmethod(wrapper) if isinstance(attribute, staticmethod) else wrapper

        original = self._patches.wrap(target, rule.name, make)
        for function in (original, shown, getattr(target, rule.name)):
            self._functions.setdefault(id(function), (function, rule, target))
        if target is Tensor and rule.name in vars(FunctionalTensor):
            self.patch(rule, FunctionalTensor)  # what AOTAutograd traces with has a method of its own
        in_place = f"{rule.name}_"
        if (
            rule.category in ("native", "half", "promote", "float")
            and rule.place != "torch.nn.functional"
            and not rule.name.startswith("__")
            and hasattr(target, in_place)
        ):
            self._patches.surround(target, in_place, functools.partial(_write_in_place, self, rule))

    def replace_names(self) -> None:
        """Patch what modules imported by name, as in `from torch.nn.functional import linear`."""
        for module in _modules_of_others():
            self._rename(module)

    def watch(self, model: nn.Module) -> list[RemovableHandle]:
        """Let the model's forwards cast, and the functions that its modules hold as attributes.

        What is held in a way that cannot be patched gets a warning that names it.
        """
        held: dict[str, None] = {}  # in the order in which they were found
        for name, module in model.named_modules():
            self._rename(module)
            self._watched.append(weakref.ref(module))
            for where, value in _held_by(module, name or type(module).__name__):
                if id(value) in self._functions:
                    _, rule, target = self._functions[id(value)]
                    if getattr(target, rule.name) is not value:
                        held[f"{where} {rule.op}"] = None
        if held:
            warnings.warn(
                "some functions were taken from torch before amp.initialize and will not cast their "
                f"arguments: {'; '.join(held)}. Call them by their name in torch, from a method.",
                AmpWarning,
                stacklevel=2,
            )
        return regions.watch(model, self)

    def close(self) -> None:
        """Give every function back, also where it was imported by name meanwhile. Idempotent."""
        if not self.live:
            return
        self.live = False
        regions.close_for(self)
        self._patches.undo()
        watched = [module for reference in self._watched if (module := reference()) is not None]
        for holder in (*_modules_of_others(), *watched):
            self._rename(holder)
        _forget_compiled()

    def _rename(self, holder: Any) -> None:
        """Let the attributes of `holder` that are patched functions be what those are in torch now."""
        for name, value in list(vars(holder).items()):
            if id(value) in self._functions:
                _, rule, target = self._functions[id(value)]
                setattr(holder, name, getattr(target, rule.name))


def _held_by(module: nn.Module, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what a module holds in ways that cannot be patched, each with words that say how."""
    for key, value in vars(module).items():
        yield f"{name}.{key} is a partial of", getattr(value, "func", None)
        if type(value) in (list, tuple, dict):
            items = value.values() if type(value) is dict else value
            yield from ((f"{name}.{key} holds", item) for item in items)
    for cls in type(module).__mro__:
        for key, value in vars(cls).items() if not cls.__module__.startswith("torch.") else ():
            yield f"{cls.__qualname__}.{key} is", getattr(value, "__func__", value)


def _modules_of_others() -> Iterator[ModuleType]:
    """Yield the loaded modules that are neither torch's nor ours."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] not in ("torch", "amp"):
            yield module


def _introduce_dynamo() -> None:
    """Let Dynamo make its tables of torch's functions before these are patched.

    It makes them once in a process, by identity. Made while a session is open they would hold wrappers,
    and after the session Dynamo would not know the functions themselves.
    """
    from torch._dynamo import trace_rules
    from torch._dynamo.variables import torch as in_graph

    handlers = getattr(in_graph, "TorchInGraphFunctionVariable", None)
    for holder, name in (
        (trace_rules, "get_torch_obj_rule_map"),
        (trace_rules, "get_tensor_method"),
        (in_graph, "get_overridable_functions"),
        (handlers, "_get_handlers"),
    ):
        getattr(holder, name, lambda: None)()


def _forget_compiled() -> None:
    """Reset `torch.compile`, and give its caches on disk a key that is for these rules alone.

    Dynamo does not look at what `x @ w` calls: neither its guards nor its cache keys would know.
    """
    caster = regions.newest_caster()
    tag, _, _ = torch.compiler.config.cache_key_tag.partition(_TAG)
    if caster is not None:
        tag += _TAG + hashlib.sha256(repr(caster.policy).encode()).hexdigest()[:16]
    torch.compiler.config.cache_key_tag = tag
    torch._dynamo.reset()


_TAG = "|amp:"


# Wrappers.


def call_with_casts(
    caster: OpCaster, rule: OpRule, original: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `original` with its arguments cast by `rule`, if `caster` casts here and now."""
    leave_alone = "dtype" if rule.category == "float" else "out"
    if kwargs and (kwargs.get("out") is not None or kwargs.get(leave_alone) is not None):
        return original(*args, **kwargs)
    kind = _device_type(args, kwargs)
    if not casts(caster, kind):
        return original(*args, **kwargs)
    on_gpu = rule.category == "recurrent" and kind != "cpu" and kind in DEVICE_TYPES
    if on_gpu and caster.dtype is torch.float16:
        with torch.autocast(kind, caster.dtype):  # casts weights into one buffer, as cuDNN wants them
            return original(*args, **kwargs)
    args, kwargs = _convert(caster.dtype, rule, args, kwargs)
    if on_gpu:  # for cuDNN, torch.autocast casts to float16 whatever its own dtype is
        with disable_casts(), torch.backends.cudnn.flags(enabled=False):
            return original(*args, **kwargs)
    if not rule.closed:
        return original(*args, **kwargs)
    with disable_casts():
        return original(*args, **kwargs)


def _make_wrapper(caster: OpCaster, rule: OpRule, original: Function) -> Function:
    """Return `original` as callers see it while `caster` is live.

    Two cheap questions come first: whether torch.autocast casts here, and whether all tensors are in
    the right dtype already.
    """
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
        if forwards.modules:
            return original(*args, **kwargs)
        return nothing_to_cast(*args, **kwargs)

    def float_along_dim(self: Tensor, dim: Any, dtype: torch.dtype | None = None) -> Any:
        # The loop over arguments would make a small softmax a tenth slower.
        if self.dtype is right and dtype is None:
            return original(self, dim)
        return slow(self, dim, dtype=dtype)

    if rule.category == "native":
        wrapper: Function = native
    elif rule.category not in ("half", "float") or rule.closed:
        wrapper = slow
    elif rule.op in ("torch.Tensor.softmax", "torch.Tensor.log_softmax"):
        wrapper = float_along_dim
    else:
        wrapper = nothing_to_cast
    functools.update_wrapper(wrapper, original)
    place, _, cls = rule.place.rpartition(".")
    in_class = rule.place == "torch.Tensor"
    wrapper.__module__ = place if in_class else rule.place  # where pickle finds it again
    wrapper.__qualname__ = f"{cls}.{rule.name}" if in_class else rule.name
    return wrapper


def _convert(
    half: torch.dtype, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    """Return what a rule makes of arguments."""
    match rule.category:
        case "native" | "half" | "recurrent":
            return _cast_to(half, args, kwargs)
        case "float":
            return _cast_to(torch.float32, args, kwargs)
        case "promote":
            return _cast_to_widest(args, kwargs)
        case "sequence":
            first, _ = _cast_to_widest(args[:1], {})
            return (*first, *args[1:]), kwargs
        case "padding":
            mode = args[2] if len(args) > 2 else kwargs.get("mode")
            repeats_values = mode in ("reflect", "replicate")
            return _cast_to(torch.float32, args, kwargs) if repeats_values else (args, kwargs)
        case "banned":
            for tensor in _tensors([*args, *kwargs.values()]):
                if tensor.dtype in LOW_PRECISION:
                    raise AmpNotImplementedError(
                        f"{rule.op} was given a {tensor.dtype} tensor: {rule.note}."
                    )
    return (args, kwargs) if rule.dtype is None else _cast_to(rule.dtype, args, kwargs)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in `value`, which may hold lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _device_type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the device type of the first tensor, or `"cpu"` if there is none to cast."""
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


def _cast_to_widest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    dtypes = {
        tensor.dtype for tensor in _tensors([*args, *kwargs.values()]) if tensor.is_floating_point()
    }
    if len(dtypes) < 2 or not dtypes <= CASTABLE | {torch.float64}:
        return args, kwargs
    widest = functools.reduce(torch.promote_types, dtypes)
    return _cast_to(widest, args, kwargs)


def _check_rnn_input(
    caster: OpCaster, original: Function, module: nn.RNNBase, input: Tensor, batch_sizes: Tensor | None
) -> None:
    """Check an input whose dtype need not be the weights': both are cast."""
    weight = module._flat_weights[0]
    if casts(caster, input.device.type) and isinstance(weight, Tensor) and input.dtype in CASTABLE:
        input = torch.empty_like(input, dtype=weight.dtype, device="meta")
    with regions.plain_torch():
        original(module, input, batch_sizes)


def _script(patches: Patches, original: Function, *args: Any, **kwargs: Any) -> Any:
    """Call `torch.jit.script`, which can compile torch's functions and no wrapper of them."""
    for module in args[0].modules() if args and isinstance(args[0], nn.Module) else ():
        if regions.is_watched(module):
            raise AmpRuntimeError(
                f"torch.jit.script cannot compile this {type(module).__name__}: its functions "
                "cast as they are called, which its source does not say. Use "
                "torch.jit.trace, torch.export or torch.compile, or script it after "
                "amp.get_session().close()."
            )
    with patches.lifted():
        return original(*args, _frames_up=kwargs.pop("_frames_up", 0) + 2, **kwargs)


def _write_in_place(
    caster: OpCaster, rule: OpRule, original: Function, *args: Any, **kwargs: Any
) -> Any:
    """Call a function's in-place form, with the other arguments cast to the dtype that it writes to.

    That of a function that gives FP32 casts nothing, and raises where it would write to a half tensor.
    """
    target: Any = args[0] if args else None
    gives_float32 = rule.category == "float"
    concerned = LOW_PRECISION if gives_float32 else CASTABLE
    is_concerned = isinstance(target, Tensor) and target.dtype in concerned
    if not is_concerned or not casts(caster, target.device.type):
        return original(*args, **kwargs)
    if gives_float32:
        raise AmpNotImplementedError(
            f"{rule.name}_ runs in FP32 and cannot write to a {target.dtype} tensor in place. Call "
            f"{rule.name}, which returns an FP32 tensor, or use amp.disable_casts() around it."
        )
    args, kwargs = _cast_to(target.dtype, args, kwargs)
    return original(*args, **kwargs)
