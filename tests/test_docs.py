"""What the documents say can be checked where it is code: profiles load, and links lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

import amp

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = [page for page in PAGES if re.search(r"^\s*>>> ", page.read_text(), re.MULTILINE)]
PROFILES = [
    pytest.param(block, id=f"{page.stem}{i}")
    for page in PAGES
    for i, block in enumerate(
        re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    )
]


@pytest.mark.parametrize("profile", PROFILES)
def test_profiles_load(profile: str, tmp_path: Path) -> None:
    (tmp_path / "profile.yaml").write_text(profile)
    assert amp.load_profile(tmp_path / "profile.yaml").enabled


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if anchor:
            assert anchor in map(slug, re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)), link


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.stem)
def test_examples_give_what_they_say(page: Path) -> None:
    failed, attempted = doctest.testfile(str(page), module_relative=False, verbose=False)
    assert (failed, attempted > 0) == (0, True)


@pytest.mark.parametrize("module", ["formats", "rounding", "scaling", "memory"])
def test_docstrings_give_what_they_say(module: str) -> None:
    holder = importlib.import_module(f"amp.numerics.{module}")
    failed, attempted = doctest.testmod(holder)
    assert (failed, attempted > 0) == (0, True)


def slug(heading: str) -> str:
    """Return the anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
