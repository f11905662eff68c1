"""Saving, restoring and seeding the random number generators of torch, Python and NumPy."""

from __future__ import annotations

import random
import sys
from contextlib import ExitStack
from typing import Any

import torch


def keep_random_numbers(stack: ExitStack) -> None:
    """Restore the present state of all generators when a stack ends."""
    stack.callback(torch.set_rng_state, torch.get_rng_state())
    stack.callback(random.setstate, random.getstate())
    has_cuda: Any = torch.cuda.is_initialized
    if has_cuda():
        stack.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        stack.callback(numpy.random.set_state, numpy.random.get_state())


def seed_random_numbers(seed: int) -> None:
    """Seed all generators, on all devices."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
