"""Where the op that runs now was called: the function of torch, the module, and the user's line.

A backward op is where its forward op was: autograd numbers its nodes, and an op is made right after its
node.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import _disable_current_modes

_TORCH, _AMP = (
    str(Path(module.__file__ or "").parent) + os.sep for module in (torch, sys.modules["amp"])
)
_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = "site-packages" + os.sep


class Place(NamedTuple):
    """Where an op was called.

    Attributes:
        op: the name of the function that was called, such as `softmax`.
        module: the name of the innermost module; empty outside of any.
        file, line: the innermost line that is neither torch's nor the library's.
    """

    op: str
    module: str
    file: str
    line: int


class Places(AbstractContextManager["Places"]):
    """Knows where ops are called while it is open.

    Args:
        models: whose modules have names, by what these begin with.
        note_loss: is given what each backward starts from.
        note_call: is given each function of torch that has been called: the place, the function, its
            arguments and its result.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        note_loss: Callable[[Tensor], None] = lambda loss: None,
        note_call: Callable[[Place, Any, tuple[Any, ...], dict[str, Any], Any], None] | None = None,
    ) -> None:
        self._models, self._note_loss, self._note_call = models, note_loss, note_call
        self._names: dict[int, str] = {}
        self._forward: dict[int, Place] = {}  # by the number of the autograd node
        self._stacks = threading.local()
        self._api = threading.local()
        self._open = ExitStack()

    def __enter__(self) -> Places:
        with ExitStack() as stack:
            for prefix, model in self._models.items():
                for name, module in model.named_modules():
                    self._names.setdefault(id(module), prefix + name)
                    before = module.register_forward_pre_hook(self._enter_module, prepend=True)
                    after = module.register_forward_hook(self._leave_module, always_call=True)
                    stack.callback(before.remove)
                    stack.callback(after.remove)
            stack.enter_context(_Calls(self))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def here(self, aten: str) -> tuple[Place, str]:
        """Return where the op that runs now was called, and the phase."""
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and not self._stack:
            node = torch._C._current_autograd_node()
            known = self._forward.get(node._sequence_nr()) if node is not None else None
            return known or Place(aten, "", *_user_line()), "backward"
        place = Place(getattr(self._api, "name", None) or aten, self._module, *_user_line())
        number: Any = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
        self._forward.setdefault(number() - 1, place)
        return place, "recompute" if in_backward else "forward"

    @property
    def _module(self) -> str:
        return next((name for name in reversed(self._stack) if name), "")

    @property
    def _stack(self) -> list[str]:
        if not hasattr(self._stacks, "names"):
            self._stacks.names = []
        names: list[str] = self._stacks.names
        return names

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._names.get(id(module), ""))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch; ops inside of it are called as it is."""
        outer = getattr(self._api, "name", None)
        if outer is not None:
            return function(*args, **kwargs)
        self._api.name = _name_of(function)
        try:
            result = function(*args, **kwargs)
        finally:
            self._api.name = None
        if self._note_call is not None:
            place = Place(_name_of(function), self._module, *_user_line())
            self._note_call(place, function, args, kwargs, result)
        return result

    def note_loss(self, loss: Tensor) -> None:
        """Tell what a backward starts from."""
        with torch.no_grad(), _disable_current_modes():
            self._note_loss(loss)


class _Calls(TorchFunctionMode):
    """Tells the functions of torch that are called."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self._places = places

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            self._places.note_loss(args[0])
            with self:  # what is computed anew inside of it has names too
                return _backward(*args, **kwargs)
        return self._places.call(func, args, kwargs)


def _backward(
    loss: Tensor,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Do what `Tensor.backward` does, past function modes."""
    torch.autograd.backward(loss, gradient, retain_graph, create_graph, inputs=inputs)


def _name_of(function: Any) -> str:
    name = resolve_name(function) or getattr(function, "__name__", "")
    return str(name).replace("torch.Tensor.", "Tensor.")


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_users(file: str) -> bool:
    if file.startswith(_PYTHON) and _PACKAGES not in file:
        return False
    return not file.startswith((_TORCH, _AMP, "<"))


def _user_line() -> tuple[str, int]:
    for frame in _frames():
        if _is_users(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
    return "", 0


def file_of_caller() -> str:
    """Return the file that has called the function of torch that a `note_call` is told of."""
    told_by = ("places.py", "recording.py", "overrides.py")
    return next(x for frame in _frames() if not (x := frame.f_code.co_filename).endswith(told_by))


def is_called_by_amp() -> bool:
    """Whether this library, and no user's line, has called torch for the op that runs now."""
    own = ("trace.py", "places.py", "wide.py", "clipping.py", "patching.py")  # called in a user's name
    files = [frame.f_code.co_filename for frame in _frames()]
    files = [x for x in files if not (x.startswith(_AMP) and x.endswith(own))]
    return next((x.startswith(_AMP) for x in files if not x.startswith(_TORCH)), False)
