"""Predict, from the compiled code alone, the share of a GPU's bandwidth that each kernel can reach.

    PYTHONPATH=. python docs/benchmarks/predict_kernels.py        # what `make predict` runs

No GPU is needed, and none was used: the rows are predictions. docs/kernels.md has the model in words
and the rows of the main kernels, which this writes too. All rows go to kernels-predicted.md.
"""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from amp.kernels.language import WARPS, triton
from docs.benchmarks import machine_code
from docs.benchmarks.bench_kernels import table
from docs.benchmarks.machine_code import Body
from tests.kernels.compile_cases import CASES, Case, listing_of

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "docs" / "benchmarks" / "kernels-predicted.md"
DOCUMENT = ROOT / "docs" / "kernels.md"
BEGIN, END = "<!-- predicted by docs/benchmarks/predict_kernels.py -->", "<!-- end -->"
MAIN = (  # the kernels of the table in docs/kernels.md
    *("adam fp32 fp32", "adam fp32 fp16", "adam bf16 + int16", "adam, seeded"),
    *("adam bf16 + int8, packed", "adam fp16 + int8, packed"),
    *("adam, no merge fp32 fp16", "momentum sgd fp32 fp16", "lamb fp32 fp16", "lamb, norms fp32 fp16"),
    *("unscale fp16 fp32", "check fp16", "l2norm fp16", "axpby fp16 fp32 fp32"),
    *("master_copy fp32 fp16", "merge fp16", "differ fp16", "split bf16 int16", "join bf16 int16"),
)
SPECIAL_LANES = 16  # of a unit, for reciprocals, roots and exponentials, on all of them
REGISTERS = 512  # of a lane, for all warps of a quarter of a unit; a warp gets them in eights
KIB = 1024
SCANNED_THREADS = 256  # of the programs that give the turnover; ours have 256 too, or 512 on AMD


class Product(NamedTuple):
    """A GPU: what its makers say of it, and what others have measured on it.

    A unit is an SM of NVIDIA's or a CU of AMD's; AMD calls a warp a wavefront.
    """

    name: str
    units: int
    lanes: int  # of a unit, for FP32
    clock: float  # GHz, at most
    shared: int  # bytes of a unit
    peak: float  # GB/s of its memory, as specified
    reached: float  # GB/s, the most that a streaming benchmark reached
    near: float  # nanoseconds until a load from L2 is there
    far: float  # nanoseconds until a load from memory is there
    scan: dict[int, float]  # GB/s of copying doubles, two programs in each unit, by their threads
    width: int = 32  # threads of a warp
    warps: int = 16  # that a quarter of a unit holds


# Limits of a unit: the CUDA Programming Guide, technical specifications of compute capability 8.0, 9.0
# and 10.0; for gfx942, LLVM's llvm-calc-occupancy and the ISA guide of AMD's CDNA3. Units, clock and
# peak: data sheets. Latencies, scans and what was reached: te42kyfo/gpu-benches on GitHub (gpu-latency;
# gpu-stream, `scale` and the best `triad`; for GB200 gpu-roofline), read from the fork of xxrjun.
PRODUCTS: dict[str, Product] = {
    "sm_80": Product(
        name="A100 SXM 80 GB", units=108, lanes=64, clock=1.41, shared=164 * KIB,
        peak=2039, reached=1794, near=205 / 1.41, far=550 / 1.41,
        scan={128: 579, 256: 1025, 512: 1577, 1024: 1737},
    ),
    "sm_90": Product(
        name="GH200 96 GB", units=132, lanes=128, clock=1.98, shared=228 * KIB,
        peak=4000, reached=3783, near=280 / 1.98, far=679 / 1.98,
        scan={128: 854, 256: 1397, 512: 2269, 1024: 3174},
    ),
    "sm_100": Product(  # no latencies and no scan were found: those of GH200 stand in
        name="GB200", units=152, lanes=128, clock=1.965, shared=228 * KIB,
        peak=8000, reached=6389, near=280 / 1.98, far=679 / 1.98, scan={},
    ),
    "gfx942": Product(
        name="MI300X", units=304, lanes=64, clock=2.1, shared=64 * KIB,
        peak=5300, reached=4000, near=213 / 2.092, far=880 / 2.092,
        scan={128: 1534, 256: 2729, 512: 3427, 1024: 3997},
        width=64, warps=8,
    ),
}  # fmt: skip


