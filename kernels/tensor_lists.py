"""Lists of dense tensors that query sizes and dtypes once, and where the tensors are at each step.

A step goes through hundreds of tensors, and a GPU finishes it in the time that the host needs for a few
queries of each. So the first function that looks at a list makes a `TensorList` of it, and later ones
(the check of gradients, the plan of a launch, the step) read what it has stored.
"""

from __future__ import annotations

import dataclasses
import functools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp.kernels import host_lists
from amp.kernels.host_lists import has_own_values

SLICE = 2**16
"""The number of elements whose temporaries fit in a core's cache."""
SLICE_OF_DEVICE = 2**20
"""The same on other devices than the CPU, where each operation is a launch."""


@dataclasses.dataclass(frozen=True, eq=False)
class Kind:
    """The sizes, dtypes and strides of tensors, without their addresses. Made by `kind_of` alone.

    Attributes:
        sizes: the number of elements of each.
        dtypes: the dtype of each.
        orders: shape and strides of each; None where all are contiguous.
    """

    sizes: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    orders: tuple[Any, ...] | None


kind_of = functools.lru_cache(maxsize=256)(Kind)
"""Makes a `Kind`. Equal kinds are one object, so that comparing and hashing them is fast."""


class Layout(NamedTuple):
    """Where the tensors of a list are, and of which kind: see `TensorList`."""

    addresses: array[int]
    device: torch.device | None
    kind: Kind


class ReleasedMemoryError(RuntimeError):
    """A tensor whose memory has been released, as by `untyped_storage().resize_(0)`."""


class TensorList(list[Tensor]):
    """Dense tensors, and their addresses, device and kind when the list was first asked.

    Tensors can move: by `.data = ...`, `set_`, a resized storage. Call `now` on a list that was kept
    before its tensors go to a kernel again.

    Args:
        tensors: dense tensors; see `dense`.
        like: a list whose tensors are on the same devices.
        dtype: the dtype of all tensors; they then have the sizes and orders of `like`.
        before: where tensors in these places were. If all were contiguous, and still are what and where
            they were, less is to be asked.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        like: TensorList | None = None,
        dtype: torch.dtype | None = None,
        before: Layout | None = None,
    ) -> None:
        super().__init__(tensors)
        self._like = like
        self._layout: Layout | None = None
        if like is not None:
            self.device = like.device
            if dtype is not None:
                self.kind = kind_of(like.kind.sizes, (dtype,) * len(tensors), like.kind.orders)
        if before is not None and before.kind.orders is None:
            lists, kind = host_lists.lists, before.kind
            is_there = lists.are_at(self, before.addresses)
            if is_there and lists.are_of_kind(self, kind.sizes, kind.dtypes):
                self.addresses, self.device, self.kind = self._layout = before
                self._have_memory = True

    def at(self, indices: Sequence[int]) -> TensorList:
        """Return some of the tensors, without querying them again."""

        def pick(values: Sequence[Any]) -> tuple[Any, ...]:
            return tuple([values[i] for i in indices])

        some, kind = TensorList(pick(self)), self.kind
        some.addresses, some.device = array("q", pick(self.addresses)), self.device
        some._have_memory = self._have_memory
        orders = None if kind.orders is None else pick(kind.orders)
        some.kind = kind_of(pick(kind.sizes), pick(kind.dtypes), orders)
        return some

    def now(self) -> TensorList:
        """Return a list with current addresses: this one, if no tensor has moved."""
        return self if host_lists.lists.are_at(self, self.addresses) else TensorList(self)

    @property
    def layout(self) -> Layout | None:
        """What plans of kernels depend on, which holds no tensor; None if one has no memory."""
        if self._layout is None and self.has_memory:
            self._layout = Layout(self.addresses, self.device, self.kind)
        return self._layout

    @cached_property
    def addresses(self) -> array[int]:
        """The address of each tensor's elements, which no two devices share; 0 without memory."""
        self._have_memory = host_lists.lists.have_memory(self)  # at the same moment
        return host_lists.lists.addresses(self)  # type: ignore[no-any-return]

    @property
    def has_memory(self) -> bool:
        """Whether each tensor with elements has memory for them."""
        _ = self.addresses
        return self._have_memory or not any(map(has_no_memory, self))

    def check_memory(self) -> None:
        """Raise ReleasedMemoryError if a tensor with elements has no memory."""
        if not self.has_memory:
            shapes = [str(tuple(tensor.shape)) for tensor in self if has_no_memory(tensor)]
            raise ReleasedMemoryError(
                f"a tensor of shape {shapes[0]} has no memory: it was released, as by "
                "untyped_storage().resize_(0). Restore it first"
            )

    @cached_property
    def device(self) -> torch.device | None:
        """The device of all of them; None if there are several."""
        first = self[:1]
        is_one = first and host_lists.lists.are_together(self, first * len(self))
        return first[0].device if is_one else None

    @cached_property
    def kind(self) -> Kind:
        """The sizes, dtypes and strides of the tensors.

        Raises:
            RuntimeError: a tensor is sparse.
        """
        _ = self.addresses  # query both at the same moment
        sizes, dtypes, are_contiguous = host_lists.lists.kind(self)
        shapes = () if are_contiguous else tuple([(each.shape, each.stride()) for each in self])
        orders = shapes or None
        like = None if self._like is None else self._like.kind
        self._like = None  # it may hold parameters, which a list of gradients must not
        if like is not None and (like.sizes, like.dtypes, like.orders) == (sizes, dtypes, orders):
            return like  # `kind_of` would have to hash them to find it
        return kind_of(sizes, dtypes, orders)


