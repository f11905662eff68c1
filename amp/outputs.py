"""Files that commands write: one of another kind is not overwritten."""

from pathlib import Path

from amp.errors import AmpValueError

_BEGINNINGS = {
    ".html": (b"<!doctype html", b"<html"),
    ".png": (b"\x89png",),
    ".svg": (b"<?xml", b"<svg"),
}
"""How files of a kind begin, in small letters."""


def check_output(path: Path, kind: str) -> None:
    """Raise AmpValueError if a file is there that is not of the kind to be written, and not empty.

    Args:
        path: of the file to be written.
        kind: `".html"`, `".png"` or `".svg"`.
    """
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except (OSError, ValueError):  # there is none; or writing says what is wrong
        return
    if start and not start.lower().lstrip().startswith(_BEGINNINGS[kind]):
        raise AmpValueError(
            f"{path} is there already, and is no {kind[1:].upper()} file. Nothing was written: give "
            "another name, or remove it"
        )
