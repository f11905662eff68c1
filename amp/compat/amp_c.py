"""What `amp_C` and `apex.multi_tensor_apply` had: apex's list kernels, by way of this library's.

Every function takes apex's arguments: a chunk size, which is not looked at; a flag, int32 `[1]`, that
is set where something is inf or NaN, and that makes optimizer steps skip; and lists of tensors. The
host does not wait for the device on GPUs with Triton.
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
    """Calls a function of this module; apex cut its lists into chunks here.

    Args:
        chunk_size: passed on.

    Attributes:
        available: True.
    """

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Do nothing: the functions are here."""

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Lists, *args: Any
    ) -> Any:
        """Return what `op` does with the lists."""
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
    """Write `a * lists[0] + b * lists[1]` to `lists[2]`; check both, or the one that is said."""
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
    """Return the norm of all tensors, float32 `[1]`, and those of each, `[n]`, or nothing, `[0]`."""
    return multi_tensor_unscale_l2norm(chunk_size, flag, lists, None, per_tensor)


def multi_tensor_unscale_l2norm(
    chunk_size: int, flag: Tensor, lists: Lists, inv_scale: Tensor | None, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the norms of `lists[0] * inv_scale`, as `multi_tensor_l2norm` does."""
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
    """Step parameters, `lists` being gradients, parameters and two moments.

    Args:
        chunk_size: not looked at.
        flag: where it is not 0, nothing is stepped.
        lists: as above.
        lr: the rate.
        beta1: how much of the first moment is kept.
        beta2: how much of the second.
        eps: added to the root.
        step: which step this is, from 1.
        mode: 0 adds the weight decay to the gradient, 1 is AdamW's.
        bias_correction: whether moments are corrected for having started at 0.
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
    """Step parameters by LAMB, clipped by a norm that is known; see `multi_tensor_adam`."""
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
    """Step parameters, `lists` being gradients, parameters, the momentum, and perhaps 16-bit weights.

    Args:
        chunk_size: not looked at.
        flag: where it is not 0, nothing is stepped.
        lists: as above.
        weight_decay: the weight decay.
        momentum: how much of the momentum is kept.
        dampening: how much of a gradient does not enter it.
        lr: the rate.
        nesterov: whether to look ahead.
        first_run: whether the momentum begins with these gradients.
        wd_after_momentum: whether the weight decay stays out of the momentum.
        scale: what to multiply the gradients by.
    """
    group = {"lr": lr, "momentum": momentum, "dampening": dampening, "nesterov": nesterov}
    group |= {"weight_decay": weight_decay, "wd_after_momentum": wd_after_momentum}
    options = {"models": lists[3] if len(lists) > 3 else None, "inv_scale": _one(scale, flag)}
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
    """Move a scale and its counts, each a tensor of one element, and return the scale.

    As apex's it does not grow to inf, and it falls to 0 instead of a denormal number.
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
    """Return a number as float32 `[1]`, on the device of a tensor if it is on none."""
    if isinstance(value, Tensor):
        return value.reshape(1).float()
    return torch.full((1,), value, dtype=torch.float32, device=like.device)


def _raise_flag(flag: Tensor, found_inf: Tensor) -> None:
    """Set a flag where something was found; it is never cleared."""
    flag.copy_(torch.maximum(flag, found_inf.to(flag.dtype)))
