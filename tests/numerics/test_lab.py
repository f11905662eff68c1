"""The lab as a file: it needs nothing else, its links lead on, its numbers are the library's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import amp
from amp.cli import main
from amp.numerics import lab
from tests.browsers import Page

ROOT = Path(__file__).parents[2]


def test_the_page_needs_nothing_else(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "page.html"
    assert main(["lab", "--out", str(file)]) == 0
    assert str(file) in capsys.readouterr().out
    text = file.read_text(encoding="utf-8")
    addresses = {
        link for link in re.findall(r"https?://[^\"'\s]+", text) if not link.startswith(lab.HOME)
    }
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert "url(" not in text
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=", text)
    assert not re.findall(r"/\*[A-Z]+\*/", text)
    assert main(["lab", "--out", str(tmp_path / "no" / "where.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_shared_table_has_every_format_and_its_ends() -> None:
    numbers = lab.vectors()["numbers"]
    assert len({v["format"] for v in numbers}) == 9
    assert sum(v["overflow"] for v in numbers) > 50
    assert sum(v["subnormal"] for v in numbers) > 20
    assert sum(v["underflow"] for v in numbers) > 20


def test_its_links_lead_to_pages_and_headings_that_are_there() -> None:
    links = re.findall(rf'href="{lab.DOCS}/([^"]+)"', lab.page())
    assert {"profiles.md", "fp8.md", "ops.md", "optimizers.md", "numerics.md"} <= set(links)
    for link in links:
        file, _, heading = link.partition("#")
        text = (ROOT / "docs" / file).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        assert not heading or heading in [each.lower().replace(" ", "-") for each in headings]
    page = lab.page()
    for section in re.findall(r'href="#(\w+)"', page):
        assert f'<section id="{section}"' in page


def test_the_levels_that_it_names_are_those_that_apply_the_cure() -> None:
    named = {
        cure: re.findall(r"O\d", text)
        for cure, text in re.findall(r'data-levels="(\w+)">(.*?)</span>', lab.page())
    }
    profiles = {name: amp.load_profile(name) for name in (f"O{i}" for i in range(10))}
    assert named == {
        "masters": [name for name, profile in profiles.items() if profile.master_weights],
        "dynamic": [name for name, profile in profiles.items() if profile.loss_scale == "dynamic"],
    }


def luminance(colour: str) -> float:
    """Return the relative luminance of `#rrggbb`, by WCAG 2.2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_its_colours_stand_out_enough_in_both_schemes() -> None:
    blocks = re.findall(r":root \{([^}]*)\}", lab.style())
    assert len(blocks) == 2
    for block in blocks:
        colours = dict(re.findall(r"--(\w+): (#\w{6})", block))
        for name in colours.keys() - {"paper", "panel", "line"}:
            least = 3.0 if name in ("edge", "soft") else 4.5  # those two are never letters
            for ground in ("paper", "panel"):
                pair = sorted((luminance(colours[name]), luminance(colours[ground])))
                assert (pair[1] + 0.05) / (pair[0] + 0.05) >= least, (name, ground)


@pytest.mark.slow
def test_its_numbers_are_those_of_the_library(page: Page) -> None:
    found = page.run("return lab.check()")
    assert found["wrong"] == []
    assert found["count"] > 8000
    assert page.text("check") == f"{found['count']} of {found['count']} in the shared table agree."
    assert page.run("return performance.getEntriesByType('resource').length") == 0
    broken = page.run("lab.formats.float16.bias = 14; return lab.check().wrong.length")
    assert broken > 0
