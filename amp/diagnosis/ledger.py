"""The ledger of a forward: the torch functions that were called, and their dtypes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from amp.casting import cast_hooks, wrappers
from amp.diagnosis.places import Place, file_of_caller
from amp.dtypes import LOW_PRECISION


class Call(NamedTuple):
    """A call of a torch function, from outside of torch.

    Attributes:
        place: where it was called.
        function: the function.
        takes: the dtypes of its floating arguments, before amp's casts.
        gives: the dtypes of its floating results.
    """

    place: Place
    function: Any
    takes: tuple[torch.dtype, ...]
    gives: tuple[torch.dtype, ...]


class Ledger:
    """What the first forward of each model calls.

    Attributes:
        is_open: whether such a forward runs.
        calls: the calls of torch functions with a floating result, in order.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.calls: list[Call] = []
        self._cast_by_amp: dict[int, tuple[Tensor, torch.dtype]] = {}  # results of casts, dtypes before

    def close(self) -> None:
        """Record nothing more, and keep no tensor of the forward, whose graph would live on."""
        self.is_open = False
        self._cast_by_amp.clear()

    def note_call(
        self, place: Place, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Record a call of a torch function."""
        tensors = [x for x in tree_leaves((args, kwargs)) if _is_floating(x)]
        gives = tuple(x.dtype for x in tree_leaves(result) if _is_floating(x))
        caller = file_of_caller()
        if caller == cast_hooks.__file__:
            return  # a cast of what a model takes or returns, or its check
        if function is Tensor.to and caller == wrappers.__file__:
            self._cast_by_amp[id(result)] = (result, tensors[0].dtype)
            return
        takes: list[torch.dtype] = [self._cast_by_amp.get(id(x), (x, x.dtype))[1] for x in tensors]
        self._cast_by_amp.clear()
        if gives and place.op:
            self.calls.append(Call(place, function, tuple(dict.fromkeys(takes)), gives))

    def note_fp8(self, place: Place, module: nn.Module, x: Tensor, output: Tensor) -> None:
        """Record the call of a layer that amp runs in FP8 or FP4."""
        layer: Any = vars(module)["_amp_fp8"]
        takes: tuple[torch.dtype, ...] = (x.dtype,)
        if layer.runs(module.training) and output.dtype in LOW_PRECISION:  # else autocast is off
            is_fp4 = layer.forward_is_fp4(module.training)
            takes = (x.dtype, _FLOAT4 if is_fp4 else torch.float8_e4m3fn)
        self.calls.append(Call(place, nn.functional.linear, takes, (output.dtype,)))


_FLOAT4: torch.dtype = getattr(torch, "float4_e2m1fn_x2", torch.uint8)  # torch 2.8


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
