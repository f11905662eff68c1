"""Unscaling gradients, and finding out whether they are finite.

    target_i = source_i * inv_scale                   for every i
    found_inf = 1 if any source or target element is inf or NaN

The check covers the products too: a scale below 1 can make an inf out of a finite gradient.

Shapes: `sources[i]` and `targets[i]` have one shape, of any size; a target may be its source.
Dtypes: float16, bfloat16, float32 or float64 on either side. Products are FP32, or FP64 where either
side is, and rounded to nearest even, once (FP64 ones to 16 bits by way of FP32). Sparse gradients go
through their values, DTensors through their local shards. Launches: one for each device and pair of
dtypes. Memory traffic: each source is read and each target written once; `check` only reads.
Reference: `torch._amp_foreach_non_finite_check_and_unscale_`, which checks before it multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp.kernels.language import (
    ALIGNMENT,
    STEP,
    any_of,
    dtype_of,
    jit,
    launch,
    locate,
    narrow,
    not_finite,
    tl,
    vector_length,
    wide,
)
from amp.kernels.tables import flag_on, plan, to_device
from amp.kernels.tensor_lists import dense, were_written

BLOCK = 8192
CHECK_BLOCK = 16384
WARPS = 8


@torch.no_grad()
def unscale(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    inv_scale: Tensor,
    found_inf: Tensor | None,
    *,
    backend: str | None = None,
) -> None:
    """Write `sources * inv_scale` to `targets`. The host does not wait for the device.

    Args:
        sources: scaled gradients.
        targets: where the unscaled ones go; may be the sources themselves.
        inv_scale: float32 `[1]`.
        found_inf: float32 `[1]`, set to 1 on overflow and never cleared; None checks nothing.
        backend: see `amp.kernels.backend`.

    Raises:
        ValueError: sources and targets do not match.
        UnsupportedTensorError: a dtype that is not listed above.
    """
    inputs = dense(sources)
    outputs = inputs if targets is sources else dense(targets)
    todo = plan(inputs, outputs, block=BLOCK, backend=backend)
    were_written(targets)
    for each in todo.launches:
        with flag_on(each.device, found_inf) as flag:
            launch(
                unscale_kernel,
                len(each.chunks),
                each.device,
                each.rows,
                each.chunks,
                to_device(inv_scale, each.device),
                flag,
                SOURCE=dtype_of(each.dtypes[0]),
                TARGET=dtype_of(each.dtypes[1]),
                BLOCK=BLOCK,
                num_warps=WARPS,
            )
    for same in todo.fallback:
        unscale_reference([inputs[i] for i in same], [outputs[i] for i in same], inv_scale, found_inf)


def check(
    sources: Sequence[Tensor],
    inv_scale: Tensor,
    found_inf: Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Set `found_inf` if `sources` or their FP32 products with `inv_scale` are not finite.

    Nothing else is written. The host does not wait for the device. Arguments and errors are those of
    `unscale`.
    """
    inputs = dense(sources)
    todo = plan(inputs, block=CHECK_BLOCK, backend=backend)
    for each in todo.launches:
        with flag_on(each.device, found_inf) as flag:
            launch(
                check_kernel,
                len(each.chunks),
                each.device,
                each.rows,
                each.chunks,
                to_device(inv_scale, each.device),
                flag,
                SOURCE=dtype_of(each.dtypes[0]),
                BLOCK=CHECK_BLOCK,
                num_warps=WARPS,
            )
    for same in todo.fallback:
        check_reference([inputs[i] for i in same], inv_scale, found_inf)


@jit
def _unscale_block(source, target, i, mask, inv_scale):
    x = tl.load(source + i, mask=mask, other=0.0)
    y = narrow(wide(x, target.dtype.element_ty) * inv_scale, target.dtype.element_ty)
    tl.store(target + i, y, mask=mask)
    return any_of(not_finite(y))


@jit(do_not_specialize=["inv_scale", "found_inf"])
def unscale_kernel(
    rows, chunks, inv_scale, found_inf, SOURCE: tl.constexpr, TARGET: tl.constexpr, BLOCK: tl.constexpr
):
    row, start, length = locate(chunks, rows, 2, BLOCK)
    source, target = tl.load(row), tl.load(row + 1)
    scale = tl.load(inv_scale)
    vectors = vector_length(source | target, length)
    i = tl.arange(0, BLOCK)
    bad = _unscale_block(
        tl.multiple_of(source.to(tl.pointer_type(SOURCE)), ALIGNMENT) + start,
        tl.multiple_of(target.to(tl.pointer_type(TARGET)), ALIGNMENT) + start,
        i,
        i < vectors,
        scale,
    )
    for first in range(vectors, length, STEP):
        j = first + tl.arange(0, STEP)
        bad |= _unscale_block(
            source.to(tl.pointer_type(SOURCE)) + start,
            target.to(tl.pointer_type(TARGET)) + start,
            j,
            j < length,
            scale,
        )
    if found_inf is not None:
        if bad != 0:
            tl.store(found_inf, 1.0)


