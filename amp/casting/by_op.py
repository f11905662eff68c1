"""The strategy by which torch's functions cast their arguments, op by op."""

from __future__ import annotations

from torch import nn

from amp.casting.module_rules import restore_classes, run_in_float32
from amp.casting.op_caster import OpCaster
from amp.casting.policy import policy_of
from amp.casting.regions import DEVICE_TYPES, casts
from amp.casting.registry import registered
from amp.casting.strategy import Strategy, Undo
from amp.profiles.properties import Properties


class CastOps(Strategy):
    """Functions cast their arguments, for as long as the session is open."""

    def __init__(self, properties: Properties) -> None:
        super().__init__(properties)
        self._policy = policy_of(properties)
        self._caster: OpCaster | None = None

    @staticmethod
    def is_asked_for(properties: Properties) -> bool:
        """Whether a profile casts functions."""
        return properties.patch_torch_functions

    def begin(self, undo: Undo) -> None:
        """Patch the functions, once in a session."""
        if self._caster is None:
            caster = OpCaster(self._policy)
            undo.callback(caster.close)
            caster.install(registered())
            self._caster = caster

    def prepare_model(self, model: nn.Module, undo: Undo) -> None:
        """Let the model's forwards run in autocast regions, and modules under a rule in FP32."""
        assert self._caster is not None
        for handle in self._caster.watch(model):
            undo.callback(handle.remove)
        chosen = run_in_float32(model, self.properties.rules, self._caster)
        undo.callback(restore_classes, chosen)

    @property
    def casts_ops(self) -> bool:
        """Whether functions cast their arguments, here and now."""
        return self._caster is not None and any(casts(self._caster, kind) for kind in DEVICE_TYPES)

    def stop(self) -> None:
        """Give torch its functions back."""
        if self._caster is not None:
            self._caster.close()
