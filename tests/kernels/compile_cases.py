"""Every kernel with its usual arguments, and how it is compiled for a GPU that is not there."""

from __future__ import annotations

import collections
import functools
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from amp.kernels import (
    adagrad,
    adam,
    axpby,
    l2norm,
    lamb,
    lion,
    master_copy,
    moments,
    novograd,
    sgd,
    split,
    stepping,
    unscale,
    update_scale,
)
from amp.kernels.language import OPTIONS, WARPS, tl, triton
from amp.kernels.tensor_lists import kind_of

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
GPUS = {
    **{f"sm_{number}": GPUTarget("cuda", number, 32) for number in (80, 89, 90, 100, 120)},
    **{name: GPUTarget("hip", name, 64) for name in ("gfx942", "gfx950")},
}
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
"""The GPUs that every kernel is compiled for."""
POINTERS = {
    "rows": "*i64",
    "chunks": "*i32",
    "firsts": "*i32",
    **dict.fromkeys(("a", "b"), "*fp32"),
    **dict.fromkeys(
        (
            *("inv_scale", "found_inf", "sums", "each", "partials", "total", "clip", "state", "found"),
            *("numbers", "of_tensor", "bad_steps", "step", "flag"),
        ),
        "*fp32",
    ),
    "origins": "*i64",
    "ticket": "*i32",
    "factors": "*fp64",
}
COUNTS = {"n": "i32", "n_partials": "i32", "n_of_tensor": "i32"}


class Case(NamedTuple):
    """A kernel, and what it must move by definition.

    Attributes:
        kernel: the kernel.
        constants: its compile-time arguments.
        reads: bytes that it reads from each stream for each element of a chunk.
        writes: bytes that it writes, likewise.
    """

    kernel: Any
    constants: dict[str, Any]
    reads: Sequence[int] = ()
    writes: Sequence[int] = ()


MANY = kind_of((stepping.MANY,), (torch.float32,), None)
"""Parameters that are many enough for large programs."""


def stepping_case(
    rule: Any,
    param: Any,
    grad: Any,
    *,
    model: Any = None,
    low: Any = None,
    moment: Any = None,
    merges: bool = True,
) -> Case:
    if moment is None:
        moment = F32 if model or low else param
    moments = [moment] * (1 if moment is tl.int16 else len(rule.moments))
    constants = {
        "NUMBERS": NUMBERS[rule],
        "PREPARE": rule.prepare,
        "UPDATE": rule.update,
        "MAXIMIZE": False,
        "DTYPES": tuple(dtype for dtype in (param, grad, *moments, model, low) if dtype),
        "MOMENTS": len(moments),
        "OTHER": "model" if model else "low" if low else None,
        "MERGES": bool(model) and merges,
        "BLOCK": stepping.BLOCK,
        "COUNTERS": stepping.COUNTERS,
        "sums": None,
        "HAS_RUNS": False,
        "PARTS": 1,
        "origins": None,
    }
    is_random = bool((moment is BF16 and low) or low is tl.int8)
    if is_random:
        del constants["origins"]
    parts = stepping.parts_of(MANY, is_random, bool(low))
    constants |= {"PARTS": parts, "BLOCK": parts * stepping.BLOCK}
    kept = [SIZE[dtype] for dtype in (param, *moments, low) if dtype]
    of_model = [SIZE[model]] if model else []
    reads = [SIZE[grad], *kept, *(of_model if merges else [])]
    return Case(stepping.step_kernel, constants, reads, [*kept, *of_model])


NUMBERS = {
    adagrad.ADAGRAD: 5,
    adam.ADAMW: 11,
    lamb.LAMB: 12,
    lion.LION: 6,
    novograd.NOVOGRAD: 9,
    sgd.MOMENTUM_SGD: 6,
    sgd.SGD: 6,
}
"""How many hyper-parameters each rule has."""
CASES: dict[str, Case] = {}
F16, BF16, F32, F64 = tl.float16, tl.bfloat16, tl.float32, tl.float64
SIZE = {tl.int8: 1, F16: 2, BF16: 2, tl.int16: 2, F32: 4, F64: 8}
for source, target in ((F16, F32), (BF16, BF16), (F32, F32)):
    CASES[f"unscale {source} {target}"] = Case(
        unscale.unscale_kernel,
        {"DTYPES": (source, target), "BLOCK": unscale.BLOCK},
        [SIZE[source]],
        [SIZE[target]],
    )