@jit(do_not_specialize=["inv_scale", "found_inf"])
def check_kernel(rows, chunks, inv_scale, found_inf, SOURCE: tl.constexpr, BLOCK: tl.constexpr):
    row, start, length = locate(chunks, rows, 1, BLOCK)
    source = tl.load(row)
    scale = tl.load(inv_scale)
    vectors = vector_length(source, length)
    i = tl.arange(0, BLOCK)
    x = tl.load(
        tl.multiple_of(source.to(tl.pointer_type(SOURCE)), ALIGNMENT) + start + i,
        mask=i < vectors,
        other=0.0,
    )
    bad = any_of(not_finite(wide(x, SOURCE) * scale))
    for first in range(vectors, length, STEP):
        j = first + tl.arange(0, STEP)
        y = tl.load(source.to(tl.pointer_type(SOURCE)) + start + j, mask=j < length, other=0.0)
        bad |= any_of(not_finite(wide(y, SOURCE) * scale))
    if bad != 0:
        tl.store(found_inf, 1.0)


def unscale_reference(
    sources: list[Tensor], targets: list[Tensor], inv_scale: Tensor, found_inf: Tensor | None
) -> None:
    """Do `unscale` in plain torch, on tensors of one device and pair of dtypes."""
    common = torch.promote_types(sources[0].dtype, targets[0].dtype)
    products = targets
    if targets[0].dtype is not common:
        products = [source.to(common, copy=True) for source in sources]
    elif any(source is not target for source, target in zip(sources, targets, strict=True)):
        torch._foreach_copy_(targets, sources)
    scale_and_check(products, inv_scale, found_inf)
    if targets[0].dtype is not common:
        torch._foreach_copy_(targets, products)
        scale_and_check(targets, torch.ones_like(inv_scale), found_inf)


def scale_and_check(tensors: list[Tensor], factor: Tensor, found_inf: Tensor | None) -> None:
    """Multiply tensors of one device and dtype by `factor`, float32 `[1]`; check before and after."""
    device = tensors[0].device
    here = to_device(factor, device)
    if not _torch_can_check(device, tensors[0].dtype):
        for tensor in tensors:  # in place, torch on CUDA would round the factor to bfloat16
            tensor.copy_(tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * here[0])
        if found_inf is not None:
            check_reference(tensors, torch.ones_like(here), found_inf)
        return
    with flag_on(device, found_inf) as flag:
        seen = torch.zeros_like(here) if flag is None else flag
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, seen, here)
        if flag is not None and not _is_at_most_one(factor):
            torch._amp_foreach_non_finite_check_and_unscale_(tensors, flag, torch.ones_like(here))


def _torch_can_check(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's own operation takes a dtype: on CUDA it knows no bfloat16 (torch 2.11)."""
    return device.type == "cpu" or dtype is not torch.bfloat16


@torch.no_grad()
def check_reference(sources: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """Do `check` in plain torch, on tensors of one device and dtype.

    Products are finite where those of the extremes are. On the CPU torch's own operation, multiplying
    by 1, is faster than finding those.
    """
    device = sources[0].device
    on_cpu = device.type == "cpu" and all(source.is_contiguous() for source in sources)
    if on_cpu and _is_at_most_one(inv_scale):
        with flag_on(device, found_inf) as flag:
            one = torch.ones(1, dtype=torch.float32, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(list(sources), flag, one)
        return
    extremes = torch.stack([extreme for source in sources for extreme in torch.aminmax(source)])
    wider = torch.promote_types(extremes.dtype, torch.float32)
    products = extremes.to(wider) * to_device(inv_scale, device)
    with flag_on(device, found_inf) as flag:
        torch.maximum(flag, products.isfinite().all().logical_not(), out=flag)


def _is_at_most_one(factor: Tensor) -> bool:
    """Whether products cannot overflow, as far as the host knows without waiting for a device."""
    return factor.device.type == "cpu" and factor.tolist()[0] <= 1.0
