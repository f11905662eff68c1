"""The kernels that quantize to FP4, compiled for GPUs without one: what their machine code must have.

128 bits at a time where the matrix is read first, no spills, at most as many registers as let three
programs run at a time, IEEE arithmetic, and no conversion to FP4 with random bits, which few GPUs have.
"""

from __future__ import annotations

import collections
import re
from pathlib import Path

import pytest

from amp.kernels.language import INTERPRETED, triton

if triton is None or INTERPRETED:
    pytest.skip("needs Triton's compiler", allow_module_level=True)

from amp.kernels import fp4_tiles as tiles
from tests.kernels.compile_cases import run
from tests.kernels.fp4_cases import BYTES, CASES, TARGETS, Case, compiled

pytestmark = pytest.mark.slow


def bytes_of_rows(case: Case) -> int:
    """Return how many bytes a thread reads of a tile at a time, by rows."""
    return tiles.SIZES["TM"] * tiles.TILE[1] * BYTES[case.source] // (32 * tiles.WARPS)


def loads_needed(case: Case) -> tuple[int, int]:
    """Return how many 128-bit and 64-bit loads a thread has in its code: a row's part in its loop."""
    by_columns = (16, 0) if case.source == "fp32" else (0, 16)
    if case.kernel is tiles.amaxes_kernel:
        return by_columns
    return by_columns[0] + bytes_of_rows(case) // 16, by_columns[1]


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
        found = collections.Counter(re.findall(r"\bLDG\.E\.(128|64)\b", run("nvdisasm", binary)))
        if (found["128"], found["64"]) != loads_needed(case):
            problems.append(f"{name}: {found}, not {loads_needed(case)}")
        if int(usage["REG"]) > tiles.REGISTERS or usage["STACK"] != "0" or usage["LOCAL"] != "0":
            problems.append(f"{name}: {usage}")
        if wrong := re.findall(r"fma\.|cvt\.rs|\.ftz", kernel.asm["ptx"]):
            problems.append(f"{name}: {sorted(set(wrong))}")
    assert not problems


@pytest.mark.parametrize("target", [name for name in TARGETS if name.startswith("gfx")])
def test_on_amd(target: str) -> None:
    problems = []
    for name, case in list(CASES.items())[list(TARGETS).index(target) % 6 :: 6]:
        code = compiled(case, TARGETS[target]).asm["amdgcn"]
        usage = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count):\s*(\d+)", code))
        found = collections.Counter(re.findall(r"(?:buffer|global)_load_dwordx([24])", code))
        wide, narrow = loads_needed(case)
        if found["4"] < wide or found["2"] != narrow:  # LLVM may unroll the loop
            problems.append(f"{name}: {found}, not {loads_needed(case)}")
        if int(usage.pop("vgpr_count")) > tiles.REGISTERS or set(usage.values()) != {"0"}:
            problems.append(f"{name}: {usage}")
    assert not problems
