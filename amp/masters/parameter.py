"""`MasterParameter`, the class of masters whose optimizer takes scaled gradients."""

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from amp.distributed import is_sharded
from amp.errors import AmpRuntimeError
from amp.kernels.grad_mode import without_grad
from amp.kernels.tensor_lists import are_plain

_GRAD: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data

store_grad: Callable[[Tensor, Tensor | None], None] = _GRAD.__set__
"""Sets `.grad`, without first moving a deferred gradient there."""


class NoHolder:
    """Holds no gradients."""

    def show(self) -> None:
        """Move deferred gradients, unscaled, to `.grad`; here there are none."""


class MasterParameter(Tensor):
    """An FP32 parameter that is a master, and whose optimizer takes scaled gradients.

    Its gradient may be deferred: it stays as backward left it, and the step unscales it. Reading
    `.grad` before that returns it unscaled, in FP32. Kernels keep the address of a master, so its
    memory never moves: values assigned to `.data` are copied into it.

    A copy or a pickle of it is an ordinary `nn.Parameter`.
    """

    holder: Any = NoHolder()
    """What may hold its deferred gradient: a `MasterGradients` of `amp.training.deferred`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        ordinary = nn.Parameter(self.detach(), self.requires_grad)
        return ordinary.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @property
    def grad(self) -> Tensor | None:
        """The unscaled gradient, float32."""
        self.holder.show()
        return stored_grad(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.holder.show()
        store_grad(self, value)

    @grad.deleter
    def grad(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.holder.show()
        store_grad(self, None)

    @property
    def data(self) -> Tensor:
        """The values, detached from autograd."""
        return _DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape:
            raise AmpRuntimeError(
                f"a master of shape {tuple(self.shape)} was assigned data of shape "
                f"{tuple(value.shape)}: it stands for a parameter of its own shape. Change the model "
                "before amp.initialize"
            )
        without_grad(self.copy_)(value)  # raises the version, unlike `.data.copy_`


class _WholeMaster(MasterParameter, nn.Parameter):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A master of a parameter that is not a DTensor."""


@functools.cache
def _class_of_shards() -> type:
    from torch.distributed.tensor import DTensor

    return type("ShardedMaster", (MasterParameter, DTensor), {"__doc__": "A master that is a DTensor."})


def make_master(memory: Tensor, requires_grad: bool, takes_scaled: bool) -> nn.Parameter:
    """Return a master with this memory, float32; `takes_scaled` is about its optimizer."""
    if takes_scaled and are_plain([memory]):
        return _WholeMaster(memory, requires_grad)
    master = nn.Parameter(memory, requires_grad)
    if takes_scaled and is_sharded(memory):
        master.__class__ = _class_of_shards()  # a DTensor has no constructor for a parameter
    return master


def stored_grad(parameter: Tensor) -> Tensor | None:
    """Return `.grad`, without first moving a deferred gradient there."""
    return _GRAD.__get__(parameter)  # type: ignore[no-any-return]


def have_grads(parameters: Iterable[Tensor]) -> bool:
    """Whether any parameter has a gradient in `.grad`, deferred ones apart."""
    return any(map(operator.is_not, map(_GRAD.__get__, parameters), itertools.repeat(None)))


def store_grads(parameters: Sequence[Tensor], grads: Sequence[Tensor | None] | None = None) -> None:
    """Do `store_grad` for each parameter. Without `grads`, set None."""
    for parameter, grad in zip(parameters, grads or [None] * len(parameters), strict=True):
        store_grad(parameter, grad)
