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

from collections.abc import Sequence
from typing import Literal

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
from amp.kernels.unscale import scale_and_check

BLOCK = 4096
WARPS = 8

Check = Literal["x", "y", "both"]


@torch.no_grad()
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
    lists = [dense(tensors) for tensors in (xs, ys, outs)]
    todo = plan(*lists, block=BLOCK, backend=backend)
    were_written(outs)
    for each in todo.launches:
        with flag_on(each.device, found_inf) as flag:
            launch(
                axpby_kernel,
                len(each.chunks),
                each.device,
                each.rows,
                each.chunks,
                _on(each.device, a),
                _on(each.device, b),
                flag,
                X=dtype_of(each.dtypes[0]),
                Y=dtype_of(each.dtypes[1]),
                OUT=dtype_of(each.dtypes[2]),
                A_IS_POINTER=isinstance(a, Tensor),
                B_IS_POINTER=isinstance(b, Tensor),
                CHECK=check,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )
    for same in todo.fallback:
        inputs_x, inputs_y, outputs = [[tensors[i] for i in same] for tensors in lists]
        axpby_reference(a, inputs_x, b, inputs_y, outputs, found_inf, check)


def _on(device: torch.device, factor: float | Tensor) -> float | Tensor:
    if isinstance(factor, Tensor):
        return to_device(factor, device)
    return float(factor)


@jit
def _axpby_block(x, y, out, i, mask, a, b, CHECK: tl.constexpr):
    dtype = out.dtype.element_ty
    ax = a * wide(tl.load(x + i, mask=mask, other=0.0), dtype)
    by = b * wide(tl.load(y + i, mask=mask, other=0.0), dtype)
    total = narrow(ax + by, dtype)
    tl.store(out + i, total, mask=mask)
    checked = total
    if CHECK == "x":
        checked = ax
    elif CHECK == "y":
        checked = by
    return any_of(not_finite(checked))


@jit(do_not_specialize=["a", "b", "found_inf"])
def axpby_kernel(
    rows,
    chunks,
    a,
    b,
    found_inf,
    X: tl.constexpr,
    Y: tl.constexpr,
    OUT: tl.constexpr,
    A_IS_POINTER: tl.constexpr,
    B_IS_POINTER: tl.constexpr,
    CHECK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, start, length = locate(chunks, rows, 3, BLOCK)
    x, y, out = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    a = tl.load(a) if A_IS_POINTER else a
    b = tl.load(b) if B_IS_POINTER else b
    vectors = vector_length(x | y | out, length)
    i = tl.arange(0, BLOCK)
    bad = _axpby_block(
        tl.multiple_of(x.to(tl.pointer_type(X)), ALIGNMENT) + start,
        tl.multiple_of(y.to(tl.pointer_type(Y)), ALIGNMENT) + start,
        tl.multiple_of(out.to(tl.pointer_type(OUT)), ALIGNMENT) + start,
        i,
        i < vectors,
        a,
        b,
        CHECK,
    )
    for first in range(vectors, length, STEP):
        j = first + tl.arange(0, STEP)
        bad |= _axpby_block(
            x.to(tl.pointer_type(X)) + start,
            y.to(tl.pointer_type(Y)) + start,
            out.to(tl.pointer_type(OUT)) + start,
            j,
            j < length,
            a,
            b,
            CHECK,
        )
    if found_inf is not None:
        if bad != 0:
            tl.store(found_inf, 1.0)


def axpby_reference(
    a: float | Tensor,
    xs: list[Tensor],
    b: float | Tensor,
    ys: list[Tensor],
    outs: list[Tensor],
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
