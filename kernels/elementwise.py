"""What operations on the corresponding elements of lists of tensors share: unscale, axpby, copies.

Each is a Triton kernel of the arguments `rows, chunks, ..., DTYPES, BLOCK` (`amp.kernels.language`),
and the same in plain torch, for tensors that Triton does not take.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from amp.kernels.tables import flag_on, number_on, plan
from amp.kernels.tensor_lists import dense, were_written


def run(
    kernel: Any,
    reference: Callable[..., None],
    lists: Sequence[Sequence[Tensor]],
    *,
    writes: int,
    block: int,
    backend: str | None,
    **arguments: Any,
) -> None:
    """Run an operation on parallel lists of tensors. The host does not wait for the device.

    Args:
        kernel: for Triton.
        reference: for plain torch, on lists of tensors of one device and combination of dtypes.
        lists: the tensors; sparse ones and DTensors are replaced by the dense ones that they hold.
        writes: how many of the lists are written: the last ones.
        block: the number of elements of a chunk.
        backend: see `amp.kernels.backend`.
        **arguments: numbers, or float32 `[1]` each, or None. `found_inf`, if there is one, is written.
    """
    known = {id(tensors): dense(tensors) for tensors in lists}  # a list that is there twice asks once
    columns = [known[id(tensors)] for tensors in lists]
    todo = plan(*columns, block=block, backend=backend)
    for each in todo.launches:
        with flag_on(each.device, arguments.get("found_inf")) as flag:
            here = {name: number_on(each.device, value) for name, value in arguments.items()}
            if "found_inf" in arguments:
                here["found_inf"] = flag
            each.run(kernel, **here, BLOCK=block)
    for same in todo.fallback:
        with torch.no_grad():
            reference(*[[tensors[i] for i in same] for tensors in columns], **arguments)
    were_written(itertools.chain(*lists[len(lists) - writes :]))
