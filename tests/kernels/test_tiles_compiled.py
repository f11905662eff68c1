"""The kernels that quantize, compiled for real GPUs without one: what the machine code must have.

128 bits at a time where a matrix is read first, no spills, few registers, and products that are not
fused with sums. FP8 takes no more bytes than the definition says, and the hardware's own saturating
cast. FP4 takes no conversion with random bits, which few GPUs have.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

from amp.kernels.language import INTERPRETED, triton

if triton is None or INTERPRETED:
    pytest.skip("needs Triton's compiler", allow_module_level=True)

from amp.kernels import fp4_tiles
from tests.kernels.compile_cases import Listing, accesses, disassembled, resources
from tests.kernels.tile_cases import (
    CASES,
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
    "FP4": fp4_tiles.REGISTERS,
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
"""The cast to FP8 of two numbers. gfx942 has none of these formats."""
TARGETS = {
    False: ["sm_89", "sm_90", "sm_100", "gfx942", "gfx950"],
    True: ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950"],
}
"""For what the kernels of FP8 are compiled, and for what those of FP4."""


TAKES_ALL = os.environ.get("AMP_COVERING") == "all"


def cases_for(target: str) -> Iterator[tuple[str, Case]]:
    """Yield each kernel's case for one GPU in BF16 or in FP32, and so for AMD's those of FP8.

    For each of the others it is a sixth of the cases. With `AMP_COVERING=all` there are all for these.
    """
    for is_fp4, targets in TARGETS.items():
        own = [(name, case) for name, case in CASES.items() if case.is_fp4 is is_fp4]
        if target not in targets:
            continue
        if target != "sm_90" and (is_fp4 or target.startswith("sm_")):
            yield from own[targets.index(target) % 6 :: 6]
        elif TAKES_ALL:
            yield from own
        else:
            first = int(target == "gfx950")
            for source in BYTES:
                yield from [each for each in own if each[1].source == source][first::2]
                first = 1 - first


def accesses_in_fp8(case: Case, target: str) -> tuple[int, int]:
    """Return how many 128-bit loads and stores a thread needs for its part of a tile."""
    threads = warps_for(case, target) * (32 if target.startswith("sm_") else 64)
    of_thread = (case.elements + written_again(case)) // threads
    loads = of_thread * BYTES[case.source] // 16
    return loads * (2 if reads_again(case, target) else 1), case.writes * of_thread // 16


def loads_in_fp4(case: Case) -> tuple[int, int]:
    """Return how many 128-bit and 64-bit loads a thread has in its code: a row's part in its loop."""
    by_columns = (16, 0) if case.source == "fp32" else (0, 16)
    if case.kernel is fp4_tiles.amaxes_kernel:
        return by_columns
    of_rows = fp4_tiles.SIZES["TM"] * fp4_tiles.TILE[1] * BYTES[case.source]
    return by_columns[0] + of_rows // (32 * fp4_tiles.WARPS) // 16, by_columns[1]


def shortcomings(name: str, case: Case, target: str, found: Listing) -> Iterator[str]:
    registers, spilled = resources(found, target)
    if registers > MOST_REGISTERS[name.split()[0].rstrip(",")] or set(spilled.values()) != {0}:
        yield f"{registers} registers, {spilled}"
    moved = accesses(found, target)
    if case.is_fp4:
        loads, (wide, narrow) = (moved["load", 128], moved["load", 64]), loads_in_fp4(case)
        may_unroll = target.startswith("gfx")  # LLVM may unroll the loop
        if loads[1] != narrow or loads[0] < wide or (loads[0] > wide and not may_unroll):
            yield f"{loads} loads, not {wide, narrow}"
    elif (both := (moved["load", 128], moved["store", 128])) != accesses_in_fp8(case, target):
        yield f"{both} loads and stores, not {accesses_in_fp8(case, target)}"
    code = found.kernel.asm["ptx"] if target.startswith("sm_") else found.code
    if target.startswith("sm_") and (wrong := re.findall(r"fma\.|cvt\.rs|\.ftz", code)):
        yield f"{sorted(set(wrong))}"
    if not case.is_fp4 and target in CASTS:
        casts = len(re.findall(CASTS[target], code))
        if bool(casts) != (bool(case.writes) and not rounds_by_bits(case, target)):
            yield f"{casts} saturating casts"


@pytest.mark.parametrize(
    "targets", ["sm_80, sm_89", "sm_90", "sm_100, sm_120", "gfx942, gfx950"], ids=str
)
def test_machine_code(targets: str) -> None:
    problems = {}
    for target in targets.split(", "):
        for name, case in cases_for(target):
            listing = disassembled(compiled(case, target), target)
            if found := list(shortcomings(name, case, target, listing)):
                problems[target, name] = found
    assert not problems
