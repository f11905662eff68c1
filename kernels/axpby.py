"""Weighted sums, as gradient accumulation needs them.

    out_i = a * x_i + b * y_i                         for every i
    found_inf = 1 if any element is inf or NaN of    a * x_i    with check="x"
                                                     b * y_i    with check="y"
                                                     out_i      with check="both"

With `check="x"` new gradients are judged, and not those that they are added to. A sum is inf or NaN
where one of its terms is, and where it overflows its dtype.

Shapes: `xs[i]`, `ys[i]` and `outs[i]` have one shape, of any size; an out may be its x or its y.
Dtypes: float16, bfloat16, float32 or float64 each; a and b are float32. A product is FP32, or FP64
where its operand or the out is; so is the sum, which is rounded once, to nearest even. Launches: one
for each device and combination of dtypes. Memory traffic: each x and y is read and each out written
once.
Source: NVIDIA apex `multi_tensor_axpby`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from amp.kernels.elementwise import run
from amp.kernels.language import each_part, jit, narrow, not_finite, report, tl, wide
from amp.kernels.unscale import scale_and_check

BLOCK = 4096

Check = Literal["x", "y", "both"]


def axpby(
    a: float | Tensor,
    xs: Sequence[Tensor],
    b: float | Tensor,
    ys: Sequence[Tensor],
    outs: Sequence[Tensor],
    found_inf: Tensor | None = None,
    *,
    check: Check = "both",
    backend: str | None = None,
) -> None:
    """Write `a * xs + b * ys` to `outs`. The host does not wait for the device.

    Args:
        a: a number, or float32 `[1]`.
        xs: tensors.
        b: a number, or float32 `[1]`.
        ys: tensors.
        outs: where the sums go; may be `xs` or `ys` themselves.
        found_inf: float32 `[1]`, set to 1 on overflow and never cleared; None checks nothing.
        check: the products that `found_inf` is about.
        backend: see `amp.kernels.backend`.

    Raises:
        ValueError: the lists do not match, or `check` is something else.
        UnsupportedTensorError: a dtype that is not listed above.
    """
    if check not in ("x", "y", "both"):
        raise ValueError(f"check={check!r} is not one of 'x', 'y', 'both'")
    run(
        axpby_kernel,
        functools.partial(axpby_reference, check=check),
        (xs, ys, outs),
        writes=1,
        block=BLOCK,
        backend=backend,
        constants={"CHECK": check},
        a=a,
        b=b,
        found_inf=found_inf,
    )


@jit
def _axpby(pointers, i, mask, arguments):
    x, y, out = pointers
    a, b = arguments[0], arguments[1]
    check: tl.constexpr = arguments[3]
    dtype = out.dtype.element_ty
    ax = a * wide(tl.load(x + i, mask=mask, other=0.0), dtype)
    by = b * wide(tl.load(y + i, mask=mask, other=0.0), dtype)
    total = narrow(ax + by, dtype)
    tl.store(out + i, total, mask=mask)
    checked = total
    if check == "x":
        checked = ax
    elif check == "y":
        checked = by
    report(arguments[2], not_finite(checked))
    return 0


@jit(do_not_specialize=["a", "b", "found_inf"])
def axpby_kernel(
    rows, chunks, a, b, found_inf, CHECK: tl.constexpr, DTYPES: tl.constexpr, BLOCK: tl.constexpr
):
    # As a variable the tuple would lose what is known when this is compiled.
    each_part(_axpby, rows, chunks, (tl.load(a), tl.load(b), found_inf, CHECK), DTYPES, BLOCK)


def axpby_reference(
    xs: list[Tensor],
    ys: list[Tensor],
    outs: list[Tensor],
    a: float | Tensor,
    b: float | Tensor,
    found_inf: Tensor | None,
    check: Check,
) -> None:
    """Do `axpby` in plain torch, on tensors of one device and combination of dtypes."""
    out = outs[0].dtype
    ax = _scaled(a, xs, out, found_inf if check == "x" else None)
    by = ys
    if isinstance(b, Tensor) or b != 1.0 or check == "y":
        by = _scaled(b, ys, out, found_inf if check == "y" else None)
    if out is torch.promote_types(ax[0].dtype, by[0].dtype):
        for x, y, total in zip(ax, by, outs, strict=True):
            torch.add(x, y, out=total)
    else:
        for x, y, total in zip(ax, by, outs, strict=True):
            total.copy_(x + y)
    if check == "both":
        scale_and_check(outs, torch.ones(1, dtype=torch.float32, device="cpu"), found_inf)


def _scaled(
    factor: float | Tensor, tensors: Sequence[Tensor], out: torch.dtype, found_inf: Tensor | None
) -> list[Tensor]:
    """Return the products of `factor` and tensors, in the dtype to compute in."""
    dtype = torch.promote_types(torch.promote_types(tensors[0].dtype, out), torch.float32)
    products = [tensor.to(dtype, copy=True) for tensor in tensors]
    if not isinstance(factor, Tensor):
        factor = torch.tensor([factor], dtype=torch.float32, device="cpu")
    scale_and_check(products, factor, found_inf)
    return products
