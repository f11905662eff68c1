"""Writing a comparison as one self-contained HTML file, in the style of the lab."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import amp
from amp.numerics import lab

_HERE = Path(__file__).parent


def page(comparison: dict[str, Any]) -> str:
    """Return the page as HTML, from the result of `Comparison.to_json`."""
    data = json.dumps(comparison, separators=(",", ":"))
    text = (_HERE / "compare.html").read_text(encoding="utf-8")
    for mark, content in (
        ("/*CSS*/", lab.style() + (_HERE / "compare.css").read_text(encoding="utf-8")),
        ("/*VERSION*/", amp.__version__),
        ("/*JS*/", (_HERE / "compare.js").read_text(encoding="utf-8")),
        ("/*DATA*/", data.replace("<", "\\u003c")),  # last: names may contain any text, even a mark
    ):
        text = text.replace(mark, content)
    return text


def write(comparison: dict[str, Any], path: str | Path) -> Path:
    """Write the page to a file, and return its path.

    Raises:
        AmpValueError: the folder does not exist, the file cannot be written, or the path has a file of
            another kind.
    """
    return lab.write_page(Path(path), page(comparison))
