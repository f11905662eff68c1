"""Whether the wrappers of a session's models have reduced gradients over the ranks.

Gradient accumulation without communication (DDP's and FSDP's `no_sync`, FSDP2's
`set_requires_gradient_sync(False)`) does not reduce gradients. They must not be unscaled yet, because
the next backward reduces them together with its own gradients, at one scale.

DDP decides in its forward whether the backward will reduce, so the forward notes it. FSDP decides in
the backward, and keeps unreduced gradients elsewhere, where amp looks for them.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from amp import active, distributed
from amp.casting import sharded
from amp.distributed import ProcessGroup
from amp.errors import AmpRuntimeError
from amp.patching import Patch, around
from amp.training.hidden_gradients import hide_in_backward


class Synchronization:
    """The DDP and FSDP wrappers of a session's models.

    Args:
        session: the session. Its `named_parameters` returns the parameters that its models have now,
            with their names.

    Attributes:
        wrappers: how many wrappers are watched.
    """

    def __init__(self, session: Any) -> None:
        properties = session.properties
        self._named_parameters: Callable[[], Mapping[Any, Tensor]] = session.named_parameters
        self._has_masters = bool(properties.master_weights)
        self._may_join = not (properties.master_weights or properties.loss_scaling.dynamic)
        self._was_alone = False
        self._units: list[weakref.ref[Any]] = []
        self._fsdp1: list[weakref.ref[Any]] = []
        self._ddps: list[weakref.ref[Any]] = []
        self.wrappers = 0

    def watch(self, models: Iterable[nn.Module]) -> None:
        """Watch the wrappers inside of models, and every DDP that will be around them."""
        self._was_alone |= distributed.world_size() == 1
        for model in models:
            self._units += map(weakref.ref, sharded.units_of(model))
            self._fsdp1 += map(weakref.ref, sharded.fsdp1_modules(model))
        self.wrappers = len(self._units) + len(self._fsdp1) + len(self._ddps)

    def introduce(self, ddp: Any) -> None:
        """Note a DDP that has been made, if it wraps these models or parts of them.

        Raises:
            AmpRuntimeError: the process group was made after the session's masters.
        """
        own = set(map(id, self._named_parameters().values()))
        if own.isdisjoint(map(id, ddp._module_parameters)):
            return
        if self._has_masters and self._was_alone and distributed.world_size() > 1:
            raise AmpRuntimeError(
                "torch.distributed.init_process_group was called after amp.initialize, which has made "
                "each rank's master weights from that rank's values; DDP makes only the 16-bit weights "
                "equal. Call init_process_group before amp.initialize"
            )
        ddp._amp_reduces, ddp._amp_may_join = True, self._may_join
        ddp._pre_forward = types.MethodType(_pre_forward, ddp)  # a forward may bypass hooks
        ddp._post_forward = types.MethodType(_post_forward, ddp)
        self._ddps.append(weakref.ref(ddp))
        self.wrappers += 1

    def are_reduced(self, parameters: Sequence[Tensor]) -> bool:
        """Whether none of a model's parameters has a gradient that is still to be reduced."""
        left = [ddp._module_parameters for ddp in self.own_ddps() if not ddp._amp_reduces]
        left += map(sharded.parameters_of, filter(sharded.has_unreduced, _alive(self._units)))
        left += [x.parameters() for x in filter(sharded.has_unreduced1, _alive(self._fsdp1))]
        if not left:
            return True
        own = set(map(id, parameters))
        return all(own.isdisjoint(map(id, unreduced)) for unreduced in left)

    def own_ddps(self) -> list[Any]:
        """Return the DDPs around these models."""
        return _alive(self._ddps)

    def groups_of_ddps(self) -> list[ProcessGroup]:
        """Return the process groups of the DDPs around these models, whose ranks see different data."""
        return [ddp.process_group for ddp in self.own_ddps()]

    def drop_unreduced(self, parameters: Sequence[Tensor]) -> None:
        """Drop the gradients of these parameters that FSDP2 keeps to be reduced later."""
        for unit in filter(sharded.has_unreduced, _alive(self._units)):
            sharded.drop_unreduced(unit, set(map(id, parameters)))


def _pre_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Begin a DDP's forward, and note, in a way that Dynamo can trace, whether it will reduce.

    Raises:
        AmpRuntimeError: the DDP is inside `join`, which this session does not support.
    """
    if torch.is_grad_enabled():
        if self._join_config.enable and not self._amp_may_join:
            raise AmpRuntimeError(
                "DistributedDataParallel.join() is not for a session with master weights or a dynamic "
                "loss scale: its last broadcast reaches 16-bit weights and no masters, and the scale "
                "would go on moving on some ranks alone. Give all ranks the same number of batches, "
                "for example by DistributedSampler(..., drop_last=True), or take opt_level='O4'"
            )
        self._amp_reduces = self.require_backward_grad_sync
    return type(self)._pre_forward(self, *args, **kwargs)


def _post_forward(self: Any, output: Any) -> Any:
    """End a DDP's forward, and prepare gradients for its backward."""
    output = type(self)._post_forward(self, output)
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        sessions = active.open_sessions()
        own = [s for s in sessions if any(each is self for each in s.synchronization.own_ddps())]
        hide_in_backward(own, output)
    return output


def _init(original: Callable[..., None], ddp: Any, *args: Any, **kwargs: Any) -> None:
    """Make a DDP, and let sessions know of it."""
    original(ddp, *args, **kwargs)
    for session in active.open_sessions():
        session.synchronization.introduce(ddp)


PATCHES = (
    Patch(
        ("torch.nn.parallel.distributed.DistributedDataParallel",),
        "__init__",
        around(_init),
        "gradients of `no_sync` would be unscaled before they are reduced, and ranks would drift apart",
    ),
)
"""The functions that are patched in a session with masters, a loss scale, or shared FP8 scales."""


def _alive(references: Iterable[weakref.ref[Any]]) -> list[Any]:
    return [found for reference in references if (found := reference()) is not None]
