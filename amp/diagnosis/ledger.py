"""The ledger of a forward: its products and casts, and the torch functions that were called."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from amp.casting import wrappers
from amp.diagnosis.memories import Memories
from amp.diagnosis.places import Place, file_of_caller
from amp.diagnosis.records import CASTS, UNWRITTEN
from amp.diagnosis.twins import floats_in


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
    """What the first forward of each model costs.

    Args:
        memories: those of the shadow.

    Attributes:
        is_open: whether such a forward runs.
        ops: how many ops there were.
        products: the floating-point operations of matrix products, convolutions and attentions, by the
            dtype of the factors; a multiplication with an addition counts as two.
        calls: the calls of torch functions with a floating result, in order.
        casts: how many casts of activations from one floating dtype to another there were.
        cast_bytes: how many bytes these read and wrote.
    """

    def __init__(self, memories: Memories) -> None:
        self.is_open = False
        self.ops = self.casts = self.cast_bytes = 0
        self.products = Counter[torch.dtype]()
        self.calls: list[Call] = []
        self._memories = memories
        self._last: tuple[Place, torch.dtype] | None = None  # of the last product, and of its factors
        self._in_fp8: dict[str, Any] = {}
        self._cast_by_amp: dict[int, tuple[Tensor, torch.dtype]] = {}  # results of casts, dtypes before

    def close(self) -> None:
        """Record nothing more, and keep no tensor of the forward, whose graph would live on."""
        self.is_open = False
        self._cast_by_amp.clear()

    def follow_fp8(self, name: str, module: nn.Module) -> Any:
        """Count a module that amp runs in FP8 or FP4 as one product; return a handle to stop."""
        self._in_fp8[name] = module
        return module.register_forward_hook(functools.partial(self._note_fp8, name))

    def op_ends(
        self, place: Place, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Record a product or a cast."""
        inputs, outputs, aten = floats_in(args), floats_in(result), func.overloadpacket.__name__
        if flops := _flops(func, args, kwargs, result):
            emulated = self._memories[inputs[-1]].before  # FP8 on hardware without FP8 products
            dtype = emulated if emulated and _is_eighth(emulated) else inputs[-1].dtype
            module = self._in_fp8.get(place.module)
            if module is not None and module._amp_fp8.forward_is_fp4(module.training):
                dtype = _FLOAT4
            self.products[dtype] += flops
            self._last = place, dtype
        if not func.is_view and (inputs or outputs):
            self.ops += aten not in UNWRITTEN
            for y in outputs:
                self._memories[y].before = None
            if aten in CASTS and inputs and outputs and inputs[-1].dtype is not outputs[0].dtype:
                self._note_cast(inputs[-1], outputs[0])

    def _note_cast(self, x: Tensor, y: Tensor) -> None:
        self._memories[y].before = x.dtype
        is_held = self._memories[x].owned.kind in ("weight", "buffer")
        if not (is_held or _is_eighth(x.dtype) or _is_eighth(y.dtype)):
            self.casts += 1
            self.cast_bytes += x.nbytes + y.nbytes

    def call_ends(
        self, place: Place, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Record a call of a torch function."""
        tensors = [x for x in tree_leaves((args, kwargs)) if _is_floating(x)]
        gives = tuple(x.dtype for x in tree_leaves(result) if _is_floating(x))
        if place.module in self._in_fp8:
            return
        if function is Tensor.to and file_of_caller() == wrappers.__file__:
            self._cast_by_amp[id(result)] = (result, tensors[0].dtype)
            return
        takes: list[torch.dtype] = [self._cast_by_amp.get(id(x), (x, x.dtype))[1] for x in tensors]
        self._cast_by_amp.clear()
        if gives and place.op:
            self.calls.append(Call(place, function, tuple(dict.fromkeys(takes)), gives))

    def _note_fp8(self, name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        """Record the call of a layer that amp runs in FP8."""
        if self.is_open and self._last is not None and self._last[0].module == name:
            place = self._last[0]._replace(op="torch.nn.functional.linear")
            takes = (args[0].dtype, self._last[1])
            self.calls.append(Call(place, nn.functional.linear, takes, (output.dtype,)))


_FLOAT4: torch.dtype = getattr(torch, "float4_e2m1fn_x2", torch.uint8)  # torch 2.8


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_eighth(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    packet = func.overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    if packet.__name__.startswith("_scaled_dot_product") and "backward" not in packet.__name__:
        count: Any = sdpa_flop_count
        return int(count(*[x.shape for x in args[:3]]))
    return 0
