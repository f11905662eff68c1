"""What older releases of torch do otherwise. The lowest that is supported is in `pyproject.toml`."""

import torch


def accelerator_type() -> str | None:
    """Return the type of the accelerator that torch is built for, or None."""
    try:
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 raises where later ones return None
        return None
    return None if accelerator is None else accelerator.type
