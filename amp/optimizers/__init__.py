"""Fused optimizers, which do a whole step in one kernel launch: unscale, clip, skip, update."""

from amp.optimizers.adagrad import FusedAdagrad
from amp.optimizers.adam import FusedAdam
from amp.optimizers.lamb import FusedLAMB
from amp.optimizers.lion import FusedLion
from amp.optimizers.novograd import FusedNovoGrad
from amp.optimizers.sgd import FusedSGD

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedLion", "FusedNovoGrad", "FusedSGD"]
