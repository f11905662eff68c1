"""Masters that take what other code has written to their 16-bit parameters.

    master_i = parameter_i       where round_to_nearest_even(master_i) != parameter_i
    differs  = 1                 if there is such an i

A 16-bit parameter is the truth, and its master holds the value that it rounds: where both agree, the
master keeps all its bits. They are compared as numbers, so -0.0 agrees with 0.0. A NaN of either is a
difference, and NaNs of both are none.

Shapes: `parameters[i]` and `masters[i]` have one shape, of any size. Dtypes: float16 or bfloat16, and
float32. Launches: one for each device and dtype of parameters; plain torch takes a few for each 16
million elements. Memory traffic: each tensor is read once, 6 bytes an element. A block of BLOCK
elements is written only if one of them changes, on the CPU a vector or a slice. In a fused step the
merge happens in registers, and costs 2 bytes; see `amp.kernels.stepping`.

No version of a master goes up: a version says that other code has written to the master itself. Only
what `torch.compile` makes of a merge raises versions, as of all that it writes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils._python_dispatch import _get_current_dispatch_mode

from amp.kernels import cpu_loop
from amp.kernels.backend import requested
from amp.kernels.interrupts import without_grad
from amp.kernels.language import each_part, jit, narrow, report, tl, widened
from amp.kernels.launch_plans import (
    UnsupportedTensorError,
    are_flat,
    flag_on,
    merge_flag,
    plan,
    takes_at_once,
)
from amp.kernels.master_copy import master_copy
from amp.kernels.tensor_lists import Kind, TensorList, are_plain, dense

BLOCK = 4096
SLICE = 2**18
"""The number of elements that plain torch compares at once on the CPU, in a core's cache."""
TOGETHER = 2**24
"""The same on other devices, where each operation is a launch."""


def merge(
    parameters: Sequence[Tensor], masters: Sequence[Tensor], *, backend: str | None = None
) -> None:
    """Merge masters with their parameters, in place. The host does not wait for the device.

    Args:
        parameters: float16 or bfloat16.
        masters: float32. No version of them goes up, and where they agree with their parameters nothing
            is written. On the CPU two `TensorList`s that were merged before are not looked at again.
        backend: see `amp.kernels.backend`.

    Raises:
        ValueError: the lists do not match.
        UnsupportedTensorError: a dtype that is not listed above.
    """
    left = _run_again(parameters, masters, MERGE, backend)
    if left is None:
        _run(parameters, masters, None, backend)
    elif left:
        merge_reference([parameters[i] for i in left], [masters[i] for i in left], None, looks=True)