def has_no_memory(tensor: Tensor) -> bool:
    """Whether the memory of a dense tensor with elements has been released."""
    is_elsewhere = tensor.is_meta or not has_own_values(type(tensor))
    return not is_elsewhere and not tensor.data_ptr() and tensor.numel() > 0


def are_plain(tensors: Iterable[Tensor]) -> bool:
    """Whether all tensors have their own values."""
    return all(map(has_own_values, set(map(type, tensors))))


def dense(tensors: Sequence[Tensor]) -> TensorList:
    """Return dense tensors on the same memory: a sparse one's values, a DTensor's local shard."""
    if isinstance(tensors, TensorList):
        return tensors
    if are_plain(tensors) and not any(tensor.is_sparse for tensor in tensors):
        return TensorList(tensors)
    return TensorList([t._values() if t.is_sparse else local(t) for t in tensors])


def local(tensor: Tensor) -> Tensor:
    """Return the shard of a DTensor that this rank holds, on the same memory; any other tensor itself.

    `DTensor.to_local` would be differentiable. If the values are still on their way from other ranks,
    this waits for them.
    """
    values: Any = getattr(tensor, "_local_tensor", tensor)
    if type(values) is not Tensor and hasattr(values, "wait"):
        return values.wait()  # type: ignore[no-any-return]
    return values  # type: ignore[no-any-return]


def local_shards(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return what `local` returns for each tensor."""
    found: list[Tensor] | None = host_lists.lists.shards(list(tensors))
    return list(map(local, tensors)) if found is None else found


def slices(*tensors: Tensor) -> Iterator[Sequence[Tensor]]:
    """Yield slices of tensors of one shape, on the same memory, whatever their strides.

    What is computed slice by slice needs no temporaries as large as the tensors.
    """
    first = tensors[0]
    size, limit = first.numel(), SLICE if first.device.type == "cpu" else SLICE_OF_DEVICE
    if size <= limit:
        yield tensors
        return
    dim = next(dim for dim, length in enumerate(first.shape) if length > 1)
    length = max(1, limit * first.shape[dim] // size)
    for parts in zip(*[tensor.split(length, dim) for tensor in tensors], strict=True):
        yield from slices(*parts)
