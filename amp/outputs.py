"""Files that commands write: one of another kind is not overwritten, which is told before the work."""

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
    """Raise AmpValueError if there is no such folder, or what is there is not of the kind to write.

    An empty file is of every kind.

    Args:
        path: of the file to be written.
        kind: `".html"`, `".png"` or `".svg"`.
        mark: what the first KiB of the file has to hold besides. For a `path` that nobody has named, so
            that not even a file of that kind is lost.
    """
    if "\0" in str(path) or not path.absolute().parent.is_dir():
        raise AmpValueError(f"{path} cannot be written: there is no folder {path.absolute().parent}")
    start = None
    try:
        if stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its other end
            with path.open("rb") as file:
                start = file.read(1024)
    except (OSError, ValueError):  # there is none; or writing says what is wrong
        return
    if start is None:
        raise AmpValueError(
            f"{path} is no regular file. Nothing was written: give the name of a file, or of none"
        )
    if start and not (start.lower().lstrip().startswith(_BEGINNINGS[kind]) and mark.encode() in start):
        what = f"{kind[1:].upper()} file" + (f" with {mark!r} in it" if mark else "")
        raise AmpValueError(
            f"{path} is there already, and is no {what}. Nothing was written: give another name, or "
            "remove it"
        )
