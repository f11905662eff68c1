"""Twins: the values of tensors if nothing had been rounded since the watch began.

Here is how an op runs on twins, and how far a tensor is from its twin; `amp.diagnosis.memories` keeps
the twins themselves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._pytree import tree_leaves, tree_map

_OPAQUE = {"_amp_update_scale_", "set_", "resize_", "_local_scalar_dense", "lift_fresh"}
_WITH_INDICES = {"topk", "sort", "max", "min", "median", "nanmedian", "kthvalue", "mode"}
"""Ops that return values along a dimension, and their indices."""
CANNOT_RUN = (RuntimeError, TypeError, NotImplementedError)
"""What `run_wide` raises for an op that does not compute in FP64."""


def is_float(x: Any) -> TypeGuard[Tensor]:
    """Whether something is a dense tensor of floating or complex numbers with values."""
    if not isinstance(x, Tensor) or is_functorch_wrapped_tensor(x) or x.is_nested or x._is_zerotensor():
        return False  # the last has no memory: the tangents of constants are zeros without any
    is_dense = x.layout is torch.strided and not x.is_meta and x.numel() > 0
    return is_dense and (x.is_floating_point() or x.is_complex())


def floats_in(value: Any) -> list[Tensor]:
    """Return the dense floating and complex tensors with values, in nested arguments or results."""
    return [x for x in tree_leaves(value) if is_float(x)]


def as_real(x: Tensor) -> Tensor:
    """Return a view of a complex tensor with its real and imaginary parts, and others as they are."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def largest(x: Tensor) -> float:
    """Return the largest magnitude; inf or NaN if there is one. The host waits for the device."""
    return float(torch.linalg.vector_norm(computable(x.detach()), math.inf).item())


def computable(x: Tensor) -> Tensor:
    """Return a tensor in a dtype that torch computes in: FP8 as FP32."""
    return x.float() if x.dtype.itemsize == 1 else x


def is_finite(x: Tensor) -> bool:
    """Whether a tensor has no inf or NaN. The host waits for the device."""
    return math.isfinite(largest(x))


def has_minus_inf_alone(x: Tensor) -> bool:
    """Whether all infs of a tensor are negative, as far as its numbers have a sign."""
    return not x.is_complex() and bool((x[x.isinf()] < 0).all())


def wrong_in(real: Tensor, exact: Tensor) -> Tensor:
    """Return which elements of a tensor are inf or NaN, and finite in its twin."""
    return ~computable(real.detach()).isfinite() & exact.isfinite()


_NOTHING = 1e-200


def difference(real: Tensor, exact: Tensor) -> float:
    """Return how far a tensor is from its twin, relative to the norm of what is finite in the twin.

    Of a twin that is 0 everything is very far, but in the same proportion.
    """
    wide, counts = real.detach().to(exact.dtype), exact.isfinite()
    off = torch.where((wide == exact) | ~counts, 0.0, wide - exact)
    size = float(torch.linalg.vector_norm(torch.where(counts, exact, 0.0)))
    distance = float(torch.linalg.vector_norm(off))
    return distance / (size or _NOTHING)


def has_twin(func: Any) -> bool:
    """Whether an op can run on twins: it is torch's own, and draws no random numbers."""
    is_seeded = torch.Tag.nondeterministic_seeded in func.tags
    return func.namespace == "aten" and not is_seeded and func.overloadpacket.__name__ not in _OPAQUE


def run_wide(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any = None) -> Any:
    """Run an op of aten on FP64 tensors, with its dtype arguments widened, and return its result.

    Where the run has chosen indices, as in a maximum, the result has the values at these.

    Raises:
        Exception: one of `CANNOT_RUN`.
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
    args, kwargs = tree_map(functools.partial(_wide, func), (tuple(args), kwargs))
    if name in ("_softmax", "_log_softmax"):
        args = (*args[:2], False)  # the third one asks for a result wider than the input
    return func(*args, **kwargs)


def _wide(func: Any, x: Any) -> Any:
    """Return what an op takes in FP64 in the place of an argument."""
    if isinstance(x, torch.dtype):
        return torch.float64 if x.is_floating_point else torch.complex128 if x.is_complex else x
    is_twin = not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex()
    # Of integers there are no twins, and the op may write to them.
    return x if is_twin or not func._schema.is_mutable else x.clone()


_NORMS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
"""Ops that update running statistics, if their sixth argument is true."""


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the floating tensors among the arguments that an op writes to."""
    if func.overloadpacket.__name__ in _NORMS and args[5]:  # whose schema does not say so
        return floats_in(args[3:5])
    given = {**dict(zip([x.name for x in func._schema.arguments], args, strict=False)), **kwargs}
    changed = [x.name for x in func._schema.arguments if x.alias_info and x.alias_info.is_write]
    return floats_in([given.get(name) for name in changed])


def fresh_in(result: Any, written: list[Tensor]) -> list[Tensor]:
    """Return the floating results of an op that are none of the tensors that it has written to."""
    return [x for x in floats_in(result) if all(x is not each for each in written)]
