"""Every kernel compiled for real GPUs, without one: no spills, few registers, 128-bit accesses.

Triton brings its own assembler and disassembler. What a kernel compiles to is read from the machine
code: a pointer table that the compiler cannot see through turns into element-wise loads, and no test of
results would notice.
"""

from __future__ import annotations

import collections
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from amp.kernels import (
    adagrad,
    adam,
    axpby,
    l2norm,
    lamb,
    lion,
    master_copy,
    novograd,
    sgd,
    split,
    stepping,
    unscale,
    update_scale,
)
from amp.kernels.language import INTERPRETED, OPTIONS, tl, triton

if triton is None or INTERPRETED:
    pytest.skip("needs Triton's compiler", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

pytestmark = pytest.mark.slow

KERNELS = Path(unscale.__file__).parent
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
WARPS = 8
MOST_REGISTERS = 96
POINTERS = {
    "rows": "*i64",
    "chunks": "*i32",
    "firsts": "*i32",
    **dict.fromkeys(("a", "b"), "*fp32"),
    **dict.fromkeys(
        (
            *("inv_scale", "found_inf", "sums", "each", "partials", "total", "clip", "state"),
            *("numbers", "of_tensor"),
        ),
        "*fp32",
    ),
    "ticket": "*i32",
    "factors": "*fp64",
}
COUNTS = {"n": "i32", "n_partials": "i32", "n_of_tensor": "i32", "seed": "i32"}


class Case(NamedTuple):
    """A kernel and what it must compile to.

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


def stepping_case(
    rule: Any, param: Any, grad: Any, *, model: Any = None, low: Any = None, moment: Any = None
) -> Case:
    if moment is None:
        moment = F32 if model or low else param
    moments = [moment] * rule.moments
    constants = {
        "NUMBERS": NUMBERS[rule],
        "PREPARE": rule.prepare,
        "UPDATE": rule.update,
        "MAXIMIZE": False,
        "DTYPES": tuple(dtype for dtype in (param, grad, *moments, model, low) if dtype),
        "MOMENTS": rule.moments,
        "OTHER": "model" if model else "low" if low else None,
        "BLOCK": stepping.BLOCK,
        "COUNTERS": stepping.COUNTERS,
        "sums": None,
        "seed": None,
    }
    if moment is BF16 and low:
        del constants["seed"]
    kept = [SIZE[dtype] for dtype in (param, *moments, low) if dtype]
    return Case(
        stepping.step_kernel, constants, [SIZE[grad], *kept], [*kept, *([SIZE[model]] if model else [])]
    )


NUMBERS = {
    adagrad.ADAGRAD: 5,
    adam.ADAM: 11,
    lamb.LAMB: 12,
    lion.LION: 6,
    novograd.NOVOGRAD: 9,
    sgd.MOMENTUM_SGD: 6,
    sgd.SGD: 6,
}
"""How many hyper-parameters each rule has."""
CASES: dict[str, Case] = {}
if triton is not None:
    F16, BF16, F32, F64 = tl.float16, tl.bfloat16, tl.float32, tl.float64
    SIZE = {F16: 2, BF16: 2, tl.int16: 2, F32: 4, F64: 8}
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
        constants = {"CHECK": "x", "DTYPES": (x, y, out), "BLOCK": axpby.BLOCK}
        reads, writes = [SIZE[x], SIZE[y]], [SIZE[out]]
        CASES[f"axpby {x} {y} {out}"] = Case(axpby.axpby_kernel, constants, reads, writes)
    for source, target in ((F32, F16), (F32, BF16), (F16, F32), (F64, F16), (F64, BF16)):
        CASES[f"master_copy {source} {target}"] = Case(
            master_copy.copy_kernel,
            {"DTYPES": (source, target), "BLOCK": master_copy.BLOCK},
            [SIZE[source]],
            [SIZE[target]],
        )
    rules = {
        "adam": adam.ADAM,
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
        if name in ("adam", "momentum sgd"):
            CASES[f"{name}, seeded"] = stepping_case(rule, BF16, BF16, low=tl.int16, moment=BF16)
    for param, grad, low in ((F32, F16, None), (BF16, BF16, tl.int16)):
        of_step = stepping_case(lamb.LAMB, param, grad, low=low).constants
        measuring = {**of_step, "UPDATE": lamb.LAMB.direction, "of_tensor": None, "ticket": None}
        del measuring["sums"]
        reads = [SIZE[dtype] for dtype in (param, grad, F32, F32, low) if dtype]
        CASES[f"lamb, norms {param} {grad}"] = Case(stepping.step_kernel, measuring, reads)
    for weight, low in ((F16, tl.int16), (BF16, tl.int16), (F16, F16)):
        constants = {"DTYPES": (weight, low, F32), "BLOCK": split.BLOCK}
        CASES[f"join {weight} {low}"] = Case(split.join_kernel, constants, [2, 2], [4])
        constants = {"DTYPES": (F32, weight, low), "BLOCK": split.BLOCK}
        CASES[f"split {weight} {low}"] = Case(split.split_kernel, constants, [4], [2, 2])
    CASES["l2norm total"] = Case(
        l2norm.norms_kernel, {"COLUMNS": 3, "EPS": l2norm.CLIP_EPS, "BLOCK": l2norm.FINISH_BLOCK}
    )
    CASES["update_scale"] = Case(update_scale.update_kernel, {"RESET_EACH_STEP": True})


def compiled(case: Case, target: Any) -> Any:
    names = case.kernel.arg_names
    types = {name: POINTERS.get(name) or COUNTS.get(name) or "fp32" for name in names}
    signature = {**types, **dict.fromkeys(case.constants, "constexpr")}
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=target, options={"num_warps": WARPS, **OPTIONS})


def vector_accesses(case: Case, threads: int) -> tuple[int, int]:
    """Return how many 128-bit loads and stores a thread needs for its part of a chunk."""
    block = case.constants.get("BLOCK", 0)
    loads, stores = (
        sum(block * size // (16 * threads) for size in s) for s in (case.reads, case.writes)
    )
    return loads, stores


def run(tool: str, *arguments: object) -> str:
    command = [str(TOOLS / tool), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def roundings_that_torch_has_not(ptx: str) -> list[str]:
    """Return what would make results differ from torch's, or between variants of a kernel."""
    problems = []
    if "fma." in ptx:
        problems.append("products that are not rounded before they are added")
    if re.search(r"cvt\.rn\.(bf16|f16)\.f64", ptx):
        problems.append("FP64 to 16 bits, and not by way of FP32")
    if re.search(r"(min|max)\.f32", ptx) and "norms_kernel" in ptx:
        problems.append("a smaller or larger one that is not NaN where one of two is")
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
