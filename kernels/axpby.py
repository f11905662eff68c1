"""Weighted sums, as gradient accumulation needs them.

    out_i = a * x_i + b * y_i                         for every i
    found_inf = 1 if any element of an x_i, or of its product with a, is inf or NaN

Only the new gradients `xs` are checked, not the totals `ys` that they are added to.

Shapes: `xs[i]`, `ys[i]` and `outs[i]` have one shape, of any size; an out may be its x or its y.
Dtypes: float16, bfloat16, float32 or float64 each; a and b are float32. A product is FP32, or FP64
where its operand or the out is FP64; so is the sum, which is rounded once, to nearest even (from FP64
to 16 bits by way of FP32).
Launches: one for each device and combination of dtypes. Memory traffic: each x and y is read and each
out written once.
Source: NVIDIA apex `multi_tensor_axpby`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp.kernels import host_lists
from amp.kernels.foreach import copies
from amp.kernels.language import each_part, jit, narrow, not_finite, report, tl, wide
from amp.kernels.launch_plans import BadSteps, Elementwise
from amp.kernels.unscale import scale_and_check

BLOCK = 4096


def axpby(
    a: float | Tensor,
    xs: Sequence[Tensor],
    b: float | Tensor,
    ys: Sequence[Tensor],
    outs: Sequence[Tensor],
    found_inf: Tensor | None = None,
    *,
    backend: str | None = None,
    bad_steps: BadSteps | None = None,
) -> None:
    """Write `a * xs + b * ys` to `outs`. The host does not wait for the device.

    Args:
        a: a number, or float32 `[1]`.
        xs: tensors.
        b: a number, or float32 `[1]`.
        ys: tensors.
        outs: where the sums go; may be `xs` or `ys` themselves.
        found_inf: float32 `[1]`, set to 1 on overflow and never cleared; None checks nothing.
        backend: see `amp.kernels.backend`.
        bad_steps: where Triton's kernel records which `a * xs` overflow.

    Raises:
        ValueError: the lists do not match.
        UnsupportedTensorError: a dtype that is not listed above.
    """
    _AXPBY.run((xs, ys, outs), backend, bad_steps, a=a, b=b, found_inf=found_inf)


@jit
def _axpby(pointers, i, mask, arguments):
    x, y, out = pointers
    a, b, report_to = arguments
    dtype = out.dtype.element_ty
    ax = a * wide(tl.load(x + i, mask=mask, other=0.0), dtype)
    by = b * wide(tl.load(y + i, mask=mask, other=0.0), dtype)
    tl.store(out + i, narrow(ax + by, dtype), mask=mask)
    report(report_to, not_finite(ax), 3)
    return 0


@jit
def axpby_kernel(
    rows, chunks, a, b, found_inf, bad_steps, step, DTYPES: tl.constexpr, BLOCK: tl.constexpr
):
    report_to = (found_inf, bad_steps, step, rows, chunks)
    each_part(_axpby, rows, chunks, (tl.load(a), tl.load(b), report_to), DTYPES, BLOCK)


def axpby_reference(
    xs: list[Tensor],
    ys: list[Tensor],
    outs: list[Tensor],
    a: float | Tensor,
    b: float | Tensor,
    found_inf: Tensor | None,
) -> None:
    """Do `axpby` in plain torch, on tensors of one device and combination of dtypes."""
    out = outs[0].dtype
    sums = _scaled(a, xs, out, found_inf)
    by = _scaled(b, ys, out, None) if isinstance(b, Tensor) or b != 1.0 else ys
    if sums[0].dtype is out and host_lists.lists.are_same(by, outs):
        torch._foreach_add_(outs, sums)
    else:
        torch._foreach_add_(sums, by)
        torch._foreach_copy_(outs, sums)


def _scaled(
    factor: float | Tensor, tensors: Sequence[Tensor], out: torch.dtype, found_inf: Tensor | None
) -> list[Tensor]:
    """Return the products of `factor` and tensors, in the dtype to compute in."""
    dtype = torch.promote_types(torch.promote_types(tensors[0].dtype, out), torch.float32)
    products = copies(tensors, dtype)
    if not isinstance(factor, Tensor):
        factor = torch.tensor([factor], dtype=torch.float32, device="cpu")
    scale_and_check(products, factor, found_inf)
    return products


_AXPBY = Elementwise(axpby_kernel, axpby_reference, writes=1, block=BLOCK, in_cpp="axpby")
