"""Count the bytes that AdamW keeps for each parameter, and write them into docs/optimizers.md.

Every tensor that is alive is counted, each storage once, before the step and after it. `--check` writes
nothing, and fails if the document says anything else.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ["AMP_KERNELS"] = "reference"  # compiled or not, a step keeps the same

import torch
from torch import Tensor, nn

import amp
from amp.optimizers import FusedAdam
from amp.training.deferred_gradients import DeferredGradient

DOCUMENT = Path(__file__).parents[1] / "optimizers.md"
BEGIN, END = "<!-- counted by docs/benchmarks/count_memory.py -->", "<!-- end -->"
WIDTH = 1000


class Row(NamedTuple):
    """A way to train."""

    name: str
    optimizer: Callable[[Any], torch.optim.Optimizer]
    level: str | None
    overrides: dict[str, Any]


ROWS = (
    Row("FP32, `torch.optim.AdamW`", torch.optim.AdamW, None, {}),
    Row("O1, `FusedAdam`", FusedAdam, "O1", {}),
    Row("O2, `torch.optim.AdamW`", torch.optim.AdamW, "O2", {}),
    Row("O2, `torch.optim.AdamW`, `split16`", torch.optim.AdamW, "O2", {"master_weights": "split16"}),
    Row("O2, `FusedAdam`", FusedAdam, "O2", {}),
    Row("O2, `FusedAdam`, `split16`", FusedAdam, "O2", {"master_weights": "split16"}),
    Row("O2, `FusedAdam`, `kahan`", FusedAdam, "O2", {"master_weights": "kahan"}),
    Row(
        "O2, `FusedAdam`, `split16`, `state_dtype: bfloat16`",
        FusedAdam,
        "O2",
        {"master_weights": "split16", "state_dtype": "bfloat16"},
    ),
    Row(
        "O2, `FusedAdam`, `split24`, `state_dtype: packed16`",
        FusedAdam,
        "O2",
        {"master_weights": "split24", "state_dtype": "packed16"},
    ),
)


def bytes_alive() -> int:
    """Return the memory of all tensors that are alive."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):
            # autograd's own gradients are no objects of Python's until somebody looks
            for tensor in (thing, thing.grad if type(thing) is nn.Parameter else None):
                # Deferred gradients have no memory until they are used.
                if tensor is not None and type(tensor) is not DeferredGradient:
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def count(row: Row) -> tuple[float, float]:
    """Return the bytes for each parameter between backward and step, and after `zero_grad`."""
    before = bytes_alive()
    model: Any = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)])
    optimizer: Any = row.optimizer(model.parameters())
    with amp.Session(
        row.level or "O0", verbosity=0, enabled=row.level is not None, **row.overrides
    ) as session:
        model, optimizer = session.initialize(model, optimizer)
        between = 0
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.ones(1, WIDTH)).float().sum() * 1e-9  # no overflow
            with session.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            del loss, scaled_loss
            between = bytes_alive() - before
            optimizer.step()
        optimizer.zero_grad()
        after = bytes_alive() - before
    return between / (2 * WIDTH**2), after / (2 * WIDTH**2)


def table() -> str:
    """Return the table of all rows."""
    lines = ["| bytes for each parameter | before the step | after `zero_grad` |", "|---|---|---|"]
    lines += ["| {} | {:.0f} | {:.0f} |".format(row.name, *count(row)) for row in ROWS]
    return "\n".join(lines)


def main() -> None:
    """Write the table, or check it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text = DOCUMENT.read_text()
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    counted = f"{head}{BEGIN}\n{table()}\n{END}{tail}"
    if not check:
        DOCUMENT.write_text(counted)
    elif counted != text:
        sys.exit(f"{DOCUMENT.name} does not say what is counted; run {Path(__file__).name}")


if __name__ == "__main__":
    main()
