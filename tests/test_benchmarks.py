"""The tables under docs/benchmarks are what the pictures beside them are drawn from."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

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
