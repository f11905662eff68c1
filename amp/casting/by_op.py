"""The strategy by which torch's functions cast their arguments, op by op.

The functions of an `OpPolicy` are replaced by wrappers, process-wide, until the session closes: under
every name that a loaded module has for them, and in what modules of the model hold as attributes.
"""

import functools
import hashlib
import inspect
import warnings
import weakref
from collections.abc import Iterator
from types import ClassMethodDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensor

from amp.casting import current, regions
from amp.casting.module_rules import run_in_float32
from amp.casting.op_names import resolve
from amp.casting.policy import OpRule, policy_of
from amp.casting.regions import DEVICE_TYPES, Function, casts
from amp.casting.registry import registered
from amp.casting.scripting import script
from amp.casting.strategy import Strategy
from amp.casting.wrappers import check_rnn_input, make_choosing, make_wrapper
from amp.errors import AmpWarning
from amp.patching import Patches, modules_of_others, show_patched
from amp.profiles.properties import Properties
from amp.undo import Undo


class CastOps(Strategy):
    """Functions cast their arguments, for as long as the session is open.

    Attributes:
        policy: the rule of each function.
        dtype: of the ops that gain from half precision.
        live: whether functions are patched.
        is_inherited: whether this process was forked since, and has called no model of the session.
        wrappers: functions as its session's threads see them, by the id of their place and their name.
        device_types: whose tensors functions cast outside of forwards, the models'; empty is all.
    """

    def __init__(self, properties: Properties) -> None:
        super().__init__(properties)
        self.policy = policy_of(properties)
        self.dtype = self.policy.dtype
        self.live = self._is_open = self.is_inherited = False
        self.device_types: set[str] = set()
        self._has_begun = False
        self._patches = Patches()
        # Of originals and wrappers, by their ids.
        self._rules: dict[int, OpRule] = {}
        self._places: dict[int, tuple[Any, str, Any]] = {}
        # By where a function is.
        self.wrappers: dict[tuple[int, str], Function] = {}
        self._watched: list[weakref.ref[nn.Module]] = []
        self._hold: weakref.ref[_Hold] | None = None

    @staticmethod
    def is_asked_for(properties: Properties) -> bool:
        """Whether a profile casts functions."""
        return properties.patch_torch_functions

    def begin(self, undo: Undo) -> None:
        """Patch the functions that this torch has, once in a session."""
        with current.opening:
            _stop_dropped()
            self._begin(undo)

    def _begin(self, undo: Undo) -> None:
        if self._has_begun:
            return
        undo.if_it_fails.append(self._begin_anew)
        missing = self.policy.missing()
        hold = _Hold(self)
        self._hold = weakref.ref(hold)
        undo.callback(hold.release)
        undo.callback(self.stop)
        self._is_open = self.live = True
        _introduce_dynamo()
        regions.open_for(self, self._patches)
        for rule in self.policy.rules:
            if rule.category != "calls" and rule.op not in missing:
                self.patch(rule, resolve(rule.place))
        self._patches.surround(nn.RNNBase, "check_input", check_rnn_input)
        self._patches.surround(torch.jit, "script", functools.partial(_script, self._patches))
        for rule, target in registered():
            self.patch(rule, target)
        self.replace_names()
        _forget_compiled()
        self._has_begun = True

    def _begin_anew(self) -> None:
        """Patch functions in the next `initialize`, where this one has failed and given them back."""
        self._has_begun = False

    def patch(self, rule: OpRule, target: Any) -> None:
        """Patch one function of `target`, and its in-place form."""
        shown = getattr(target, rule.name)  # the original, or an older session's wrapper
        attribute = inspect.getattr_static(target, rule.name, None)

        def make(function: Function) -> Any:
            is_method = isinstance(attribute, (classmethod, ClassMethodDescriptorType))
            function = getattr(attribute, "__func__", attribute) if is_method else function
            place = id(target), rule.name
            self.wrappers[place] = wrapper = make_wrapper(self, rule, function)
            if len(current.live_casters) > 1:
                wrapper = make_choosing(place, wrapper, function)
            if is_method:
                return classmethod(wrapper)
            return staticmethod(wrapper) if isinstance(attribute, staticmethod) else wrapper

        original = self._patches.wrap(target, rule.name, make)
        for function in (original, shown, getattr(target, rule.name)):
            self._rules.setdefault(id(function), rule)
            self._places.setdefault(id(function), (target, rule.name, function))
        if target is Tensor and rule.name in vars(FunctionalTensor):
            self.patch(rule, FunctionalTensor)  # what AOTAutograd traces with has a method of its own
        if rule.in_place is not None and hasattr(target, rule.in_place.name):
            self.patch(rule.in_place, target)

    def rule_of(self, function: Any) -> OpRule | None:
        """Return the rule for a function of torch, or for a wrapper of it, while it is patched."""
        return self._rules.get(id(function))

    def replace_names(self) -> None:
        """Patch what modules imported by name, as in `from torch.nn.functional import linear`."""
        for module in modules_of_others():
            self._rename(module)

    def prepare_model(self, model: nn.Module, undo: Undo) -> None:
        """Let the model's forwards run in autocast regions, and modules under a rule in FP32.

        Functions that its modules hold as attributes cast too. What is held in a way that cannot be
        patched gets a warning that names it.
        """
        self.device_types |= {parameter.device.type for parameter in model.parameters()}
        held: dict[str, None] = {}  # in the order in which they were found
        for name, module in model.named_modules():
            self._rename(module)
            self._watched.append(weakref.ref(module))
            for where, value in _held_by(module, name or type(module).__name__):
                if id(value) in self._places:
                    target, name_there, _ = self._places[id(value)]
                    if getattr(target, name_there) is not value:
                        held[f"{where} {self._rules[id(value)].op}"] = None
        if held:
            warnings.warn(
                "some functions were taken from torch before amp.initialize and will not cast their "
                f"arguments: {'; '.join(held)}. Call them by their name in torch, from a method.",
                AmpWarning,
                stacklevel=2,
            )
        undo.callback(run_in_float32(model, self.properties.rules, self))
        undo.callback(regions.watch(model, self))
        cls: Any = type(model)  # which `watch` has made for this model
        cls._amp_hold = None if self._hold is None else self._hold()

    @property
    def casts_ops(self) -> bool:
        """Whether functions cast their arguments, here and now."""
        return any(casts(self, kind) for kind in DEVICE_TYPES)

    def stop(self) -> None:
        """Give every function back, also where it was imported by name meanwhile. Idempotent."""
        if self._is_open:
            with current.opening:
                self._stop()
                _stop_dropped()

    def _stop(self) -> None:
        self.live = False
        regions.close_for(self)
        self._patches.undo()
        watched = [module for reference in self._watched if (module := reference()) is not None]
        for holder in (*modules_of_others(), *watched):
            self._rename(holder)
        _forget_compiled()
        self._is_open = False
        # A newer session may hold a wrapper of this one, which holds this one, and so on to the first.
        self._places.clear()
        self._rules.clear()

    def _rename(self, holder: Any) -> None:
        """Let the attributes of `holder` that are patched functions be what those are in torch now."""
        show_patched(holder, self._places)