for source in (F16, F32):
    constants = {"DTYPES": (source,), "BLOCK": unscale.CHECK_BLOCK}
    CASES[f"check {source}"] = Case(unscale.check_kernel, constants, [SIZE[source]])
    constants = {"DTYPES": (source,), "BLOCK": l2norm.BLOCK}
    CASES[f"l2norm {source}"] = Case(l2norm.squares_kernel, constants, [SIZE[source]])
for x, y, out in ((F16, F32, F32), (BF16, BF16, BF16), (F32, F32, F32)):
    constants = {"DTYPES": (x, y, out), "BLOCK": axpby.BLOCK}
    reads, writes = [SIZE[x], SIZE[y]], [SIZE[out]]
    CASES[f"axpby {x} {y} {out}"] = Case(axpby.axpby_kernel, constants, reads, writes)
for source, target in ((F32, F16), (F32, BF16), (F16, F32), (F64, F16), (F64, BF16)):
    CASES[f"master_copy {source} {target}"] = Case(
        master_copy.copy_kernel,
        {"DTYPES": (source, target), "BLOCK": master_copy.BLOCK},
        [SIZE[source]],
        [SIZE[target]],
    )
for source in (F16, BF16):
    constants = {"DTYPES": (source, F32), "BLOCK": master_copy.MERGE_BLOCK}
    CASES[f"merge {source}"] = Case(master_copy.merge_kernel, {**constants, "flag": None}, [2, 4], [4])
    CASES[f"differ {source}"] = Case(master_copy.merge_kernel, constants, [2, 4])
rules = {
    "adam": adam.ADAMW,
    "momentum sgd": sgd.MOMENTUM_SGD,
    "sgd": sgd.SGD,
    "lion": lion.LION,
    "adagrad": adagrad.ADAGRAD,
    "lamb": lamb.LAMB,
    "novograd": novograd.NOVOGRAD,
}
for name, rule in rules.items():
    for param, grad, model in (
        (F32, F32, None),
        (F32, F16, F16),
        (F32, BF16, BF16),
        (BF16, BF16, None),
    ):
        CASES[f"{name} {param} {grad}"] = stepping_case(rule, param, grad, model=model)
    halves = [(BF16, tl.int16), (F16, tl.int16), (BF16, BF16)]
    for weight, low in halves if name == "adam" else halves[:1]:
        CASES[f"{name} {weight} + {low}"] = stepping_case(rule, weight, weight, low=low)
    if name in ("adam", "momentum sgd", "sgd"):
        only_written = stepping_case(rule, F32, F16, model=F16, merges=False)
        CASES[f"{name}, no merge fp32 fp16"] = only_written
    if name in ("adam", "momentum sgd"):
        CASES[f"{name}, seeded"] = stepping_case(rule, BF16, BF16, low=tl.int16, moment=BF16)
    packed = tl.int16 if name == "adam" else BF16
    for weight in (BF16, F16) if name in ("adam", "momentum sgd", "lion") else ():
        CASES[f"{name} {weight} + int8, packed"] = stepping_case(
            rule, weight, weight, low=tl.int8, moment=packed
        )
for param, grad, model, low in ((F32, F16, F16, None), (BF16, BF16, None, tl.int16)):
    of_step = stepping_case(lamb.LAMB, param, grad, model=model, low=low)
    measuring = {**of_step.constants, "UPDATE": lamb.LAMB.direction, "of_tensor": None, "ticket": None}
    del measuring["sums"]
    CASES[f"lamb, norms {param} {grad}"] = Case(stepping.step_kernel, measuring, of_step.reads)
