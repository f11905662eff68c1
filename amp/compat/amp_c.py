"""The functions of `amp_C` and `apex.multi_tensor_apply`, on this library's kernels.

Every function takes apex's arguments: a chunk size, which has no effect; a flag, int32 `[1]`, that is
set if a value is inf or NaN, and with which optimizer steps are skipped; and lists of tensors. The host
does not wait for the device on GPUs with Triton.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from amp.lazy import kernels
from amp.profiles.keys import SMALLEST_SCALE
from amp.training.recorder import FOUND_INF, GOOD_STEPS, HYSTERESIS, SCALE, STATE_SIZE

Lists = Sequence[Sequence[Tensor]]


class MultiTensorApply:
    """Calls a function of this module. In apex this divides the lists into chunks.

    Args:
        chunk_size: passed to the function, where it has no effect.

    Attributes:
        available: True.
    """

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Do nothing: the functions are always available."""

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Lists, *args: Any
    ) -> Any:
        """Call `op` on the lists, and return its result."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)


def multi_tensor_scale(chunk_size: int, flag: Tensor, lists: Lists, scale: float | Tensor) -> None:
    """Write `lists[0] * scale` to `lists[1]`."""
    found_inf = torch.zeros_like(flag, dtype=torch.float32)
    kernels.unscale.unscale(lists[0], lists[1], _one(scale, flag), found_inf)
    _raise_flag(flag, found_inf)


def multi_tensor_axpby(
    chunk_size: int, flag: Tensor, lists: Lists, a: float, b: float, arg_to_check: int
) -> None:
    """Write `a * lists[0] + b * lists[1]` to `lists[2]`, and check inputs for inf and NaN.

    `arg_to_check` is 0 to check `lists[0]`, 1 to check `lists[1]`, and else, such as -1, to check both.
    """
    found_inf = torch.zeros_like(flag, dtype=torch.float32)
    x, y, out = lists
    if arg_to_check == 1:
        a, x, b, y = b, y, a, x
    elif arg_to_check != 0:
        kernels.unscale.check(y, _one(b, flag), found_inf)  # now: out may be y itself
    kernels.axpby.axpby(a, x, b, y, out, found_inf)
    _raise_flag(flag, found_inf)


def multi_tensor_l2norm(
    chunk_size: int, flag: Tensor, lists: Lists, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the norm of all tensors, float32 `[1]`, and of each, `[n]`; `[0]` if not `per_tensor`."""
    return multi_tensor_unscale_l2norm(chunk_size, flag, lists, None, per_tensor)


