"""Lists of levels in the docs are those of the profiles: a new level fails here until it is in each."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import amp

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if "benchmarks" not in p.parts),
]
ITEM = r"O\d+(?: to O\d+)?"
LIST = re.compile(rf"{ITEM}(?:(?:, and| and| or|,) {ITEM}){{2,}}|O\d+ to O\d+")

PROFILES = {path.stem: amp.load_profile(path.stem) for path in (ROOT / "configs").glob("O*.yaml")}
HALF = (torch.float16, torch.bfloat16)
KINDS: dict[str, Callable[[amp.Properties], bool]] = {
    "all": lambda p: True,
    "all that change something": lambda p: p.cast_model_type is not torch.float32,
    "that cast functions": lambda p: p.cast_model_type is None,
    "that cast functions, or change nothing": lambda p: p.cast_model_type not in HALF,
    "that cast the model": lambda p: p.cast_model_type is not None,
    "that cast it to 16 bits": lambda p: p.cast_model_type in HALF,
    "with masters": lambda p: bool(p.master_weights),
    "with masters in bfloat16": lambda p: bool(p.master_weights) and p.cast_model_type is HALF[1],
    "with masters or a loss scale": lambda p: bool(p.master_weights) or p.loss_scaling.dynamic,
    "that do not scale the loss": lambda p: not p.loss_scaling.dynamic,
    "in FP8 or FP4": lambda p: p.fp8 is not None,
}
LAST = f"O{len(PROFILES) - 1}"
SELECTIONS = [f"O3 to {LAST}", f"O4 to {LAST}", "O0 to O3", "O0 to O5"]
SELECTIONS += ["O0, O1, O4", "O4, O5, O2", "O2, O1, O0"]
SELECTIONS += ["O0, O1, O2, O4, O5", "O5, O4, O7, O6, O2, O1, O0"]
"""Lists that are chosen, and no kind: apex's levels, those of a comparison, the order of a search."""


def levels_of(text: str) -> frozenset[int]:
    """The numbers of the levels that a list names."""
    found: set[int] = set()
    for item in re.findall(ITEM, text):
        first, last = re.findall(r"\d+", item)[0], re.findall(r"\d+", item)[-1]
        found |= set(range(int(first), int(last) + 1))
    return frozenset(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_lists_of_levels_are_those_of_the_profiles(page: Path) -> None:
    kinds = {
        levels_of(" ".join(name for name, profile in PROFILES.items() if holds(profile)))
        for holds in KINDS.values()
    }
    known = kinds | set(map(levels_of, SELECTIONS))
    lists = [match.group() for match in LIST.finditer(page.read_text().replace("\n", " "))]
    assert [found for found in lists if levels_of(found) not in known] == []
