"""The kernels that quantize to FP4, with their usual arguments, compiled for absent GPUs."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from amp.kernels import fp4_tiles as tiles
from amp.kernels.language import OPTIONS, triton
from amp.kernels.quantize_tiles import tiled_jit

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
POINTERS = {
    "by_row": "*u8",
    "by_column": "*i64",
    "calls": "*i64",
    **dict.fromkeys(("inverse", "transposed"), "*u8"),
    **dict.fromkeys(("row_amax", "column_amax", "outer", "outer_of_columns"), "*fp32"),
    **dict.fromkeys(("of_rows", "of_columns"), "*i32"),
}
BYTES = {"bf16": 2, "fp32": 4}


class Case(NamedTuple):
    """A kernel, its compile-time arguments, and the dtype of what is quantized."""

    kernel: Any
    constants: dict[str, Any]
    source: str

    @property
    def elements(self) -> int:
        """How many numbers a thread has."""
        return tiles.TILE[0] * tiles.TILE[1] // (32 * tiles.WARPS)


def case(kernel: Any, source: str, **constants: Any) -> Case:
    if kernel is tiles.blocks_kernel:
        constants = {"HADAMARD": False, "H": 1, "G": 16, "calls": None, **constants}
    sizes = {name: size for name, size in tiles.SIZES.items() if name in kernel.arg_names}
    return Case(kernel, {**sizes, **constants}, source)


NO_AMAX = dict.fromkeys(("row_amax", "column_amax", "outer", "outer_of_columns"))
RANDOM = {"calls": "*i64"}
CASES: dict[str, Case] = {}
for source in ("bf16", "fp32"):
    CASES[f"amaxes {source}"] = case(tiles.amaxes_kernel, source)
    for name, constants in {
        "1x16": {},
        "1x16, transformed": {"HADAMARD": True},
        "1x16, transformed, random": {"HADAMARD": True, **RANDOM},
        "16x16": {"H": 16},
        "1x32, transformed": {"HADAMARD": True, "G": 32, **NO_AMAX},
        "1x32, transformed, random": {"HADAMARD": True, "G": 32, **NO_AMAX, **RANDOM},
    }.items():
        CASES[f"{name} {source}"] = case(tiles.blocks_kernel, source, **constants)


def compiled(case: Case, target: Any) -> Any:
    names = case.kernel.arg_names
    constants = {name: value for name, value in case.constants.items() if value != POINTERS.get(name)}
    signature = {name: {**POINTERS, "x": f"*{case.source}"}.get(name, "i32") for name in names}
    signature |= dict.fromkeys(constants, "constexpr")
    known = [name for name in tiled_jit.keywords["multiples_of_16"] if name in names]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in known}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=values, attrs=attributes)
    warps = tiles.WARPS // 2 if target.backend == "hip" else tiles.WARPS
    limit = {} if target.backend == "hip" else {"maxnreg": tiles.REGISTERS}
    return triton.compile(source, target=target, options={"num_warps": warps, **OPTIONS, **limit})
