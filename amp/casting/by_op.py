"""The strategy that makes torch's functions cast their arguments, op by op.

The functions of an `OpPolicy` are replaced by wrappers, process-wide, until the session closes: under
every name that a loaded Python module has for them, and where modules of the model hold them as
attributes.
"""

import functools
import hashlib
import inspect
import weakref
from collections.abc import Iterator
from types import ClassMethodDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensor

from amp import active
from amp.casting import region_patches, regions, scripting
from amp.casting.module_rules import run_in_float32
from amp.casting.op_names import resolve
from amp.casting.policy import OpRule, policy_of
from amp.casting.regions import DEVICE_TYPES, Function, casts
from amp.casting.registry import registered
from amp.casting.strategy import Strategy
from amp.casting.wrappers import make_choosing, make_wrapper
from amp.errors import warn
from amp.patching import Patches, modules_of_others, show_patched, unpatched
from amp.profiles.properties import Properties
from amp.undo import Undo


class CastOps(Strategy):
    """Makes functions cast their arguments while the session is open.

    Attributes:
        policy: the rule of each function.
        dtype: the dtype of the ops that run in half precision.
        live: whether the session's functions cast.
        is_inherited: whether this process was forked with the session, and has called no model of it.
        wrappers: this session's wrappers, by the id of the module or class and the function's name.
        device_types: the device types of the models, whose tensors functions cast outside of forwards;
            empty means all.
    """

    def __init__(self, properties: Properties) -> None:
        super().__init__(properties)
        self.policy = policy_of(properties)
        self.dtype = self.policy.dtype
        self.live = self._is_open = self.is_inherited = False
        self.device_types: set[str] = set()
        self._has_begun = False
        self._patches = Patches()
        # Where functions are patched, by the ids of originals and wrappers.
        self._places: dict[int, tuple[Any, str, Any, OpRule]] = {}
        self.wrappers: dict[tuple[int, str], Function] = {}
        self._shown: list[Function] = []
        self._watched: list[weakref.ref[nn.Module]] = []

    @staticmethod
    def is_asked_for(properties: Properties) -> bool:
        """Whether a profile casts functions."""
        return properties.patch_torch_functions

    def begin(self, undo: Undo) -> None:
        """Patch the functions of the policy, once in a session."""
        with active.opening:
            _stop_dropped()
            if not self._has_begun:
                # A failure restores the functions, and the next `initialize` patches them again.
                undo.if_it_fails.append(functools.partial(setattr, self, "_has_begun", False))
                undo.callback(self.stop)
                self._begin()

    def _begin(self) -> None:
        missing = self.policy.missing()
        self._is_open = self.live = True
        _introduce_dynamo()
        active.look_at_casts()
        active.deactivate()
        region_patches.turn_on()
        self._patches.install(region_patches.PATCHES)
        for rule in self.policy.rules:
            if rule.category != "calls" and rule.op not in missing:
                self.patch(rule, resolve(rule.place))
        for rule, target in registered():
            self.patch(rule, target)
        self.replace_names()
        _forget_compiled()
        self._has_begun = True

    def patch(self, rule: OpRule, target: Any) -> None:
        """Patch one function of `target`, and its in-place form."""
        attribute = inspect.getattr_static(target, rule.name, None)

        def make(function: Function) -> Any:
            is_method = isinstance(attribute, (classmethod, ClassMethodDescriptorType))
            function = getattr(attribute, "__func__", attribute) if is_method else function
            place = id(target), rule.name
            self.wrappers[place] = wrapper = make_wrapper(self, rule, function)
            if active.are_several():
                wrapper = make_choosing(place, wrapper, function)
            self._know(rule, target, wrapper)
            self._shown.append(wrapper)
            scripting.stand_for(wrapper, unpatched(function))
            if is_method:
                return classmethod(wrapper)
            return staticmethod(wrapper) if isinstance(attribute, staticmethod) else wrapper

        self._know(rule, target, getattr(target, rule.name))  # or an older session's wrapper
        self._know(rule, target, self._patches.wrap(target, rule.name, make))
        if rule.in_place is not None and hasattr(target, rule.in_place.name):
            self.patch(rule.in_place, target)
        if target is Tensor and rule.name in vars(FunctionalTensor):
            self.patch(rule, FunctionalTensor)  # the class AOTAutograd traces with overrides the method

    def _know(self, rule: OpRule, target: Any, function: Any) -> None:
        """Record the rule and place of a function, by its id."""
        self._places.setdefault(id(function), (target, rule.name, function, rule))

    def rule_of(self, function: Any) -> OpRule | None:
        """Return the rule of a patched function, given the original or its wrapper; None for others."""
        place = self._places.get(id(function))
        return None if place is None else place[-1]

    def replace_names(self) -> None:
        """Patch names in other modules, as after `from torch.nn.functional import linear`."""
        for module in modules_of_others():
            show_patched(module, self._places)

    def prepare_model(self, model: nn.Module, undo: Undo) -> None:
        """Run the model's forwards in autocast regions, and modules with an FP32 rule in FP32.

        Functions that its modules hold as attributes are patched too. Warns of functions that are held
        where they cannot be patched, such as in a list.
        """
        self.device_types |= {parameter.device.type for parameter in model.parameters()}
        held: dict[str, None] = {}  # an ordered set
        for name, module in model.named_modules():
            show_patched(module, self._places)
            self._watched.append(weakref.ref(module))
            for where, value in _held_by(module, name or type(module).__name__):
                if id(value) in self._places:
                    target, name_there, _, rule = self._places[id(value)]
                    if getattr(target, name_there) is not value:
                        held[f"{where} {rule.op}"] = None
        if held:
            warn(
                "some functions were taken from torch before amp.initialize and will not cast their "
                f"arguments: {'; '.join(held)}. Call them by their name in torch, from a method."
            )
        undo.callback(run_in_float32(model, self.properties.rules, self))
        undo.callback(regions.watch(model, self))

    @property
    def casts_ops(self) -> bool:
        """Whether functions cast their arguments at this point, in this thread."""
        return any(casts(self, kind) for kind in DEVICE_TYPES)

    def stop(self) -> None:
        """Restore every function, also where it was imported by name meanwhile. Idempotent."""
        if self._is_open:
            with active.opening:
                self._stop()
                _stop_dropped()

    def drop(self) -> None:
        """Stop casting, after the session and its models were garbage-collected without `close`.

        The functions are restored when the next session opens or closes. This method takes no lock,
        because the garbage collector may call it anywhere, for example while Dynamo compiles.
        """
        if self._is_open:
            self.live = False
            active.look_at_casts()
            _dropped.append(self)

    def _stop(self) -> None:
        self.live = False
        active.look_at_casts()
        self._patches.undo()
        watched = [module for reference in self._watched if (module := reference()) is not None]
        for holder in (*modules_of_others(), *watched):
            show_patched(holder, self._places)
        _forget_compiled()
        self._is_open = False
        # A newer session may hold a wrapper of this session, and so keep this and older ones alive.
        scripting.forget(self._shown)
        self._shown.clear()
        self._places.clear()


