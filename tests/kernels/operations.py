"""The operations on lists of tensors, by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amp.kernels.axpby import axpby
from amp.kernels.l2norm import l2norm
from amp.kernels.master_copy import master_copy
from amp.kernels.unscale import check, unscale

OPERATIONS = ("unscale", "check", "axpby", "l2norm", "master_copy")
CHECKED = OPERATIONS[:4]
"""Those that find what is not finite."""


def scalar(device: torch.device, value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float32, device=device)


def run(
    name: str,
    sources: list[Tensor],
    targets: list[Tensor],
    factor: Tensor,
    found_inf: Tensor,
    **more: Any,
) -> Any:
    """Run an operation of sources, times a factor; targets are what it may write."""
    if name == "unscale":
        return unscale(sources, targets, factor, found_inf, **more)
    if name == "check":
        return check(sources, factor, found_inf, **more)
    if name == "axpby":
        return axpby(1.0, sources, factor, sources, targets, found_inf, **more)
    if name == "l2norm":
        return l2norm(sources, factor, found_inf=found_inf, **more)
    return master_copy(sources, targets, **more)
