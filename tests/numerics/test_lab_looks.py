"""How the lab looks: nothing collides or is cut, at three widths and in two colour schemes."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from tests.browsers import Page

SEEN = """
for (const e of document.querySelectorAll('details')) e.open = true;
const cut = [], overlaps = [], raw = [];
const width = document.documentElement.clientWidth; // innerWidth grows with what is too wide
const seen = (e) => !e.closest('.unseen') && e.getClientRects().length > 0;
const box = (e) => e.getBoundingClientRect();
for (const svg of document.querySelectorAll('svg')) {
  const texts = [...svg.querySelectorAll('text')];
  texts.forEach((a, i) => texts.slice(i + 1).forEach((b) => {
    const [p, q] = [box(a), box(b)];
    if (p.left < q.right && q.left < p.right && p.top < q.bottom && q.top < p.bottom) {
      overlaps.push(`${svg.id}: ${a.textContent} / ${b.textContent}`);
    }
  }));
  for (const text of texts) {
    const [p, q] = [box(text), box(svg)];
    const across = p.left < q.left - 0.5 || p.right > q.right + 0.5;
    const along = p.top < q.top - 0.5 || p.bottom > q.bottom + 0.5;
    if (across || along) cut.push(`${svg.id}: ${text.textContent}`);
  }
}
for (const e of document.querySelectorAll('body *:not(script, style)')) {
  if (!seen(e) || e.closest('svg')) continue;
  const letters = [...e.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const clips = getComputedStyle(e).overflowX !== 'visible' || e.tagName === 'INPUT';
  if (clips && e.type !== 'range' && e.scrollWidth > e.clientWidth + 1) cut.push(e.id || e.className);
  if (letters && (box(e).left < 0 || box(e).right > width + 0.5)) cut.push(e.textContent);
}
const told = ['output', 'svg text', '.legend', '.story', '.field > label', '#bits-presets button',
  '#bits-formula', '#bits-error', '#bits-ulp', '#bits-neighbours', '#memory-table td', '#fp8-table td',
  '#fp4-table td', '#fp4-products td'];
const missing = told.filter((selector) => !document.querySelector(selector));
for (const e of document.querySelectorAll(told)) {
  const copy = e.cloneNode(true);
  copy.querySelectorAll('.caret').forEach((hidden) => hidden.remove());
  if (/\\^|\\d\\s*e[+-]?\\d|-\\d/.test(copy.textContent)) raw.push(copy.textContent);
}
return {cut, overlaps, raw, missing, wide: document.scrollingElement.scrollWidth - width};
"""

STATES = [
    "",
    "?bits-format=float32&bits-number=2%5E-149&ulps-format=float32&ulps-weight=1.0009765625"
    "&ranges-magnitude=2%5E-150&sim-steps=0&delayed-steps=0&memory-params=175e9&scaling-scale=24"
    "&fp4-mean=-60&fp4-largest=-60&fp4-draws=1000",
    "?bits-number=nan&ulps-weight=2%5E16&ulps-negative=true&ranges-magnitude=2%5E130&sim-steps=400"
    "&sim-init=-20&delayed-steps=100&memory-params=1e12&memory-gpu=10000&fp8-mean=20&scaling-spread=0.5"
    "&fp4-largest=20&fp4-hadamard=true&fp4-outlier=20",
    "?bits-format=float4_e2m1fn&bits-number=-0&ulps-format=float8_e8m0fnu&ulps-weight=2%5E-16"
    "&memory-params=25557032&memory-gpu=1&memory-activations=1e9&fp8-spread=0.5&delayed-infs=0%2C1%2C2",
]


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (768, "light"), (1280, "light")])
def test_nothing_collides_and_nothing_is_cut(page: Page, width: int, scheme: str) -> None:
    page.look(width, scheme)
    for state in STATES:
        page.open(state)
        found = page.run(SEEN)
        assert found == {"cut": [], "overlaps": [], "raw": [], "missing": [], "wide": 0}, state
    paper = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    page.run(
        "const a = document.querySelectorAll('#sim-chart text'); a[1].replaceWith(a[0].cloneNode(true))"
    )
    page.run("document.getElementById('bits-ulp').remove()")
    found = page.run(SEEN)
    assert found["overlaps"]  # or the search would find nothing
    assert found["missing"] == ["#bits-ulp"]


@pytest.mark.slow
def test_tables_fit_at_every_width(page: Page) -> None:
    """Where they change, above all: at 40 and at 56 times 16 pixels."""
    for width in (390, 640, 641, 704, 768, 896, 897, 1000):
        page.look(width, "light")
        wide = page.run(
            "for (const e of document.querySelectorAll('details')) e.open = true;"
            "return [...document.querySelectorAll('.scroll')].map((e) => e.scrollWidth - e.clientWidth)"
        )
        assert len(wide) == 4
        assert max(wide) <= 1, width


@pytest.mark.slow
def test_charts_follow_the_width(page: Page) -> None:
    page.look(1280, "light")
    page.open()
    width = "return document.getElementById('sim-chart').viewBox.baseVal.width"
    wide = page.run(width)
    page.look(390, "light")
    page.wait(f"return (() => {{ {width} }})() < 390")
    assert wide > 800
    assert page.run(SEEN)["overlaps"] == []


@pytest.mark.slow
def test_everything_has_a_name_and_a_place_for_the_keyboard(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    nameless = page.run(
        "const label = (e) => document.getElementById(e.getAttribute('aria-labelledby'))?.textContent;"
        "return [...document.querySelectorAll('input, select')]"
        ".filter((e) => !e.labels.length && !label(e)).map((e) => e.id)"
    )
    assert nameless == []
    unnamed = "svg:not([role=img]), svg:not([aria-labelledby]), svg:not([aria-describedby])"
    assert page.run(f"return document.querySelectorAll('{unnamed}').length") == 0
    told = page.run(
        "return [...document.querySelectorAll('[aria-describedby]')]"
        ".filter((e) => !document.getElementById(e.getAttribute('aria-describedby'))).length"
    )
    assert told == 0
    unreachable = page.run(
        "return [...document.querySelectorAll('button, input, select')]"
        ".filter((e) => e.tabIndex < 0 && !e.closest('#bits-row')).length"
    )
    assert unreachable == 0
    assert page.run("return [...document.querySelectorAll('#bits-row [tabindex=\"0\"]')].length") == 1
    assert page.run("return getComputedStyle(document.documentElement).scrollBehavior") == "auto"
    page["bits-number"].send_keys(Keys.TAB)
    outline = page.run("return getComputedStyle(document.activeElement).outlineWidth")
    assert outline == "3px"


@pytest.mark.slow
def test_axes_and_legends_are_on_every_chart(page: Page) -> None:
    titles = {
        "ranges": ["magnitude"],
        "ulps": ["the numbers that float16 holds"],
        "scaling": ["share, %", "gradient times the scale"],
        "sim": ["loss scale", "step"],
        "memory": ["GB in each process"],
        "fp8": ["share, %", "number times its scale"],
        "fp4": ["number divided by its scales", "place in the block"],
        "delayed": ["magnitude", "iteration"],
    }
    for name, wanted in titles.items():
        texts = page.texts(f"#{name}-chart text")
        assert set(wanted) <= set(texts)
        assert len(texts) > len(wanted) + 2  # ticks
        assert len(page.texts(f".figure:has(#{name}-chart) .legend li")) >= 2
    ticks = page.texts("#scaling-chart .dim")
    powers = [int(re.sub("\u2212", "-", tick[1:])) for tick in ticks if re.match(r"2\u2212?\d", tick)]
    assert all(a < b for a, b in pairwise(powers))
