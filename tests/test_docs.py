"""What the documents say can be checked where it is code: snippets run, profiles load, links lead.

Python snippets of a page run one after the other. A comment that begins with `<!-- setup` starts anew,
with the code in it, which readers do not see. A comment `<!-- fragment: reason -->` over a snippet says
why it cannot run; it is only compiled.
"""

from __future__ import annotations

import doctest
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import amp
from tests.processes import run_python

ROOT = Path(__file__).parents[1]
LANGUAGES = ("json", "pycon", "python", "sh", "text", "toml", "yaml")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKING = [*PAGES, *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))]
OWN = re.compile(
    r"https://(?:github\.com/reamp/reamp/(?:blob|raw|tree)|raw\.githubusercontent\.com/reamp/reamp)/"
)
EXAMPLES = [page for page in PAGES if re.search(r"^\s*>>> ", page.read_text(), re.MULTILINE)]
PROFILES = [
    pytest.param(block, id=f"{page.stem}{i}")
    for page in PAGES
    for i, block in enumerate(
        re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    )
]

CODE = re.compile(
    r"^<!-- setup(?P<own> in a process of its own)?\n(?P<setup>.*?)^-->$"
    r"|^(?:<!-- fragment:(?P<reason>.*?) -->\n)?```python(?: hl_lines=[^\n]+)?\n"
    r"(?P<snippet>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


class Program(NamedTuple):
    """Snippets that run one after the other, each at its own line of the page."""

    page: Path
    line: int
    own_process: bool
    code: str


def programs(page: Path) -> Iterator[Program]:
    """Yield the programs of a page."""
    text = page.read_text()
    lines: list[str] = []
    start, own_process = 1, False
    for found in CODE.finditer(text):
        if found["setup"] is not None and any(lines):
            yield Program(page, start, own_process, "\n".join(lines))
        if found["setup"] is not None:
            lines, start = [], text[: found.start()].count("\n") + 1
            own_process = found["own"] is not None
        if found["reason"] is None:
            group = "setup" if found["setup"] is not None else "snippet"
            lines += [""] * (text[: found.start(group)].count("\n") - len(lines))
            lines += found[group].splitlines()
    if any(lines):
        yield Program(page, start, own_process, "\n".join(lines))


PROGRAMS = [
    pytest.param(program, id=f"{program.page.relative_to(ROOT).with_suffix('')}:{program.line}")
    for page in PAGES
    if page.stem != "integrations"  # tests/integrations runs these
    for program in programs(page)
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_snippets_run(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if program.own_process:
        file = tmp_path / f"{program.page.stem}.py"
        away = f"__import__('os').chdir({str(tmp_path)!r})"  # on the line of the page's title
        file.write_text(away + program.code)
        done = run_python(file)
        assert done.returncode == 0, done.stderr
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(amp, "compare", amp.compare)  # a page's setup replaces it by a faster one
    exec(compile(program.code, program.page, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_is_fenced_and_fragments_have_reasons(page: Path) -> None:
    text = page.read_text()
    fences = re.findall(r"^ *```(\w*)(?: hl_lines=.*)?$", text, re.MULTILINE)
    assert all(language in LANGUAGES for language in fences[::2]), fences
    assert not re.search(r"^ +```python", text, re.MULTILINE), "indented snippets are not run"
    outside = re.sub(r"^( *)```.*?^\1```$|^<!--.*?-->$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r"(?<=\n\n) {4}(?![-*]|\d+\.)\S", outside), (
        "code that is not fenced is not run"
    )
    for found in CODE.finditer(text):
        if found["reason"] is not None:
            assert len(found["reason"].split()) > 2
            compile(found["snippet"], page, "exec")


RECIPES = [page for page in PAGES if page.parent.name == "howto" and page.stem != "index"]


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_recipes_have_the_same_parts(page: Path) -> None:
    parts = re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)
    assert parts == ["The code", "At each level", "What to watch for"]


@pytest.mark.parametrize("profile", PROFILES)
def test_profiles_load(profile: str, tmp_path: Path) -> None:
    (tmp_path / "profile.yaml").write_text(profile)
    assert amp.load_profile(tmp_path / "profile.yaml").enabled


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in link and link != "lab.html":  # which is made with the site
            check_link(page.parent, link, page)


@pytest.mark.parametrize("page", [*LINKING, ROOT / "pyproject.toml"], ids=lambda page: page.stem)
def test_addresses_of_own_files_lead_to_files_of_this_tree(page: Path) -> None:
    for address in re.findall(rf"{OWN.pattern}[^\s)\"'>]+", page.read_text()):
        branch, _, link = OWN.sub("", address).partition("/")
        assert branch == "main", address
        check_link(ROOT, link, page)


def check_link(folder: Path, link: str, page: Path) -> None:
    """Check that a link leads to a file, and to a heading of it if it says so."""
    name, _, anchor = link.partition("#")
    target = folder / name if name else page
    assert target.exists(), link
    if anchor:
        assert anchor in map(slug, re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)), link


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.stem)
def test_examples_give_what_they_say(page: Path, tmp_path: Path) -> None:
    text = tmp_path / page.name
    text.write_text(
        re.sub(r"^```.*$", "", page.read_text(), flags=re.MULTILINE)
    )  # else output has fences
    failed, attempted = doctest.testfile(str(text), module_relative=False, verbose=False)
    assert (failed, attempted > 0) == (0, True)


@pytest.mark.parametrize("module", ["formats", "rounding", "scaling", "memory"])
def test_docstrings_give_what_they_say(module: str) -> None:
    holder = importlib.import_module(f"amp.numerics.{module}")
    failed, attempted = doctest.testmod(holder)
    assert (failed, attempted > 0) == (0, True)


def test_the_table_of_memory_is_what_the_planner_says() -> None:
    text = (ROOT / "docs" / "choosing.md").read_text()
    table = text.partition("<!-- checked by tests/test_docs.py -->")[2].partition("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n")[3:-1]]
    assert len(rows) == 8
    for name, *numbers in rows:
        levels = re.findall(r"O\d", name) or ["O2", "O5"]  # "the same" is said of these
        optimizer = "adamw" if "AdamW" in name else "FusedAdam"
        options: dict[str, Any] = {}
        if "split" in name or "the same" in name:
            options["master_weights"] = "split24" if "split24" in name else "split16"
        if "state_dtype" in name:
            options["state_dtype"] = "packed16" if "packed16" in name else "bfloat16"
        for level in levels:
            found = amp.numerics.footprint(10**9, level, optimizer, **options)
            parts = [found.weights, found.gradients, found.masters, found.optimizer_state]
            assert [round(part / 1e9) for part in parts] == [int(n) for n in numbers[:-1]], name
            assert sum(map(int, numbers[:-1])) == int(numbers[-1]), name


START = [ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "docs" / "quickstart.md"]


def test_there_is_one_way_to_install() -> None:
    ways = [re.findall(r"pip install '?([^\n`']+)", page.read_text()) for page in PAGES]
    own = {way for found in ways for way in found if "reamp" in way}
    assert {way.partition(" @ ")[2] or way for way in own} == {"git+https://github.com/reamp/reamp"}
    assert all("pip install git+https://github.com/reamp/reamp\n" in page.read_text() for page in START)


def test_what_one_gains_is_what_was_measured() -> None:
    readme, home = (page.read_text().split("What one gains:")[1].split("\n\n")[1] for page in START[:2])
    assert readme.replace("https://github.com/reamp/reamp/blob/main/docs/", "") == home
    memory, time, resume, doctor = home.split("\n")
    counted = re.findall(r"split\d\d.* \| (\d+) \| ", (ROOT / "docs" / "optimizers.md").read_text())
    assert set(re.findall(r"\b\d+", re.sub(r"\(.*?\)", "", memory))) <= {*counted, "16"}
    rows = (ROOT / "docs" / "benchmarks" / "step-cuda.md").read_text().split("\n")
    gpt2 = [row.split(" | ") for row in rows if "GPT-2 XL (580) | AdamW, float16, float32" in row]
    for row in gpt2[:2]:  # amp, and the faster of the two with a GradScaler
        assert f"{float(row[6]) / 1000:.1f} ms" in time
    rows = (ROOT / "docs" / "reliability.md").read_text().split("\n")
    kills = [row.split(" | ") for row in rows if "test_examples" in row]
    assert f"killed {sum(int(row[2].split()[0]) for row in kills)} times" in resume
    assert all(row[3] == "0 |" for row in kills)
    found = re.findall(r"(\d+ %) of the numbers of", (ROOT / "docs" / "diagnosis.md").read_text())
    assert found == re.findall(r"\d+ %", doctor)


FACTS = (
    "O2 and O7, half of them",  # what was killed
    "O5, O4, O7, O6, O2, O1, O0",  # what `compare` recommends on a GPU: no FP4
)
SOURCES = [path for folder in ("amp", "kernels", "examples") for path in (ROOT / folder).rglob("*.py")]
SOURCES += [ROOT / "amp" / "numerics" / "web" / "lab.html", ROOT / "docs" / "site" / "reference.py"]


def test_lists_of_levels_do_not_end_before_fp4() -> None:
    early = []
    for path in (*PAGES, *SOURCES):
        text = " ".join(path.read_text().split())
        for fact in FACTS:
            text = text.replace(fact, "")
        for words in re.findall(r"O\d(?:(?:,? (?:and |or |to )?|/)O\d)+", text):
            levels = set(re.findall(r"O\d", words))
            of_models = levels & {"O2", "O3", "O5"} and "O7" in levels and "O9" not in levels
            of_functions = levels & {"O1", "O4"} and "O6" in levels and "O8" not in levels
            if of_models or of_functions or words.endswith("to O7"):
                early.append(f"{path.name}: {words}")
    assert not early


def slug(heading: str) -> str:
    """Return the anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
