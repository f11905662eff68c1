"""The ledger of a forward: its products and casts, and the torch functions that were called."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from amp.casting import wrappers
from amp.diagnosis.places import Place, file_of_caller
from amp.diagnosis.records import CASTS
from amp.diagnosis.shadow import Shadow
from amp.diagnosis.twins import floats_in, identity_of

_CONVOLUTIONS = ("convolution", "_convolution", "cudnn_convolution", "_slow_conv2d_forward")


class Product(NamedTuple):
    """A matrix product, a convolution or an attention.

    Attributes:
        place: where it was called.
        dtype: the dtype of the factors.
        flops: floating-point operations; a multiplication with an addition counts as two.
        sizes: rows, inner dimension and columns of a matrix product; input and output channels of a
            convolution; empty for an attention.
        is_plain: whether it is a product of two matrices, and not of batches of matrices.
    """

    place: Place
    dtype: torch.dtype
    flops: int
    sizes: tuple[int, ...]
    is_plain: bool


class Constant(NamedTuple):
    """A Python number among the arguments of an op, too large for the dtype of its first tensor."""

    place: Place
    value: float
    dtype: torch.dtype


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


@dataclass
class Casts:
    """Casts of activations from one floating dtype to another.

    Attributes:
        count: how many casts there were.
        bytes: how many bytes they read and wrote.
        undone: how many casts undid the one before, by place.
    """

    count: int = 0
    bytes: int = 0
    undone: Counter[Place] = field(default_factory=Counter)


class Ledger(Shadow):
    """A shadow that records what a forward costs.

    Attributes:
        products: the matrix products, convolutions and attentions, in order.
        constants: the constants that are too large for their dtype, in order.
        calls: the calls of torch functions with a floating result, in order.
        casts: the casts of activations.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__(models)
        self.products: list[Product] = []
        self.constants: list[Constant] = []
        self.calls: list[Call] = []
        self.casts = Casts()
        self._weights: set[int] = set()
        self._in_fp8: set[str] = set()
        self._was: dict[int, torch.dtype] = {}  # for memory made by a cast, the dtype before the cast
        self._cast_by_amp: dict[int, tuple[Tensor, torch.dtype]] = {}  # results of casts, dtypes before

    def __enter__(self) -> Self:
        super().__enter__()
        for prefix, model in self._models.items():
            self._weights |= {identity_of(x) for x in (*model.parameters(), *model.buffers())}
            for name, module in model.named_modules():
                if "_amp_fp8" in vars(module):
                    self._in_fp8.add(prefix + name)
                    hook = functools.partial(self._note_fp8, prefix + name)
                    self._open.callback(module.register_forward_hook(hook).remove)
        return self

    def op_begins(self, place: Place, func: Any, args: tuple[Any, ...]) -> None:
        """Record constants, before the op may raise because of them."""
        given = floats_in(args)
        if not given or (torch.Tag.pointwise not in func.tags and "fill" not in func.name()):
            return
        limit = torch.finfo(given[0].dtype).max
        for value in args:
            if isinstance(value, (int, float)) and math.isfinite(value) and abs(value) > limit:
                self.constants.append(Constant(place, float(value), given[0].dtype))

    def op_ends(
        self, place: Place, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Record a product or a cast."""
        flops = _flops(func, args, kwargs, result)
        if flops:
            multiplied = floats_in(args)[-1]
            emulated = self._was.get(identity_of(multiplied))  # FP8 on hardware without FP8 products
            dtype = emulated if emulated and _is_eighth(emulated) else multiplied.dtype
            is_plain = func.overloadpacket.__name__ in ("mm", "addmm", "_scaled_mm")
            self.products.append(Product(place, dtype, flops, tuple(_sizes(func, args)), is_plain))
        if not func.is_view:
            self._note_cast(place, func.overloadpacket.__name__, floats_in(args), floats_in(result))

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

    def _note_cast(self, place: Place, aten: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        before = self._was.get(identity_of(inputs[-1])) if inputs else None
        for y in outputs:
            self._was.pop(identity_of(y), None)
        if aten not in CASTS or not inputs or not outputs or inputs[-1].dtype is outputs[0].dtype:
            return
        x, y = inputs[-1], outputs[0]
        self._was[identity_of(y)] = x.dtype
        if identity_of(x) in self._weights or _is_eighth(x.dtype) or _is_eighth(y.dtype):
            return
        self.casts.count += 1
        self.casts.bytes += x.nbytes + y.nbytes
        if before is y.dtype and place.module not in self._in_fp8:
            self.casts.undone[place] += 1

    def _note_fp8(self, name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        """Record the call of a layer that amp runs in FP8."""
        if self.products and self.products[-1].place.module == name:
            place = self.products[-1].place._replace(op="torch.nn.functional.linear")
            takes = (args[0].dtype, self.products[-1].dtype)
            self.calls.append(Call(place, nn.functional.linear, takes, (output.dtype,)))


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


def _sizes(func: Any, args: tuple[Any, ...]) -> Iterator[int]:
    """Yield the sizes that tensor cores want aligned: of a product, or a convolution's channels."""
    name = func.overloadpacket.__name__
    if name in _CONVOLUTIONS:
        yield from (args[0].shape[1], args[1].shape[0])
    elif name in ("mm", "bmm", "addmm", "baddbmm", "_scaled_mm"):
        first, second = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
        yield from (first.shape[-2], first.shape[-1], second.shape[-1])
