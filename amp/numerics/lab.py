"""The lab: a self-contained HTML page with nine interactive figures on number formats and scales.

The page computes in JavaScript. `vectors` has results of this package, with which the page compares its
own results when it opens.
"""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import torch

import amp
from amp.errors import AmpValueError
from amp.kernels.fp4 import SIGNS, turned
from amp.kernels.fp8 import dequantize, unpacked
from amp.kernels.philox import MULTIPLIERS, ROUNDS, WEYL, WORD, Draw, random_bytes
from amp.kernels.quantize_fp4 import quantize_fp4
from amp.numerics.formats import FORMATS, Format
from amp.numerics.fp8_simulation import SCALINGS, fp8_losses, simulate_fp8
from amp.numerics.histograms import Histogram
from amp.numerics.memory import TERMS
from amp.numerics.planning import FIRST, rows_of
from amp.numerics.rounding import bits, neighbours, survives_update, ulp
from amp.numerics.scaling import simulate_scaler
from amp.terminal.output_files import check_output
from amp.terminal.text import plain

_WEB = Path(__file__).parent / "web"
HOME = "https://github.com/reamp/reamp"
"""The target of the links, from a checkout and a site alike."""
DOCS = f"{HOME}/blob/main/docs"
SCRIPTS = "formats training check exact controls drawing bits ranges scales memory fp8 fp4 start"
"""The page's JavaScript files, in the order in which they are joined."""
OPTIMIZERS = "FusedAdam adamw sgd sgd-momentum FusedSGD-momentum FusedLAMB FusedLion"
"""The optimizers in the memory figure."""


def page() -> str:
    """Return the page as HTML."""
    data = {
        "formats": [_format(fmt) for fmt in FORMATS.values()],
        "memory": {optimizer: _memory(optimizer) for optimizer in OPTIMIZERS.split()},
        "first": FIRST,
        "scalings": SCALINGS,
        "fp4": {"signs": SIGNS, "rounds": ROUNDS, "multipliers": MULTIPLIERS, "weyl": WEYL},
        "vectors": vectors(),
    }
    text = _read("lab.html")
    for mark, content in (
        ("/*CSS*/", style() + _read("lab.css")),
        ("/*DOCS*/", f"{DOCS}/"),
        ("/*HOME*/", HOME),
        ("/*VERSION*/", amp.__version__),
        ("/*DATA*/", json.dumps(plain(data, mark="#"), separators=(",", ":"))),
        ("/*JS*/", "\n".join(_read(f"{name}.js") for name in SCRIPTS.split())),
    ):
        text = text.replace(mark, content)
    return text


def style() -> str:
    """Return the part of the style sheet that all pages share."""
    return _read("style.css")


def _read(name: str) -> str:
    return (_WEB / name).read_text(encoding="utf-8")


def write(path: str | Path | None = None) -> Path:
    """Write the page to a file, and return its path.

    Args:
        path: the path of the file. None writes `lab.html`, unless that exists and is not a lab.

    Raises:
        AmpValueError: the folder does not exist, the file cannot be written, or the path has a file of
            another kind.
    """
    mark = "<title>reamp: the numerics lab</title>" if path is None else ""
    return write_page(Path("lab.html" if path is None else path), page(), mark)


