"""The names of `apex.optimizers` and `apex.contrib.optimizers`."""

from amp.fp16_utils import FP16_Optimizer
from amp.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

__all__ = ["FP16_Optimizer", "FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"]