def multi_tensor_unscale_l2norm(
    chunk_size: int, flag: Tensor, lists: Lists, inv_scale: Tensor | None, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the norms of `lists[0] * inv_scale`, like `multi_tensor_l2norm`."""
    found_inf = torch.zeros_like(flag, dtype=torch.float32)
    inv_scale = None if inv_scale is None else _one(inv_scale, flag)
    norms = kernels.l2norm.l2norm(lists[0], inv_scale, found_inf=found_inf)
    _raise_flag(flag, found_inf)
    return norms.total, norms.each if per_tensor else norms.each[:0]


def multi_tensor_adam(
    chunk_size: int,
    flag: Tensor,
    lists: Lists,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Update parameters by Adam.

    Args:
        chunk_size: has no effect.
        flag: if it is not 0, the step is skipped.
        lists: gradients, parameters, first moments and second moments.
        lr: the learning rate.
        beta1: the decay rate of the first moment.
        beta2: the decay rate of the second moment.
        eps: added to the denominator.
        step: the number of this step, from 1.
        mode: 0 adds weight decay to the gradient, 1 decouples it as in AdamW.
        bias_correction: whether to correct the bias of the moments.
        weight_decay: the weight decay.
    """
    group = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
    group |= {"decoupled_weight_decay": mode == 1, "bias_correction": bias_correction}
    _step(kernels.adam.ADAM, group, flag, lists, step)


def multi_tensor_lamb(
    chunk_size: int,
    flag: Tensor,
    lists: Lists,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: float,
    use_nvlamb: bool = False,
) -> None:
    """Update parameters by LAMB, clipping by a given gradient norm; see `multi_tensor_adam`."""
    group = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
    group |= {"adam_w_mode": mode == 1, "bias_correction": bias_correction}
    group |= {"grad_averaging": grad_averaging, "use_nvlamb": use_nvlamb}
    clip = (max_grad_norm / _one(global_grad_norm, flag)).clamp(max=1.0) if max_grad_norm else None
    _step(kernels.lamb.LAMB, group, flag, lists, step, clip=clip)


def multi_tensor_sgd(
    chunk_size: int,
    flag: Tensor,
    lists: Lists,
    weight_decay: float,
    momentum: float,
    dampening: float,
    lr: float | Tensor,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float = 1.0,
) -> None:
    """Update parameters by SGD with momentum.

    Args:
        chunk_size: has no effect.
        flag: if it is not 0, the step is skipped.
        lists: gradients, parameters, momentum buffers, and optionally 16-bit model weights to write.
        weight_decay: the weight decay.
        momentum: the momentum factor.
        dampening: the dampening of the momentum.
        lr: the learning rate.
        nesterov: whether to use Nesterov momentum.
        first_run: whether the momentum buffers start with these gradients.
        wd_after_momentum: whether weight decay is applied after the momentum, and not in it.
        scale: the number that gradients are multiplied by.
    """
    group = {"lr": lr, "momentum": momentum, "dampening": dampening, "nesterov": nesterov}
    group |= {"weight_decay": weight_decay, "wd_after_momentum": wd_after_momentum}
    options = {"models": lists[3] if len(lists) > 3 else None, "inv_scale": _one(scale, flag)}
    if first_run:
        torch._foreach_zero_(list(lists[2]))  # apex gives new memory, in which anything may be
    _step(kernels.sgd.MOMENTUM_SGD, group, flag, lists[:3], 1 if first_run else 2, **options)


def update_scale_hysteresis(
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """Update a scale and its counters in place, each a tensor of one element, and return the scale.

    As in apex, the scale does not grow to inf, and falls to 0 instead of a subnormal number.
    """
    parts = {SCALE: current_scale, GOOD_STEPS: growth_tracker, HYSTERESIS: hysteresis_tracker}
    state = torch.zeros(STATE_SIZE, dtype=torch.float32, device=current_scale.device)
    for at, part in {**parts, FOUND_INF: found_inf}.items():
        state[at].copy_(part.reshape(()))
    kernels.update_scale.update_scale(
        state,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        hysteresis=hysteresis,
        reset_each_step=True,
        floor=0.0,
        ceiling=math.inf,
    )
    scale = state[SCALE]
    scale.copy_(torch.where(scale.isinf(), current_scale.reshape(()), scale))
    scale.mul_(scale >= SMALLEST_SCALE)
    for at, part in parts.items():
        part.copy_(state[at].reshape(part.shape))
    return current_scale


def _step(
    rule: Any, group: Mapping[str, Any], flag: Tensor, lists: Lists, t: int, **options: Any
) -> None:
    grads, params, *moments = lists
    counters = torch.full((len(params),), t - 1.0, dtype=torch.float32, device=params[0].device)
    state = (params, grads, moments, counters.unbind())
    kernels.stepping.step(
        rule, rule.numbers(group), *state, found_inf=flag.reshape(1).float(), **options
    )


def _one(value: float | Tensor, like: Tensor) -> Tensor:
    """Return a number or tensor as float32 `[1]`; a number goes to the device of `like`."""
    if isinstance(value, Tensor):
        return value.reshape(1).float()
    return torch.full((1,), value, dtype=torch.float32, device=like.device)


def _raise_flag(flag: Tensor, found_inf: Tensor) -> None:
    """Set the flag if an inf or NaN was found; never clear it."""
    flag.copy_(torch.maximum(flag, found_inf.to(flag.dtype)))
