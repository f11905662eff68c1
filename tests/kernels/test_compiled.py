"""Every kernel compiled for real GPUs, without one: few spills, few registers, 128-bit accesses.

Triton brings its own assembler and disassembler. What a kernel compiles to is read from the machine
code: a pointer table that the compiler cannot see through turns into element-wise loads, and no test of
results would notice.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from amp.kernels import moments, stepping, unscale
from amp.kernels.language import INTERPRETED, STEP, tl, triton

if triton is None or INTERPRETED:
    pytest.skip("needs Triton's compiler", allow_module_level=True)

from docs.benchmarks import predict_kernels
from tests.kernels.compile_cases import (
    CASES,
    TARGETS,
    WARPS,
    Case,
    Listing,
    accesses,
    listing,
    listing_of,
    resources,
)
from tests.kernels.test_predicted import rows_of_the_page

pytestmark = pytest.mark.slow

KERNELS = Path(unscale.__file__).parent
MOST_REGISTERS = 120  # with which a multiprocessor holds two programs
MOST_SPILLED = 96
"""So many bytes a thread may spill in a step, which has fewer registers; see `stepping.REGISTERS`."""
IS_OLDEST = triton.__version__.startswith("3.6.")
"""Whether this is the oldest Triton that is supported."""


def vector_accesses(case: Case, threads: int) -> tuple[int, int]:
    """Return how many 128-bit loads and stores a thread needs for its part of a chunk."""
    parts = case.constants.get("PARTS", 1)
    block = case.constants.get("BLOCK", 0) // parts
    loads, stores = (
        parts * sum(block * size // (16 * threads) for size in sizes if size > 1)  # int8: 64 bits
        for sizes in (case.reads, case.writes)
    )
    return loads, stores


def roundings_that_torch_has_not(ptx: str, inverses: int = 0) -> list[str]:
    """Return what would make results differ from torch's, or between variants of a kernel.

    `packing.inverse`, whose result is rounded to nearest, has six FMAs; two may be one of pairs.
    """
    problems = []
    fused = re.findall(r"fma\.rn\.f32(x2)?", ptx)
    pairs = fused.count("x2")
    if ptx.count("fma.") != len(fused) or not len(fused) <= 6 * inverses <= len(fused) + pairs:
        problems.append("products that are not rounded before they are added")
    if re.search(r"cvt\.rn\.(bf16|f16)\.f64", ptx):
        problems.append("FP64 to 16 bits, and not by way of FP32")
    return problems


def shortcomings(case: Case, target: str, found: Listing) -> list[str]:
    """Return what is wrong with a kernel's machine code."""
    problems, is_nvidia = [], target.startswith("sm_")
    registers, spilled = resources(found, target)
    may_spill = {"STACK": MOST_SPILLED} if case.kernel is stepping.step_kernel else {}
    problems += [f"{name} {n}" for name, n in spilled.items() if n > may_spill.get(name, 0)]
    if registers > MOST_REGISTERS:
        problems.append(f"{registers} registers")
    moved, needed = accesses(found, target), vector_accesses(case, (32 if is_nvidia else 64) * WARPS)
    both = moved["load", 128], moved["store", 128]
    if both != needed and (is_nvidia or case.reads):
        problems.append(f"{both} loads and stores of 128 bits, not {needed}")
    if is_nvidia:
        packs = case.kernel is moments.pack_kernel
        if case.constants.get("MOMENTS") == 1:
            packs = case.constants["DTYPES"][2] == tl.int16
        of_thread = (case.constants["BLOCK"] + int(STEP.value)) // (32 * WARPS) if packs else 0
        problems += roundings_that_torch_has_not(found.kernel.asm["ptx"], of_thread)
    return problems


@pytest.mark.parametrize("target", TARGETS)
def test_machine_code(target: str) -> None:
    """Few spills, few registers, 128-bit accesses, and no bytes moved but those of the definition.

    A third of the cases for one GPU, and a sixth for each of the others; `make predict` takes all.
    """
    problems = {}
    every = 3 if target == "sm_90" and not IS_OLDEST else 6
    tested = dict(list(CASES.items())[list(TARGETS).index(target) % every :: every])
    for name, case in tested.items():
        found = shortcomings(case, target, listing_of(name, target))
        if found:
            problems[name] = found
    assert not problems
    cases = {name: case for name, case in tested.items() if case.reads}
    rows = {name: predict_kernels.row(name, case, target) for name, case in cases.items()}
    moved = {name: cells[1] for name, cells in rows.items()}
    assert moved == {name: cells[2] for name, cells in rows.items()}
    if f"triton {triton.__version__}," in predict_kernels.ROWS.read_text():
        page = {name: row for name, row in rows_of_the_page()[target].items() if name in rows}
        assert page == rows, "the rows are of other kernels: run `make predict`"


OLDEST = os.environ.get("AMP_OLDEST_TRITON")
"""The folder of the oldest Triton that is supported."""


@pytest.mark.skipif(OLDEST is None, reason="needs AMP_OLDEST_TRITON")
def test_machine_code_of_the_oldest_triton() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "code[sm_80]"],
        env={**os.environ, "PYTHONPATH": str(OLDEST)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert "1 passed" in run.stdout


def module_of(name: str, text: str, folder: Path) -> Any:
    """Return a changed kernel file of ours as a module, which others may import by that name."""
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def edited_copy(change: Callable[[str], str], folder: Path) -> Any:
    """Return the module of the copy, on what all kernels share, changed."""
    text = (KERNELS / "language.py").read_text()
    assert change(text) != text
    module_of("edited_language", change(text), folder)
    copy = (KERNELS / "master_copy.py").read_text()
    return module_of("edited_copy", copy.replace("amp.kernels.language", "edited_language"), folder)


SCALAR_FORMS: dict[str, Callable[[str], str]] = {
    "addresses of unknown alignment": lambda text: text.replace("if ALIGNED:", "if False:"),
    "a mask that may end anywhere": lambda text: text.replace("i < vectors", "i < length"),
    "a chunk that may start anywhere": lambda text: text.replace(
        "start = tl.load(chunks + 2 * program + 1).to(tl.int64) * BLOCK",
        "start = tl.load(chunks + 2 * program + 1).to(tl.int64)",
    ),
}


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("form", SCALAR_FORMS)
def test_a_kernel_edited_back_to_scalar_accesses_would_be_noticed(
    form: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("edited_language", "edited_copy"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type] (gone after the test)
    module = edited_copy(SCALAR_FORMS[form], tmp_path)
    case = CASES["master_copy fp32 fp16"]._replace(kernel=module.copy_kernel)
    found = shortcomings(case, target, listing(case, target))
    assert any("of 128 bits" in problem for problem in found)
