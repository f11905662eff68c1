"""FP32 master weights: what stands in an optimizer for a 16-bit parameter of the model."""

from __future__ import annotations

from amp.masters.lean import LeanMasterWeights
from amp.masters.whole import MasterWeights
from amp.profiles.properties import LeanMasters


def make_masters(kind: bool | LeanMasters | None) -> MasterWeights:
    """Return the masters that `master_weights` in a profile asks for."""
    if kind is None or isinstance(kind, bool):
        return MasterWeights()
    return LeanMasterWeights(kind)
