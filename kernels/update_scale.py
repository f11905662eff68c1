"""One transition of the loss scale's state machine.

State, one float32 tensor `[7]`: scale, inverse scale, good steps since the scale last moved,
hysteresis left, found_inf, overflows in a row, transitions. Counts are whole numbers, exact up to
2**24.

    overflow:  good = 0; hysteresis -= 1
               if hysteresis <= 0: scale = max(scale * backoff, floor)
    otherwise: good += 1
               if good >= interval: scale = min(scale * growth, ceiling); good = 0; hysteresis = full
    always:    inverse = 1 / scale; found_inf = 0; transitions += 1
    found = found_inf as it was, if it is asked for

Products are FP64, rounded to FP32 once, as in `torch.amp.GradScaler`; FP32 on a device without
FP64. An overflow with hysteresis left keeps the scale. With `reset_each_step`, each good step restores
the hysteresis too. On every overflow, the caller skips the step.
Launches: one.

Sources: NVIDIA apex `update_scale_hysteresis`, Megatron-LM and DeepSpeed's dynamic scalers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from amp.kernels import host_lists
from amp.kernels.backend import has_float64, is_on_host, uses_triton
from amp.kernels.interrupts import without_grad
from amp.kernels.language import INTERPRETED, jit, launch, load_all, tl
from amp.kernels.launch_plans import numbers_on


def widest(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, or in float32 on a device that has no float64."""
    return tensor.to(torch.float64 if has_float64(tensor.device) else torch.float32)


def inverse(scale: Tensor) -> Tensor:
    """Return 1 / scale, float32, rounded once. The host does not wait for the device."""
    return widest(scale).reciprocal().float()


def update_scale(
    state: Tensor,
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    reset_each_step: bool,
    floor: float,
    ceiling: float,
    found: Tensor | None = None,
    backend: str | None = None,
) -> list[float] | None:
    """Advance `state`, float32 `[7]`, in place. The host does not wait for the device.

    `found`, float32 `[1]` on the state's device, gets its `found_inf`, before that becomes 0.

    Returns:
        The new state, if the host has it; else None.
    """
    numbers = growth_factor, backoff_factor, growth_interval, hysteresis, floor, ceiling
    is_seen = is_on_host(state) and not torch.compiler.is_compiling()  # by the host, at once
    # Triton takes a state on the CPU in its interpreter alone, and asking takes longer than an update.
    may_be_triton = backend or INTERPRETED or not is_seen
    if may_be_triton and uses_triton(state.device, backend):
        factors = numbers_on(state.device, tuple(map(float, numbers)), torch.float64)
        tensors = {"state": state, "factors": factors, "found": found}
        launch(update_kernel, 1, state.device, warps=1, **tensors, RESET_EACH_STEP=reset_each_step)
        return None
    if found is not None:
        found.copy_(state[4:5])
    if is_seen:
        new = next_state(state.tolist(), numbers, reset_each_step)
        if not host_lists.lists.put(state, new):
            state.copy_(torch.tensor(new, dtype=torch.float32, device="cpu"))
        return new
    update_scale_reference(state, numbers, reset_each_step)
    return None


@jit
def update_kernel(state, factors, found, RESET_EACH_STEP: tl.constexpr):
    growth, backoff, interval, hysteresis, floor, ceiling = load_all(factors, 6)
    scale, _, good, left, found_inf, overflows, transitions = load_all(state, 7)
    if found is not None:
        tl.store(found, found_inf)
    full = hysteresis.to(tl.float32)
    wide_scale = scale.to(tl.float64)
    if found_inf > 0.0:
        good = 0.0
        left = tl.maximum(left - 1.0, 0.0)
        overflows += 1.0
        if left <= 0.0:
            lower = tl.maximum(wide_scale * backoff, floor)
            scale = tl.minimum(lower.to(tl.float32), scale)
    else:
        good += 1.0
        overflows = 0.0
        if RESET_EACH_STEP:
            left = full
        if good >= interval.to(tl.float32):
            higher = tl.minimum(wide_scale * growth, ceiling)
            scale = tl.maximum(higher.to(tl.float32), scale)
            good = 0.0
            left = full
    new = (scale, tl.div_rn(1.0, scale), good, left, 0.0, overflows, transitions + 1.0)
    for k in tl.static_range(7):
        tl.store(state + k, new[k])


def next_state(state: list[float], numbers: Sequence[float], reset_each_step: bool) -> list[float]:
    """Return the next state, where the host has it; `numbers` are those that the kernel takes."""
    growth, backoff, interval, hysteresis, floor, ceiling = numbers
    scale, _, good, left, found_inf, overflows, transitions = state
    new = scale
    if found_inf > 0.0:
        good, left, overflows = 0.0, max(left - 1.0, 0.0), overflows + 1.0
        if left <= 0.0:
            new = min(max(scale * backoff, floor), scale)
    else:
        good, overflows = good + 1.0, 0.0
        if reset_each_step:
            left = float(hysteresis)
        if good >= interval:
            new, good, left = max(min(scale * growth, ceiling), scale), 0.0, float(hysteresis)
    if new != scale:
        new = torch.tensor(new, dtype=torch.float32, device="cpu").item()  # rounded before its inverse
    inverse_scale = 1.0 / new if new else math.inf
    return [new, inverse_scale, good, left, 0.0, overflows, transitions + 1.0]


@without_grad
def update_scale_reference(state: Tensor, numbers: Sequence[float], reset_each_step: bool) -> None:
    """Do `update_scale` in plain torch; `numbers` are those that the kernel takes."""
    growth, backoff, interval, hysteresis, floor, ceiling = numbers
    scale, _, good, left, found, overflows, transitions = widest(state).unbind()
    full, zero = torch.full_like(left, hysteresis), torch.zeros_like(scale)
    overflow = found > 0
    left_after, good = (left - 1).clamp(min=0.0), good + 1
    lower = torch.clamp(scale * backoff, min=floor).minimum(scale)
    backed_off = torch.where(left_after > 0, scale, lower)
    grows = good >= interval
    higher = torch.clamp(scale * growth, max=ceiling).maximum(scale)
    scale = torch.where(overflow, backed_off, torch.where(grows, higher, scale)).float()
    left_if_good = full if reset_each_step else torch.where(grows, full, left)
    left = torch.where(overflow, left_after, left_if_good)
    good = torch.where(overflow | grows, zero, good)
    overflows = torch.where(overflow, overflows + 1, zero)
    new = scale, inverse(scale), good, left, zero, overflows, transitions + 1
    state.copy_(torch.stack(new))