for weight, low in ((F16, tl.int16), (BF16, tl.int16), (F16, F16), (BF16, tl.int8)):
    constants = {"DTYPES": (weight, low, F32), "BLOCK": split.BLOCK}
    CASES[f"join {weight} {low}"] = Case(split.join_kernel, constants, [2, SIZE[low]], [4])
    constants = {"DTYPES": (F32, weight, low), "BLOCK": split.BLOCK}
    CASES[f"split {weight} {low}"] = Case(split.split_kernel, constants, [4], [2, SIZE[low]])
for moment in (BF16, F32):
    constants = {"DTYPES": (moment, moment, tl.int16), "BLOCK": moments.BLOCK}
    CASES[f"pack {moment}"] = Case(moments.pack_kernel, constants, [SIZE[moment]] * 2, [2])
    constants = {"DTYPES": (tl.int16, moment, moment), "BLOCK": moments.BLOCK}
    CASES[f"unpack {moment}"] = Case(moments.unpack_kernel, constants, [2], [SIZE[moment]] * 2)
CASES["l2norm finish"] = Case(l2norm.norms_kernel, {"COLUMNS": 3, "BLOCK": l2norm.FINISH_BLOCK})
CASES["update_scale"] = Case(update_scale.update_kernel, {"RESET_EACH_STEP": True})


def compiled(case: Case, target: Any) -> Any:
    names = case.kernel.arg_names
    types = {name: POINTERS.get(name) or COUNTS.get(name) or "fp32" for name in names}
    signature = {**types, **dict.fromkeys(case.constants, "constexpr")}
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constants)
    limit = {}
    if target.backend == "cuda" and case.kernel is stepping.step_kernel:  # as in a launch
        is_larger = "origins" not in case.constants and case.constants["MOMENTS"] == 2
        limit = {"maxnreg": stepping.RANDOM_REGISTERS if is_larger else stepping.REGISTERS}
    return triton.compile(source, target=target, options={"num_warps": WARPS, **OPTIONS, **limit})


class Listing(NamedTuple):
    """What a kernel was compiled to.

    Attributes:
        kernel: Triton's.
        usage: where registers and spills are listed.
        code: the machine code, disassembled.
    """

    kernel: Any
    usage: str
    code: str


def listing(case: Case, target: str) -> Listing:
    """Compile a kernel, and disassemble it."""
    return disassembled(compiled(case, GPUS[target]), target)


def disassembled(kernel: Any, target: str) -> Listing:
    if not target.startswith("sm_"):
        return Listing(kernel, kernel.asm["amdgcn"], kernel.asm["amdgcn"])
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        return Listing(kernel, run("cuobjdump", "-res-usage", binary), run("nvdisasm", "-c", binary))


def resources(found: Listing, target: str) -> tuple[int, dict[str, int]]:
    """Return how many registers a thread has, and what it spills, by the names of the tools."""
    of_nvidia = r"(REG|STACK|LOCAL):(\d+)"
    of_amd = r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count):\s*(\d+)"
    pattern = of_nvidia if target.startswith("sm_") else of_amd
    usage = {name: int(number) for name, number in re.findall(pattern, found.usage)}
    return usage.pop("REG" if target.startswith("sm_") else "vgpr_count"), usage


def accesses(found: Listing, target: str) -> collections.Counter[tuple[str, int]]:
    """Count the loads and stores of 64 and of 128 bits."""
    of_nvidia = r"\b(LDG|STG)\.E\.(?:[A-Z_]+\.)*(64|128)\b"
    of_amd = r"(?:buffer|global)_(load|store)_(?:dwordx|b)(2|4|64|128)\b"
    pattern = of_nvidia if target.startswith("sm_") else of_amd
    names = {"LDG": "load", "STG": "store", "2": 64, "4": 128, "64": 64, "128": 128}
    return collections.Counter(
        (names.get(what, what), names[bits]) for what, bits in re.findall(pattern, found.code)
    )


@functools.cache
def listing_of(name: str, target: str) -> Listing:
    """Return the listing of a case, which takes NVIDIA's tools half a second."""
    return listing(CASES[name], target)


def run(tool: str, *arguments: object) -> str:
    command = [str(TOOLS / tool), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