def round_back(parameters: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Round masters into their parameters; each parameter's version goes up. The host does not wait.

    Arguments and errors are those of `merge`. On the CPU two `TensorList`s that were merged before are
    not looked at again.
    """
    left = _run_again(parameters, masters, ROUND)
    if left is None:
        master_copy(masters, parameters)
    else:
        if left:
            master_copy([masters[i] for i in left], [parameters[i] for i in left])
        others = set(left)
        torch.autograd.graph.increment_version(
            [parameter for i, parameter in enumerate(parameters) if i not in others]
        )


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
    if takes_at_once((parameters, masters), backend) and masters[0].dtype is torch.float32:
        _run_at_once(parameters, masters, flag, backend, _get_current_dispatch_mode() is None)
        return
    both = dense(parameters), dense(masters)
    todo = plan(*both, block=BLOCK, backend=backend)
    _check(*[tensors.kind for tensors in both])
    for each in todo.launches:
        here = flag_on(each.device, flag)
        each.run(merge_kernel, flag=here, BLOCK=BLOCK)
        merge_flag(flag, here)
    for same in todo.fallback:
        theirs, ours = [tensors.at(same) for tensors in both]
        here = flag_on(ours[0].device, flag)
        looks = _are_at_hand(ours[0].device, both)
        _run_at_once(theirs, ours, here, backend, looks)
        merge_flag(flag, here)


def _run_at_once(
    parameters: Sequence[Tensor],
    masters: Sequence[Tensor],
    flag: Tensor | None,
    backend: str | None,
    looks: bool,
) -> None:
    """Do `_run` in C++ or plain torch, on tensors of one device and dtype, where the flag is too."""
    left: Sequence[int] | None = None
    if looks and not (backend or requested()[0]):
        address = MERGE if flag is None else flag.data_ptr()
        left = _run_in_cpp(dense(parameters), dense(masters), address)
    if left is None:
        merge_reference(parameters, masters, flag, looks)
    elif left:
        merge_reference([parameters[i] for i in left], [masters[i] for i in left], flag, looks)


@functools.lru_cache(maxsize=64)
def _check(of_parameters: Kind, of_masters: Kind) -> None:
    pairs = zip(of_parameters.dtypes, of_masters.dtypes, strict=True)
    for i, (parameter, master) in enumerate(pairs):
        if parameter not in (torch.float16, torch.bfloat16) or master is not torch.float32:
            raise UnsupportedTensorError(
                f"tensor {i} is {parameter}, with a master in {master}; a merge takes float16 or "
                "bfloat16, with masters in float32"
            )


@jit
def merged_block(ours, theirs):
    """Return a block of masters, float32, with what was written to their parameters."""
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


# On the CPU, in C++.


def _are_at_hand(device: torch.device, lists: Sequence[Sequence[Tensor]]) -> bool:
    """Whether the host may go through tensors: they are its own, and nothing watches or compiles it."""
    if device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return _get_current_dispatch_mode() is None and all(map(are_plain, lists))


MERGE, ROUND = 0, 1
"""What the loop does, by the last number of a row; any other is the address of a flag."""


def _source_of(dtype: torch.dtype) -> str:
    """Return the loop in C++, for parameters of a dtype."""
    lists = [("parameter", cpu_loop.TYPES[dtype]), ("master", cpu_loop.TYPES[torch.float32])]
    merges = "merge(parameter_at, master_at, n, reinterpret_cast<float *>(row[3]))"
    rounds = "write(read(master_at, n), parameter_at, n)"
    return cpu_loop.loop_over(lists, [f"if (row[3] == {ROUND}) {rounds}; else {merges};"], columns=1)


def _run_in_cpp(parameters: TensorList, masters: TensorList, does: int) -> Sequence[int] | None:
    """Let the loop go through tensors of one device and dtype, and return the indices of the others.

    Returns None if there is no loop.
    """
    made_of, elements = (parameters[0].dtype,), sum(masters.kind.sizes)
    loop = cpu_loop.loop_for(_source_of, made_of, "the merge of masters", elements)
    if loop is None:
        return None
    rows, count, left = cpu_loop.table_of(parameters, masters, does, does in (MERGE, ROUND))
    loop(rows, count, None, torch.get_num_threads())
    return left


def _run_again(
    parameters: Any, masters: Any, does: int, backend: str | None = None
) -> Sequence[int] | None:
    """Let the loop go through lists that it has gone through before; they are not looked at again.

    Returns the indices of those that it does not take; None if it has not, or may not.
    """
    table = getattr(masters, "table", None)
    if table is None or table[0] is not parameters or backend:
        return None
    if _get_current_dispatch_mode() is not None or torch.compiler.is_compiling():
        return None
    return _run_in_cpp(parameters, masters, does)


# In plain torch.


def _agree(rounded: Tensor, parameter: Tensor) -> Tensor:
    return (rounded == parameter) | (rounded.isnan() & parameter.isnan())


@without_grad
def merge_reference(
    parameters: Sequence[Tensor], masters: Sequence[Tensor], flag: Tensor | None, looks: bool
) -> None:
    """Do `_run` in plain torch, on tensors of one device and dtype.

    `looks` says that the host may compare values, and write only where they differ.
    """
    for theirs, ours in _parts(parameters, masters, masters[0].device.type == "cpu"):
        one, written = [x[0] if len(x) == 1 else _flatten_dense_tensors(x) for x in (ours, theirs)]
        rounded = one.to(written.dtype)
        if looks and _have_same_bits(rounded, written):
            continue
        agree = _agree(rounded, written)
        if flag is not None:
            torch.maximum(flag, agree.all().logical_not(), out=flag)
        elif not (looks and agree.all()):
            values = torch.where(agree, one, written)
            parts = [values] if len(ours) == 1 else _unflatten_dense_tensors(values, ours)
            # What `.data` returns has a version of its own.
            torch._foreach_copy_([x.detach().data for x in ours], list(parts))


def _parts(
    parameters: Sequence[Tensor], masters: Sequence[Tensor], on_cpu: bool
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield what goes together: several tensors, a large one, or on the CPU a slice of it."""
    limit = SLICE if on_cpu else TOGETHER
    together: tuple[list[Tensor], list[Tensor]] = [], []
    elements = 0
    for pair in zip(parameters, masters, strict=True):
        size = pair[1].numel()
        if size > limit and on_cpu and are_flat(pair):
            for first in range(0, size, limit):
                shape = (min(limit, size - first),)
                one, other = [x.as_strided(shape, (1,), x.storage_offset() + first) for x in pair]
                yield [one], [other]
            continue
        if elements and elements + size > limit:
            yield together
            together, elements = ([], []), 0
        for tensors, one in zip(together, pair, strict=True):
            tensors.append(one)
        elements += size
    if elements:
        yield together


def _have_same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether tensors of 16 bits have the same bits. Torch compares 64 at a time fastest."""
    words = one.numel() // 4 * 4
    if one.is_contiguous() and other.is_contiguous() and other.storage_offset() % 4 == 0:
        one, other = one.view(-1), other.view(-1)
        same = torch.equal(one[:words].view(torch.int64), other[:words].view(torch.int64))
        return same and torch.equal(one[words:].view(torch.int16), other[words:].view(torch.int16))
    return torch.equal(one.view(torch.int16), other.view(torch.int16))
