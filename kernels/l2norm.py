"""Norms of gradients, with the check and the clip factor that usually go with them.

    norm_i = |tensor_i * inv_scale|                   for every i, |.| the Euclidean norm
    total  = |all of them|
    clip   = min(1, max_norm / (total + 1e-6))
    found_inf = 1 if any element of a tensor, or of its product with inv_scale, is inf or NaN

Shapes: tensors of any size. Dtypes: float16, bfloat16, float32 or float64; squares and sums are FP32,
so that FP16 elements cannot overflow them; elements beyond 1.8e19, after unscaling, do, and make the
norm inf while `found_inf` stays as it was. Sparse gradients go through their values and must be
coalesced, DTensors through their local shards, whose norms are those of one rank (`amp.distributed`
adds them up).
Launches: one for each device and dtype, and one for each device. Memory traffic: each tensor is read
once.
References: `torch._foreach_norm`, `torch.nn.utils.clip_grad_norm_`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from amp.kernels.language import each_part, jit, launch, not_finite, report, tl, wide
from amp.kernels.tables import Launch, flag_on, number_on, plan, to_device
from amp.kernels.tensor_lists import dense
from amp.kernels.unscale import check_reference

BLOCK = 16384
FINISH_BLOCK = 4096
CLIP_EPS = 1e-6


class Norms(NamedTuple):
    """What `l2norm` returns, float32, on the first tensor's device.

    Attributes:
        total: `[1]`, the norm of all tensors together.
        each: `[n]`, the norm of each.
        clip: `[1]`, what to multiply the unscaled tensors by, 1 without a `max_norm`.
    """

    total: Tensor
    each: Tensor
    clip: Tensor


@torch.no_grad()
def l2norm(
    tensors: Sequence[Tensor],
    inv_scale: Tensor | None = None,
    *,
    found_inf: Tensor | None = None,
    max_norm: float | None = None,
    backend: str | None = None,
) -> Norms:
    """Return the norms of `tensors * inv_scale`. The host does not wait for the device.

    Args:
        tensors: gradients, scaled or not.
        inv_scale: float32 `[1]`; None is 1.
        found_inf: float32 `[1]`, set to 1 on overflow and never cleared; None checks nothing.
        max_norm: what to clip the total norm to; None does not clip.
        backend: see `amp.kernels.backend`.

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
    by_device: dict[torch.device, list[Launch]] = {}
    for one in todo.launches:
        by_device.setdefault(one.device, []).append(one)
    norms = [
        _launch(device, launches, len(values), inv_scale, found_inf, max_norm)
        for device, launches in by_device.items()
    ]
    if list(by_device) == [home] and not todo.fallback:
        return norms[0]
    each = torch.zeros(len(values), dtype=torch.float32, device=home)
    for on_device in norms:
        each += to_device(on_device.each, home)
    for same in todo.fallback:
        norms_of_same = l2norm_reference([values[i] for i in same], inv_scale, found_inf)
        for i, norm in zip(same, norms_of_same.unbind(), strict=True):
            each[i].copy_(to_device(norm, home))
    total = torch.linalg.vector_norm(each).reshape(1)
    return Norms(total, each, clip_factor(total, max_norm))


def clip_factor(total: Tensor, max_norm: float | None) -> Tensor:
    """Return what brings a total norm, float32 `[1]`, down to `max_norm`; 1 where it is below."""
    if max_norm is None:
        return torch.ones_like(total)
    return (max_norm / (total + CLIP_EPS)).clamp(max=1.0)


def _launch(
    device: torch.device,
    launches: Sequence[Launch],
    n: int,
    inv_scale: Tensor | None,
    found_inf: Tensor | None,
    max_norm: float | None,
) -> Norms:
    """Return the norms of the tensors on one device, 0 for those that are elsewhere."""
    counts = [len(one.chunks) for one in launches]
    memory = torch.empty(sum(counts) + n + 2, dtype=torch.float32, device=device)
    partials, each, total, clip = memory.split([sum(counts), n, 1, 1])
    of_launch = partials.split(counts)
    if sum(len(one.indices) for one in launches) < n:
        each.zero_()
    with flag_on(device, found_inf) as flag:
        for one, sums in zip(launches, of_launch, strict=True):
            one.run(
                squares_kernel,
                inv_scale=number_on(device, inv_scale),
                sums=sums,
                found_inf=flag,
                BLOCK=BLOCK,
            )
    for one, sums in zip(launches[:-1], of_launch, strict=False):
        norms_of_chunks(one, sums, each)
    norms_of_chunks(launches[-1], of_launch[-1], each, (partials, total, clip), max_norm)
    return Norms(total, each, clip)


