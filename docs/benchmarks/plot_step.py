"""Draw the rows of bench_step.py: bytes per parameter against time.

    python docs/benchmarks/plot_step.py docs/benchmarks/step-cuda.md      # part of `make bench-gpu`

The picture lies beside the rows. A line shows how long the memory takes for the bytes; where a row lies
above it, something else takes the time, or more bytes were moved than the row's optimizer needs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """A row, as far as it is drawn: `fraction` is what it reaches of the memory's own speed."""

    name: str
    bytes_per_parameter: int
    milliseconds: float
    fraction: float


def read(text: str) -> dict[str, list[Row]]:
    """Return the rows of each set of tensors in a table of bench_step.py."""
    header, _rule, *lines = [line for line in text.splitlines() if line.startswith("|")]
    names = [name.strip() for name in header.strip("|").split("|")]
    sets: dict[str, list[Row]] = {}
    for line in lines:
        cells = dict(zip(names, [cell.strip() for cell in line.strip("|").split("|")], strict=True))
        if not cells["B/param"]:
            continue  # the copy itself
        if "% of copy" in cells:
            milliseconds, fraction = float(cells["device µs"]) / 1e3, float(cells["% of copy"]) / 100
        else:
            milliseconds, fraction = float(cells["process ms"]), 1 / float(cells["x of in-place time"])
        row = Row(cells["by"], int(cells["B/param"]), milliseconds, fraction)
        sets.setdefault(cells["set"], []).append(row)
    return sets


def draw(sets: dict[str, list[Row]], title: str, path: Path) -> None:
    """Draw one panel for each set of tensors."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row.name for rows in sets.values() for row in rows))
    figure, axes = plt.subplots(
        1, len(sets), figsize=(5 * len(sets) + 2, 4), squeeze=False, layout="constrained"
    )
    for panel, (name, rows) in zip(axes.flat, sets.items(), strict=True):
        rate = rows[0].bytes_per_parameter / (rows[0].milliseconds * rows[0].fraction)
        limit = 1.15 * max(row.bytes_per_parameter for row in rows)
        panel.plot([0, limit], [0, limit / rate], color="gray", label="the memory's own speed")
        for row in rows:
            is_ours = row.name.startswith("reamp")
            panel.plot(
                row.bytes_per_parameter,
                row.milliseconds,
                marker="o" if is_ours else "x",
                linestyle="none",
                color=f"C{names.index(row.name)}",
                label=row.name,
            )
        panel.set(title=name, xlabel="bytes per parameter", ylabel="ms", xlim=(0, limit), ylim=0)
    handles = {}
    for panel in axes.flat:
        lines, labels = panel.get_legend_handles_labels()
        handles.update(zip(labels, lines, strict=True))
    figure.legend(handles.values(), handles, loc="outside right center", fontsize="small")
    figure.suptitle(title, fontsize="small")
    plt.rcParams["svg.fonttype"] = "none"  # text stays text
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rows", type=Path, help="step-cuda.md or step-cpu.md")
    parser.add_argument("--out", type=Path, help="the picture; beside the rows, as .svg")
    options = parser.parse_args()
    text = options.rows.read_text()
    if "B/param" not in text:
        sys.exit(f"no rows of bench_step.py in {options.rows}")
    try:
        draw(read(text), text.splitlines()[2], options.out or options.rows.with_suffix(".svg"))
    except ModuleNotFoundError as error:
        sys.exit(f"no picture: {error}. Install matplotlib, and draw it from {options.rows} later")
