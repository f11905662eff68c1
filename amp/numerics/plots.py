"""Plots of the results of this package, as PNG or SVG. They need matplotlib, the extra `plot`."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from amp.errors import AmpRuntimeError, AmpValueError
from amp.numerics.formats import FORMATS, Format, as_format
from amp.numerics.fp8_simulation import Fp8Step, fp8_scaled
from amp.numerics.histograms import NOTHING, Histogram, WatchReport
from amp.numerics.memory import TERMS, Footprint
from amp.numerics.scaling import GradientSurvival, ScalerStep
from amp.terminal.output_files import check_output

SUFFIXES = (".png", ".svg")


@contextmanager
def _picture(path: str | Path, rows: int = 1) -> Iterator[Any]:
    """Yield the axes to draw on, or an array of `rows` of them, and write the file at the end."""
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise AmpValueError(f"{path}: a picture is a {' or '.join(SUFFIXES)} file")
    check_output(path, suffix)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise AmpRuntimeError(
            "a picture needs matplotlib, which is not installed: "
            "pip install 'reamp[plot] @ git+https://github.com/reamp/reamp'"
        ) from None
    figure = Figure(figsize=(8.0, 4.5 if rows == 1 else 3.0 * rows), layout="constrained")
    yield figure.subplots(rows)
    try:
        figure.savefig(path, dpi=150, metadata={"Date": None} if suffix == ".svg" else {})
    except (OSError, ValueError) as error:
        raise AmpValueError(f"{str(path)!r} cannot be written: {error}") from None


def _legend(axes: Any) -> None:
    """Put the legend beside the drawing."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)


def _powers(axes: Any, name: str) -> None:
    """Give an axis a logarithmic scale with whole powers of 2, or of 16 and the like, at its ticks."""
    from matplotlib.ticker import LogLocator

    getattr(axes, f"set_{name}scale")("log", base=2)
    getattr(axes, f"{name}axis").set_major_locator(LogLocator(base=2, numticks=9))


def plot_ranges(path: str | Path) -> None:
    """Draw the range of each format on a logarithmic axis, with paler subnormal numbers."""
    with _picture(path) as axes:
        for i, fmt in enumerate(reversed(FORMATS.values())):
            low, normal, high = fmt.min_subnormal, fmt.min_normal, fmt.max
            axes.plot([low, normal], [i, i], lw=8, alpha=0.35, color="C0", solid_capstyle="butt")
            axes.plot([normal, high], [i, i], lw=8, color="C0", solid_capstyle="butt")
        _powers(axes, "x")
        axes.set_yticks(range(len(FORMATS)), [fmt.name for fmt in reversed(FORMATS.values())])
        axes.set_xlabel("representable magnitudes; subnormal numbers paler")


def plot_trace(trace: Sequence[ScalerStep], path: str | Path) -> None:
    """Draw a loss scale over its iterations, with the overflows."""
    with _picture(path) as axes:
        axes.step([s.step for s in trace], [s.next_scale for s in trace], where="mid", label="scale")
        bad = [s for s in trace if s.overflow]
        axes.plot([s.step for s in bad], [s.next_scale for s in bad], "x", color="C3", label="overflow")
        _powers(axes, "y")
        axes.set(xlabel="iteration", ylabel="loss scale after it")
        _legend(axes)


def plot_survival(survival: GradientSurvival, path: str | Path, fmt: Any = "float16") -> None:
    """Draw which fractions of gradients become 0, become subnormal and overflow, by the scale."""
    name = as_format(fmt).name
    found = survival.formats[name]
    with _picture(path) as axes:
        axes.plot(survival.scales, found.zero, label="becomes 0")
        axes.plot(survival.scales, found.subnormal, label="subnormal")
        axes.plot(survival.scales, found.overflow, label="overflows")
        if found.recommended is not None:
            axes.axvline(found.recommended, color="0.6", ls="--", label=f"{found.recommended:g}")
        _powers(axes, "x")
        axes.set(xlabel="loss scale", ylabel=f"fraction of gradients, {name}")
        _legend(axes)


