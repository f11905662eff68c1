"""The kernels that quantize, with their usual arguments, compiled for GPUs that are not there."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from amp.kernels import quantize_tiles as tiles
from amp.kernels.fp8 import Granularity
from amp.kernels.language import OPTIONS, triton

TARGETS = {
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
POINTERS = {
    "by_row": "*u8",
    "by_column": "*u8",
    **dict.fromkeys(("amax", "factor", "used", "inverse", "transposed"), "*fp32"),
    **dict.fromkeys(("seen", "divisor"), "*fp32"),
    **dict.fromkeys(("scratch", "of_rows", "of_columns"), "*i32"),
}


class Case(NamedTuple):
    """A kernel, and what it moves for each element of a tile.

    Attributes:
        kernel: the kernel.
        constants: its compile-time arguments.
        warps: of a program.
        source: the dtype of what is quantized.
        elements: of a tile.
        writes: how many FP8 matrices it writes.
        types: of arguments whose type is another than usual.
    """

    kernel: Any
    constants: dict[str, Any]
    warps: int
    source: str
    elements: int
    writes: int
    types: dict[str, str]


def case(
    kernel: Any,
    source: str,
    *,
    granularity: Granularity = "tensor",
    tile: tuple[int, int] | None = None,
    warps: int | None = None,
    types: dict[str, str] | None = None,
    **constants: Any,
) -> Case:
    own_tile, own_warps = tiles.TILES[granularity]
    tile, warps = tile or own_tile, warps or own_warps
    of_tile = {"TM": tile[0], "TK": tile[1]}
    if "by_row" in kernel.arg_names:
        constants = {"E4M3": True, "POW2": True, "BY_BITS": False, **of_tile, **constants}
        if kernel is tiles.tensor_kernel:
            constants = {"IS_GUESS": False, **constants}
    elif "TM" in kernel.arg_names:
        constants = {**of_tile, **constants}
    elements = constants.get("BLOCK", tile[0] * tile[1])
    both = [name for name in ("by_row", "by_column") if name in kernel.arg_names]
    writes = sum(name not in constants for name in both)
    return Case(kernel, constants, warps, source, elements, writes, types or {})


UNSEEN = {"seen": None, "divisor": None}
KNOWN = {"scratch": None, "used": None, "inverse": None, **UNSEEN}
"""What `tensor_kernel` gets beside the right factor."""

CASES: dict[str, Case] = {}
for source in ("bf16", "fp32"):
    block = {"BLOCK": tiles.AMAX_BLOCK}
    of_amax = {"IS_GUESS": False, "E4M3": True, "POW2": True, "warps": tiles.AMAX_WARPS, **UNSEEN}
    CASES[f"amax {source}"] = case(
        tiles.amax_kernel, source, amax=None, factor=None, **block, **of_amax
    )
    alone = {"factor": None, "used": None, "inverse": None}
    CASES[f"amax, alone {source}"] = case(tiles.amax_kernel, source, **alone, **block, **of_amax)
    CASES[f"amaxes {source}"] = case(
        tiles.amaxes_kernel, source, tile=tiles.AMAXES_TILE, warps=tiles.AMAXES_WARPS
    )
    CASES[f"current {source}"] = case(tiles.tensor_kernel, source, **KNOWN)
    CASES[f"delayed {source}"] = case(tiles.tensor_kernel, source)
    CASES[f"guessed {source}"] = case(tiles.tensor_kernel, source, IS_GUESS=True, **UNSEEN)
    CASES[f"rowwise {source}"] = case(
        tiles.rows_kernel,
        source,
        granularity="row",
        types={"of_rows": "*fp32", "of_columns": "*fp32"},
    )
    CASES[f"128x128 {source}"] = case(tiles.squares_kernel, source, granularity="128x128")
    CASES[f"1x128 {source}"] = case(tiles.groups_kernel, source, granularity="1x128", G=128, E8M0=False)
    scales = {"inverse": "*u8", "transposed": "*u8"}
    CASES[f"1x32 {source}"] = case(
        tiles.groups_kernel,
        source,
        granularity="1x32",
        types=scales,
        G=32,
        E8M0=True,
    )
CASES["current bf16, E5M2"] = case(tiles.tensor_kernel, "bf16", E4M3=False, **KNOWN)
CASES["current bf16, by row"] = case(tiles.tensor_kernel, "bf16", by_column=None, **KNOWN)
CASES["current bf16, transposed"] = case(tiles.tensor_kernel, "bf16", by_row=None, **KNOWN)
CASES["guessed bf16, by row"] = case(
    tiles.tensor_kernel, "bf16", IS_GUESS=True, by_column=None, **UNSEEN
)
CASES["guessed bf16, transposed"] = case(
    tiles.tensor_kernel, "bf16", IS_GUESS=False, by_row=None, **UNSEEN
)


def compiled(case: Case, target: Any) -> Any:
    names = case.kernel.arg_names
    pointers = {**POINTERS, "x": f"*{case.source}", **case.types}
    signature = {name: pointers.get(name, "i32") for name in names}
    signature |= dict.fromkeys(of_target(case, target), "constexpr")
    constants = {(names.index(name),): value for name, value in of_target(case, target).items()}
    known = [name for name in tiles.tiled_jit.keywords["multiples_of_16"] if name in names]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in known}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constants, attrs=attributes)
    warps = warps_for(case, target)
    return triton.compile(source, target=target, options={"num_warps": warps, **OPTIONS})


def of_target(case: Case, target: Any) -> dict[str, Any]:
    """Return the compile-time arguments of a case on a target."""
    constants = dict(case.constants)
    if "AGAIN" in case.kernel.arg_names:
        constants["AGAIN"] = reads_again(case, target)
    if "BY_BITS" in case.kernel.arg_names:
        constants["BY_BITS"] = rounds_by_bits(case, target)
    return constants


def rounds_by_bits(case: Case, target: Any) -> bool:
    """Whether a program does without the cast of the target."""
    return case.source == "fp32" and target.backend == "cuda"


def written_again(case: Case) -> int:
    """How many numbers the loop moves at a time in which the last program may write all again."""
    checks = case.kernel is tiles.tensor_kernel and "scratch" not in case.constants
    return tiles.FEW.value * case.constants["TK"] if checks else 0


def reads_again(case: Case, target: Any) -> bool:
    """Whether a program reads its tile twice."""
    return "AGAIN" in case.kernel.arg_names and case.source == "fp32" and target.arch == "gfx942"


def warps_for(case: Case, target: Any) -> int:
    """Return the warps of a program; AMD's are twice as wide."""
    return case.warps // 2 if target.backend == "hip" else case.warps
