"""Every kernel compiled for real GPUs, without one: no spills, few registers, 128-bit accesses.

Triton brings its own assembler and disassembler. What a kernel compiles to is read from the machine
code: a pointer table that the compiler cannot see through turns into element-wise loads, and no test of
results would notice.
"""

from __future__ import annotations

import collections
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from amp.kernels import unscale
from amp.kernels.language import INTERPRETED, triton

if triton is None or INTERPRETED:
    pytest.skip("needs Triton's compiler", allow_module_level=True)

from tests.kernels.compile_cases import CASES, TARGETS, WARPS, Case, compiled, run

pytestmark = pytest.mark.slow

KERNELS = Path(unscale.__file__).parent
MOST_REGISTERS = 96


def vector_accesses(case: Case, threads: int) -> tuple[int, int]:
    """Return how many 128-bit loads and stores a thread needs for its part of a chunk."""
    block = case.constants.get("BLOCK", 0)
    loads, stores = (
        sum(block * size // (16 * threads) for size in s) for s in (case.reads, case.writes)
    )
    return loads, stores


def roundings_that_torch_has_not(ptx: str) -> list[str]:
    """Return what would make results differ from torch's, or between variants of a kernel."""
    problems = []
    if "fma." in ptx:
        problems.append("products that are not rounded before they are added")
    if re.search(r"cvt\.rn\.(bf16|f16)\.f64", ptx):
        problems.append("FP64 to 16 bits, and not by way of FP32")
    return problems


def nvidia_shortcomings(case: Case, target: Any, folder: Path) -> list[str]:
    binary = folder / "kernel.cubin"
    kernel = compiled(case, target)
    binary.write_bytes(kernel.asm["cubin"])
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", run("cuobjdump", "-res-usage", binary)))
    code = run("nvdisasm", binary)
    found = collections.Counter(re.findall(r"\b(LDG|STG)\.E\.(?:[A-Z_]+\.)*128\b", code))
    problems = roundings_that_torch_has_not(kernel.asm["ptx"])
    problems += [f"{name} {usage[name]}" for name in ("STACK", "LOCAL") if usage[name] != "0"]
    if int(usage["REG"]) > MOST_REGISTERS:
        problems.append(f"{usage['REG']} registers")
    if (found["LDG"], found["STG"]) != (needed := vector_accesses(case, 32 * WARPS)):
        problems.append(f"{found['LDG']} loads and {found['STG']} stores of 128 bits, not {needed}")
    return problems


def amd_shortcomings(case: Case, target: Any) -> list[str]:
    code = compiled(case, target).asm["amdgcn"]
    usage = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count):\s*(\d+)", code))
    found = collections.Counter(re.findall(r"(?:buffer|global)_(load|store)_(?:dwordx4|b128)", code))
    problems = [f"{k} {v}" for k, v in usage.items() if k.endswith("spill_count") and v != "0"]
    if int(usage["vgpr_count"]) > MOST_REGISTERS:
        problems.append(f"{usage['vgpr_count']} registers")
    loads, stores = vector_accesses(case, 64 * WARPS)
    if case.reads and (found["load"], found["store"]) != (loads, stores):
        problems.append(
            f"{found['load']} loads and {found['store']} stores of 128 bits, not {loads, stores}"
        )
    return problems


def shortcomings(case: Case, target: str, folder: Path) -> list[str]:
    if target.startswith("sm_"):
        return nvidia_shortcomings(case, TARGETS[target], folder)
    return amd_shortcomings(case, TARGETS[target])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_no_spills_few_registers_and_128_bit_accesses(name: str, target: str, tmp_path: Path) -> None:
    found = shortcomings(CASES[name], target, tmp_path)
    if name == "adagrad bf16 + int16" and triton.__version__.startswith("3.6."):
        found = [problem for problem in found if problem != "STACK 8"]  # for 64 registers, not 74
    assert found == []


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
    assert any("of 128 bits" in problem for problem in shortcomings(case, target, tmp_path))
