"""Tables and bars for a terminal, and conversion of values for JSON."""

import itertools
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

WIDTH = 80
"""How many columns are written where the width of the terminal is not known."""
_LEAST = 12
_RED, _BOLD, OFF = "\x1b[31m", "\x1b[1m", "\x1b[0m"
LOOKS = {"plain": "", "cause": "\x1b[1;31m", "good": "\x1b[32m", "quiet": "\x1b[2m"}
"""How a line may look where there are colours, and the escape sequence before it."""


class Printer:
    """Writes to a stream, with colours if it is a terminal and NO_COLOR is not set.

    Args:
        stream: the stream; by default the `sys.stdout` at construction.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = sys.stdout if stream is None else stream
        self.is_terminal = self.stream.isatty()
        self.colours = self.is_terminal and not os.environ.get("NO_COLOR")
        self.width = shutil.get_terminal_size((WIDTH, 24)).columns if self.is_terminal else sys.maxsize
        self.block = "█"
        try:
            self.block.encode(getattr(self.stream, "encoding", None) or "ascii")
        except (UnicodeEncodeError, LookupError):
            self.block = "#"

    def line(self, text: str = "", look: str = "plain") -> None:
        """Write lines; on a terminal, fold those that are wider, and indent the rest.

        Args:
            text: the lines.
            look: one of `LOOKS`; without colours all are the same.
        """
        for line in text.split("\n"):
            for part in self._folded(line).split("\n"):
                is_coloured = self.colours and look != "plain"
                print(f"{LOOKS[look]}{part}{OFF}" if is_coloured else part, file=self.stream)

    def _folded(self, line: str) -> str:
        if len(line) <= self.width or "{" in line:  # YAML to be pasted
            return line
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        parts = textwrap.wrap(line, self.width, subsequent_indent=indent, break_long_words=False)
        return "\n".join(parts)

    def alarm(self, text: str) -> str:
        """Return a text in red, if there are colours."""
        return f"{_RED}{text}{OFF}" if self.colours and text.strip() else text

    def table(
        self,
        header: Sequence[str],
        rows: Iterable[Sequence[Any]],
        alarming: int = -1,
        widest: int = sys.maxsize,
    ) -> None:
        """Write rows under a header, numbers right-aligned, and the column `alarming` in red.

        A table that is wider than the terminal, or than `widest`, has fewer digits, less space between
        columns, heads in several lines, or at last texts in several lines.
        """
        given, room = list(rows), min(self.width, widest)
        for digits in (9, 6, 4, 3):  # as many as there is room for
            cells = [[_shown(cell, digits) for cell in row] for row in given]
            columns = list(zip(*cells, strict=True)) or [()] * len(header)
            right = [all(_is_numeric(cell) for cell in column) for column in columns]
            widths = _widths(header, columns, right, room)
            if sum(widths) + 2 * (len(widths) - 1) <= room:
                break
        gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= room else " "

        def put(row: Sequence[str], is_head: bool = False) -> None:
            folded = [textwrap.wrap(x, width) or [""] for x, width in zip(row, widths, strict=True)]
            for parts in itertools.zip_longest(*folded, fillvalue=""):
                shown = [
                    text.rjust(width) if to_right else text.ljust(width)
                    for text, width, to_right in zip(parts, widths, right, strict=True)
                ]
                if alarming >= 0 and not is_head:
                    shown[alarming] = self.alarm(shown[alarming])
                line = gap.join(shown).rstrip()
                print(f"{_BOLD}{line}{OFF}" if is_head and self.colours else line, file=self.stream)

        put(header, is_head=True)
        for row in cells:
            put(row)

    def bar(self, fraction: float, width: int = 40) -> str:
        """Return a bar of `fraction` of a width; at least one character above 0."""
        cells = round(min(max(fraction, 0.0), 1.0) * width)
        return self.block * max(cells, 1 if fraction > 0 else 0)


def _widths(
    header: Sequence[str], columns: Sequence[Sequence[str]], right: Sequence[bool], room: int
) -> list[int]:
    """Return the widths of columns in so much room: of heads, and then of texts, that are folded."""
    held = [max(map(len, column), default=0) for column in columns]
    widths = [max(len(title), 1, width) for title, width in zip(header, held, strict=True)]
    gaps = len(widths) - 1
    if sum(widths) + 2 * gaps > room:
        words = [max(map(len, title.split()), default=0) for title in header]
        widths = [max(word, 1, width) for word, width in zip(words, held, strict=True)]
    while sum(widths) + gaps > room:
        texts = [(width, i) for i, width in enumerate(widths) if not right[i] and width > _LEAST]
        if not texts:
            break
        width, i = max(texts)
        widths[i] = max(_LEAST, width - (sum(widths) + gaps - room))
    return widths


def _shown(cell: Any, digits: int) -> str:
    if isinstance(cell, bool) or cell is None:
        return {True: "yes", False: "", None: "-"}[cell]
    return f"{cell:.{digits}g}" if isinstance(cell, float) else str(cell)


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


def unit_of(size: float) -> tuple[str, float]:
    """Return the unit to write so many bytes in, and how many bytes it has."""
    return next(x for x in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)) if size >= x[1] / 10 or x[1] == 1e3)


def bytes_in_words(size: float) -> str:
    """Return a number of bytes as text, such as `14.16 GB`."""
    unit, of = unit_of(size)
    return f"{size / of:,.{0 if size >= 1e12 else 2}f} {unit}"
