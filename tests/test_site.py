"""The site of the documentation, as `make docs` builds it, opened as files and without a network."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import amp
from docs.site import reference
from tests.browsers import Page, chromium

ROOT = Path(__file__).parents[1]
SITE = ROOT / "docs" / "site"

pytestmark = pytest.mark.xdist_group("site")  # which is built once

needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("material") is None, reason="needs the docs extra"
)


@pytest.mark.parametrize("name", reference.PAGES)
def test_pages_made_of_the_code_are_those_of_this_code(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == reference.PAGES[name](), "run `make docs`"


@needs_mkdocs
def test_every_public_name_has_its_place_in_the_reference() -> None:
    from docs.site import hooks

    named = [name for page, (_, names) in hooks.API.items() for name in names.split()]
    assert set(amp.__all__) <= set(named)
    for package in (amp.optimizers, amp.fp16_utils, amp.compat):
        assert set(package.__all__) <= set(named)
    assert {f"diagnosis.{name}" for name in amp.diagnosis.__all__} <= set(named)
    assert {f"trials.{name}" for name in amp.trials.__all__} <= set(named)


@needs_mkdocs
def test_names_in_tables_break_between_words() -> None:
    from docs.site import hooks

    cell = "<td><code>torch.nn.Linear</code> a.b <code>fully(keep_norm_fp32=FusedAdam)</code></td>"
    shown = hooks.on_post_page(f"<p><code>a.b</code></p><table>{cell}</table>", None, None)
    assert "torch.<wbr>nn.<wbr>Linear</code> a.b" in shown
    assert "fully(<wbr>keep_<wbr>norm_<wbr>fp32=<wbr>Fused<wbr>Adam)" in shown
    assert shown.startswith("<p><code>a.b</code></p>")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(  # with --quiet, warnings of links that lead nowhere would not fail it
        [sys.executable, "-m", "mkdocs", "build", "-f", SITE / "mkdocs.yml", "-d", folder],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture
def page(site: Path) -> Iterator[Page]:
    with chromium() as browser:
        shown = Page(browser, (site / "index.html").as_uri())
        yield shown
        shown.close()  # fails if anything could not be loaded, as from a network


@needs_mkdocs
@pytest.mark.slow
def test_the_reference_shows_what_users_call(site: Path) -> None:
    shown = (site / "api" / "training.html").read_text()
    for name in ("live_models", "named_parameters", "watch_forwards"):
        assert f'id="amp.Session.{name}"' not in shown, name
    assert 'id="amp.Session.scale_loss"' in shown
    assert '<a href="../profiles.html">' in shown


@needs_mkdocs
@pytest.mark.slow
def test_the_lab_leads_to_pages_of_the_site(site: Path) -> None:
    links = re.findall(r'href="([^"]+)"', (site / "lab.html").read_text(encoding="utf-8"))
    assert {"index.html", "profiles.html#the-loss-scale", "numerics.html"} <= set(links)
    for link in links:
        name, _, anchor = link.partition("#")
        page = (site / (name or "lab.html")).read_text(encoding="utf-8")  # of github.com there is none
        assert not anchor or f'id="{anchor}"' in page, link


@needs_mkdocs
@pytest.mark.slow
def test_the_lab_in_its_frame_does_not_scroll(page: Page, site: Path) -> None:
    page.driver.get((site / "the-lab.html").as_uri())
    page.wait("return document.querySelector('iframe.lab').clientHeight > 3000")
    page.driver.switch_to.frame(page.driver.find_element("css selector", "iframe.lab"))
    page.wait("return document.documentElement.scrollHeight <= innerHeight + 1")
    page.driver.switch_to.default_content()


@needs_mkdocs
@pytest.mark.slow
def test_search_works_in_files(page: Page) -> None:
    page.wait("return document.readyState == 'complete'")
    box = page.driver.find_element("css selector", "input[data-md-component=search-query]")
    box.click()
    box.send_keys("split16")
    found = "document.querySelectorAll('.md-search-result__item h1')"
    assert "Fused optimizers" in page.wait(f"return [...{found}].map((e) => e.textContent).join()")


@needs_mkdocs
@pytest.mark.slow
def test_the_table_of_ops_is_filtered(page: Page, site: Path) -> None:
    page.driver.get((site / "ops-table.html").as_uri() + "?op=torch.softmax")
    page.wait("return document.querySelector('.ops-filter')")
    rows = page.driver.find_elements("css selector", "article tbody tr:not([hidden])")
    shown = [row.text for row in rows]
    assert len(shown) == 1
    assert shown[0].startswith("torch.softmax,")
    assert shown[0].endswith("float32 float32")
    box = page.driver.find_element("css selector", ".ops-filter")
    box.clear()
    box.send_keys("torch.relu")
    assert page.texts(".ops-filter + p") == [
        "No rule names torch.relu: it follows its input, and runs in the dtype of its arguments."
    ]


@needs_mkdocs
@pytest.mark.slow
def test_no_page_is_wider_than_a_phone(page: Page, site: Path) -> None:
    page.look(390, "light")
    for file in sorted(site.rglob("*.html"))[::2]:  # those of the reference are alike
        if file.name not in ("404.html", "lab.html"):  # the lab has tests of its own
            page.driver.get(file.as_uri())
            assert page.run("return document.documentElement.scrollWidth") <= 390, file
