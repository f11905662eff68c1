"""Half of a run in FP8, as a script: `python -m tests.fp8_resume FOLDER` goes on from there."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch

from tests.fp8_models import BASES, RECIPE_NAMES, trained

FIRST, SECOND = range(3), range(3, 6)
CASES: list[tuple[str, Any]] = [
    *zip(itertools.cycle(BASES), RECIPE_NAMES, strict=False),
    *((level, recipe) for level in BASES[:2] for recipe in ("delayed", "nvfp4")),
    ("O5", {"recipe": "delayed", "power_of_2_scales": False, "amax_history": 4}),
]


def main(folder: Path) -> None:
    """Go on with each case that a file in the folder is of, and write what came out."""
    torch.set_num_threads(1)
    for case, (level, recipe) in enumerate(CASES):
        state = torch.load(folder / f"{case}.pt", weights_only=True)
        torch.save(trained(recipe, SECOND, state, level=level)[0], folder / f"{case}.out")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
