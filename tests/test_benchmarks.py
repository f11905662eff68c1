"""The tables under docs/benchmarks are what the pictures beside them are drawn from."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.benchmarks import first_gpu
from docs.benchmarks.bench_kernels import table

FOLDER = Path(__file__).parents[1] / "docs" / "benchmarks"

GPU_ROWS = """\
# The step on a GPU

Some GPU, some versions

| set | operation | B/param | by | GB/s | % of copy | device µs | kernels + copies | host µs | ratio |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
| 2 GiB | copy_ |  | torch | 4000 | 100 |  |  |  |  |
| ResNet-50 (161) | AdamW | 30 | reamp O2, FusedAdam | 3600 | 90.0 | 213.3 | 4 + 3 | 200 | 1.00 |
| flat 1e9 (1) | AdamW | 30 | reamp O2, FusedAdam | 3800 | 95.0 | 7894.7 | 4 + 3 | 90 | 1.00 |
"""


def plot(rows: Path, picture: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "plot_step.py"), str(rows), "--out", str(picture)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_rows_of_either_device_make_a_picture(tmp_path: Path) -> None:
    on_gpu = tmp_path / "step-cuda.md"
    on_gpu.write_text(GPU_ROWS)
    for rows in (FOLDER / "step-cpu.md", on_gpu):
        picture = tmp_path / f"{rows.stem}.svg"
        run = plot(rows, picture)
        assert run.returncode == 0, run.stderr
        assert "ResNet-50 (161)" in picture.read_text()
        assert "reamp O2, FusedAdam" in picture.read_text()
    assert "flat 1e9 (1)" in (tmp_path / "step-cuda.svg").read_text()


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.md"
    nothing.write_text("no table\n")
    run = plot(nothing, tmp_path / "nothing.svg")
    assert run.returncode == 1
    assert run.stderr.splitlines() == [f"no rows of bench_step.py in {nothing}"]


# docs/benchmarks/first_gpu.py.

SCRIPT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(2); print('too late')"])
print("a row")
{}
"""


@pytest.mark.parametrize(
    ("end", "how"),
    [("time.sleep(60)", "cut"), ("sys.exit(3)", "failed with exit status 3"), ("", "ended")],
)
def test_a_part_ends_with_what_it_started_and_leaves_its_rows(
    end: str, how: str, tmp_path: Path
) -> None:
    file = tmp_path / "part.txt"
    assert first_gpu.run([sys.executable, "-c", SCRIPT.format(end)], file, 1.5) == how
    time.sleep(1.5)
    assert file.read_text() == "a row\n"


def test_rows_are_in_a_file_before_the_next_one_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "rows.md"

    def measured() -> Iterator[list[str]]:
        for i in range(3):
            lines = file.read_text().splitlines() if file.exists() else []
            assert len(lines) == (i + 1 if i else 0)
            yield [f"row {i}", "of two cells"]

    assert table(measured(), file) + "\n" == file.read_text()


@pytest.mark.slow
def test_each_part_of_the_first_minutes_on_a_gpu_starts_writes_and_ends(tmp_path: Path) -> None:
    """On the CPU, where tests are collected for a GPU that is claimed, and benchmarks are cut."""
    command = [sys.executable, str(FOLDER / "first_gpu.py"), "--rehearse", "--minutes", "3"]
    start = time.monotonic()
    subprocess.run([*command, "--out", str(tmp_path)], check=True, capture_output=True)
    assert time.monotonic() - start < 240
    _, _, *rows = (tmp_path / "summary.md").read_text().splitlines()
    found = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [name for name, *_ in found] == [part.name for part in first_gpu.PARTS]
    assert {how for _, how, *_ in found} <= {"ended", "cut"}, (tmp_path / "summary.md").read_text()
    for name, *_ in found:
        text = (tmp_path / f"{name}.txt").read_text()
        assert text, name
        if name.startswith("tests-"):
            assert "::test_" in text
    assert "PASS  kernels: a launch" in (tmp_path / "selftest.txt").read_text()
    assert (tmp_path / "step-cpu.md").read_text().startswith("# The step")


def test_sets_for_a_gpu_fit_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    bench_kernels = importlib.import_module("bench_kernels")
    assert list(bench_kernels.sets_for(80 * 2**30)) == ["ResNet-50", "GPT-2 XL", "flat 1e9"]
    small = bench_kernels.sets_for(24 * 10**9)
    assert list(small) == ["ResNet-50", "GPT-2 large", "flat 5e8"]
    assert len(small["GPT-2 large"]) == 436
    assert 0.77e9 < bench_kernels.elements_in(small["GPT-2 large"]) < 0.78e9
    assert all(30 * bench_kernels.elements_in(shapes) < 24 * 10**9 for shapes in small.values())
    assert list(bench_kernels.sets_for(8 * 10**9)) == ["ResNet-50"]