def knee(asked: float) -> float:
    """Return the share of a bandwidth that is had, where `asked` times the bandwidth would be used:
    a straight line for little and 1 for much, as Little's law has it, with the corner rounded off.
    """
    return asked / math.sqrt(1 + asked**2)


def rate_asked(product: Product, bytes_at_once: float, life: float) -> float:
    """Return how much of what can be reached programs would move, if memory were never busy.

    Those in one unit load and store `bytes_at_once` in a life, until their successors start.
    """
    return bytes_at_once / life * product.units / product.reached


def turnover(product: Product) -> float:
    """Return the nanoseconds by which a program lives longer than its loads take, from the scan."""
    scanned = product if product.scan else PRODUCTS["sm_90"]
    share = scanned.scan[SCANNED_THREADS] / scanned.reached
    asked = share / math.sqrt(1 - share**2)
    return rate_asked(scanned, 2 * SCANNED_THREADS * 16, 1.0) / asked - scanned.far


def deviation(product: Product) -> float | None:
    """Return the largest relative difference of the model from the rest of a product's scan."""
    life = turnover(product) + product.far
    rest = {n: rate / product.reached for n, rate in product.scan.items() if n != SCANNED_THREADS}
    shares = {n: knee(rate_asked(product, 2 * n * 16, life)) for n in rest}
    return max((abs(shares[n] / rest[n] - 1) for n in rest), default=None)


class Usage(NamedTuple):
    """What a program takes: registers of a thread, bytes spilled and shared."""

    registers: int
    spilled: int
    shared: int


