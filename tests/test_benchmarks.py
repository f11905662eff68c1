"""The tables under docs/benchmarks are what the pictures beside them are drawn from."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

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
import fcntl, subprocess, sys, time
lock = open({!r}, "w")
fcntl.flock(lock, fcntl.LOCK_EX)
late = [sys.executable, "-c", "import time; time.sleep(5); print('too late')"]
subprocess.Popen(late, pass_fds=[lock.fileno()])
print("a row")
{}
"""
"""What it starts holds its lock, and prints a row too late."""


@pytest.mark.parametrize(
    ("end", "how"),
    [("time.sleep(60)", "cut"), ("sys.exit(3)", "failed with exit status 3"), ("", "ended")],
)
def test_a_part_ends_with_what_it_started_and_leaves_its_rows(
    end: str, how: str, tmp_path: Path
) -> None:
    fcntl = pytest.importorskip("fcntl")
    file = tmp_path / "part.txt"
    script = SCRIPT.format(str(tmp_path / "lock"), end)
    assert first_gpu.run([sys.executable, "-c", script], file, 1.5) == how
    with (tmp_path / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until all that it started has ended
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
    subprocess.run([*command, "--out", str(tmp_path)], check=True, capture_output=True)
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


CPU = torch.device("cpu")


@pytest.mark.filterwarnings("ignore")  # of torch's compiler: a warning would be a row's error
@pytest.mark.parametrize(
    "part", ["layer_rows", "block_rows", "model_rows", pytest.param("compiled", marks=pytest.mark.slow)]
)
def test_each_way_of_training_has_a_row(part: str) -> None:
    """On a CPU with small sizes: what `--small` does."""
    benchmarks = importlib.import_module("docs.benchmarks.fp8_training")
    rows_of = getattr(benchmarks, part, benchmarks.layer_rows)
    ways = benchmarks.OF_STEPS if part == "model_rows" else benchmarks.WAYS
    if part == "compiled":
        ways = [way for way in ways if way.name in ("BF16", "O7")]
    header, *rows = rows_of(CPU, benchmarks.SMALL, ways, (part == "compiled",))
    assert [row[1].removesuffix(", compiled") for row in rows] == [way.name for way in ways]
    assert {len(row) for row in rows} == {len(header)}
    for way, row in zip(ways, rows, strict=True):
        if "torchao" in way.name and "not run: ModuleNotFoundError" in row[2]:
            continue
        assert float(row[2]) > 0
        assert row[-1] == "1.00" if way.name == way.beside else row[-1].endswith(f" of {way.beside}")


@pytest.mark.parametrize("part", ["quantization_rows", "product_rows"])
def test_the_rows_of_operations_on_a_gpu_can_be_made(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench_fp8 = importlib.import_module("docs.benchmarks.bench_fp8")

    def seconds(run: Any) -> float:
        run()
        return 1e-3

    for name in ("device_seconds", "host_seconds"):
        monkeypatch.setattr(bench_fp8, name, seconds)
    monkeypatch.setattr(bench_fp8, "copy_rate", lambda _: 1e12)
    monkeypatch.setattr(bench_fp8, "launches", lambda _: "9 + 0")
    header, *rows = getattr(bench_fp8, part)(CPU, bench_fp8.SMALL._replace(widths=(128,), tokens=128))
    assert {len(row) for row in rows} == {len(header)}
    assert len(rows) == (10 if part == "quantization_rows" else 14)
    if part == "product_rows":  # at O7 input and gradient 12 B a token, the weight 2 * 3 B
        floor = bench_fp8.floor_seconds(128, 128, 1e9, 1e12)[1]
        assert floor == pytest.approx(6 * 128**3 / 2e9 + (12 + 6) * 128**2 / 1e12)


def test_rows_are_written_as_they_are_measured(tmp_path: Path) -> None:
    """A device may be taken away at any time."""
    bench_fp8, path = importlib.import_module("docs.benchmarks.bench_fp8"), tmp_path / "rows.md"
    seen = []

    def rows() -> Iterator[list[str]]:
        for row in (["what", "us"], ["one", "1"], ["two", "2"]):
            yield row
            seen.append(path.read_text().count("\n|"))

    with path.open("w") as file, pytest.raises(RuntimeError):

        def broken() -> Iterator[list[str]]:
            yield from rows()
            raise RuntimeError

        bench_fp8.write_part(file, "layers", broken())
    assert seen == [2, 3, 4]
    assert path.read_text().endswith("| what | us |\n| --- | --- |\n| one | 1 |\n| two | 2 |\n")


def test_parts_are_chosen_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench_fp8: Any = importlib.import_module("docs.benchmarks.bench_fp8")
    monkeypatch.setitem(bench_fp8.ON_A_CPU, "layers", lambda device, sizes: iter([["what"], ["small"]]))
    options = ["--small", "--parts", "layers", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench_fp8.py", *options])
    threads = torch.get_num_threads()
    bench_fp8.main()
    torch.set_num_threads(threads)
    text = (tmp_path / "fp8-cpu.md").read_text()
    assert "## A linear layer\n\nA row is a square `nn.Linear`" in text
    assert text.endswith("| small |\n")
