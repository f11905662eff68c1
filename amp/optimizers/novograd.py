"""NovoGrad, with apex's arguments."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from amp.distributed import reduce_norm
from amp.errors import AmpValueError, brief, truth_of
from amp.kernels.changes import Changes
from amp.lazy import kernels
from amp.optimizers.batches import Batch
from amp.optimizers.fused import FusedOptimizer
from amp.state_checks import as_float


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad: Adam with one second moment for each tensor, the running norm of its gradients.

    Args:
        params: parameters, named parameters or groups of them.
        lr: the rate; each of these may be a number or a tensor of one element, for each group.
        bias_correction: whether moment and norm are corrected for having started at 0.
        betas: how much of the running mean of gradients and of their norm a step keeps.
        eps: added to the norm.
        weight_decay: the weight decay.
        amsgrad: not supported, as in apex.
        reg_inside_moment: whether norm and weight decay act on the gradient before the moment does.
        grad_averaging: whether the moment is a mean, or a sum.
        norm_type: 2 for the Euclidean norm, 0 for the largest magnitude.
        init_zero: whether the running norm starts at 0, or at the first gradient's.
        set_grad_none, maximize, max_grad_norm, state_dtype: see `FusedOptimizer`.
    """

    _ranges = ("lr", "eps", "weight_decay")
    _scalars = ("exp_avg_sq",)
    _goes_by_norms = True
    _required = frozenset({"params", "lr", "betas", "eps", "weight_decay"})

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
        state_dtype: torch.dtype | None = None,
    ) -> None:
        if truth_of("amsgrad", amsgrad):
            raise AmpValueError("FusedNovoGrad has no amsgrad, nor does apex's; leave it out")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"bias_correction": bias_correction, "reg_inside_moment": reg_inside_moment}
        defaults |= {"grad_averaging": grad_averaging, "norm_type": norm_type, "init_zero": init_zero}
        super().__init__(
            params, {**defaults, "maximize": maximize}, set_grad_none, max_grad_norm, state_dtype
        )

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        if as_float(group["norm_type"]) not in (0, 2):
            raise AmpValueError(
                f"norm_type={brief(group['norm_type'])} is not one of 2, the Euclidean norm, and 0, "
                "the largest magnitude"
            )

    def _from_group(self, group: dict[str, Any], state: Mapping[Any, dict[str, Any]]) -> None:
        """Apex keeps the norms in the group: one tensor for float16 parameters, one for the others."""
        norms = group.pop("exp_avg_sq", None)
        if norms is None:
            return
        keys = [key for key in group["params"] if key in state]
        halves = [key for key in keys if _dtype_of(state[key].get("exp_avg")) is torch.float16]
        others = [key for key in keys if key not in set(halves)]
        if not isinstance(norms, (list, tuple)) or len(norms) != 2:
            raise AmpValueError(
                f"a group of the state dict has the norms {brief(norms)}, not 2 tensors"
            )
        for same, values in zip((halves, others), norms, strict=True):
            if _dtype_of(values) is None or values.layout is not torch.strided:
                raise AmpValueError(
                    f"norms of a group of the state dict are {brief(values)}, no tensor"
                )
            if values.dim() != 1 or len(same) != len(values):
                raise AmpValueError(
                    f"a group of the state dict has {values.numel()} norms for {len(same)} parameters"
                )
            for key, value in zip(same, values.unbind(), strict=True):
                state[key]["exp_avg_sq"] = value

    def _rules(self) -> Any:
        return (kernels.novograd.NOVOGRAD,)

    def _of_tensor(
        self,
        batch: Batch,
        grads: Sequence[Tensor],
        factors: Sequence[Tensor],
        found_inf: Tensor | None,
        changes: Changes,
    ) -> Tensor:
        """Return the running norms, as this step moves them."""
        group = self.param_groups[batch.index]
        states = [self.state[parameter] for parameter in batch.stepped]
        norms: Tensor = self._norms(grads, group["norm_type"])
        norms = reduce_norm(norms, batch.cut, is_largest=group["norm_type"] == 0)
        for factor in factors:
            norms = norms * factor.to(norms.device, non_blocking=True)
        steps, known = [
            torch.stack([state[name].to(norms.device, non_blocking=True) for state in states])
            for name in ("step", "exp_avg_sq")
        ]
        beta2: float | Tensor = group["betas"][1]
        if group["norm_type"] == 2:
            blended = (beta2 * known.square() + (1 - beta2) * norms.square()).sqrt()
        else:
            blended = beta2 * known + (1 - beta2) * norms
        if not group["init_zero"]:
            blended = torch.where(steps == 0, norms, blended)
        if found_inf is not None:
            found_inf = found_inf.to(norms.device, non_blocking=True)
            blended = torch.where(found_inf == 0, blended, known)
        running = [state["exp_avg_sq"] for state in states]
        changes.add(functools.partial(torch._foreach_copy_, running, list(blended.unbind())))
        return blended

    def _norms(self, grads: Sequence[Tensor], norm_type: int) -> Tensor:
        if norm_type == 2:
            return kernels.l2norm.l2norm(grads).each  # type: ignore[no-any-return]
        values = list(kernels.tensor_lists.dense(grads))
        return torch.stack([norm.float() for norm in torch._foreach_norm(values, math.inf)])


def _dtype_of(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, Tensor) else None
