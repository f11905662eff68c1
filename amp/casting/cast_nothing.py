"""The strategy of levels at which functions cast nothing, whatever other sessions are open."""

from __future__ import annotations

import torch
from torch import nn

from amp.casting import current
from amp.casting.strategy import Strategy
from amp.casting.weight_casts import forwards
from amp.profiles.properties import Properties
from amp.undo import Undo


class CastNoOps(Strategy):
    """A thread that calls the session's models casts nothing, until it calls another session's."""

    def __init__(self, properties: Properties) -> None:
        super().__init__(properties)
        self._bystander: current.Bystander | None = None

    @staticmethod
    def is_asked_for(properties: Properties) -> bool:
        """Whether a profile leaves functions alone."""
        return properties.enabled and not properties.patch_torch_functions

    def begin(self, undo: Undo) -> None:
        """Let the session be known, once."""
        if self._bystander is None:
            undo.if_it_fails.append(self._begin_anew)
            undo.callback(self.stop)
            self._bystander = current.stand_by()

    def _begin_anew(self) -> None:
        self._bystander = None

    def prepare_model(self, model: nn.Module, undo: Undo) -> None:
        """Let a thread that calls the model cast nothing."""
        assert self._bystander is not None
        undo.callback(model.register_forward_pre_hook(_CallModel(self._bystander), prepend=True).remove)

    def stop(self) -> None:
        """Let threads cast as other sessions say. Idempotent."""
        if self._bystander is not None:
            current.stand_aside(self._bystander)


class _CallModel:
    """A forward pre-hook of a model of a session that casts no functions. A copy's does nothing."""

    def __init__(self, bystander: current.Bystander | None = None) -> None:
        self._bystander = bystander

    def __call__(self, module: nn.Module, args: object) -> None:
        bystander = self._bystander
        if torch.compiler.is_compiling() or bystander is None or not bystander.live:
            return
        if not forwards.is_in_one():
            current.call_model_of(bystander)

    def __deepcopy__(self, memo: object) -> _CallModel:
        return _CallModel()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (_CallModel, ())
