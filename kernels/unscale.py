"""Unscale gradients, and check whether they are finite.

    target_i = source_i * inv_scale                   for every i
    found_inf = 1 if any source or target element is inf or NaN

The check covers the products too: a scale below 1 can make an inf out of a finite gradient.

Shapes: `sources[i]` and `targets[i]` have one shape, of any size; a target may be its source.
Dtypes: float16, bfloat16, float32 or float64 on either side. Products are FP32, or FP64 where either
side is, and rounded to nearest even, once (FP64 ones to 16 bits by way of FP32). Of sparse gradients
the values are taken, of DTensors the local shards. Launches: one for each device and pair of
dtypes. Memory traffic: each source is read and each target written once; `check` only reads.
Reference: `torch._amp_foreach_non_finite_check_and_unscale_`, which checks before it multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp.kernels import host_lists
from amp.kernels.foreach import copies
from amp.kernels.language import each_part, jit, narrow, not_finite, report, tl, wide
from amp.kernels.launch_plans import BadSteps, Elementwise, number_on, to_device

UNCHECKED = {("cuda", torch.bfloat16)}
"""Devices and dtypes that torch's own operation does not take (torch 2.11)."""
BLOCK = 8192
CHECK_BLOCK = 16384


def unscale(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    inv_scale: Tensor,
    found_inf: Tensor | None,
    *,
    backend: str | None = None,
    bad_steps: BadSteps | None = None,
) -> None:
    """Write `sources * inv_scale` to `targets`. The host does not wait for the device.

    Args:
        sources: scaled gradients.
        targets: where the unscaled ones go; may be the sources themselves.
        inv_scale: float32 `[1]`.
        found_inf: float32 `[1]`, set to 1 on overflow and never cleared; None checks nothing.
        backend: see `amp.kernels.backend`.
        bad_steps: where Triton's kernel records which sources overflow.

    Raises:
        ValueError: sources and targets do not match.
        UnsupportedTensorError: a dtype that is not listed above.
    """
    _UNSCALE.run((sources, targets), backend, bad_steps, inv_scale=inv_scale, found_inf=found_inf)


def check(
    sources: Sequence[Tensor],
    inv_scale: float | Tensor,
    found_inf: Tensor,
    *,
    backend: str | None = None,
    bad_steps: BadSteps | None = None,
) -> None:
    """Set `found_inf` if `sources` or their products with `inv_scale` are not finite.

    Nothing else is written. The host does not wait for the device. Arguments and errors are those of
    `unscale`; `inv_scale` may be a number too.
    """
    _CHECK.run((sources,), backend, bad_steps, inv_scale=inv_scale, found_inf=found_inf)


@jit
def _unscale(pointers, i, mask, arguments):
    source, target = pointers
    inv_scale, report_to = arguments
    x = tl.load(source + i, mask=mask, other=0.0)
    y = narrow(wide(x, target.dtype.element_ty) * inv_scale, target.dtype.element_ty)
    tl.store(target + i, y, mask=mask)
    report(report_to, not_finite(y), 2)
    return 0


@jit
def unscale_kernel(
    rows, chunks, inv_scale, found_inf, bad_steps, step, DTYPES: tl.constexpr, BLOCK: tl.constexpr
):
    report_to = (found_inf, bad_steps, step, rows, chunks)
    each_part(_unscale, rows, chunks, (tl.load(inv_scale), report_to), DTYPES, BLOCK)


@jit
def _check(pointers, i, mask, arguments):
    inv_scale, report_to = arguments
    x = tl.load(pointers[0] + i, mask=mask, other=0.0)
    report(report_to, not_finite(wide(x, x.dtype) * inv_scale), 1)
    return 0


@jit
def check_kernel(
    rows, chunks, inv_scale, found_inf, bad_steps, step, DTYPES: tl.constexpr, BLOCK: tl.constexpr
):
    report_to = (found_inf, bad_steps, step, rows, chunks)
    each_part(_check, rows, chunks, (tl.load(inv_scale), report_to), DTYPES, BLOCK)


def unscale_reference(
    sources: list[Tensor], targets: list[Tensor], inv_scale: Tensor, found_inf: Tensor | None
) -> None:
    """Do `unscale` in plain torch, on tensors of one device and pair of dtypes."""
    common = torch.promote_types(sources[0].dtype, targets[0].dtype)
    products = targets
    if targets[0].dtype is not common:
        products = copies(sources, common)
    elif not host_lists.lists.are_same(sources, targets):
        torch._foreach_copy_(targets, sources)
    scale_and_check(products, inv_scale, found_inf)
    if targets[0].dtype is not common:
        torch._foreach_copy_(targets, products)
        scale_and_check(targets, torch.ones_like(inv_scale), found_inf)


def scale_and_check(tensors: list[Tensor], factor: Tensor, found_inf: Tensor | None) -> None:
    """Multiply tensors of one device and dtype by `factor`, float32 `[1]`; check before and after.

    `found_inf` is on that device.
    """
    device = tensors[0].device
    here = factor if factor.device == device else to_device(factor, device)
    if (device.type, tensors[0].dtype) in UNCHECKED:
        # In place, torch on CUDA would round the factor to bfloat16.
        wide = copies(tensors, torch.promote_types(tensors[0].dtype, torch.float32))
        torch._foreach_mul_(wide, here[0])
        torch._foreach_copy_(tensors, wide)
        if found_inf is not None:
            check_reference(tensors, None, found_inf)
        return
    seen = torch.zeros_like(here) if found_inf is None else found_inf
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, seen, here)
    if found_inf is not None and not _is_at_most_one(factor):
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, torch.ones_like(here))


def check_reference(
    sources: Sequence[Tensor], inv_scale: float | Tensor | None, found_inf: Tensor
) -> None:
    """Do `check` in plain torch, on tensors of one device and dtype; `inv_scale=None` is 1.

    All products are finite if those of the extremes are. On the CPU torch's own operation, with a
    factor of 1, is faster than finding the extremes.
    """
    device = sources[0].device
    are_flat_on_cpu = device.type == "cpu" and all(map(Tensor.is_contiguous, sources))
    if are_flat_on_cpu and _is_at_most_one(inv_scale):
        one = torch.ones(1, dtype=torch.float32, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(list(sources), found_inf, one)
    else:
        extremes = torch.stack(list(_extremes(sources)))
        wider = torch.promote_types(extremes.dtype, torch.float32)
        products = extremes.to(wider)
        if (factor := number_on(device, inv_scale)) is not None:
            products = products * factor
        torch.maximum(found_inf, products.isfinite().all().logical_not(), out=found_inf)


def _extremes(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return numbers among which is the largest magnitude of each tensor, and NaN if it has one."""
    if tensors[0].device.type in ("cuda", "meta"):
        return torch._foreach_norm(list(tensors), torch.inf)
    # This norm is slow on the CPU, and leaves out NaNs on MPS.
    return [extreme for tensor in tensors for extreme in torch.aminmax(tensor)]


def _is_at_most_one(factor: float | Tensor | None) -> bool:
    """Whether the host knows, without waiting for a device, that products cannot overflow."""
    if isinstance(factor, Tensor):
        return factor.device.type == "cpu" and abs(factor.tolist()[0]) <= 1.0
    return factor is None or abs(factor) <= 1.0


_UNSCALE = Elementwise(unscale_kernel, unscale_reference, writes=1, block=BLOCK, in_cpp="unscale")
_CHECK = Elementwise(check_kernel, check_reference, writes=0, block=CHECK_BLOCK, in_cpp="check")
