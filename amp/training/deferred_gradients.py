"""Deferred gradients: kept for the step as backward left them, or as FP32 sums of several blocks.

An optimizer that takes scaled gradients steps from them directly, and their unscaled values are never
made. Until the step `.grad` holds a `DeferredGradient`: a float32 tensor, which is unscaled when an
operation first needs its values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_map_only

from amp.casting.regions import ThreadState
from amp.distributed import shard_like
from amp.errors import AmpTypeError
from amp.kernels import host_lists
from amp.kernels.host_lists import grads_of, have_grads, store_grads
from amp.kernels.interrupts import outside_inference_mode, without_grad
from amp.kernels.tensor_lists import TensorList, local
from amp.lazy import kernels
from amp.masters.agreement import Pairs
from amp.torch_versions import HAS_GRAD_DTYPE
from amp.training import unscaling
from amp.training.unscaling import NewGradients

if TYPE_CHECKING:
    from amp.kernels.l2norm import Norms

_NONE = TensorList([])
_INTERNALS: Any = torch._C  # whose private functions have no types


class Deferred(NamedTuple):
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


class LazyValues:
    """Scaled gradients, and the unscaled ones from the first use on.

    Attributes:
        made: the unscaled ones, once something has used them, and maybe changed them; until then none.
    """

    def __init__(self) -> None:
        self.begin(_NONE)

    def begin(self, grads: TensorList, inv_scale: Tensor | None = None) -> None:
        """Go on with other gradients: dense ones, to be multiplied by float32 `[1]`; None is 1."""
        self._grads, self._inv_scale = grads, inv_scale
        self.made: Sequence[Tensor] = ()

    def make(self) -> Sequence[Tensor]:
        """Return the unscaled gradients, float32, in new memory. No host sync.

        From the first call on they are the gradients, and may be changed in place.
        """
        if self._grads and not self.made:
            ThreadState().around(self._make)
        return self.made

    @without_grad
    def _make(self) -> None:
        with outside_inference_mode():
            self.made = unscaling.unscaled(self._grads.now(), self._inv_scale)


class DeferredGradient(Tensor):
    """A gradient that is unscaled when an operation first uses its values; float32.

    It refers to no parameter, because Python's garbage collector does not see that a parameter refers
    to its gradient.

    Args:
        like: a tensor with its shape, strides and device.
        of: one object for all gradients of an optimizer, which has their values.
        index: which of them it is.
    """

    __torch_function__ = _INTERNALS._disabled_torch_function_impl  # operations come to the one below

    def __new__(cls, like: Tensor, of: LazyValues, index: int) -> DeferredGradient:
        """Make a tensor without memory."""
        made: Any = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=torch.float32, device=like.device
        )
        _INTERNALS._set_throw_on_mutable_data_ptr(made)  # for code in C++ that asks for its memory
        return made  # type: ignore[no-any-return]

    def __init__(self, like: Tensor, of: LazyValues, index: int) -> None:
        self._of, self._index = of, index

    @property
    def unscaled(self) -> Tensor:
        """The unscaled gradient, an ordinary tensor; empty once it was dropped. No host sync."""
        values = self._of.make()  # a memory profiler finds dropped ones among all objects
        return values[self._index] if values else torch.empty(0)

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


class Deferral:
    """The deferred gradients of one optimizer, and the tensors that stand for them in `.grad`.

    The tensors are used again by the next block, because making them would take as long as a step. If a
    script has kept one, new ones are made, because the kept one must not change.

    Args:
        optimizer: which steps from them.

    Attributes:
        deferred: the gradients that are kept for the step, or None.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.deferred: Deferred | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._values, self._shown = LazyValues(), list[Tensor]()
        """For each gradient a `DeferredGradient`, or a DTensor of one."""
        self._shown_for: tuple[Any, ...] = ()
        """The pairs, and the sizes and orders of the gradients, that they were made for."""
        self._references = self._count_references()

    def takes(self, new: NewGradients, pairs: Pairs) -> bool:
        """Whether the gradients of a block may stay as they are until the step.

        They may not if one is sparse, keeps its values elsewhere or has a graph, if optimizers share a
        master, if masters have other gradients, or deferred ones that were used or are of other pairs.
        """
        if not new.of_masters.are_dense or new.have_graphs:
            return False
        if max(map(len, host_lists.lists.read_slot(pairs.pairs, "users")), default=0) > 1:
            return False
        if self.deferred is None:
            return not have_grads(pairs.masters)
        fits = not new.of_masters.grads or self.deferred.of is new.pairs
        return fits and not self._values.made

    def defer(self, new: NewGradients, inv_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Check the gradients of a block, add those of earlier ones, and keep all for the step.

        Sums are unscaled, and the check is of them. If gradients are to be clipped, it finds their
        norms. No host sync.

        Args:
            new: the gradients, which `takes` has taken.
            inv_scale: float32 `[1]`, what to multiply them by; None is 1.
            found_inf: float32 `[1]`, set to 1 on overflow; None checks nothing.
        """
        of, norms = new.pairs, None
        _, grads, _, bad_steps = new.of_masters
        if not grads:
            return
        if (earlier := self.deferred) is not None:
            a, b = [1.0 if factor is None else factor for factor in (inv_scale, earlier.inv_scale)]
            made = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
            sums = TensorList(made, like=grads, dtype=torch.float32)
            kernels.axpby.axpby(a, grads, b, earlier.grads.now(), sums, found_inf, bad_steps=bad_steps)
            grads, inv_scale = sums, None
            store_grads(of.masters)  # what is shown may be used again if nothing refers to it
            of.forget_grads()
            self.forget()
        else:
            # Norms of shards are those of one rank; the step combines all ranks.
            max_norm = getattr(self._optimizer, "max_grad_norm", None) if of.are_plain else None
            if found_inf is not None:
                factor = 1.0 if inv_scale is None else inv_scale
                found: Any = {"found_inf": found_inf, "bad_steps": bad_steps}
                if max_norm is None:
                    kernels.unscale.check(grads, factor, **found)
                else:
                    norms = kernels.l2norm.l2norm(grads, inv_scale, max_norm=max_norm, **found)
            # DDP's gradients are views of a buffer, which any backward through it overwrites.
            if not host_lists.lists.are_whole(grads):
                grads = TensorList([grad.clone() for grad in grads])
        if not HAS_GRAD_DTYPE:
            store_grads(of.models)
        self._show(Deferred(of, grads, inv_scale, norms))

    def _show(self, deferred: Deferred) -> None:
        """Put tensors that stand for gradients into the `.grad` of their masters."""
        of, grads = deferred.of, deferred.grads
        shown_for = of, grads.kind.sizes, grads.kind.orders
        if self._shown_for != shown_for:
            self._begin_anew()
            self._shown_for = shown_for
            self._shown = [
                shard_like(DeferredGradient(grad, self._values, i), master)
                for i, (grad, master) in enumerate(zip(grads, of.masters, strict=True))
            ]
            self._references = self._count_references()
        self._values.begin(grads, deferred.inv_scale)
        store_grads(of.masters, self._shown)
        self.deferred = deferred

    def shown_by(self, pairs: Pairs) -> list[Tensor] | None:
        """Return the gradients of masters, if they are what stands for deferred ones; else None."""
        is_of_all = self.deferred is not None and self.deferred.of is pairs
        if is_of_all and len(self._shown) == len(pairs.masters):  # not so after an interrupt
            return self._shown if host_lists.lists.have_grads(pairs.masters, self._shown) else None
        return None

    def _count_references(self) -> tuple[list[int], list[int]]:
        """Return how often Python and C++ refer to each tensor that is shown, and to its shard."""
        tensors, count = self._shown, torch.Tensor._use_count  # type: ignore[attr-defined]
        if tensors and not self._shown_for[0].are_plain:
            tensors = [*tensors, *[getattr(tensor, "_local_tensor", tensor) for tensor in tensors]]
        return list(map(sys.getrefcount, tensors)), list(map(count, tensors))

    @property
    def kept(self) -> Deferred | None:
        """The deferred gradients, with the unscaled ones if a script may have changed these."""
        if self.deferred is None or not self._values.made:
            return self.deferred
        return Deferred(self.deferred.of, TensorList(self._values.made))

    def unscale_if_changed(self, pairs: Pairs) -> None:
        """Unscale if a script has given one of these masters another gradient, or none."""
        if self.deferred is not None:
            known = grads_of(self.deferred.of.masters)
            count = sum([grad is not None for grad in grads_of(pairs.masters)])
            if count != len(known) or not host_lists.lists.are_same(known, self._shown):
                self.unscale(pairs)

    def unscale(self, pairs: Pairs) -> None:
        """Replace deferred gradients by unscaled ones. No host sync."""
        if self.deferred is None:
            return
        both, shown = (*pairs.masters, *pairs.models), list(map(id, self._shown))
        if not set(shown).isdisjoint(map(id, grads_of(both))):
            values = map(shard_like, self._values.make(), self.deferred.of.masters)
            unscaled = dict(zip(shown, values, strict=True))
            for holder in (*both, *pairs.pairs):
                if (grad := unscaled.get(id(holder.grad))) is not None:
                    holder.grad = grad
        self.forget()

    def for_step(self, pairs: Pairs) -> Deferred:
        """Return the gradients for an optimizer that unscales them itself, with current addresses.

        Raises:
            AmpTypeError: a gradient is sparse.
        """
        kept = self.deferred
        if kept is not None and not self._values.made:
            return kept._replace(of=kept.of.now(), grads=kept.grads.now())
        self.unscale(pairs)
        of = pairs.only([grad is not None for grad in grads_of(pairs.masters)])
        grads = [local(master.grad) for master in of.masters]
        for master, grad in zip(of.masters, grads, strict=True):
            if grad.layout is not torch.strided:
                raise AmpTypeError(
                    f"the gradient of a parameter of shape {tuple(master.shape)} is sparse "
                    f"({grad.layout}); {type(self._optimizer).__name__} takes dense ones. Leave out "
                    "sparse=True, or give the parameter to another optimizer"
                )
        return Deferred(of.now(), TensorList(grads))

    def forget(self) -> None:
        """Forget the gradients, and free those that nothing refers to."""
        if self._count_references() == self._references:
            self._values.begin(_NONE)
        else:
            self._begin_anew()
        self.deferred = None  # last: while it is there, this is done again
