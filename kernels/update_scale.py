"""The loss scale's state machine, one transition.

State, one float32 tensor `[6]`: scale, inverse scale, good steps since the scale last moved,
hysteresis left, found_inf, overflows in a row.

    overflow:  good = 0; hysteresis -= 1
               if hysteresis <= 0: scale = max(scale * backoff, floor)
    otherwise: good += 1
               if good >= interval: scale = min(scale * growth, ceiling); good = 0; hysteresis = full
    always:    inverse = 1 / scale; found_inf = 0

An overflow with hysteresis left keeps the scale. With `reset_each_step`, each good step gives the
hysteresis back too. The step is skipped on every overflow; that is the caller's business.

Sources: NVIDIA apex `update_scale_hysteresis`, Megatron-LM and DeepSpeed's dynamic scalers.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE, INVERSE, GOOD_STEPS, HYSTERESIS, FOUND_INF, OVERFLOWS = range(6)
STATE_SIZE = 6


@torch.no_grad()
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
) -> None:
    """Advance `state`, float32 `[6]`, in place. The host does not wait for the device."""
    scale, _, good, left, found, overflows = state.unbind()
    overflow = found > 0
    full = torch.full_like(left, hysteresis)

    left_if_overflow = left - 1
    lower = torch.clamp(scale * backoff_factor, min=floor).minimum(scale)
    scale_if_overflow = torch.where(left_if_overflow > 0, scale, lower)

    counted = good + 1
    grow = counted >= growth_interval
    higher = torch.clamp(scale * growth_factor, max=ceiling).maximum(scale)
    scale_if_good = torch.where(grow, higher, scale)
    good_if_good = torch.where(grow, 0.0, counted)
    left_if_good = full if reset_each_step else torch.where(grow, full, left)

    new_scale = torch.where(overflow, scale_if_overflow, scale_if_good)
    zero = torch.zeros_like(scale)
    state.copy_(
        torch.stack(
            [
                new_scale,
                new_scale.double().reciprocal().float(),
                torch.where(overflow, zero, good_if_good),
                torch.where(overflow, torch.clamp(left_if_overflow, min=0.0), left_if_good),
                zero,
                torch.where(overflow, overflows + 1, zero),
            ]
        )
    )
