"""Files that commands write: one of another kind is not overwritten."""

import stat
from pathlib import Path

from amp.errors import AmpValueError

_BEGINNINGS = {
    ".html": (b"<!doctype html", b"<html"),
    ".png": (b"\x89png",),
    ".svg": (b"<?xml", b"<svg"),
}
"""How files of a kind begin, in small letters."""


def check_output(path: Path, kind: str, mark: str = "") -> None:
    """Raise AmpValueError if something is there that is not of the kind to be written, and not empty.

    Args:
        path: of the file to be written.
        kind: `".html"`, `".png"` or `".svg"`.
        mark: what the first KiB of the file has to hold besides. For a `path` that nobody has named, so
            that not even a file of that kind is lost.
    """
    start = None
    try:
        if stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its other end
            with path.open("rb") as file:
                start = file.read(1024)
    except (OSError, ValueError):  # there is none; or writing says what is wrong
        return
    if start is None:
        what = "no regular file"
    elif not start or (start.lower().lstrip().startswith(_BEGINNINGS[kind]) and mark.encode() in start):
        return
    else:
        what = f"no {kind[1:].upper()} file" + (f" with {mark!r} in it" if mark else "")
    raise AmpValueError(
        f"{path} is there already, and is {what}. Nothing was written: give another name, or remove it"
    )
