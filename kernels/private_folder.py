"""Folders that no other user can write to, for what a process keeps or builds and then runs."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """Return the folder of what is kept from process to process, and make it if it is not there.

    It is `$XDG_CACHE_HOME/reamp`, or `~/.cache/reamp` where that variable is unset or no absolute path.

    Raises:
        OSError: it cannot be made, or another user could write to it.
        RuntimeError: the user has no home.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the specification of that variable says to ignore it then
        base = Path("~/.cache").expanduser()
    if not base.is_absolute():
        raise FileNotFoundError(f"{base} is no absolute path; set HOME or XDG_CACHE_HOME to one")
    folder = base / "reamp"
    for missing in (base, folder):
        with contextlib.suppress(FileExistsError):
            missing.mkdir(0o700)
    if folder.is_symlink():
        raise PermissionError(f"{folder} is a link")
    folder = parent_folder(folder)
    found = folder.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & OTHERS:
        raise PermissionError(f"{folder} is not a folder that this user alone can write to")
    return folder


def parent_folder(folder: Path) -> Path:
    """Return the real path of a folder in which others cannot replace what this user makes.

    Others may write to it, or to one above it, only where they cannot rename what is not theirs, as in
    `/tmp`.

    Raises:
        OSError: there is no such folder, or others could replace it or what is in it.
    """
    real = folder.resolve(strict=True)
    for each in (real, *real.parents):
        found = each.lstat()
        by_others = found.st_mode & OTHERS and not found.st_mode & stat.S_ISVTX
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(f"{each} is not a folder")
        if found.st_uid not in (os.geteuid(), 0) or by_others:
            raise PermissionError(f"{each} is a folder that users other than this one can write to")
    return real


def is_private(descriptor: int) -> bool:
    """Whether what is open is a file of this user that others cannot write to."""
    found = os.fstat(descriptor)
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & OTHERS
