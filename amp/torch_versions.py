"""What older releases of torch do otherwise. The oldest that is supported is in `pyproject.toml`."""

import re

import torch

VERSION = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])

CASTS_LOSE_GRADIENTS = VERSION < (2, 11)
"""Whether torch.autocast keeps a cast of a weight that was made under `no_grad` for uses after it."""


def accelerator_type() -> str | None:
    """Return the type of the accelerator that torch is built for, or None."""
    try:
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 raises where later ones return None
        return None
    return None if accelerator is None else accelerator.type
