"""Deferred gradients: in 16 bits and scaled, as backward left them, until something reads them.

An optimizer that takes scaled gradients steps from them directly, and the FP32 gradients are never
made. In `.grad` stands a `DeferredGradient` meanwhile: a float32 tensor for whoever uses it, which is
unscaled when an operation first needs its values.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_map_only

from amp.casting.regions import ThreadState
from amp.distributed import is_sharded, shard_like
from amp.errors import AmpTypeError
from amp.kernels.interrupts import outside_inference_mode, without_grad
from amp.kernels.tensor_lists import TensorList, are_same, local
from amp.lazy import kernels
from amp.masters.agreement import Pairs
from amp.masters.grads import grads_of, store_grads
from amp.torch_versions import HAS_GRAD_DTYPE
from amp.training import unscaling
from amp.training.group_contents import NewGradients

if TYPE_CHECKING:
    from amp.kernels.l2norm import Norms
    from amp.kernels.launch_plans import BadSteps

_INTERNALS: Any = torch._C  # whose private functions have no types


class Unscaling:
    """Scaled gradients, and the unscaled ones from the first use on.

    Args:
        grads: the gradients, dense.
        inv_scale: float32 `[1]`, what to multiply them by; None is 1.
    """

    def __init__(self, grads: TensorList, inv_scale: Tensor | None) -> None:
        self._grads, self._inv_scale = grads, inv_scale

    @functools.cached_property
    def values(self) -> Sequence[Tensor]:
        """The unscaled gradients in memory of their own, float32. No host sync.

        From the first use on they are the gradients, and may be changed in place.
        """
        return ThreadState().around(self._unscaled)

    @without_grad
    def _unscaled(self) -> Sequence[Tensor]:
        with outside_inference_mode():
            return unscaling.unscaled(self._grads.now(), self._inv_scale)

    @property
    def is_done(self) -> bool:
        """Whether something has used the unscaled gradients."""
        return "values" in vars(self)


@dataclass(frozen=True, eq=False)
class Deferred:
    """The gradients of masters, kept for the step.

    Attributes:
        of: the pairs that have a gradient.
        grads: the gradients, dense: as backward left them, or float32 sums.
        inv_scale: float32 `[1]`, what to multiply them by; None is 1.
        norms: the norms of the unscaled gradients, if the check has computed them.
    """

    of: Pairs
    grads: TensorList
    inv_scale: Tensor | None = None
    norms: Norms | None = None

    def now(self) -> Deferred:
        """Return the same with the current address of each tensor."""
        return replace(self, of=self.of.now(), grads=self.grads.now())

    def checked(
        self, found_inf: Tensor | None, max_norm: float | None, bad_steps: BadSteps | None
    ) -> Deferred:
        """Check the gradients, and find their norms if they are to be clipped. No host sync."""
        if found_inf is None:
            return self
        inv_scale = torch.ones_like(found_inf) if self.inv_scale is None else self.inv_scale
        if max_norm is None:
            kernels.unscale.check(self.grads, inv_scale, found_inf, bad_steps=bad_steps)
            return self
        clipped = {"found_inf": found_inf, "max_norm": max_norm, "bad_steps": bad_steps}
        return replace(self, norms=kernels.l2norm.l2norm(self.grads, inv_scale, **clipped))

    def plus(self, later: Deferred, found_inf: Tensor | None, bad_steps: BadSteps | None) -> Deferred:
        """Check the gradients of a later block, and return the sums with them. No host sync."""
        earlier = self.grads.now(), self.inv_scale
        grads = unscaling.sums(later.grads, later.inv_scale, *earlier, found_inf, bad_steps)
        return Deferred(later.of, grads)

    @property
    def newest(self) -> Sequence[Tensor]:
        """The unscaled gradients, if other code has used and maybe changed them; else `grads`."""
        return self.unscaling.values if self.unscaling.is_done else self.grads

    def in_own_memory(self) -> Deferred:
        """Return the same gradients in memory of their own. No host sync."""
        return replace(self, grads=TensorList([grad.clone() for grad in self.grads]))

    @functools.cached_property
    def unscaling(self) -> Unscaling:
        """The unscaled gradients, which are made when something uses them."""
        return Unscaling(self.grads, self.inv_scale)


class DeferredGradient(Tensor):
    """A gradient that is unscaled when an operation first uses its values; float32.

    It refers to no parameter, because Python's garbage collector does not see that a parameter refers
    to its gradient.

    Args:
        like: a tensor with its shape, strides and device.
        of: one object for all gradients of an optimizer, whose `unscaling` has their values.
        index: which of them it is.
    """

    __torch_function__ = _INTERNALS._disabled_torch_function_impl  # operations come to the one below

    def __new__(cls, like: Tensor, of: _Shown, index: int) -> DeferredGradient:
        """Make a tensor without memory."""
        made: Any = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=torch.float32, device=like.device
        )
        _INTERNALS._set_throw_on_mutable_data_ptr(made)  # for code in C++ that asks for its memory
        return made  # type: ignore[no-any-return]

    def __init__(self, like: Tensor, of: _Shown, index: int) -> None:
        self._of, self._index = of, index

    @property
    def unscaled(self) -> Tensor:
        """The unscaled gradient, an ordinary tensor; empty once it was dropped. No host sync."""
        unscaling = self._of.unscaling  # a memory profiler finds dropped ones among all objects
        return torch.empty(0) if unscaling is None else unscaling.values[self._index]

    @classmethod
    @_disable_dynamo  # which would trace what code that it has compiled calls
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call an operation with the values of such gradients."""
        args, kwargs = tree_map_only(DeferredGradient, lambda each: each.unscaled, (args, kwargs or {}))
        return function(*args, **kwargs)


