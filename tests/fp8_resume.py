"""Half of a run in FP8, as a script: `python -m tests.fp8_resume FOLDER` goes on from there."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import amp
from tests.fp8_models import BASES, RECIPE_NAMES, batches, history, initialize, net, train

HALF, WHOLE = 3, 6
CASES: list[tuple[str, Any]] = [
    *((level, recipe) for level in BASES for recipe in RECIPE_NAMES),
    ("O5", {"recipe": "delayed", "power_of_2_scales": False, "amax_history": 4}),
]


def start(case: int) -> tuple[Any, Any]:
    level, fp8 = CASES[case]
    return initialize(net(), level, fp8)


def data_from(step: int) -> Any:
    return itertools.islice(batches(), step, None)


def outcome(model: Any) -> list[Tensor]:
    """Return the weights, and what `delayed` remembers."""
    remembered = [] if history() is None else [history().amaxes]
    return [*model.state_dict().values(), *remembered]


def second_half(case: int, state: dict[str, Any]) -> list[Tensor]:
    """Load a checkpoint into a new model, and go on."""
    model, optimizer = start(case)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    amp.load_state_dict(state["amp"])
    train(model, optimizer, data_from(HALF), WHOLE - HALF)
    found = [tensor.clone() for tensor in outcome(model)]
    amp.get_session().close()
    return found


def main(folder: Path) -> None:
    """Go on with each case that a file in the folder is of, and write what came out."""
    torch.set_num_threads(1)
    for case in range(len(CASES)):
        state = torch.load(folder / f"{case}.pt", weights_only=True)
        torch.save(second_half(case, state), folder / f"{case}.out")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
