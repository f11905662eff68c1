"""Whether the wrappers of a session's models have reduced gradients over the ranks.

Accumulation without communication leaves gradients where they are: DDP's and FSDP's `no_sync`, FSDP2's
`set_requires_gradient_sync(False)`. What is not reduced yet must not be unscaled, because the next
backward reduces it together with its own gradients, at one scale.

DDP decides in its forward whether the backward will reduce, so its forwards are watched. FSDP decides
in the backward, and what it has left is found where FSDP keeps it.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amp import distributed
from amp.casting import sharded
from amp.distributed import ProcessGroup
from amp.errors import AmpRuntimeError
from amp.patching import Patches
from amp.profiles.properties import Properties
from amp.undo import Undo
from amp.weak import members


class Synchronization:
    """What a session knows of its models' wrappers.

    Args:
        properties: what the session's profile resolved to.
        named_parameters: returns the parameters that the session's models have now, with their names.
    """

    def __init__(
        self, properties: Properties, named_parameters: Callable[[], Mapping[Any, Tensor]]
    ) -> None:
        self._named_parameters = named_parameters
        self._has_masters = bool(properties.master_weights)
        self._may_join = not (properties.master_weights or properties.loss_scaling.dynamic)
        self._was_alone = False
        self._units: list[weakref.ref[Any]] = []
        self._fsdp1: list[weakref.ref[Any]] = []
        self._ddps: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        """The DDPs that there are, and whether they wrap these models, or parts of them."""

    def watch(self, models: Iterable[nn.Module], undo: Undo) -> None:
        """Look at the wrappers that models have inside, and at every DDP around them until `undo`."""
        self._was_alone |= distributed.world_size() == 1
        for model in models:
            self._units += map(weakref.ref, sharded.units_of(model))
            self._fsdp1 += map(weakref.ref, sharded.fsdp1_modules(model))
        if self not in _watching:
            _watching.add(self)
            undo.callback(_watching.discard, self)
            patches = Patches()
            undo.always(patches.undo)
            patches.surround(DistributedDataParallel, "__init__", _wrap)
            patches.surround(DistributedDataParallel, "_pre_forward", _begin_forward)

    def lets_join(self, ddp: Any) -> bool:
        """Whether a DDP may be inside `join`, for all that this session is to it.

        Raises:
            AmpRuntimeError: the session does not know of its ranks.
        """
        if ddp not in self._ddps:
            own = set(map(id, self._named_parameters().values()))
            self._ddps[ddp] = not own.isdisjoint(map(id, ddp._module_parameters))
        if not self._ddps[ddp]:
            return True
        if self._has_masters and self._was_alone and distributed.world_size() > 1:
            raise AmpRuntimeError(
                "torch.distributed.init_process_group was called after amp.initialize, which has made "
                "each rank's master weights of its own values; DDP makes only the 16-bit weights "
                "equal. Call init_process_group before amp.initialize"
            )
        return self._may_join

    def are_reduced(self, parameters: Sequence[Tensor]) -> bool:
        """Whether none of a model's parameters has a gradient that is still to be reduced."""
        left = [
            *(
                ddp._module_parameters
                for ddp in self.own_ddps()
                if not getattr(ddp, "_amp_reduces", True)
            ),
            *(
                sharded.parameters_of(unit)
                for unit in _alive(self._units)
                if sharded.has_unreduced(unit)
            ),
            *(module.parameters() for module in _alive(self._fsdp1) if sharded.has_unreduced1(module)),
        ]
        if not left:
            return True
        own = set(map(id, parameters))
        return all(own.isdisjoint(map(id, unreduced)) for unreduced in left)

    def own_ddps(self) -> list[Any]:
        """Return the DDPs around these models that a forward has been called of."""
        return [ddp for ddp, is_ours in self._ddps.items() if is_ours]

    def groups_of_ddps(self) -> list[ProcessGroup]:
        """Return the process groups of the DDPs around these models, whose ranks see different data."""
        return [ddp.process_group for ddp in self.own_ddps()]

    def drop_unreduced(self, parameters: Sequence[Tensor]) -> None:
        """Drop the gradients of these parameters that FSDP2 keeps to be reduced later."""
        for unit in filter(sharded.has_unreduced, _alive(self._units)):
            sharded.drop_unreduced(unit, set(map(id, parameters)))


_watching: weakref.WeakSet[Synchronization] = weakref.WeakSet()


def _wrap(original: Any, ddp: Any, *args: Any, **kwargs: Any) -> None:
    """Make a DDP."""
    original(ddp, *args, **kwargs)
    _introduce(ddp)


def _introduce(ddp: Any) -> None:
    """Note in a DDP what the sessions that are open make of it."""
    answers = [session.lets_join(ddp) for session in members(_watching)]
    ddp._amp_may_join = all(answers)
    ddp._amp_reduces = getattr(ddp, "_amp_reduces", True)


def _begin_forward(original: Any, ddp: Any, *args: Any, **kwargs: Any) -> Any:
    """Begin a DDP's forward, and note in the DDP, as Dynamo can, whether it reduces the gradients.

    Raises:
        AmpRuntimeError: the DDP is inside `join`, and a session cannot follow that.
    """
    if torch.is_grad_enabled():
        if not torch.compiler.is_compiling():
            _introduce(ddp)
        if ddp._join_config.enable and not getattr(ddp, "_amp_may_join", True):
            raise AmpRuntimeError(
                "DistributedDataParallel.join() is not for a session with master weights or a dynamic "
                "loss scale: its last broadcast reaches 16-bit weights and no masters, and the scale "
                "would go on moving on some ranks alone. Give all ranks the same number of batches, "
                "for example by DistributedSampler(..., drop_last=True), or take opt_level='O4'"
            )
        ddp._amp_reduces = ddp.require_backward_grad_sync
    return original(ddp, *args, **kwargs)


def _alive(references: Iterable[weakref.ref[Any]]) -> list[Any]:
    return [found for reference in references if (found := reference()) is not None]
