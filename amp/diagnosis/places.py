"""Finding where the current op was called: the torch function, the module, and the user's line.

The place of a backward op is that of its forward op, found by the sequence number of the autograd node:
a forward op runs right after its node is made.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, resolve_name
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from amp import active
from amp.diagnosis.guard import guarded
from amp.names import unwrapped_name

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_TORCH, _AMP = (
    str(Path(module.__file__ or "").parent) + os.sep for module in (torch, sys.modules["amp"])
)
_LOOKING = tuple(_AMP + folder + os.sep for folder in ("diagnosis", "trials"))
_FOR_THE_USER = ("clipping.py", "patching.py")
"""Files of amp that call what the user has called."""
_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = "site-packages" + os.sep


class Place(NamedTuple):
    """Where an op was called.

    Attributes:
        op: the name of the function that was called, such as `softmax`.
        module: the name of the innermost module; empty outside of any module.
        file: the file of the innermost line outside of torch and this library.
        line: the number of that line.
    """

    op: str
    module: str
    file: str
    line: int


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside `DistributedDataParallel`, `DataParallel` and `torch.compile`."""
    while hasattr(model, "_orig_mod") or isinstance(model, _WRAPPERS):
        model = getattr(model, "_orig_mod" if hasattr(model, "_orig_mod") else "module")
    return model


def session_of(model: nn.Module) -> Any:
    """Return the open session of a model, given without its wrappers, or None."""
    every = active.open_sessions()
    return next((x for x in every if any(unwrapped(each) is model for each in x.live_models())), None)


def modules_of(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return all modules of models, which are given by the prefix of their names, by their names."""
    return dict(named_in(models, "named_modules"))


def named_in(models: Mapping[str, nn.Module], method: str) -> Iterator[tuple[str, Any]]:
    """Yield what a method of models, as `named_buffers`, yields, with names without those of wrappers.

    Args:
        models: the models, by the prefix of the names.
        method: the name of the method.
    """
    for prefix, model in models.items():
        for name, x in getattr(model, method)():
            yield prefix + unwrapped_name(name), x


class Hook:
    """A hook of a module. In a copy or a pickle of the module it does nothing."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()

    def __call__(self, *args: Any) -> None:
        """Call the function."""
        if self._function is not None:
            self._function(*args)


class Places(TorchFunctionMode):
    """Tracks where ops are called, from `begin` on, and tells a shadow of calls and backwards.

    Args:
        models: the models whose modules are named, by the prefix of the names.
        shadow: is told of calls of models and torch functions, and of backwards.
    """

    def __init__(self, models: Mapping[str, nn.Module], shadow: Any) -> None:
        super().__init__()
        self._models, self._shadow, self.unfollowed = models, shadow, shadow.unfollowed
        self._names: dict[int, str] = {}
        self._forward: dict[int, Place] = {}  # by the number of the autograd node
        self._thread = _Thread()

    def begin(self, stack: ExitStack) -> None:
        """Track where ops are called until a stack ends."""
        for name, module in modules_of(self._models).items():
            self._names.setdefault(id(module), name)
            if isinstance(module, torch.jit.ScriptModule):
                continue  # which takes no hooks
            hook = Hook(self._enter_module)
            before = module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
            after = module.register_forward_hook(Hook(self._leave_module), always_call=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        stack.enter_context(self)

    def here(self, aten: str) -> tuple[Place, str]:
        """Return where the current op was called, and the phase; `aten` is the op's name."""
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and not self._thread.modules:
            node: Any = torch._C._current_autograd_node()
            known = self._forward.get(node._sequence_nr()) if node is not None else None
            if isinstance(node, torch.autograd.function.BackwardCFunction):  # a backward in Python
                return Place(aten, known.module if known else "", *user_line()), "backward"
            return known or Place(aten, "", *user_line()), "backward"
        place = Place(self._thread.function or aten, self._module, *user_line())
        number: Any = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
        self._forward.setdefault(number() - 1, place)
        return place, "recompute" if in_backward else "forward"

    @property
    def _module(self) -> str:
        return next((name for name in reversed(self._thread.modules) if name), "")

    @guarded
    def _enter_module(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        self._thread.modules.append(self._names.get(id(module), ""))
        is_model = any(module is model for model in self._models.values())
        if is_model and kwargs is not None:  # else the hook was removed by one before it
            self._shadow.model_called(module, args, kwargs)

    @guarded
    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._shadow.module_left(module, args, output)
        if self._thread.modules:
            self._thread.modules.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            self._shadow.backward_begins([])
        if func is Tensor.backward:
            self._shadow.backward_begins(args[:1])
            gradient = kwargs.pop("gradient")  # torch passes all by their names
            with self:  # so that calls in recomputed forwards are seen too
                return torch.autograd.backward(args[0], gradient, **kwargs)
        self._thread.function = self._called(func) or ""  # the ops inside get its name
        try:
            result = func(*args, **kwargs)
        finally:
            self._thread.function = ""
        self._shadow.function_called(func, args, kwargs, result)
        return result

    def of_call(self, function: Any) -> Place:
        """Return where a function is called that has just returned."""
        return Place(_name_of(function), self._module, *user_line())

    @guarded
    def _called(self, function: Any) -> str:
        return _name_of(function)


class _Thread(threading.local):
    """What a thread is in: modules, by their names, and the outermost torch function."""

    def __init__(self) -> None:
        self.modules: list[str] = []
        self.function = ""


@functools.lru_cache  # looking names up would take a tenth of a watched step
def _name_of(function: Any) -> str:
    name = resolve_name(function) or getattr(function, "__name__", "")
    return str(name).replace("torch.Tensor.", "Tensor.")


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


@functools.cache
def _is_users(file: str) -> bool:
    if file.startswith(_PYTHON) and _PACKAGES not in file:
        return False
    return not file.startswith((_TORCH, _AMP, "<"))


def user_line(in_packages: bool = True) -> tuple[str, int]:
    """Return the file and line of the innermost frame outside of torch and this library.

    Without `in_packages` frameworks are passed over too, if a script has called them.
    """
    innermost = None
    for frame in _frames():
        if _is_users(file := frame.f_code.co_filename):
            if in_packages or _PACKAGES not in file:
                return file, frame.f_lineno
            innermost = innermost or (file, frame.f_lineno)
    return innermost or ("", 0)


def open_modes() -> list[Any]:
    """Return the modes of torch's that the script is in: they must be left in reverse order.

    A default device is none of them: torch enters and leaves it below all others.
    """
    functions: Any = _get_current_function_mode_stack
    modes = *functions(), *_get_current_dispatch_mode_stack()
    return [mode for mode in modes if not isinstance(mode, DeviceContext)]


def file_of_caller() -> str:
    """Return the file that called the torch function which has just returned."""
    told_by = ("guard.py", "places.py", "ledger.py", "shadow.py", "overrides.py")
    return next(x for frame in _frames() if not (x := frame.f_code.co_filename).endswith(told_by))


def is_called_by_amp() -> bool:
    """Whether this library, and not the user's code, called torch for the current op."""
    others = (_TORCH, *_LOOKING)
    files = [frame.f_code.co_filename for frame in _frames()]
    files = [x for x in files if not (x.startswith(_AMP) and x.endswith(_FOR_THE_USER))]
    return next((x.startswith(_AMP) for x in files if not x.startswith(others)), False)