def resident(product: Product, usage: Usage) -> tuple[int, str]:
    """Return how many programs a unit holds, and what allows no more."""
    of_thread = 8 * math.ceil(usage.registers / 8)
    limits = {
        "warps": 4 * product.warps // WARPS,
        "registers": 4 * (REGISTERS // of_thread) // WARPS,
        "shared memory": product.shared // max(usage.shared, 1),
    }
    least = min(limits, key=lambda name: limits[name])
    return limits[least], least


class Prediction(NamedTuple):
    """What is to be expected of a kernel on a GPU."""

    programs: int  # that a unit holds
    in_flight: int  # bytes that these load at a time
    needed: float  # bytes that latency times peak bandwidth asks for
    life: float  # nanoseconds of a program
    expected: float  # share of the peak bandwidth
    limit: str  # what keeps it from more


def predict(product: Product, usage: Usage, body: Body) -> Prediction:
    """Return what is to be expected of a kernel that moves something."""
    moved = body.loaded + body.stored
    programs, limit = resident(product, usage)
    slots = body.instructions + body.special * (product.lanes / SPECIAL_LANES - 1)
    issue = WARPS * product.width * slots / product.lanes / product.clock
    life = turnover(product) + body.waits + issue
    by_waiting = knee(rate_asked(product, programs * moved, life))
    by_issuing = rate_asked(product, moved, issue)
    if by_issuing < by_waiting:
        limit = "instructions"
    elif by_waiting >= knee(2):
        limit = "memory"
    return Prediction(
        programs,
        programs * body.in_flight,
        product.far * product.peak / product.units * body.loaded / moved,
        life,
        min(by_waiting, by_issuing) * product.reached / product.peak,
        limit,
    )


def examined(name: str, target: str) -> tuple[Usage, Body]:
    """Compile a kernel for a target, and return what it takes and does there."""
    product, (kernel, listed, code) = PRODUCTS[target], listing_of(name, target)
    if target.startswith("sm_"):
        path = machine_code.sass(code)
        names = ("REG", "STACK", "LOCAL")
    else:
        path = machine_code.amdgcn(code)
        names = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
    registers, *spilled = (int(re.findall(rf"\b{name}:\s*(\d+)", listed)[-1]) for name in names)
    body = machine_code.body(path, WARPS * product.width, product.near, product.far)
    return Usage(registers, sum(spilled), kernel.metadata.shared), body


HEADER = [
    *("kernel", "B/element, loaded + stored", "by definition", "of tables", "registers", "spilled"),
    *("shared B", "warps", "KiB in flight", "KiB needed", "waits ns"),
    *("life ns", "expected % of peak", "limited by", "elements to fill the GPU"),
]


def row(name: str, case: Case, target: str) -> list[str]:
    """Return a row of a table under `HEADER`."""
    product, block = PRODUCTS[target], case.constants["BLOCK"]
    usage, body = examined(name, target)
    found = predict(product, usage, body)
    return [
        name,
        f"{body.loaded / block:g} + {body.stored / block:g}",
        f"{sum(case.reads)} + {sum(case.writes)}",
        f"{body.shared / block:.3f}",
        *map(str, usage),
        f"{found.programs * WARPS} of {4 * product.warps}",
        f"{found.in_flight / KIB:.0f}",
        f"{found.needed / KIB:.1f}",
        f"{body.waits:.0f}",
        f"{found.life:.0f}",
        f"{100 * found.expected:.0f}",
        found.limit,
        f"{product.units * found.programs * block:,}",
    ]


def products() -> Iterator[list[str]]:
    """Yield the table of products."""
    yield [
        *("target", "product", "SMs or CUs", "peak GB/s", "reached GB/s", "L2 ns", "memory ns"),
        *("turnover ns", "KiB needed for loads alone", "largest error of the model"),
    ]
    for target, product in PRODUCTS.items():
        off = deviation(product)
        numbers = (product.units, product.peak, product.reached, product.near, product.far)
        yield [
            *(target, product.name, *(f"{x:.0f}" for x in (*numbers, turnover(product)))),
            f"{product.far * product.peak / product.units / KIB:.1f}",
            "" if off is None else f"{100 * off:.0f} %",
        ]


def main_rows(rows: dict[str, dict[str, list[str]]]) -> Iterator[list[str]]:
    """Yield the table of the main kernels from the rows by target and kernel."""
    yield ["kernel", *HEADER[1:2], *(f"{target}, {PRODUCTS[target].name}" for target in rows)]
    expected, limit = HEADER.index("expected % of peak"), HEADER.index("limited by")
    for name in MAIN:
        cells = [of_target[name] for of_target in rows.values()]
        yield [*cells[0][:2], *(f"{x[expected]} % ({x[limit]})" for x in cells)]


def main() -> None:
    """Compile everything, and write both files."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", "kernels"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    setting = f"From {versions}, kernels of commit {commit}."
    page = "# Kernels, predicted\n\n[The model](../kernels.md#kernels-on-paper): calculated, not "
    page += f"measured. {setting}\n"
    rows: dict[str, dict[str, list[str]]] = {}
    for target, product in PRODUCTS.items():
        rows[target] = {name: row(name, case, target) for name, case in CASES.items() if case.reads}
        of_target = table([HEADER, *rows[target].values()])
        page += f"\n## {target}\n\nFor {product.name}.\n\n{of_target}\n"
    ROWS.write_text(page)
    tables = f"{setting}\n\n{table(products())}\n\n{table(main_rows(rows))}"
    before, after = re.split(f"{BEGIN}.*{END}", DOCUMENT.read_text(), flags=re.DOTALL)
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}")


if __name__ == "__main__":
    main()
