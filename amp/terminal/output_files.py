"""A check of the page that a command will write, so that it overwrites no file of another kind."""

import stat
from pathlib import Path

from amp.errors import AmpValueError

_BEGINNINGS = b"<!doctype html", b"<html"
"""The first bytes of a page, in lower case."""


def check_output(path: Path, mark: str = "") -> None:
    """Raise AmpValueError if the folder does not exist, or a file that is no HTML has this path.

    An empty file may always be overwritten.

    Args:
        path: the path of the page to write.
        mark: a text that the first KiB of an existing file must contain. It is for a default `path`, so
            that a file of the user is not lost even if it is of the same kind.
    """
    if "\0" in str(path) or not path.absolute().parent.is_dir():
        raise AmpValueError(f"{path} cannot be written: there is no folder {path.absolute().parent}")
    start = None
    try:
        if stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its other end
            with path.open("rb") as file:
                start = file.read(1024)
    except (OSError, ValueError):  # no such file; or else writing it will raise the error
        return
    if start is None:
        raise AmpValueError(
            f"{path} is not a regular file. Nothing was written: give the name of a file or a new name"
        )
    if start and not (start.lower().lstrip().startswith(_BEGINNINGS) and mark.encode() in start):
        what = "HTML file" + (f" with {mark!r} in it" if mark else "")
        raise AmpValueError(
            f"{path} exists already, and is not a {what}. Nothing was written: give another name, or "
            "remove the file"
        )
