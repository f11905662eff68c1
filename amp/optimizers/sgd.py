"""FusedSGD: SGD, with momentum or without, with apex's arguments."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from amp.errors import AmpTypeError, AmpValueError
from amp.lazy import kernels
from amp.optimizers.fused import FusedOptimizer
from amp.profiles.properties import StateDtype


class FusedSGD(FusedOptimizer):
    """Stochastic gradient descent, with apex's arguments and defaults, but for `set_grad_none`.

    The formula is that of `torch.optim.SGD`, whose state dicts it loads and saves; see
    `amp.kernels.sgd`. The momentum has the dtype of the parameters.

    Args:
        params: parameters, named parameters or groups of them.
        lr: the learning rate, required unless each group has one.
        momentum: the decay rate of the momentum; 0 keeps none.
        dampening: the fraction of a gradient that does not enter the momentum.
        weight_decay: the fraction of the parameter that is added to the gradient.
        nesterov: whether to look ahead; needs a momentum and no dampening.
        wd_after_momentum: whether weight decay is added after the momentum, and stays out of it.
        materialize_master_grads: accepted as in apex, without effect.
        set_grad_none, maximize, max_grad_norm, state_dtype: see `FusedOptimizer`.

    Raises:
        AmpTypeError: there is no `lr` for a group.
    """

    _ranges = ("lr", "momentum", "dampening", "weight_decay")
    _required = ("lr", "momentum", "dampening", "nesterov", "weight_decay")
    _uncounted_steps = 1  # torch's counts none, and its first step makes the momentum

    def __init__(
        self,
        params: Any,
        lr: float | Tensor | None = None,
        momentum: float | Tensor = 0.0,
        dampening: float | Tensor = 0.0,
        weight_decay: float | Tensor = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = True,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        state_dtype: StateDtype | None = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        defaults |= {"weight_decay": weight_decay, "wd_after_momentum": wd_after_momentum}
        defaults |= {"maximize": maximize, "foreach": None, "differentiable": False}
        super().__init__(params, defaults, set_grad_none, max_grad_norm, state_dtype)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        if group["lr"] is None:
            raise AmpTypeError("FusedSGD needs a learning rate: FusedSGD(params, lr=0.1)")
        super()._check_group(group)
        dampening = group["dampening"]
        if not isinstance(dampening, Tensor) and dampening > 1:
            raise AmpValueError(f"dampening={dampening:g} must be at most 1")
        if group["nesterov"] and (_is_zero(group["momentum"]) or not _is_zero(dampening)):
            raise AmpValueError(
                f"nesterov=True with momentum={group['momentum']} and dampening={group['dampening']}: "
                "it needs a momentum above 0 and a dampening of 0"
            )

    def _rule(self, group: Any = None) -> Any:
        without_momentum = group is not None and _is_zero(group["momentum"])
        return kernels.sgd.SGD if without_momentum else kernels.sgd.MOMENTUM_SGD


def _is_zero(value: float | Tensor) -> bool:
    """Whether a number is 0; False for a tensor, whose value the host would wait for."""
    return not isinstance(value, Tensor) and value == 0
