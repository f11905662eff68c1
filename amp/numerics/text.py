"""Tables and bars for a terminal, and conversion of values for JSON."""

import math
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

_RED, _BOLD, _OFF = "\x1b[31m", "\x1b[1m", "\x1b[0m"


class Printer:
    """Writes to a stream, with colours if it is a terminal and NO_COLOR is not set.

    Args:
        stream: the stream; by default the `sys.stdout` at construction.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = sys.stdout if stream is None else stream
        self.colours = self.stream.isatty() and not os.environ.get("NO_COLOR")
        self.block = "█"
        try:
            self.block.encode(getattr(self.stream, "encoding", None) or "ascii")
        except (UnicodeEncodeError, LookupError):
            self.block = "#"

    def line(self, text: str = "") -> None:
        """Write a line."""
        print(text, file=self.stream)

    def alarm(self, text: str) -> str:
        """Return a text in red, if there are colours."""
        return f"{_RED}{text}{_OFF}" if self.colours and text.strip() else text

    def table(self, header: Sequence[str], rows: Iterable[Sequence[Any]], alarming: int = -1) -> None:
        """Write rows under a header, numbers right-aligned, and the column `alarming` in red."""
        cells = [[_shown(cell) for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
        columns = list(zip(*cells, strict=True)) or [()] * len(header)
        right = [all(_is_numeric(cell) for cell in column) for column in columns]

        def put(row: Sequence[str]) -> list[str]:
            return [
                text.rjust(width) if to_right else text.ljust(width)
                for text, width, to_right in zip(row, widths, right, strict=True)
            ]

        head = "  ".join(put(header)).rstrip()
        self.line(f"{_BOLD}{head}{_OFF}" if self.colours else head)
        for row in cells:
            shown = put(row)
            if alarming >= 0:
                shown[alarming] = self.alarm(shown[alarming])
            self.line("  ".join(shown).rstrip())

    def bar(self, fraction: float, width: int = 40) -> str:
        """Return a bar of `fraction` of a width; at least one character above 0."""
        cells = round(min(max(fraction, 0.0), 1.0) * width)
        return self.block * max(cells, 1 if fraction > 0 else 0)


def _shown(cell: Any) -> str:
    if isinstance(cell, bool) or cell is None:
        return {True: "yes", False: "", None: "-"}[cell]
    return f"{cell:.9g}" if isinstance(cell, float) else str(cell)


def _is_numeric(cell: str) -> bool:
    bare = cell.lstrip("+-")
    return bare in ("", "inf", "nan") or bare[0].isdigit()


def plain(value: Any, mark: str = "") -> Any:
    """Return a value for JSON: inf and NaN become strings, with `mark` in front, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{mark}{value}"
    if isinstance(value, dict):
        return {key: plain(item, mark) for key, item in value.items()}
    return [plain(item, mark) for item in value] if isinstance(value, (list, tuple)) else value


def gigabytes(size: float) -> str:
    """Return a number of bytes in GB of 10**9."""
    return f"{size / 1e9:,.2f}" if size < 1e12 else f"{size / 1e9:,.0f}"