class _Hold:
    """What a session and its models have: when all of them have gone, functions cast no more.

    Functions are given back when the next session that casts any opens or closes: the garbage
    collector may run anywhere, such as while Dynamo compiles.
    """

    def __init__(self, caster: CastOps) -> None:
        self._end = weakref.finalize(self, _drop, caster)
        self._end.atexit = False

    def release(self) -> None:
        """Do nothing then: the session has been closed."""
        self._end.detach()


_dropped: list[CastOps] = []
"""Of sessions that nobody has closed and nobody has any more: what they patched is to be given back."""


def _drop(caster: CastOps) -> None:
    """Let a caster cast no more. It takes no lock: the garbage collector calls it."""
    if caster._is_open:
        caster.live = False
        current.end(caster)
        _dropped.append(caster)


def _stop_dropped() -> None:
    while _dropped:
        caster = _dropped[0]
        if caster._is_open:
            caster._stop()
        _dropped.remove(caster)


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


_TAG = "|amp:"


def _forget_compiled() -> None:
    """Reset `torch.compile`, and give its caches on disk a key that is for these rules alone.

    Dynamo does not look at what `x @ w` calls: neither its guards nor its cache keys would know.
    """
    caster = current.newest_caster()
    tag, _, _ = torch.compiler.config.cache_key_tag.partition(_TAG)
    if caster is not None:
        tag += _TAG + hashlib.sha256(repr(caster.policy).encode()).hexdigest()[:16]
    torch.compiler.config.cache_key_tag = tag
    torch._dynamo.reset()


def _script(
    patches: Patches,
    original: Function,
    obj: Any,
    optimize: Any = None,
    _frames_up: int = 0,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call `torch.jit.script`, which can compile torch's functions and no wrapper of them."""
    with patches.lifted():
        return script(original, obj, optimize, _frames_up + 1, *args, **kwargs)
