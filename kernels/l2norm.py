"""Norms of gradients, with the check and the clip factor that usually go with them.

    norm_i = |tensor_i * inv_scale|                   for every i, |.| the Euclidean norm
    total  = |all of them|
    clip   = min(1, max_norm / (total + 1e-6))
    found_inf = 1 if any element of a tensor, or of its product with inv_scale, is inf or NaN

Shapes: tensors of any size. Dtypes: float16, bfloat16, float32 or float64; squares and sums are FP32,
so that FP16 elements cannot overflow them. Elements beyond 1.8e19, after unscaling, overflow them: the
norm is then inf, and `found_inf` is not set. Of sparse gradients, which must be coalesced, the values
are taken; of DTensors the local shards, so that norms are those of one rank (`amp.distributed` combines
them).
Launches: two for each device and dtype, and small torch operations for the total. Memory traffic:
each tensor is read once.
References: `torch._foreach_norm`, `torch.nn.utils.clip_grad_norm_`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp.kernels.interrupts import without_grad
from amp.kernels.language import each_part, jit, launch, not_finite, report, tl, wide
from amp.kernels.launch_plans import BadSteps, Launch, flag_on, merge_flag, number_on, plan, to_device
from amp.kernels.tensor_lists import dense
from amp.kernels.unscale import check_reference

BLOCK = 16384
FINISH_BLOCK = 4096
CLIP_EPS = 1e-6


class Norms(NamedTuple):
    """The result of `l2norm`, float32, on the first tensor's device.

    Attributes:
        total: `[1]`, the norm of all tensors together.
        each: `[n]`, the norm of each.
        clip: `[1]`, what to multiply the unscaled tensors by, 1 without a `max_norm`.
    """

    total: Tensor
    each: Tensor
    clip: Tensor


@without_grad
def l2norm(
    tensors: Sequence[Tensor],
    inv_scale: Tensor | None = None,
    *,
    found_inf: Tensor | None = None,
    max_norm: float | None = None,
    backend: str | None = None,
    bad_steps: BadSteps | None = None,
) -> Norms:
    """Return the norms of `tensors * inv_scale`. The host does not wait for the device.

    Args:
        tensors: gradients, scaled or not.
        inv_scale: float32 `[1]`; None is 1.
        found_inf: float32 `[1]`, set to 1 on overflow and never cleared; None checks nothing.
        max_norm: what to clip the total norm to; None does not clip.
        backend: see `amp.kernels.backend`.
        bad_steps: where Triton's kernel records which tensors' norms are not finite.

    Raises:
        ValueError: a sparse tensor is not coalesced.
        UnsupportedTensorError: a dtype that is not listed above.
    """
    for i, tensor in enumerate(tensors):
        if tensor.is_sparse and not tensor.is_coalesced():
            raise ValueError(f"tensor {i} is sparse and not coalesced; pass tensor.coalesce()")
    values = dense(tensors)
    todo = plan(values, block=BLOCK, backend=backend)
    home = values[0].device if values else torch.device("cpu")
    each = torch.zeros(len(values), dtype=torch.float32, device=home)
    for one in todo.launches:
        is_home = one.device == home
        norms = each if is_home else torch.zeros_like(each, device=one.device)
        flag, factor = flag_on(one.device, found_inf), number_on(one.device, inv_scale)
        sums = torch.empty(len(one.chunks), dtype=torch.float32, device=one.device)
        one.run(squares_kernel, inv_scale=factor, sums=sums, found_inf=flag, BLOCK=BLOCK)
        merge_flag(found_inf, flag)
        norms_of_chunks(one, sums, norms, bad_steps)
        if not is_home:
            each += to_device(norms, home)
    for same in todo.fallback:
        norms = l2norm_reference([values[i] for i in same], inv_scale, found_inf)
        torch._foreach_copy_([each[i] for i in same], list(to_device(norms, home).unbind()))
    total = torch.linalg.vector_norm(each).reshape(1)
    return Norms(total, each, clip_factor(total, max_norm))


def clip_factor(total: Tensor, max_norm: float | None) -> Tensor:
    """Return the factor, float32 `[1]`, that brings a norm down to `max_norm`; 1 if it is below."""
    if max_norm is None:
        return torch.ones_like(total)
    return (max_norm / (total + CLIP_EPS)).clamp(max=1.0)


def norms_of_chunks(one: Launch, sums: Tensor, each: Tensor, bad_steps: BadSteps | None = None) -> None:
    """Write the norms of a launch's tensors to `each`, float32, at their indices. No host sync.

    `sums`, float32 `[chunks]`, has the sums of squares of its chunks. `bad_steps` is as in `l2norm`.
    """
    arguments: dict[str, Any] = {"rows": one.rows, "firsts": one.firsts, "sums": sums, "each": each}
    arguments |= {**BadSteps.on(one.device, bad_steps), "COLUMNS": one.rows.shape[1]}
    launch(norms_kernel, len(one.indices), one.device, **arguments, BLOCK=FINISH_BLOCK)


@jit
def _squares(pointers, i, mask, arguments):
    inv_scale, found_inf = arguments
    x = wide(tl.load(pointers[0] + i, mask=mask, other=0.0), tl.float32)
    if inv_scale is not None:
        x *= tl.load(inv_scale)
    y = x.to(tl.float32)
    total = tl.sum(y * y, axis=0)
    report((found_inf, None, None, None, None), not_finite(x), 1)
    return total


@jit
def squares_kernel(rows, chunks, inv_scale, sums, found_inf, DTYPES: tl.constexpr, BLOCK: tl.constexpr):
    total = each_part(_squares, rows, chunks, (inv_scale, found_inf), DTYPES, BLOCK)
    tl.store(sums + tl.program_id(0), total)


@jit
def norms_kernel(rows, firsts, sums, each, bad_steps, step, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Program i finishes the norm of a launch's i-th tensor."""
    program = tl.program_id(0)
    end = tl.load(firsts + program + 1)
    square = tl.zeros([BLOCK], tl.float32)
    for at in range(tl.load(firsts + program), end, BLOCK):
        i = at + tl.arange(0, BLOCK)
        square += tl.load(sums + i, mask=i < end, other=0.0)
    index = tl.load(rows + program * COLUMNS + COLUMNS - 1)
    norm = tl.sqrt_rn(tl.sum(square, axis=0))
    tl.store(each + index, norm)
    if bad_steps is not None:
        if not_finite(norm):
            tl.store(bad_steps + index, tl.load(step))


def l2norm_reference(
    tensors: Sequence[Tensor], inv_scale: Tensor | None, found_inf: Tensor | None
) -> Tensor:
    """Do `l2norm` in plain torch: the norms of tensors of one device and dtype, float32 `[n]`."""
    values = [tensor.float() if tensor.dtype is torch.float64 else tensor for tensor in tensors]
    norms = torch.stack(torch._foreach_norm(values, 2, dtype=torch.float32))
    if inv_scale is not None:
        norms *= to_device(inv_scale, norms.device)
    # On the CPU the host knows without waiting whether a check is needed.
    is_finite = norms.device.type == "cpu" and all(map(math.isfinite, norms.tolist()))
    if found_inf is not None and not is_finite:
        flag = flag_on(norms.device, found_inf)
        check_reference(tensors, inv_scale, flag)
        merge_flag(found_inf, flag)
    return norms
