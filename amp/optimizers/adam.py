"""FusedAdam: Adam and AdamW."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from amp.errors import AmpValueError, truth_of
from amp.lazy import kernels
from amp.optimizers.fused import FusedOptimizer
from amp.profiles.properties import StateDtype


class FusedAdam(FusedOptimizer):
    """Adam, or AdamW, with apex's arguments and defaults.

    The formula is that of `torch.optim.Adam` and `AdamW`, whose state dicts it loads and saves; see
    `amp.kernels.adam`. Moments have the dtype of the parameters.

    Args:
        params: parameters, named parameters or groups of them.
        lr: the learning rate; a tensor on the device can change in a replayed CUDA graph.
        bias_correction: whether the moments are corrected for having started at 0.
        betas: the decay rates of the two moments.
        eps: added to the square root of the second moment.
        adam_w_mode: whether the weight decay is decoupled, as in AdamW, or added to the gradient.
        weight_decay: the weight decay.
        amsgrad: must be False, as in apex.
        capturable: accepted as in apex, without effect: where Triton runs, every step can be captured.
        master_weights: must be False: `amp.initialize` makes masters.
        set_grad_none, maximize, max_grad_norm, state_dtype: see `FusedOptimizer`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | Tensor = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float | Tensor = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        state_dtype: StateDtype | None = None,
    ) -> None:
        if truth_of("master_weights", master_weights):
            raise AmpValueError(
                "FusedAdam(master_weights=True): FP32 masters come from amp.initialize(model, "
                "optimizer, opt_level='O2'), or 'O5' for bfloat16. Leave the argument out"
            )
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"bias_correction": bias_correction, "amsgrad": amsgrad, "maximize": maximize}
        # torch.optim.AdamW's names, for settings that are the same in every group here
        defaults |= {"decoupled_weight_decay": truth_of("adam_w_mode", adam_w_mode)}
        defaults |= {"capturable": capturable, "foreach": None, "differentiable": False}
        super().__init__(params, defaults, set_grad_none, max_grad_norm, state_dtype)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        if group["amsgrad"]:
            raise AmpValueError(
                "FusedAdam does not support amsgrad=True: use torch.optim.Adam(..., amsgrad=True)"
            )

    def _rule(self, group: Any = None) -> Any:
        is_decoupled = group is not None and group["decoupled_weight_decay"]
        return kernels.adam.ADAMW if is_decoupled else kernels.adam.ADAM
