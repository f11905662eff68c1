"""A hook before the steps of all optimizers, which finds one that `initialize` was not given."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from amp.dtypes import LOW_PRECISION
from amp.errors import warn
from amp.training.wrapped_optimizers import innermost


class Unattached:
    """Warns once of each optimizer that steps 16-bit weights of the models, which should have masters.

    Optimizers of a session hold the masters instead. Of a wrapper, the one inside it is looked at.

    There is one hook for all sessions. Only `forget` removes it: the garbage collector, which may run
    while torch calls its hooks, must not change them.
    """

    def __init__(self) -> None:
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._hook: RemovableHandle | None = None

    def watch(self, models: Iterable[nn.Module]) -> None:
        """Warn of optimizers that step weights of these models too."""
        self._models.update(models)
        self._known.clear()
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self)

    def forget(self, models: Iterable[nn.Module]) -> None:
        """Warn no longer of these models, because their session has closed."""
        self._models.difference_update(models)
        if self._hook is not None and not self._models:
            self._hook.remove()
            self._hook = None

    def __call__(self, optimizer: Any, *_: object) -> None:
        """Look at an optimizer that is about to step for the first time."""
        if torch.compiler.is_compiling() or optimizer in self._known:
            return
        self._known.add(optimizer)
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        half = (p for model in self._models for p in model.parameters() if p.dtype in LOW_PRECISION)
        if innermost(optimizer) is optimizer and any(id(parameter) in stepped for parameter in half):
            warn(
                f"{type(optimizer).__name__} has 16-bit weights of a model of amp.initialize and no "
                "FP32 masters: small updates are lost, and its gradients are not unscaled. Pass it to "
                "amp.initialize together with the model, or now to "
                "amp.get_session().initialize([], optimizer). To step 16-bit weights, pass "
                "master_weights=False"
            )


unattached = Unattached()