def write_page(path: Path, content: str, mark: str = "") -> Path:
    """Write HTML to a file, and return its path. Raises as `write`; for `mark`, see `check_output`."""
    check_output(path, mark)
    try:
        path.write_text(content, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise AmpValueError(f"{str(path)!r} cannot be written: {error}") from None
    return path


def _format(fmt: Format) -> dict[str, Any]:
    derived = ("bits", "max_exponent", "min_exponent", "max", "min_normal", "min_subnormal")
    nan_pattern = None if fmt.nan == "none" else fmt.nan_pattern
    more = {name: getattr(fmt, name) for name in derived}
    return {**dataclasses.asdict(fmt), **more, "nan_pattern": nan_pattern}


def _memory(optimizer: str) -> list[dict[str, Any]]:
    """Return the bytes of each term, for one parameter, of the ways to train in `reamp memory`."""
    count = 10**9
    return [
        {"levels": row.levels, "way": row.optimizer}
        | {term: round(getattr(row.footprint, term) / count, 3) for term in TERMS}
        for row in rows_of(count, optimizer, activations=count)
    ]


@functools.cache
def vectors() -> dict[str, list[Any]]:
    """Return this package's results for some inputs, for the page to compare with."""
    return {
        "numbers": [entry for fmt in FORMATS.values() for entry in _numbers(fmt)],
        "traces": [_trace(*case) for case in _TRACES],
        "counts": list(_COUNTS.items()),
        "fates": [_fate(fmt, log2_scale) for fmt in FORMATS.values() for log2_scale in (0, 8, 24)],
        "memory": [_memory_case(*case) for case in _MEMORY],
        "fp8": [_fp8_case(*case) for case in _FP8],
        "fp4": [_fp4_case(*case) for case in _FP4],
        "histories": [_history(*case) for case in _HISTORIES],
    }


def _drawn(count: int, seed: int, low: int = -26, high: int = 17) -> list[float]:
    """Return random numbers of either sign with exponents in a range, the same on all machines."""
    generator = torch.Generator("cpu").manual_seed(seed)
    fractions = 2 * torch.rand(count, generator=generator, dtype=torch.float64, device="cpu") - 1
    exponents = torch.randint(low, high, (count,), generator=generator, device="cpu")
    return list(map(math.ldexp, fractions.tolist(), exponents.tolist()))


def _inputs(fmt: Format) -> list[float]:
    drawn = _drawn(20, fmt.bits)
    tie = fmt.max + 2.0 ** (fmt.max_exponent - fmt.mantissa_bits - 1)
    ends = (fmt.max, tie, tie * 1.01, fmt.min_normal, fmt.min_subnormal, fmt.min_subnormal / 2, 1.0)
    near = [*ends, *(end * 1.4 for end in ends), 1 + fmt.ulp_at_1 / 2, 1 + 1.5 * fmt.ulp_at_1]
    common = [0.0, math.pi, 0.1, 1e-8, 1.00005, 448.0, 65504.0, 65520.0, math.inf]
    return [*drawn, *common, *(-x for x in common), *near, *(-x for x in near), math.nan]


def _numbers(fmt: Format) -> list[dict[str, Any]]:
    x = torch.tensor(_inputs(fmt), dtype=torch.float64, device="cpu")
    update = torch.where(x.isfinite(), 5e-5 * x, 1.0)
    near, found = neighbours(x, fmt)._asdict(), bits(x, fmt)._asdict()
    del found["error"]
    survives = survives_update(x, update, fmt)
    columns = {"x": x, "ulp": ulp(x, fmt), **near, "update": update, "survives": survives, **found}
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [{"format": fmt.name, **dict(zip(columns, row, strict=True))} for row in rows]


_TRACES: tuple[tuple[int, list[int], dict[str, Any]], ...] = (
    (20, [10], {"init": 2.0**15, "growth_interval": 5}),
    (40, [3, 4, 5, 20, 30, 31], {"init": 1000.0, "growth_interval": 4, "hysteresis": 2}),
    (30, [1, 2, 3], {"init": 7.0, "growth_factor": 1.3, "backoff_factor": 0.7, "growth_interval": 2}),
    (30, list(range(12)), {"init": 64.0, "min": 8.0, "max": 100.0, "growth_interval": 3}),
)


def _trace(steps: int, overflows: list[int], options: dict[str, Any]) -> dict[str, Any]:
    trace = simulate_scaler(steps=steps, overflows=overflows, **options)
    after = {"scales": [s.next_scale for s in trace], "good": [s.good_steps for s in trace]}
    return {"steps": steps, "overflows": overflows, "options": options, **after}


_COUNTS = {e: (e * e) % 97 for e in range(-149, 128)}


def _fate(fmt: Format, log2_scale: int) -> dict[str, Any]:
    zero, subnormal, overflow = Histogram(_COUNTS, 0, 0).fates(fmt, 2.0**log2_scale)
    found = {"zero": zero, "subnormal": subnormal, "overflow": overflow}
    return {"format": fmt.name, "log2_scale": log2_scale, **found}


_MEMORY: tuple[tuple[float, str, dict[str, Any]], ...] = (
    (7e9, "adamw", {}),
    (175e9, "FusedAdam", {"activations": 1e9, "world_size": 64, "sharding": "zero3"}),
    (25557032, "sgd-momentum", {"world_size": 3, "sharding": "zero1"}),
    (335e6, "FusedLAMB", {"world_size": 8, "sharding": "zero2"}),
)


def _memory_case(params: float, optimizer: str, options: dict[str, Any]) -> dict[str, Any]:
    found = [row.footprint for row in rows_of(params, optimizer, **options)]
    rows = [{term: getattr(each, term) for term in (*TERMS, "total")} for each in found]
    in_page = {("world" if key == "world_size" else key): value for key, value in options.items()}
    return {"params": params, "optimizer": optimizer, "options": in_page, "rows": rows}


_FP8 = ((5, 70, -10, 8), (3, 32, -30, -20), (130, 2, -3, 12))


def _fp8_case(rows: int, columns: int, low: int, high: int) -> dict[str, Any]:
    x = torch.tensor(_drawn(rows * columns, rows, low, high), dtype=torch.float32, device="cpu")
    x = x.view(rows, columns)
    x[0, 0] = 0.0
    return {"x": x.tolist(), "losses": [loss._asdict() for loss in fp8_losses(x)]}


_FP4: tuple[tuple[int, int, int, bool, tuple[int, int, int] | None], ...] = (
    (32, -12, -2, False, None),
    (32, -12, -2, True, None),
    (32, -12, -2, True, (7, 2**40 + 11, 2**31 + 5)),
    (64, -9, 9, False, (2**32 - 1, 3, 0)),
    (32, 100, 127, False, None),
    (32, -140, -120, False, None),
    (32, -200, -190, False, None),  # zeros, in FP32
)


def _fp4_case(
    count: int, low: int, high: int, hadamard: bool, drawn: tuple[int, int, int] | None
) -> dict[str, Any]:
    x = torch.tensor(_drawn(count, count, low, high), dtype=torch.float32, device="cpu")[:, None]
    x[:16] *= 2.0**-9
    x[16] = 0.0
    draw = None
    if drawn is not None:
        calls, seed, name = drawn
        draw = Draw(torch.tensor(calls, device="cpu"), seed, name)
    operand = quantize_fp4(x, by_row=False, hadamard=hadamard, draw=draw).by_column
    assert operand is not None
    assert operand.outer is not None
    columns = {
        "number": turned(x, count, hadamard),
        "scale": operand.inverse.float().repeat_interleave(16),
        "outer": operand.outer.expand(count),
        "kept": unpacked(operand.values),
        "value": dequantize(operand),
    }
    shared: dict[str, Any] = {"x": x.flatten().tolist(), "hadamard": hadamard}
    if draw is not None:
        columns["byte"] = random_bytes(torch.Size(operand.shape), draw.of_columns())
        shared |= {
            "call": int(draw.calls),
            "name": draw.name,
            "key": [draw.seed & WORD, draw.seed >> 32],
        }
    rows = zip(*(column.flatten().tolist() for column in columns.values()), strict=True)
    return {**shared, "rows": [dict(zip(columns, row, strict=True)) for row in rows]}


_AMAXES = [4.0, 3.0, 500.0, 2.0, 0.0, 1.0, 0.7, math.inf, 0.5, 0.125, 0.11, 900.0, 1e-3]

_HISTORIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("float8_e4m3fn", {"amax_history": 3}),
    ("float8_e4m3fn", {"amax_history": 4, "amax_algo": "most_recent", "margin": 1}),
    ("float8_e5m2", {"amax_history": 1, "margin": 2}),
)


def _history(fmt: str, options: dict[str, Any]) -> dict[str, Any]:
    steps = [step._asdict() for step in simulate_fp8(_AMAXES, fmt, **options)]
    return {"format": fmt, "options": options, "amaxes": _AMAXES, "steps": steps}
