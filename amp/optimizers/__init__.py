"""Fused optimizers, which do a whole step in one kernel launch: unscale, clip, skip, update."""

import sys
from typing import TYPE_CHECKING, NoReturn

from amp.optimizers.adagrad import FusedAdagrad
from amp.optimizers.adam import FusedAdam
from amp.optimizers.lamb import FusedLAMB
from amp.optimizers.lion import FusedLion
from amp.optimizers.novograd import FusedNovoGrad
from amp.optimizers.sgd import FusedSGD
from amp.other_names import no_such_name

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedLion", "FusedNovoGrad", "FusedSGD"]

if not TYPE_CHECKING:  # type checkers would take it for a module that has every name

    def __getattr__(name: str) -> NoReturn:
        """Raise AttributeError, or ImportError, whose message says which names there are."""
        hint = "" if name.startswith("_") else f"; it has {', '.join(__all__)}"
        if "adam" in name.lower():
            hint = "; FusedAdam is AdamW by default, and Adam with adam_w_mode=False"
        raise no_such_name(__name__, __file__, name, hint, sys._getframe(1))
