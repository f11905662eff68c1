"""Where Lightning writes to parameters in ways that masters do not see, until `Patches.undo`.

`toggle_optimizer` freezes what is in the optimizers' groups, which are masters. `WeightAveraging`
exchanges weights and averages through `.data`, which leaves no trace and would round the averages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn

from amp.dtypes import LOW_PRECISION
from amp.masters.master_values import put_values, values_of
from amp.patching import Patches
from amp.training.attachment import AttachedOptimizer


def patch_for_masters(module: Any, optimizers: Sequence[Any]) -> Patches:
    """Let a Trainer's module and callbacks reach the masters.

    Args:
        module: the LightningModule, whose Trainer has the callbacks.
        optimizers: that train it.
    """
    patches = Patches()
    for name in ("toggle_optimizer", "untoggle_optimizer"):
        patches.surround(module, name, partial(_toggle, optimizers))
    for callback in module.trainer.callbacks:
        for name, function in (("_swap_models", _swap), ("_copy_average_to_current", _copy)):
            if hasattr(callback, name):
                patches.surround(callback, name, partial(function, callback))
    return patches


def _toggle(optimizers: Sequence[Any], original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Freeze and unfreeze the weights as Lightning does it with their masters."""
    original(*args, **kwargs)
    for optimizer in optimizers:
        attached = AttachedOptimizer.of(optimizer)
        lists = None if attached is None else attached.gradients.look_at_groups()
        for master, model in () if lists is None else zip(lists.masters, lists.models, strict=True):
            model.requires_grad_(master.requires_grad)


def _pairs(callback: Any, module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the tensors of the average and of the model."""
    average = callback._average_model.module
    return zip(
        chain(average.parameters(), average.buffers()),
        chain(module.parameters(), module.buffers()),
        strict=True,
    )


def _swap(callback: Any, original: Callable[..., Any], module: nn.Module) -> None:
    for average, current in _pairs(callback, module):
        before = average.detach().clone()
        is_narrow = current.dtype in LOW_PRECISION
        average.data.copy_(values_of(current) if is_narrow else current.detach())
        put_values(current, before)


def _copy(callback: Any, original: Callable[..., Any], module: nn.Module) -> None:
    for average, current in _pairs(callback, module):
        put_values(current, average.detach())