def norms_of_chunks(
    one: Launch,
    sums: Tensor,
    each: Tensor,
    of_all: tuple[Tensor, Tensor, Tensor] | None = None,
    max_norm: float | None = None,
) -> None:
    """Write the norms of a launch's tensors from the sums of squares of its chunks. No host sync.

    Args:
        one: the launch.
        sums: float32 `[chunks]`.
        each: float32, where the norm of each goes, at its index.
        of_all: for the norm of several launches together: the sums of squares of all their chunks, and
            where that norm and what clips it go, float32 `[1]` each.
        max_norm: what to clip it to; None does not clip.
    """
    partials, total, clip = of_all or (sums, sums, sums)
    launch(
        norms_kernel,
        len(one.indices) + (of_all is not None),
        one.device,
        rows=one.rows,
        firsts=one.firsts,
        sums=sums,
        each=each,
        partials=partials,
        n_partials=len(partials),
        max_norm=None if max_norm is None else float(max_norm),
        total=total,
        clip=clip,
        n=len(one.indices),
        COLUMNS=one.rows.shape[1],
        EPS=CLIP_EPS,
        BLOCK=FINISH_BLOCK,
    )


@jit
def _squares(pointers, i, mask, arguments):
    inv_scale, found_inf = arguments
    x = wide(tl.load(pointers[0] + i, mask=mask, other=0.0), tl.float32)
    if inv_scale is not None:
        x *= tl.load(inv_scale)
    y = x.to(tl.float32)
    total = tl.sum(y * y, axis=0)
    report(found_inf, not_finite(x))
    return total


@jit(do_not_specialize=["inv_scale", "sums", "found_inf"])
def squares_kernel(rows, chunks, inv_scale, sums, found_inf, DTYPES: tl.constexpr, BLOCK: tl.constexpr):
    total = each_part(_squares, rows, chunks, (inv_scale, found_inf), DTYPES, BLOCK)
    tl.store(sums + tl.program_id(0), total)


@jit
def _sum_of(sums, first, end, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(first, end, BLOCK):
        i = at + tl.arange(0, BLOCK)
        total += tl.load(sums + i, mask=i < end, other=0.0)
    return tl.sum(total, axis=0)


@jit(do_not_specialize=["sums", "each", "partials", "n_partials", "total", "clip", "n"])
def norms_kernel(
    rows,
    firsts,
    sums,
    each,
    partials,
    n_partials,
    max_norm,
    total,
    clip,
    n,
    COLUMNS: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program i < n finishes the norm of a launch's i-th tensor; program n, if any, the total."""
    program = tl.program_id(0)
    if program < n:
        square = _sum_of(sums, tl.load(firsts + program), tl.load(firsts + program + 1), BLOCK)
        index = tl.load(rows + program * COLUMNS + COLUMNS - 1)
        tl.store(each + index, tl.sqrt_rn(square))
    else:
        norm = tl.sqrt_rn(_sum_of(partials, 0, n_partials, BLOCK))
        tl.store(total, norm)
        if max_norm is not None:
            factor = tl.div_rn(max_norm, norm + EPS)
            tl.store(clip, tl.minimum(factor, 1.0, propagate_nan=tl.PropagateNan.ALL))
        else:
            tl.store(clip, 1.0)


def l2norm_reference(
    tensors: Sequence[Tensor], inv_scale: Tensor | None, found_inf: Tensor | None
) -> Tensor:
    """Do `l2norm` in plain torch: the norms of tensors of one device and dtype, float32 `[n]`."""
    values = [tensor.float() if tensor.dtype is torch.float64 else tensor for tensor in tensors]
    norms = torch.stack(torch._foreach_norm(values, 2, dtype=torch.float32))
    if inv_scale is not None:
        norms *= to_device(inv_scale, norms.device)
    if found_inf is not None and not _are_known_finite(norms):
        one = torch.ones(1, dtype=torch.float32, device="cpu")
        check_reference(tensors, one if inv_scale is None else inv_scale, found_inf)
    return norms


def _are_known_finite(norms: Tensor) -> bool:
    """Whether norms are finite, as far as the host knows without waiting for a device."""
    return norms.device.type == "cpu" and all(map(math.isfinite, norms.tolist()))
