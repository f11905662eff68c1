"""FusedLAMB: LAMB, and NVIDIA's variant of it, with apex's arguments."""

from typing import Any

from torch import Tensor

from amp.errors import AmpValueError, truth_of
from amp.lazy import kernels
from amp.optimizers.fused import FusedOptimizer
from amp.profiles.properties import StateDtype


class FusedLAMB(FusedOptimizer):
    """LAMB: Adam whose step is scaled by the norm of the parameter, tensor by tensor.

    Args:
        params: parameters, named parameters or groups of them.
        lr: the learning rate; like betas, eps and weight_decay, a number or a tensor of one element.
        bias_correction: whether the moments are corrected for having started at 0.
        betas: the decay rates of the running means of gradients and of their squares.
        eps: added to the square root of the second moment.
        weight_decay: the weight decay.
        amsgrad: not supported, as in apex.
        adam_w_mode: whether the weight decay is decoupled.
        grad_averaging: whether the first moment is a mean of gradients, or a sum.
        use_nvlamb: whether norms scale the step without weight decay too.
        set_grad_none, maximize, max_grad_norm, state_dtype: see `FusedOptimizer`.
    """

    _goes_by_norms = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | Tensor = 1e-6,
        weight_decay: float | Tensor = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        *,
        maximize: bool = False,
        state_dtype: StateDtype | None = None,
    ) -> None:
        if truth_of("amsgrad", amsgrad):
            raise AmpValueError("FusedLAMB has no amsgrad, nor does the paper; leave it out")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"bias_correction": bias_correction, "adam_w_mode": adam_w_mode}
        defaults |= {"grad_averaging": grad_averaging, "use_nvlamb": use_nvlamb, "maximize": maximize}
        super().__init__(params, defaults, set_grad_none, max_grad_norm, state_dtype)

    def _rule(self, group: Any = None) -> Any:
        return kernels.lamb.LAMB
