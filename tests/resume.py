"""Half of a training run, as a script: `python -m tests.resume FOLDER` goes on where FOLDER stopped.

`tests/test_checkpoint.py` runs it in a process of its own and compares with an unbroken run.
"""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import amp
from tests.models import DYNAMIC_LEVELS, LEVELS, ConvNet, batch, conv_net, initialize, step_on

OPTIMIZERS = ("SGD", "AdamW")
OVERFLOWS = (2, 9)  # one in each half
HALF, WHOLE = 6, 13
CASES = [(level, name) for level in LEVELS for name in OPTIMIZERS]


def make(name: str, level: str, seed: int = 0) -> tuple[ConvNet, torch.optim.Optimizer]:
    """Return a new model and optimizer, not yet initialized."""
    model = conv_net(seed)
    if name == "SGD":
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    eps = 1e-3 if level == "O3" else 1e-8  # 1e-8 is 0 in float16
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=eps)


def scaling(level: str) -> dict[str, Any]:
    """A loss scale that moves in each half."""
    if level in DYNAMIC_LEVELS:
        return {"loss_scale": {"init": 1024, "growth_interval": 4, "hysteresis": 2}, "verbosity": 0}
    return {"verbosity": 0}


def train(model: nn.Module, optimizer: Any, level: str, steps: range) -> None:
    for step in steps:
        images, labels = batch(step)
        loss = F.cross_entropy(model(images), labels)
        if step in OVERFLOWS and level in DYNAMIC_LEVELS:
            loss = loss * math.inf
        optimizer.zero_grad()
        step_on(loss, optimizer)


def checkpoint(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}


def outcome(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Everything that must be equal bit for bit."""
    return {
        **checkpoint(model, optimizer),
        "weights": [p.detach().clone() for p in model.parameters()],
        "masters": [p.detach().clone() for p in amp.master_params(optimizer)],
    }


def go_on(folder: Path, level: str, name: str, load_first: bool) -> dict[str, Any]:
    """Load the checkpoint of one case, before `initialize` or after it, and run the second half."""
    saved = torch.load(folder / f"{level}-{name}.pt", weights_only=True)
    model, optimizer = make(name, level, seed=1)
    if not load_first:
        model, optimizer = initialize(model, optimizer, level, **scaling(level))
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    amp.load_state_dict(saved["amp"])
    if load_first:
        model, optimizer = initialize(model, optimizer, level, **scaling(level))
    train(model, optimizer, level, range(HALF, WHOLE))
    return outcome(model, optimizer)


if __name__ == "__main__":
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    from amp.frontend import _Default

    root = Path(sys.argv[1])
    for level, name in CASES:
        for load_first in (False, True):
            result = go_on(root, level, name, load_first)
            torch.save(result, root / f"{level}-{name}-{'before' if load_first else 'after'}.pt")
            amp.get_session().close()
            _Default.session = None  # so that the next case may load before it initializes