_dropped: list[CastOps] = []
"""The casters of garbage-collected sessions, whose functions are still to be restored."""


def _stop_dropped() -> None:
    while _dropped:
        caster = _dropped[0]
        if caster._is_open:
            caster._stop()
        _dropped.remove(caster)


def _held_by(module: nn.Module, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the values that a module holds where they cannot be patched, each with a description."""
    for key, value in vars(module).items():
        yield f"{name}.{key} is a partial of", getattr(value, "func", None)
        if type(value) in (list, tuple, dict):
            items = value.values() if type(value) is dict else value
            yield from ((f"{name}.{key} holds", item) for item in items)
    for cls in type(module).__mro__:
        for key, value in vars(cls).items() if not cls.__module__.startswith("torch.") else ():
            yield f"{cls.__qualname__}.{key} is", getattr(value, "__func__", value)


def _introduce_dynamo() -> None:
    """Make Dynamo build its tables of torch's functions before they are patched.

    It builds them once in a process, by identity. If it built them while a session is open, they would
    hold wrappers, and after the session Dynamo would not recognize the originals.
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
    """Reset `torch.compile`, and give its caches on disk a key that depends on the rules.

    Dynamo does not see that `x @ w` calls a patched function: its guards and cache keys would miss it.
    """
    caster = active.newest_caster()
    tag, _, _ = torch.compiler.config.cache_key_tag.partition(_TAG)
    if caster is not None:
        tag += _TAG + hashlib.sha256(repr(caster.policy).encode()).hexdigest()[:16]
    torch.compiler.config.cache_key_tag = tag
    if torch._dynamo.convert_frame.input_codes.seen:  # else there is nothing to reset
        torch._dynamo.reset()  # which imports Inductor where there is a GPU
