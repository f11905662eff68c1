"""Whether a wrapper of a model reduces gradients over the ranks in a backward.

Accumulation without communication leaves gradients where they are: DDP's and FSDP's `no_sync`, FSDP2's
`set_requires_gradient_sync(False)`. What is not reduced yet must not be unscaled, because the next
backward reduces it together with its own gradients, at one scale.
"""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from amp import distributed
from amp.casting import sharded
from amp.errors import AmpRuntimeError
from amp.profiles.properties import Properties


class Watch:
    """A forward pre-hook on a model, which looks at the DDP that the forward runs in.

    DDP decides in the forward whether the backward will reduce. FSDP decides in the backward.

    Args:
        model: the model, as FSDP has wrapped it.
        may_join: whether ranks may run out of data one by one, under `DistributedDataParallel.join`.
    """

    def __init__(self, model: nn.Module, may_join: bool) -> None:
        self._may_join = may_join
        self._ddp_reduces = True
        self._fsdp1 = sharded.fsdp1_modules(model)
        self._units = sharded.units_of(model)

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Note whether the forward's gradients will be reduced by DDP.

        Raises:
            AmpRuntimeError: DDP is inside `join`, and the session cannot follow that.
        """
        if not torch.is_grad_enabled():
            return
        ddp: Any = DistributedDataParallel._active_ddp_module
        self._ddp_reduces = ddp is None or ddp.require_backward_grad_sync
        if ddp is not None and ddp._join_config.enable and not self._may_join:
            raise AmpRuntimeError(
                "DistributedDataParallel.join() is not for a session with master weights or a dynamic "
                "loss scale: its last broadcast reaches 16-bit weights and no masters, and the scale "
                "would go on moving on some ranks alone. Give all ranks the same number of batches, "
                "for example by DistributedSampler(..., drop_last=True), or take opt_level='O4'"
            )

    @property
    def reduces(self) -> bool:
        """Whether the gradients of the last backward were reduced."""
        return (
            self._ddp_reduces
            and all(module._sync_gradients for module in self._fsdp1)
            and all(map(sharded.reduces, self._units))
        )


class Synchronization:
    """The watches on a session's models."""

    def __init__(self) -> None:
        self._watches: list[weakref.ref[Watch]] = []

    def watch(self, models: Iterable[nn.Module], properties: Properties) -> Iterator[RemovableHandle]:
        """Watch more models, where there are other ranks. A watch belongs to its model."""
        may_join = not (properties.master_weights or properties.loss_scaling.dynamic)
        for model in models if distributed.world_size() > 1 else ():
            watch = Watch(model, may_join)
            self._watches.append(weakref.ref(watch))
            yield model.register_forward_pre_hook(watch, prepend=True)

    def is_off(self) -> bool:
        """Whether the last backward of one of the models has left its gradients unreduced."""
        watches = [reference() for reference in self._watches]
        return any(watch is not None and not watch.reduces for watch in watches)