def plot_memory(rows: Sequence[Footprint], path: str | Path, limit: float | None = None) -> None:
    """Draw footprints as stacked bars, in GB, with a line at `limit`, in GB."""
    with _picture(path) as axes:
        names = [f"{r.opt_level}\n{r.masters_kept}" for r in rows]
        bottom = [0.0] * len(rows)
        for term in TERMS:
            sizes = [getattr(row, term) / 1e9 for row in rows]
            axes.bar(names, sizes, bottom=bottom, label=term.replace("_", " "))
            bottom = [below + size for below, size in zip(bottom, sizes, strict=True)]
        if limit is not None:
            axes.axhline(limit, color="0.3", ls="--")
        axes.set_ylabel("GB")
        _legend(axes)


def plot_report(
    report: WatchReport, path: str | Path, fmt: Any = "float16", scale: float = 1.0
) -> None:
    """Draw a model's gradients by exponent, with the range that a format loses shaded.

    Args:
        report: the report of an `amp.numerics.watch`.
        path: a PNG or SVG file.
        fmt: the format.
        scale: the loss scale that gradients are multiplied by.
    """
    fmt = as_format(fmt)
    gradients = report.gradients
    with _picture(path) as axes:
        _draw_exponents(axes, gradients, fmt, math.frexp(scale)[1] - 1)
        axes.set_xlabel("log2 of the gradient" + (f" times {scale:g}" if scale != 1 else ""))
        axes.set_ylabel(f"fraction; {gradients.zeros / max(gradients.total, 1):.1%} are 0")
        _legend(axes)


def plot_fp8(
    tensors: Sequence[Tensor],
    history: Sequence[Fp8Step],
    path: str | Path,
    fmt: Any = "float8_e4m3fn",
    scalings: Sequence[str] = ("none", "tensor", "1x32"),
) -> None:
    """Draw tensors by exponent, scaled for FP8 with some granularities, and a delayed scale over time.

    Args:
        tensors: the tensors to scale.
        history: the result of `amp.numerics.simulate_fp8`.
        path: a PNG or SVG file.
        fmt: `float8_e4m3fn` or `float8_e5m2`.
        scalings: some of `amp.numerics.fp8_simulation.SCALINGS`.
    """
    fmt = as_format(fmt)
    with _picture(path, len(scalings) + 1) as rows:
        *upper, last = rows
        for axes, scaling in zip(upper, scalings, strict=True):
            scaled = (fp8_scaled(x, fmt, scaling)[0] for x in tensors)
            _draw_exponents(axes, sum(map(Histogram.of, scaled), NOTHING), fmt, 0)
            axes.set_ylabel(f"scale for: {scaling}")
        limits = [axes.get_xlim() for axes in upper]
        for axes in upper:
            axes.set_xlim(min(low for low, _ in limits), max(high for _, high in limits))
        _legend(rows[0])
        rows[-2].set_xlabel("log2 of the numbers times their scales")
        steps, bad = [s.step for s in history], [s for s in history if s.saturated]
        last.step(steps, [fmt.max / s.factor for s in history], where="mid", label="what fits")
        last.plot(steps, [s.amax for s in history], ".", label="amax")
        last.plot([s.step for s in bad], [s.amax for s in bad], "x", color="C3", label="saturates")
        _powers(last, "y")
        last.set(xlabel="iteration", ylabel="delayed")
        _legend(last)


def _draw_exponents(axes: Any, histogram: Histogram, fmt: Format, shift: int) -> None:
    """Draw a histogram, shifted by a power of 2, with the range that a format loses shaded."""
    from matplotlib.ticker import MultipleLocator

    total = max(histogram.total, 1)
    exponents = [e + shift for e in histogram.counts]
    axes.bar(exponents, [n / total for n in histogram.counts.values()], width=1.0, align="edge")
    low, high = min([*exponents, fmt.min_exponent]) - 4, max([*exponents, 0]) + 4
    smallest = fmt.min_exponent - fmt.mantissa_bits - 1
    axes.axvspan(-1000, smallest, color="C3", alpha=0.25, label=f"becomes 0 in {fmt.name}")
    axes.axvspan(smallest, fmt.min_exponent, color="C1", alpha=0.2, label="subnormal")
    if high > fmt.max_exponent:
        axes.axvspan(fmt.max_exponent + 1, 1000, color="C4", alpha=0.25, label="too large")
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(MultipleLocator(8))
