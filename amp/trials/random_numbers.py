"""Saving, restoring and seeding the random number generators of torch, Python and NumPy."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch


def keep_random_numbers() -> Callable[[], None]:
    """Return a function that restores the present state of all generators."""
    on_cpu, python = torch.get_rng_state(), random.getstate()
    has_cuda: Any = torch.cuda.is_initialized
    on_cuda = torch.cuda.get_rng_state_all() if has_cuda() else None
    numpy: Any = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()

    def restore() -> None:
        torch.set_rng_state(on_cpu)
        random.setstate(python)
        if on_cuda is not None:
            torch.cuda.set_rng_state_all(on_cuda)
        if numpy is not None:
            numpy.random.set_state(state)

    return restore


def seed_random_numbers(seed: int) -> None:
    """Seed all generators, on all devices."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
