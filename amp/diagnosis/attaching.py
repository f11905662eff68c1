"""Following the training of any script, with amp or without it, by torch's own hooks.

What torch has no hook for is replaced while the training is followed: the constructor of optimizers,
the methods of its gradient scaler, `torch.autograd.backward`, and `nn.Module._apply`, which `.half()`
calls.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from amp.diagnosis.twins import is_float
from amp.dtypes import dtype_name


class _Thread(threading.local):
    """How many modules a thread is in."""

    depth = 0


class Training:
    """Follows what trains in this process while it is open: one method for each event.

    Attributes:
        is_in_scaler: whether a gradient scaler that is enabled is at work.
    """

    def __init__(self) -> None:
        self.is_in_scaler = False
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._thread = _Thread()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._enter_module).remove)
            leave = register_module_forward_hook(self._leave_module, always_call=True)
            stack.callback(leave.remove)
            stack.callback(register_optimizer_step_pre_hook(self._begin_step).remove)
            stack.callback(register_optimizer_step_post_hook(self.optimizer_stepped).remove)
            replace_in(stack, Optimizer, "__init__", self._make_optimizer)
            replace_in(stack, torch.autograd, "backward", self._backward)
            replace_in(stack, nn.Module, "_apply", self._apply)
            replace_in(stack, torch, "clear_autocast_cache", self._clear_cache)
            for name in ("scale", "unscale_", "step", "update"):
                replace_in(stack, torch.amp.GradScaler, name, self._scaler_call)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that were made, or have stepped, in this order, and are alive."""
        return list(filter(None, [reference() for reference in self._optimizers]))

    def follow(self, optimizer: Optimizer) -> None:
        """Add an optimizer."""
        if all(each is not optimizer for each in self.optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    # Events.

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """An optimizer was made."""

    def root_called(self, model: nn.Module, args: Any) -> None:
        """A module is called from outside of any module, with these positional arguments."""

    def root_returns(self, model: nn.Module) -> None:
        """The forward of such a module has ended."""

    def backward_begins(self, losses: list[Tensor]) -> None:
        """A backward is about to begin."""

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""

    def optimizer_stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """An optimizer has stepped, with these arguments."""

    def scaler_called(self, name: str, scaler: Any, given: Any, result: Any) -> None:
        """A gradient scaler's `scale`, `unscale_`, `step` or `update` has returned."""

    def autocast_left(self) -> None:
        """The outermost autocast block has ended, and its cache is empty."""

    def module_cast(self, module: nn.Module, before: dict[str, Tensor]) -> None:
        """A module's tensors were replaced; `before` has its own floating buffers."""

    # Hooks, and what stands in for functions.

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._thread.depth += 1
        if self._thread.depth == 1 and torch._C._current_graph_task_id() == -1:
            self.root_called(module, args)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._thread.depth = max(self._thread.depth - 1, 0)
        if self._thread.depth == 0 and torch._C._current_graph_task_id() == -1:
            self.root_returns(module)

    def _begin_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.follow(optimizer)
        self.optimizer_steps(optimizer)

    def _make_optimizer(self, original: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self.follow(optimizer)
        self.optimizer_made(optimizer)

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        self.backward_begins([tensors] if isinstance(tensors, Tensor) else list(tensors))
        return original(tensors, *args, **kwargs)

    def _clear_cache(self, original: Any) -> None:
        original()
        self.autocast_left()

    def _apply(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = {name: x for name, x in module._buffers.items() if is_float(x)}
        result = original(module, *args, **kwargs)
        self.module_cast(module, before)
        return result

    def _scaler_call(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if not scaler.is_enabled():
            return original(scaler, *args, **kwargs)
        was, self.is_in_scaler = self.is_in_scaler, True
        try:
            result = original(scaler, *args, **kwargs)
        finally:
            self.is_in_scaler = was
        given = next(iter((*args, *kwargs.values())), None)
        self.scaler_called(original.__name__, scaler, given, result)
        return result


def replace_in(stack: ExitStack, holder: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace an attribute until a stack ends, by a function that gets the original before all else."""
    original = getattr(holder, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(holder, name, call)
    stack.callback(setattr, holder, name, original)


_CANNOT = {
    "DeepSpeedEngine": "DeepSpeed's engine, whose optimizer and gradients torch's hooks do not see",
    "FullyShardedDataParallel": "FSDP1, whose flat parameters have no names: use fully_shard",
}


def described(models: Iterable[nn.Module]) -> list[str]:
    """Return the classes of models, the number and dtypes of their parameters, and what hides them."""
    parts = []
    for model in models:
        sizes, classes = Counter[str](), {type(each).__name__ for each in model.modules()}
        for parameter in model.parameters():
            sizes[dtype_name(parameter.dtype)] += parameter.numel()
        held = " and ".join(f"{count:,} parameters in {dtype}" for dtype, count in sizes.items())
        parts.append(f"{type(model).__name__}, {held}")
        parts += [f"cannot look into {why}" for name, why in _CANNOT.items() if name in classes]
    return parts


def models_in_memory(optimizers: Iterable[Optimizer]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the outermost modules of this process that have parameters of optimizers, and all others.

    The others share nothing with these, such as averages. All objects are looked at, which takes a
    tenth of a second.
    """
    modules = [x for x in gc.get_objects() if issubclass(type(x), nn.Module)]
    owned = {x for optimizer in optimizers for x in _parameters_of(optimizer)}
    trained = _outermost([x for x in modules if any(id(p) in owned for p in x.parameters())])
    known = {id(parameter) for model in trained for parameter in model.parameters()}
    return trained, _outermost([x for x in modules if all(id(p) not in known for p in x.parameters())])


def optimizers_of(model: nn.Module) -> list[Optimizer]:
    """Return the optimizers, made before they could be followed, that have parameters of a model."""
    own = set(map(id, model.parameters()))
    found = [x for x in gc.get_objects() if issubclass(type(x), Optimizer)]
    return [optimizer for optimizer in found if own & _parameters_of(optimizer)]


def _parameters_of(optimizer: Optimizer) -> set[int]:
    """Return the ids of the parameters of an optimizer."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    inner = {id(each) for module in modules for each in module.modules() if each is not module}
    return [module for module in modules if id(module) not in inner]
