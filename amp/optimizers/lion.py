"""FusedLion: Lion, with the defaults of its paper."""

from typing import Any

from torch import Tensor

from amp.lazy import kernels
from amp.optimizers.fused import FusedOptimizer
from amp.profiles.properties import StateDtype


class FusedLion(FusedOptimizer):
    """Lion, with the defaults of its paper.

    See `amp.kernels.lion` for the formula. Its moment, `exp_avg`, has the dtype of the parameters.

    Args:
        params: parameters, named parameters or groups of them.
        lr: the learning rate; a third to a tenth of AdamW's.
        betas: the decay rates of the mean, for the step's direction and for the stored mean.
        weight_decay: decoupled, as in AdamW; three to ten times AdamW's.
        set_grad_none, maximize, max_grad_norm, state_dtype: see `FusedOptimizer`.
    """

    _ranges = ("lr", "weight_decay")
    _required = ("lr", "betas", "weight_decay")
    _uncounted_steps = 0  # the formula does not use them, and other Lions do not count

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float | Tensor = 0.0,
        set_grad_none: bool = True,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        state_dtype: StateDtype | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, set_grad_none, max_grad_norm, state_dtype)

    def _rule(self, group: Any = None) -> Any:
        return kernels.lion.LION
