"""The kernels that quantize to FP8 and FP4, with their usual arguments, for GPUs that are not there."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.compiler import ASTSource

from amp.kernels import fp4_tiles
from amp.kernels import quantize_tiles as tiles
from amp.kernels.fp8 import Granularity
from amp.kernels.language import OPTIONS, triton
from tests.kernels.compile_cases import GPUS

OF_FP4 = (fp4_tiles.amaxes_kernel, fp4_tiles.blocks_kernel)
POINTERS = {
    **dict.fromkeys(("by_row", "by_column"), "*u8"),
    **dict.fromkeys(("amax", "factor", "used", "inverse", "transposed", "seen", "divisor"), "*fp32"),
    **dict.fromkeys(("scratch", "of_rows", "of_columns"), "*i32"),
}
POINTERS_OF_FP4 = {
    "by_row": "*u8",
    "by_column": "*i64",
    "calls": "*i64",
    **dict.fromkeys(("inverse", "transposed"), "*u8"),
    **dict.fromkeys(("row_amax", "column_amax", "outer", "outer_of_columns"), "*fp32"),
    **dict.fromkeys(("of_rows", "of_columns"), "*i32"),
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

    @property
    def is_fp4(self) -> bool:
        return self.kernel in OF_FP4


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


def fp4_case(kernel: Any, source: str, **constants: Any) -> Case:
    sizes = {name: size for name, size in fp4_tiles.SIZES.items() if name in kernel.arg_names}
    elements = fp4_tiles.TILE[0] * fp4_tiles.TILE[1]
    return Case(kernel, sizes | constants, fp4_tiles.WARPS, source, elements, 0, POINTERS_OF_FP4)


UNSEEN = {"seen": None, "divisor": None}
KNOWN = {"scratch": None, "used": None, "inverse": None, **UNSEEN}
"""What `tensor_kernel` gets beside the right factor."""
NO_AMAX = dict.fromkeys(("row_amax", "column_amax", "outer", "outer_of_columns"))

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
    of_rows = dict.fromkeys(("of_rows", "of_columns"), "*fp32")
    CASES[f"rowwise {source}"] = case(tiles.rows_kernel, source, granularity="row", types=of_rows)
    CASES[f"128x128 {source}"] = case(tiles.squares_kernel, source, granularity="128x128")
    CASES[f"1x128 {source}"] = case(tiles.groups_kernel, source, granularity="1x128", G=128, E8M0=False)
    scales: Any = {"types": {"inverse": "*u8", "transposed": "*u8"}, "G": 32, "E8M0": True}
    CASES[f"1x32 {source}"] = case(tiles.groups_kernel, source, granularity="1x32", **scales)
    CASES[f"FP4, amaxes {source}"] = fp4_case(fp4_tiles.amaxes_kernel, source)
    for name, constants in {
        "1x16": {"calls": None},
        "1x16, transformed": {"HADAMARD": True, "calls": None},
        "1x16, transformed, random": {"HADAMARD": True},
        "16x16": {"H": 16, "calls": None},
        "1x32, transformed": {"HADAMARD": True, "G": 32, **NO_AMAX, "calls": None},
        "1x32, transformed, random": {"HADAMARD": True, "G": 32, **NO_AMAX},
    }.items():
        usual = {"HADAMARD": False, "H": 1, "G": 16}
        CASES[f"FP4, {name} {source}"] = fp4_case(fp4_tiles.blocks_kernel, source, **usual | constants)
for name, changes in {
    "current bf16, E5M2": {"E4M3": False, **KNOWN},
    "current bf16, by row": {"by_column": None, **KNOWN},
    "current bf16, transposed": {"by_row": None, **KNOWN},
    "guessed bf16, by row": {"IS_GUESS": True, "by_column": None, **UNSEEN},
    "guessed bf16, transposed": {"IS_GUESS": False, "by_row": None, **UNSEEN},
}.items():
    CASES[name] = case(tiles.tensor_kernel, "bf16", **changes)


def compiled(case: Case, target: str) -> Any:
    gpu, names = GPUS[target], case.kernel.arg_names
    pointers = {**POINTERS, "x": f"*{case.source}", **case.types}
    signature = {name: pointers.get(name, "i32") for name in names}
    signature |= dict.fromkeys(of_target(case, target), "constexpr")
    constants = {(names.index(name),): value for name, value in of_target(case, target).items()}
    known = [name for name in tiles.tiled_jit.keywords["multiples_of_16"] if name in names]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in known}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constants, attrs=attributes)
    limit = {"maxnreg": fp4_tiles.REGISTERS} if case.is_fp4 and gpu.backend == "cuda" else {}
    options = {"num_warps": warps_for(case, target), **OPTIONS, **limit}
    return triton.compile(source, target=gpu, options=options)


def of_target(case: Case, target: str) -> dict[str, Any]:
    """Return the compile-time arguments of a case on a target."""
    constants = dict(case.constants)
    if "AGAIN" in case.kernel.arg_names:
        constants["AGAIN"] = reads_again(case, target)
    if "BY_BITS" in case.kernel.arg_names:
        constants["BY_BITS"] = rounds_by_bits(case, target)
    return constants


def rounds_by_bits(case: Case, target: str) -> bool:
    """Whether a program does without the cast of the target."""
    return case.source == "fp32" and target.startswith("sm_")


def written_again(case: Case) -> int:
    """How many numbers the loop moves at a time in which the last program may write all again."""
    checks = case.kernel is tiles.tensor_kernel and "scratch" not in case.constants
    return tiles.FEW.value * case.constants["TK"] if checks else 0


def reads_again(case: Case, target: str) -> bool:
    """Whether a program reads its tile twice."""
    return "AGAIN" in case.kernel.arg_names and case.source == "fp32" and target == "gfx942"


def warps_for(case: Case, target: str) -> int:
    """Return the warps of a program; AMD's are twice as wide."""
    return case.warps if target.startswith("sm_") else case.warps // 2