def _of_values(name: str) -> Callable[..., Any]:
    """Return a method that calls the method of the values."""

    def method(self: DeferredGradient, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.unscaled, name)(*args, **kwargs)

    return method


def _set_data(grad: DeferredGradient, values: Tensor) -> None:
    grad.unscaled.data = values


DeferredGradient.data = property(  # type: ignore[assignment]  # pyright: ignore
    lambda grad: grad.unscaled.data, _set_data
)

for _name in (  # those that are no operations
    *("data_ptr", "untyped_storage", "storage", "share_memory_", "numpy", "tolist", "__array__"),
    *("__deepcopy__", "__reduce_ex__", "__dlpack__", "__dlpack_device__"),
):
    setattr(DeferredGradient, _name, _of_values(_name))


class _Shown:
    """What the deferred gradients of an optimizer have in common."""

    def __init__(self, unscaling: Unscaling | None) -> None:
        self.unscaling = unscaling


class ShownGradients:
    """The tensors that stand in `.grad` for deferred gradients.

    They are used again by the next block, because making them would take as long as a step, unless
    other code has kept one, which must then stay the gradient that it is.

    Args:
        deferred: the gradients.

    Attributes:
        deferred: the gradients that are shown.
        grads: for each a `DeferredGradient`, or a DTensor of one.
    """

    def __init__(self, deferred: Deferred) -> None:
        self.deferred, self._shown = deferred, _Shown(deferred.unscaling)
        pairs = enumerate(zip(deferred.grads, deferred.of.masters, strict=True))
        self.grads = [
            _sharded(DeferredGradient(grad, self._shown, i), master) for i, (grad, master) in pairs
        ]
        self._references = self._count_references()
        self._is_free = False

    def of(self, deferred: Deferred) -> ShownGradients:
        """Return what shows these gradients: this object, if it may be used again."""
        old, new = self.deferred.grads.kind, deferred.grads.kind
        is_alike = self.deferred.of is deferred.of and (old.sizes, old.orders) == (
            new.sizes,
            new.orders,
        )
        if not is_alike or not (self._is_free or self._count_references() == self._references):
            return ShownGradients(deferred)
        self._is_free = False
        self.deferred, self._shown.unscaling = deferred, deferred.unscaling
        return self

    def release(self) -> bool:
        """Free the gradients, unless other code has kept one; return whether they are freed."""
        self._is_free = self._count_references() == self._references
        if self._is_free:
            self.deferred = replace(self.deferred, grads=self.deferred.grads.with_tensors(()))
            self._shown.unscaling = None
        return self._is_free

    def _count_references(self) -> list[list[int]]:
        inner = self.grads if self.deferred.of.are_plain else list(map(local, self.grads))
        count: Any = Tensor._use_count  # type: ignore[attr-defined]  # references in C++
        return [
            list(map(each, tensors))
            for tensors in (self.grads, inner)
            for each in (sys.getrefcount, count)
        ]


def _sharded(grad: DeferredGradient, master: Tensor) -> Tensor:
    """Return a deferred gradient as a DTensor, if the master is one."""
    if not is_sharded(master):
        return grad
    from torch.distributed.tensor import DTensor

    return DTensor(grad, master._spec, requires_grad=False)  # type: ignore[attr-defined, no-untyped-call]


