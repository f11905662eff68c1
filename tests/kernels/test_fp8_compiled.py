"""The kernels that quantize, compiled for real GPUs without one: what the machine code must have.

128 bits at a time, no spills, at most 64 registers, the hardware's own saturating cast, and no more
bytes than the definition says.
"""

from __future__ import annotations

import collections
import re
from pathlib import Path

import pytest

from amp.kernels.language import INTERPRETED, triton

if triton is None or INTERPRETED:
    pytest.skip("needs Triton's compiler", allow_module_level=True)

from tests.kernels.compile_cases import run
from tests.kernels.fp8_cases import (
    CASES,
    TARGETS,
    Case,
    compiled,
    reads_again,
    rounds_by_bits,
    warps_for,
    written_again,
)

pytestmark = pytest.mark.slow

MOST_REGISTERS = {
    "amax": 72,
    "amaxes": 40,
    "rowwise": 64,
    "current": 128,
    "delayed": 168,
    "guessed": 168,
    "128x128": 144,
    "1x32": 144,
    "1x128": 255,
}
"""The bound of a case, by its first word: of 255 on NVIDIA and 512 on AMD.

With more, fewer programs fit on a GPU at a time. Large tiles take most, and were fastest on an H100.
"""
BYTES = {"bf16": 2, "fp32": 4}

CASTS = {
    "sm_89": r"cvt\.rn\.satfinite\.e[45]m[23]x2\.f16x2",
    "sm_90": r"cvt\.rn\.satfinite\.e[45]m[23]x2\.f32",
    "sm_100": r"cvt\.rn\.satfinite\.e[45]m[23]x2\.f32",
    "gfx950": r"v_cvt_scalef32_pk_(?:fp8|bf8)_f32",
}
"""The cast of two numbers. gfx942 has none of these formats."""


def most_registers(name: str) -> int:
    return MOST_REGISTERS[name.split()[0].rstrip(",")]


def needed(case: Case, threads: int) -> tuple[int, int]:
    """Return how many 128-bit loads and stores a thread needs for its part of a tile."""
    of_thread = (case.elements + written_again(case)) // threads
    return of_thread * BYTES[case.source] // 16, case.writes * of_thread // 16


@pytest.mark.parametrize("target", [name for name in TARGETS if name.startswith("sm_")])
def test_on_nvidia(target: str, tmp_path: Path) -> None:
    """All cases for one GPU, and a sixth of them for each of the others."""
    problems = []
    cases = list(CASES.items())
    for name, case in cases if target == "sm_90" else cases[list(TARGETS).index(target) % 6 :: 6]:
        kernel = compiled(case, TARGETS[target])
        binary = tmp_path / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", run("cuobjdump", "-res-usage", binary)))
        code = run("nvdisasm", binary)
        found = collections.Counter(re.findall(r"\b(LDG|STG)\.E\.(?:[A-Z_]+\.)*128\b", code))
        casts = len(re.findall(CASTS[target], kernel.asm["ptx"]))
        if (found["LDG"], found["STG"]) != needed(case, 32 * case.warps):
            problems.append(f"{name}: {found}, not {needed(case, 32 * case.warps)}")
        if int(usage["REG"]) > most_registers(name) or usage["STACK"] != "0" or usage["LOCAL"] != "0":
            problems.append(f"{name}: {usage}")
        if bool(casts) != (bool(case.writes) and not rounds_by_bits(case, TARGETS[target])):
            problems.append(f"{name}: {casts} saturating casts")
        if "fma." in kernel.asm["ptx"]:
            problems.append(f"{name}: fused products")
    assert not problems


@pytest.mark.parametrize("target", [name for name in TARGETS if name.startswith("gfx")])
def test_on_amd(target: str) -> None:
    problems = []
    for name, case in CASES.items():
        code = compiled(case, TARGETS[target]).asm["amdgcn"]
        usage = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count):\s*(\d+)", code))
        found = collections.Counter(
            re.findall(r"(?:buffer|global)_(load|store)_(?:dwordx4|b128)", code)
        )
        casts = len(re.findall(CASTS.get(target, "no cast"), code))
        loads, stores = needed(case, 64 * warps_for(case, TARGETS[target]))
        loads *= 2 if reads_again(case, TARGETS[target]) else 1
        if (found["load"], found["store"]) != (loads, stores):
            problems.append(f"{name}: {found}, not {loads} and {stores}")
        if int(usage.pop("vgpr_count")) > most_registers(name) or set(usage.values()) != {"0"}:
            problems.append(f"{name}: {usage}")
        if target in CASTS and bool(case.writes) != bool(casts):
            problems.append(f"{name}: {casts} saturating casts")
    assert not problems
