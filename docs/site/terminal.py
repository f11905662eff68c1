"""Draws docs/images/doctor.svg: what `reamp doctor examples/nan.py` prints on a terminal."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
from html import escape
from pathlib import Path

from amp.cli import main as reamp
from amp.terminal.text import LOOKS, OFF

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs/images/doctor.svg"
COMMAND = "reamp doctor examples/nan.py"
_WIDTH, _LINE, _LETTER, _MARGIN = 80, 19, 8.43, 20
_STYLE = """
  rect {fill: #14181f}
  text {font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace;
    fill: #d7dce5; white-space: pre}
  .command {fill: #ffffff; font-weight: 600}
  .cause {fill: #ff7b72; font-weight: 600}
  .good {fill: #7ee787}
  .quiet {fill: #8b95a5}
"""


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed() -> list[str]:
    """Run the command, and return its lines as on a terminal of 80 columns, with their colours."""
    stream, before = _Terminal(), dict(os.environ)
    os.environ |= {"COLUMNS": str(_WIDTH), "NO_COLOR": ""}
    try:
        with contextlib.redirect_stdout(stream), contextlib.chdir(ROOT):
            reamp(COMMAND.split()[1:])
    finally:
        os.environ.clear()
        os.environ.update(before)
    return stream.getvalue().splitlines()


def drawn(lines: list[str]) -> str:
    """Return lines of a terminal as an SVG picture."""
    looks = {code: look for look, code in LOOKS.items()}
    rows = [("command", f"$ {COMMAND}")]
    for line in lines:
        begin = next(x for x in sorted(looks, key=len, reverse=True) if line.startswith(x))
        text = line.removeprefix(begin).removesuffix(OFF)
        rows.append((looks[begin], text))
    width, height = 2 * _MARGIN + _WIDTH * _LETTER, 2 * _MARGIN + _LINE * len(rows)
    texts = [
        f'  <text class="{kind}" x="{_MARGIN}" y="{y:.1f}">{escape(text)}</text>'
        for y, (kind, text) in zip(itertools.count(_MARGIN + 0.75 * _LINE, _LINE), rows, strict=False)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img"',
            f'  aria-label="{COMMAND} names the line, the reason and the cure">',
            f"  <style>{_STYLE}  </style>",
            f'  <rect width="{width:.0f}" height="{height}" rx="8"/>',
            *texts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(drawn(printed()), encoding="utf-8")
