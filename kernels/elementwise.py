"""The common part of element-wise operations on lists of tensors: unscale, axpby, copies.

Each operation is a Triton kernel with the arguments `rows, chunks, ..., DTYPES, BLOCK`
(`amp.kernels.language`), and the same in plain torch for tensors that Triton does not take.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp.kernels.grad_mode import without_grad
from amp.kernels.launch_plans import BadSteps, flag_on, merge_flag, number_on, plan, takes_at_once
from amp.kernels.tensor_lists import dense


@without_grad
def _call(reference: Callable[..., None], *lists: list[Tensor], **arguments: Any) -> None:
    reference(*lists, **arguments)


class Elementwise(NamedTuple):
    """An operation on the corresponding elements of lists of tensors.

    Attributes:
        kernel: for Triton.
        reference: for plain torch, on lists of tensors of one device and combination of dtypes.
        writes: how many lists are written; they are the last ones.
        block: the number of elements of a chunk.
    """

    kernel: Any
    reference: Callable[..., None]
    writes: int
    block: int

    def run(
        self,
        lists: Sequence[Sequence[Tensor]],
        backend: str | None,
        bad_steps: BadSteps | None = None,
        **arguments: Any,
    ) -> None:
        """Run it. The host does not wait for the device.

        Args:
            lists: the tensors; sparse ones and DTensors are replaced by the dense ones that they hold.
            backend: see `amp.kernels.backend`.
            bad_steps: where a check records the tensors that are not finite.
            **arguments: numbers, or float32 `[1]` each, or None, for kernel and reference alike.
                `found_inf`, if there is one, is written.
        """
        if takes_at_once(lists, backend):
            _call(self.reference, *map(list, lists), **arguments)
            written = list(itertools.chain(*lists[len(lists) - self.writes :]))
            torch.autograd.graph.increment_version(written)
            return
        known = {id(tensors): dense(tensors) for tensors in lists}  # a list given twice: once
        columns = [known[id(tensors)] for tensors in lists]
        todo = plan(*columns, block=self.block, backend=backend)
        for each in todo.launches:
            here = {name: number_on(each.device, value) for name, value in arguments.items()}
            if "found_inf" in arguments:
                here["found_inf"] = flag_on(each.device, arguments["found_inf"])
                here |= BadSteps.on(each.device, bad_steps)
            each.run(self.kernel, **here, BLOCK=self.block)
            merge_flag(arguments.get("found_inf"), here.get("found_inf"))
        for same in todo.fallback:
            chosen = [[tensors[i] for i in same] for tensors in columns]
            _call(self.reference, *chosen, **arguments)
        written = list(itertools.chain(*lists[len(lists) - self.writes :]))
        torch.autograd.graph.increment_version(written)