class Deferral:
    """The deferred gradients of one optimizer.

    Args:
        optimizer: which steps from them.
        is_possible: whether it takes scaled gradients.

    Attributes:
        is_possible: as it was passed.
        deferred: the gradients that are kept for the step, or None.
    """

    def __init__(self, optimizer: Any, is_possible: bool) -> None:
        self._optimizer, self.is_possible = optimizer, is_possible
        self._shown: ShownGradients | None = None
        self.deferred: Deferred | None = None

    def takes(self, new: NewGradients, pairs: Pairs) -> bool:
        """Whether the gradients of a block may stay as they are until the step, if that is possible."""
        if not new.are_dense or new.have_graphs:
            return False
        if any([len(pair.users) > 1 for pair in pairs.pairs]):  # noqa: C419 (is faster)
            return False
        if self.deferred is None:
            return not pairs.have_grads()
        is_sum = not new.grads or self.deferred.of is new.of_masters
        return is_sum and not self.deferred.unscaling.is_done

    def defer(
        self,
        new: NewGradients,
        inv_scale: Tensor | None,
        found_inf: Tensor | None,
        bad_steps: BadSteps | None,
    ) -> None:
        """Check the gradients of a block, add those of earlier ones, and keep all for the step."""
        if not new.grads:
            return
        deferred = Deferred(new.of_masters, new.grads, inv_scale)
        if self.deferred is not None:
            deferred = self.deferred.plus(deferred, found_inf, bad_steps)
            store_grads(deferred.of.masters)  # what is shown may be used again if nothing refers to it
            for pair in deferred.of.pairs:
                pair.grad = None
        else:
            # Norms of shards are those of one rank; the step combines all ranks.
            is_whole = deferred.of.are_plain
            max_norm = getattr(self._optimizer, "max_grad_norm", None) if is_whole else None
            deferred = deferred.checked(found_inf, max_norm, bad_steps)
            # DDP's gradients are views of a buffer, which any backward through it overwrites.
            if any(map(Tensor._is_view, deferred.grads)):
                deferred = deferred.in_own_memory()
        if not HAS_GRAD_DTYPE:
            store_grads(deferred.of.models)
        self._shown = ShownGradients(deferred) if self._shown is None else self._shown.of(deferred)
        store_grads(deferred.of.masters, self._shown.grads)
        self.deferred = deferred

    def is_complete(self, pairs: Pairs) -> bool:
        """Whether no other code has given any of these pairs another gradient, or none."""
        if self.deferred is None or self._shown is None:
            return False
        known = [pair.grad for pair in self.deferred.of.pairs]
        count = sum([pair.grad is not None for pair in pairs.pairs])
        return count == len(known) and are_same(known, self._shown.grads)

    def unscale(self, pairs: Pairs) -> None:
        """Put unscaled gradients in the place of deferred ones. No host sync."""
        if self.deferred is None or self._shown is None:
            return
        shown, of = self._shown.grads, self.deferred.of
        place_of = {id(grad): i for i, grad in enumerate(shown)}
        there = grads_of((*pairs.masters, *pairs.models))
        if any(id(grad) in place_of for grad in there):
            unscaled = list(map(shard_like, self.deferred.unscaling.values, of.masters))
            for tensor, grad in zip((*pairs.masters, *pairs.models), there, strict=True):
                if (i := place_of.get(id(grad))) is not None:
                    tensor.grad = unscaled[i]
            for pair in pairs.pairs:
                if (i := place_of.get(id(pair.grad))) is not None:
                    pair.grad = unscaled[i]
            self.deferred = None
        else:
            del shown, of
            self.forget()

    def for_step(self, pairs: Pairs) -> Deferred:
        """Return the gradients for an optimizer that unscales them itself.

        Raises:
            AmpTypeError: a gradient is sparse.
        """
        if self.deferred is not None:
            if not self.deferred.unscaling.is_done:
                return self.deferred
            self.unscale(pairs)
        grads = grads_of(pairs.masters)
        of = pairs.only([grad is not None for grad in grads])
        there = [local(grad) for grad in grads if grad is not None]
        for master, grad in zip(of.masters, there, strict=True):
            if grad.layout is not torch.strided:
                raise AmpTypeError(
                    f"the gradient of a parameter of shape {tuple(master.shape)} is sparse "
                    f"({grad.layout}); {type(self._optimizer).__name__} takes dense ones. Leave out "
                    "sparse=True, or give the parameter to another optimizer"
                )
        return Deferred(of, TensorList(there))

    def forget(self, for_ever: bool = False) -> None:
        """Forget the gradients, and free those that nothing refers to."""
        self.deferred = None
        if self._shown is not None and (not self._shown.release() or for_ever):
            self._shown = None
