"""Hooks that cast a module's inputs and outputs. In a deep copy of a module they cast to FP32.

A model's floating-point inputs are cast to its dtype, unless a profile says otherwise. But a cast may
ruin positions, tables and masks: a 16-bit float rounds large integers, and -1e9 becomes -inf in
float16. The user is warned of this once for each argument.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import _disable_current_modes

from amp.casting.containers import cast_tensors, map_tensors
from amp.dtypes import CASTABLE, SCALABLE, dtype_name
from amp.errors import AmpTypeError, brief, warn
from amp.kernels.interrupts import without_grad
from amp.profiles import properties

EXACT_INTEGERS = {torch.float16: 2048, torch.bfloat16: 256}
"""The largest integer of each format up to which all integers are exact."""
EXACT_IN_FP32 = 2**24
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_LOOKS = 8
"""For how many shapes an argument is checked: each check may make the host wait for the device."""


class _Cast:
    """A hook that casts to `dtype`. It can be pickled, and its deep copy casts to FP32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __deepcopy__(self, memo: object) -> Self:
        other = copy.copy(self)
        other.dtype = torch.float32
        return other


class CastOutput(_Cast):
    """A forward hook that casts float16, bfloat16 and float32 outputs to `dtype`."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the cast output, or None to keep it."""
        if isinstance(output, Tensor):
            may_be_cast = output.dtype in CASTABLE and output.dtype is not self.dtype
            return output.to(self.dtype) if may_be_cast else None
        if output is None:
            return self._without_output(module)
        return cast_tensors(output, CASTABLE, self.dtype)

    def _without_output(self, module: nn.Module) -> None:
        """Handle a forward that has returned nothing, or raised."""


class CastInputs(_Cast):
    """A forward pre-hook that casts floating arguments, float64 included, to `dtype`."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the cast arguments, or None to keep them."""
        if len(args) == 1 and not kwargs and getattr(args[0], "dtype", None) is self.dtype:
            return None  # the usual case
        return self._cast_all(args, kwargs)

    def _cast_all(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return cast_tensors(args, SCALABLE, self.dtype), cast_tensors(kwargs, SCALABLE, self.dtype)


class ModelInputs(CastInputs):
    """A forward pre-hook on a model that casts all floating arguments, or all but some.

    Args:
        model: the model; the signature of its forward gives the arguments' names.
        dtype: the dtype that floating arguments, float64 included, are cast to.
        which: True casts all, False casts none, and a tuple of globs names arguments not to cast.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, which: properties.CastInputs) -> None:
        super().__init__(dtype)
        self.which = which
        self._names = positional_names(model)
        self._seen: dict[str, set[torch.Size]] = {}
        self._warned: set[str] = set()

    def _cast_all(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        names = self._names
        if len(args) > len(names):
            names = [*names, *(f"argument {i}" for i in range(len(names), len(args)))]
        positional = tuple(map(self._cast, names, args))
        return positional, {name: self._cast(name, value) for name, value in kwargs.items()}

    def _cast(self, name: str, value: Any) -> Any:
        if self.which is not True and (self.which is False or matches(self.which, name)):
            return value
        if isinstance(value, Tensor):
            return self._cast_tensor(name, value)
        return map_tensors(functools.partial(self._cast_tensor, name), value)

    def _cast_tensor(self, name: str, x: Tensor) -> Tensor:
        if x.dtype not in SCALABLE or x.dtype is self.dtype:
            return x
        if not torch.compiler.is_compiling():  # a guard on what was seen would compile twice
            seen = self._seen.setdefault(name, set())
            if x.shape not in seen and len(seen) < _LOOKS:
                self._look(name, x, seen)
        return x.to(self.dtype)

    def _look(self, name: str, x: Tensor, seen: set[torch.Size]) -> None:
        """Check an argument once for each shape, and warn if the cast changes its meaning."""
        # Under vmap or jacrev it has no values to look at, and torch.jit.trace would record the look.
        if is_functorch_wrapped_tensor(x) or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return
        if not can_ruin(x, self.dtype):
            return
        seen.add(x.shape)
        if name not in self._warned and (found := ruined_by_cast(x, self.dtype)):
            self._warned.add(name)
            dtype = dtype_name(self.dtype)
            warn(
                f"the argument '{name}' of the model is cast to {dtype}, and holds {found}. Give "
                "integers as torch.long and masks as bools, or exempt the argument: "
                f"{properties.excepting([name], self.which)} in a profile"
            )


def can_ruin(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether a cast of a tensor may ruin integers or masks, as far as is known without its values."""
    is_wide = x.dtype in (torch.float32, torch.float64) and x.layout is torch.strided
    return is_wide and dtype in EXACT_INTEGERS and x.numel() > 0 and not x.is_meta


@without_grad
def ruined_by_cast(x: Tensor, dtype: torch.dtype) -> str:
    """Return which integers or masks a cast ruins, as part of a sentence, or an empty text.

    The host waits for the device.
    """
    limit = EXACT_INTEGERS[dtype]
    with _disable_current_modes():  # modes that watch the model should not see these ops
        cast = x.to(dtype)
        low, largest = float(x.amin()), float(x.abs().amax())
        if -torch.inf < low < -torch.finfo(dtype).max:
            return f"{low:g}, which becomes -inf: a row that is masked entirely gives NaN"
        is_large = limit < largest <= EXACT_IN_FP32
        changed = (x != cast) & (x != -largest)  # which may be the -10000 of a mask
        if is_large and bool((x == x.round()).all() and changed.any()):
            return f"integers up to {largest:g}, and {dtype_name(dtype)} rounds those above {limit}"
    return ""


def matches(which: properties.CastInputs, name: str) -> bool:
    """Whether a profile says not to cast the argument or module of this name."""
    return isinstance(which, tuple) and any(fnmatchcase(name, pattern) for pattern in which)


def cast_inputs_to(module: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Make a module cast its inputs to this dtype and no other; return a function that undoes it."""
    hooks = module._forward_pre_hooks
    before = {i: hook for i, hook in hooks.items() if isinstance(hook, CastInputs)}
    hooks.update(dict.fromkeys(before, CastInputs(dtype)))
    if before:
        return functools.partial(hooks.update, before)
    return module.register_forward_pre_hook(CastInputs(dtype), with_kwargs=True).remove


def check_names(model: nn.Module, which: properties.CastInputs) -> None:
    """Raise AmpTypeError for a name that is neither an argument of the model nor one of its modules."""
    kinds = {name: each.kind for name, each in _parameters_of(model).items()}
    if inspect.Parameter.VAR_KEYWORD in kinds.values():
        return
    names = [name for name, kind in kinds.items() if kind is not inspect.Parameter.VAR_POSITIONAL]
    known = [*names, *(name for name, _ in model.named_modules())]
    for pattern in which if isinstance(which, tuple) else ():
        if not any(fnmatchcase(name, pattern) for name in known):
            raise AmpTypeError(
                f"cast_model_inputs has {brief(pattern)}, which is no argument of "
                f"{type(model).__name__}'s forward ({', '.join(names)}) and the name of no "
                "module in it"
            )


def positional_names(model: nn.Module) -> list[str]:
    """Return the names of the positional arguments of a model's forward."""
    return [name for name, each in _parameters_of(model).items() if each.kind in _BY_POSITION]


def _parameters_of(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return {}
