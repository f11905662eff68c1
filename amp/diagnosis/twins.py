"""Twins: for each tensor, what it would hold if nothing had been rounded since the watch began.

A twin is memory in a wider format beside the memory of a tensor, with as many elements. So a view of
the tensor has the same view of the twin, and what is written through one view is seen through the
others. Memory that was there before the watch is widened when it is first read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

_WeakReference: Any = StorageWeakRef
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_FLOATS |= {torch.float8_e4m3fn, torch.float8_e5m2}
_OPAQUE = {"_amp_update_scale_", "set_", "resize_", "_local_scalar_dense", "lift_fresh"}
_WITH_INDICES = {"topk", "sort", "max", "min", "median", "nanmedian", "kthvalue", "mode"}
"""Ops that return values along a dimension, and their indices."""


def is_float(x: Any) -> bool:
    """Whether something is a dense floating tensor with values."""
    if not isinstance(x, Tensor) or is_functorch_wrapped_tensor(x):
        return False
    if x.layout is not torch.strided or x.is_meta:
        return False
    return x.is_floating_point() and x.numel() > 0


def floats_in(value: Any) -> list[Tensor]:
    """Return the dense floating tensors with values, in nested arguments or results."""
    return [x for x in tree_flatten(value)[0] if is_float(x)]


def largest(x: Tensor) -> float:
    """Return the largest magnitude; inf or NaN if there is one. The host waits for the device."""
    x = x.float() if x.dtype.itemsize == 1 else x
    return float(torch.linalg.vector_norm(x.detach(), math.inf).item())


def is_finite(x: Tensor) -> bool:
    """Whether a tensor has no inf or NaN. The host waits for the device."""
    return math.isfinite(largest(x))


def difference(real: Tensor, exact: Tensor) -> float:
    """Return how far a tensor is from its twin, relative to the norm of what is finite in the twin."""
    wide, counts = real.detach().to(exact.dtype), exact.isfinite()
    off = torch.where((wide == exact) | ~counts, 0.0, wide - exact)
    size = float(torch.linalg.vector_norm(torch.where(counts, exact, 0.0)))
    distance = float(torch.linalg.vector_norm(off))
    return distance / size if size else float(distance > 0)


def identity_of(x: Tensor) -> int:
    """Return an identifier of a tensor's memory, valid as long as the memory lives."""
    return int(own_part(x).untyped_storage()._cdata)


def own_part(x: Any) -> Tensor:
    """Return what a rank holds of a tensor: all of it, unless it is a DTensor."""
    part: Tensor = getattr(x, "_local_tensor", x)
    return part


class Twins:
    """The twins of all memory that was read or written.

    Args:
        dtype: their dtype.
    """

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.dtype = dtype
        self._flat: dict[int, tuple[Any, Tensor]] = {}  # with a weak reference to the memory

    def of(self, x: Tensor) -> Tensor:
        """Return the twin of a tensor, a view of the twin of its memory."""
        return _as(x, self._of_memory(x))

    def put(self, x: Tensor, exact: Tensor) -> None:
        """Set the twin of a tensor."""
        _as(x, self._of_memory(x)).copy_(exact)

    def renew(self, x: Tensor) -> None:
        """Give a tensor's memory a copy of its twin, since views of the old one are kept."""
        reference, flat = self._flat.get(identity_of(x), (None, None))
        if reference is not None and flat is not None:
            self._flat[identity_of(x)] = reference, flat.clone()

    def forget(self, x: Tensor) -> None:
        """Take a tensor's values for exact when it is read again."""
        self._flat.pop(identity_of(x), None)

    def knows(self, x: Tensor) -> bool:
        """Whether a tensor's memory has a twin."""
        known = self._flat.get(identity_of(x))
        return known is not None and not known[0].expired()

    def _of_memory(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        length = storage.nbytes() // x.element_size()
        reference, flat = self._flat.get(storage._cdata, (None, None))
        if reference is None or flat is None or reference.expired() or flat.numel() != length:
            everything = x.detach().as_strided((length,), (1,), 0)
            flat = everything.to(self.dtype, copy=True)
            reference = _WeakReference(storage)
            self._flat[storage._cdata] = reference, flat
            if len(self._flat) % 256 == 0:
                self._flat = {key: one for key, one in self._flat.items() if not one[0].expired()}
        return flat


def _as(x: Tensor, flat: Tensor) -> Tensor:
    return flat.as_strided(x.size(), x.stride(), x.storage_offset())


def has_twin(func: Any) -> bool:
    """Whether an op can run on twins: it is torch's own, and draws no random numbers."""
    is_seeded = torch.Tag.nondeterministic_seeded in func.tags
    return func.namespace == "aten" and not is_seeded and func.overloadpacket.__name__ not in _OPAQUE


def run_wide(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    result: Any = None,
    dtype: Any = torch.float64,
) -> Any:
    """Run an op of aten on wide tensors, with its dtype arguments widened, and return its result.

    Where the run has chosen indices, as in a maximum, the result has the values at these.

    Raises:
        Exception: the op does not compute in this dtype.
    """
    name = func.overloadpacket.__name__
    if name in _WITH_INDICES and isinstance(result, (tuple, list)) and len(result) == 2:
        at = 2 if name in ("topk", "kthvalue") else 1
        dim = kwargs.get("dim", args[at] if len(args) > at else -1)
        if type(dim) is int and result[1].dim() == args[0].dim():
            return [args[0].gather(dim, result[1]), result[1]]
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        torch._foreach_mul_(list(args[0]), args[2].item())
        return None
    leaves, spec = tree_flatten((tuple(args), kwargs))
    leaves = [dtype if isinstance(x, torch.dtype) and x in _FLOATS else x for x in leaves]
    args, kwargs = tree_unflatten(leaves, spec)
    if name in ("_softmax", "_log_softmax"):
        args = (*args[:2], False)  # the third one asks for a result wider than the input
    return func(*args, **kwargs)


def largest_from(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> float | None:
    """Run an op in FP64 on its own arguments, and return the largest magnitude of its results.

    Returns:
        The magnitude; inf or NaN if the result is not finite in FP64 either. None for an op that cannot
        be run again.
    """
    if not has_twin(func):
        return None
    args, kwargs = tree_map(lambda x: x.detach().double() if is_float(x) else x, (tuple(args), kwargs))
    try:
        result = run_wide(func, args, kwargs)
    except (RuntimeError, TypeError, NotImplementedError):
        return None
    magnitudes = [largest(x) for x in floats_in(args[:1] if result is None else result)]
    return max(magnitudes, key=lambda x: (math.isnan(x), x), default=None)
