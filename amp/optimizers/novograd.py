"""FusedNovoGrad: NovoGrad, with apex's arguments."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from amp.distributed import reduce_norm
from amp.errors import AmpValueError, brief, truth_of
from amp.lazy import kernels
from amp.optimizers.fused import FusedOptimizer
from amp.optimizers.fused_step import Ready
from amp.profiles.properties import StateDtype
from amp.state_checks import as_float
from amp.training.step_inputs import StepInputs


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad: Adam with one second moment for each tensor, the running norm of its gradients.

    Args:
        params: parameters, named parameters or groups of them.
        lr: the learning rate; like betas, eps and weight_decay, a number or a tensor of one element.
        bias_correction: whether moment and norm are corrected for having started at 0.
        betas: the decay rates of the running mean of gradients and of their running norm.
        eps: added to the norm.
        weight_decay: the weight decay.
        amsgrad: not supported, as in apex.
        reg_inside_moment: whether the gradient is divided by the norm, and weight decay added to it,
            before it enters the moment.
        grad_averaging: whether the moment is a mean, or a sum.
        norm_type: 2 for the Euclidean norm, 0 for the largest magnitude.
        init_zero: whether the running norm starts at 0, or at the first gradient's norm.
        set_grad_none, maximize, max_grad_norm, state_dtype: see `FusedOptimizer`.
    """

    _scalars = ("exp_avg_sq",)
    _goes_by_norms = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | Tensor = 1e-8,
        weight_decay: float | Tensor = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        state_dtype: StateDtype | None = None,
    ) -> None:
        if truth_of("amsgrad", amsgrad):
            raise AmpValueError("FusedNovoGrad has no amsgrad, nor does apex's; leave it out")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"bias_correction": bias_correction, "reg_inside_moment": reg_inside_moment}
        defaults |= {"grad_averaging": grad_averaging, "norm_type": norm_type, "init_zero": init_zero}
        defaults |= {"maximize": maximize}
        super().__init__(params, defaults, set_grad_none, max_grad_norm, state_dtype)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        if as_float(group["norm_type"]) not in (0, 2):
            raise AmpValueError(
                f"norm_type={brief(group['norm_type'])} is not one of 2, the Euclidean norm, and 0, "
                "the largest magnitude"
            )

    def _from_group(self, group: dict[str, Any], state: Mapping[Any, dict[str, Any]]) -> None:
        """Move the norms from apex's group: one tensor for float16 parameters, one for the others."""
        norms = group.pop("exp_avg_sq", None)
        if norms is None:
            return
        keys = [key for key in group["params"] if key in state]
        halves = [k for k in keys if getattr(state[k].get("exp_avg"), "dtype", None) is torch.float16]
        others = [key for key in keys if key not in set(halves)]
        are_two = isinstance(norms, (list, tuple)) and len(norms) == 2
        if not are_two or not all(isinstance(x, Tensor) and x.layout is torch.strided for x in norms):
            raise AmpValueError(
                f"a group of the state dict has the norms {brief(norms)}, not 2 tensors"
            )
        for same, values in zip((halves, others), norms, strict=True):
            if values.dim() != 1 or len(same) != len(values):
                raise AmpValueError(
                    f"a group of the state dict has {values.numel()} norms for {len(same)} parameters"
                )
            for key, value in zip(same, values.unbind(), strict=True):
                state[key]["exp_avg_sq"] = value

    def _rule(self, group: Any = None) -> Any:
        return kernels.novograd.NOVOGRAD

    def _of_tensor(self, one: Ready, clip: Tensor | None, inputs: StepInputs) -> Tensor:
        """Return the running norms after this step, and plan to store them."""
        group, grads = self.param_groups[one.batch.index], one.lists["grads"]
        states = [self.state[parameter] for parameter in one.batch.stepped]
        is_largest = group["norm_type"] == 0
        if is_largest:
            norms = torch.stack(torch._foreach_norm(list(grads), math.inf)).float()
        else:
            norms = kernels.l2norm.l2norm(grads).each
        norms = reduce_norm(norms, one.batch.cut, is_largest=is_largest)
        for factor in (one.inv_scale, clip):
            if factor is not None:
                norms = norms * factor.to(norms.device, non_blocking=True)
        steps, known = [
            torch.stack([state[name].to(norms.device, non_blocking=True) for state in states])
            for name in ("step", "exp_avg_sq")
        ]
        beta2: float | Tensor = group["betas"][1]
        if is_largest:
            blended = beta2 * known + (1 - beta2) * norms
        else:
            blended = (beta2 * known.square() + (1 - beta2) * norms.square()).sqrt()
        if not group["init_zero"]:
            blended = torch.where(steps == 0, norms, blended)
        if inputs.found_inf is not None:
            found_inf = inputs.found_inf.to(norms.device, non_blocking=True)
            blended = torch.where(found_inf == 0, blended, known)
        running = [state["exp_avg_sq"] for state in states]
        inputs.changes.add(functools.partial(torch._foreach_copy_, running, list(blended.unbind())))
        return blended
