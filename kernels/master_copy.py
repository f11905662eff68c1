"""Copies between FP32 masters and 16-bit weights, and merges of masters with written weights.

    target_i = round_to_nearest_even(source_i)        for every i

    master_i = parameter_i       where round_to_nearest_even(master_i) != parameter_i
    differs  = 1                 if there is such an i

A 16-bit parameter is its master, rounded. A merge finds where it is not, because a script has written
to it: there the master takes the parameter's value, and elsewhere it keeps all its bits. They are
compared as numbers, so -0.0 agrees with 0.0. A NaN of either is a difference, and NaNs of both are
none.

Shapes: the i-th tensors of both lists have one shape, of any size. Dtypes: float16, bfloat16, float32
or float64 on either side of a copy, where what is too large for the target becomes inf; for a merge
float16 or bfloat16, and float32. Launches: one for each device and pair of dtypes; plain torch takes a
few for each 16 million elements of a merge. Memory traffic: a copy reads each source and writes each
target once; a merge reads each tensor once, 6 bytes an element. A block of MERGE_BLOCK elements is
written only if one of them changes, on the CPU a vector or a slice. In a fused step the merge happens
in registers, and costs 2 bytes; see `amp.kernels.stepping`. Reference of copies: `torch.Tensor.copy_`.

No version of a master goes up: a version says that a script has written to the master itself. Only a
merge in code of `torch.compile` raises versions, as all its writes do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from amp.kernels.backend import is_eager
from amp.kernels.interrupts import without_grad
from amp.kernels.language import each_part, jit, narrow, report, tl, widened
from amp.kernels.launch_plans import Elementwise, UnsupportedTensorError, are_flat
from amp.kernels.tensor_lists import Kind, are_plain, dense

BLOCK = 8192
MERGE_BLOCK = 4096
SLICE = 2**18
"""The number of elements that plain torch compares at once on the CPU, in a core's cache."""
TOGETHER = 2**24
"""The same on other devices, where each operation is a launch."""


def master_copy(
    sources: Sequence[Tensor], targets: Sequence[Tensor], *, backend: str | None = None
) -> None:
    """Copy each source into its target. The host does not wait for the device.

    Raises:
        ValueError: sources and targets do not match.
        UnsupportedTensorError: a dtype that is not listed above.
    """
    _COPY.run((sources, targets), backend)


