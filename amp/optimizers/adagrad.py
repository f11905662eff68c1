"""FusedAdagrad: Adagrad, with apex's arguments."""

from typing import Any

from torch import Tensor

from amp.lazy import kernels
from amp.optimizers.fused import FusedOptimizer
from amp.profiles.properties import StateDtype


class FusedAdagrad(FusedOptimizer):
    """Adagrad, with apex's arguments and defaults.

    The formula is that of `torch.optim.Adagrad`, whose state dicts it loads and saves; see
    `amp.kernels.adagrad`. The sum of squares has the dtype of the parameters.

    Args:
        params: parameters, named parameters or groups of them.
        lr: the learning rate.
        eps: added to the square root of the sum.
        weight_decay: the weight decay.
        adagrad_w_mode: whether the weight decay is decoupled, as in AdamW.
        lr_decay: the rate at step t is `lr / (1 + (t - 1) * lr_decay)`.
        initial_accumulator_value: the initial value of the sum.
        set_grad_none, maximize, max_grad_norm, state_dtype: see `FusedOptimizer`.
    """

    _ranges = ("lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value")
    _required = ("lr", "eps", "weight_decay")
    _uncounted_steps = 0  # apex's counts none: it has no lr_decay

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        eps: float | Tensor = 1e-10,
        weight_decay: float | Tensor = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
        *,
        lr_decay: float | Tensor = 0.0,
        initial_accumulator_value: float = 0.0,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        state_dtype: StateDtype | None = None,
    ) -> None:
        defaults: dict[str, Any] = {"lr": lr, "lr_decay": lr_decay}
        defaults |= {"eps": eps, "weight_decay": weight_decay}
        defaults |= {"initial_accumulator_value": initial_accumulator_value, "maximize": maximize}
        defaults |= {"adagrad_w_mode": adagrad_w_mode, "foreach": None, "differentiable": False}
        super().__init__(params, defaults, set_grad_none, max_grad_norm, state_dtype)

    def _rule(self, group: Any = None) -> Any:
        return kernels.adagrad.ADAGRAD