def copy_in_cpp(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
    """Do `master_copy` if all are on the CPU and C++ takes them; return whether that was done."""
    return _COPY.run_in_cpp((sources, targets))


def merge(
    parameters: Sequence[Tensor], masters: Sequence[Tensor], *, backend: str | None = None
) -> None:
    """Merge masters with their parameters, in place. The host does not wait for the device.

    Args:
        parameters: float16 or bfloat16.
        masters: float32. No version of them goes up, and where they agree with their parameters nothing
            is written.
        backend: see `amp.kernels.backend`.

    Raises:
        ValueError: the lists do not match.
        UnsupportedTensorError: a dtype that is not listed above.
    """
    _run(parameters, masters, None, backend)


def merge_in_cpp(parameters: Sequence[Tensor], masters: Sequence[Tensor]) -> bool:
    """Do `merge` if all tensors are on the CPU and C++ takes them; return whether that was done."""
    return _MERGE.run_in_cpp((parameters, masters))


@without_grad
def merged(parameter: Tensor, master: Tensor) -> Tensor:
    """Return what `merge` would make of a master, in new memory. The host does not wait."""
    rounded = master.to(parameter.dtype)
    return torch.where(_agree(rounded, parameter), master, parameter)


def differ(
    parameters: Sequence[Tensor], masters: Sequence[Tensor], *, backend: str | None = None
) -> Tensor:
    """Return whether `merge` would change a master: 1.0 or 0.0, float32 `[1]`, on the first's device.

    The host does not wait for the device. Arguments and errors are those of `merge`.
    """
    home = masters[0].device if masters else torch.device("cpu")
    flag = torch.zeros(1, dtype=torch.float32, device=home)
    _run(parameters, masters, flag, backend)
    return flag


def _run(
    parameters: Sequence[Tensor],
    masters: Sequence[Tensor],
    flag: Tensor | None,
    backend: str | None,
) -> None:
    """Merge, or with a flag, float32 `[1]`, set it if that would change anything."""
    both = dense(parameters), dense(masters)
    _check(*[tensors.kind for tensors in both])
    _MERGE.run(both, backend, flag=flag)


@functools.lru_cache(maxsize=64)
def _check(of_parameters: Kind, of_masters: Kind) -> None:
    # Lists of two lengths are found later.
    pairs = zip(of_parameters.dtypes, of_masters.dtypes, strict=False)
    for i, (parameter, master) in enumerate(pairs):
        if parameter not in (torch.float16, torch.bfloat16) or master is not torch.float32:
            raise UnsupportedTensorError(
                f"tensor {i} is {parameter}, with a master in {master}; a merge takes float16 or "
                "bfloat16, with masters in float32"
            )


@jit
def _copy(pointers, i, mask, arguments):
    source, target = pointers
    x = tl.load(source + i, mask=mask, other=0.0)
    tl.store(target + i, narrow(x, target.dtype.element_ty), mask=mask)
    return 0


@jit
def copy_kernel(rows, chunks, DTYPES: tl.constexpr, BLOCK: tl.constexpr):
    each_part(_copy, rows, chunks, (), DTYPES, BLOCK)


@jit
def merged_block(ours, theirs):
    """Return a block of masters, float32, with the values written to their parameters."""
    written = widened(theirs)
    return tl.where(widened(narrow(ours, theirs.dtype)) == written, ours, written)


@jit
def _merge(pointers, i, mask, arguments):
    parameter, master = pointers
    ours = tl.load(master + i, mask=mask, other=0.0)
    value = merged_block(ours, tl.load(parameter + i, mask=mask, other=0.0))
    differs = (value != ours) & ((value == value) | (ours == ours))
    if arguments is not None:
        report((arguments, None, None, None, None), differs, 2)
    else:
        if tl.max(differs.to(tl.int32), axis=0) != 0:
            tl.store(master + i, tl.where(differs, value, ours), mask=mask)
    return 0


@jit
def merge_kernel(rows, chunks, flag, DTYPES: tl.constexpr, BLOCK: tl.constexpr):
    each_part(_merge, rows, chunks, flag, DTYPES, BLOCK)


# Without Triton.


def copy_reference(sources: list[Tensor], targets: list[Tensor]) -> None:
    """Do `master_copy` in plain torch."""
    torch._foreach_copy_(targets, sources)


def _agree(rounded: Tensor, parameter: Tensor) -> Tensor:
    return (rounded == parameter) | (rounded.isnan() & parameter.isnan())


def merge_reference(
    parameters: Sequence[Tensor], masters: Sequence[Tensor], flag: Tensor | None
) -> None:
    """Merge tensors of one device and dtype, or set a flag there, in plain torch."""
    is_own = masters[0].device.type == "cpu" and are_plain([*parameters, *masters])
    may_look = is_own and is_eager()  # the host may compare values, and write only where they differ
    for theirs, ours in _parts(parameters, masters):
        one, written = [x[0] if len(x) == 1 else _flatten_dense_tensors(x) for x in (ours, theirs)]
        rounded = one.to(written.dtype)
        if may_look and not torch.count_nonzero(rounded.view(torch.int16) ^ written.view(torch.int16)):
            continue
        agree = _agree(rounded, written)
        if flag is not None:
            torch.maximum(flag, agree.all().logical_not(), out=flag)
        elif not (may_look and agree.all()):
            values = torch.where(agree, one, written)
            parts = [values] if len(ours) == 1 else _unflatten_dense_tensors(values, ours)
            # What `.data` returns has a version of its own.
            torch._foreach_copy_([x.detach().data for x in ours], list(parts))


def _parts(
    parameters: Sequence[Tensor], masters: Sequence[Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield tensors to process together: several, a large one, or on the CPU a slice of it."""
    on_cpu = masters[0].device.type == "cpu"
    limit = SLICE if on_cpu else TOGETHER
    theirs, ours, elements = list[Tensor](), list[Tensor](), 0
    for pair in zip(parameters, masters, strict=True):
        size = pair[0].numel()
        slices: Iterator[Any] = iter([pair])
        if on_cpu and size > limit and are_flat(pair):
            slices = zip(*[x.as_strided((size,), (1,)).split(limit) for x in pair], strict=True)
        for parameter, master in slices:
            if elements and elements + master.numel() > limit:
                yield theirs, ours
                theirs, ours, elements = [], [], 0
            theirs.append(parameter)
            ours.append(master)
            elements += master.numel()
    if elements:
        yield theirs, ours


_COPY = Elementwise(copy_kernel, copy_reference, writes=1, block=BLOCK, in_cpp="copy")
_MERGE = Elementwise(
    merge_kernel, merge_reference, writes=0, block=MERGE_BLOCK, flag="flag", in_cpp="merge"
)
