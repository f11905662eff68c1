"""Saving a checkpoint so that its file is complete at every moment: the old one, or the new one.

The new file is written beside the old one, and gets its name at the end. If the process is killed
before that, the next save removes the unfinished file. It knows such a file by its name, and because
nobody holds its lock: a lock ends with its process. So a file that another process or thread is still
writing stays.
"""

import contextlib
import errno
import hashlib
import os
import re
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from amp.errors import AmpTypeError, AmpValueError

if sys.platform != "win32":
    import fcntl


def save(path: str | os.PathLike[str], state: Any) -> None:
    """Do `torch.save` so that `path` is a complete checkpoint even if the process is killed.

    The state is written to a new file beside `path`, such as `checkpoint.pt.9f86d081884c7d65.tmp`. When
    that is on the disk, it is renamed to `path`. A killed process may leave such a file, and the next
    save to `path` removes it. In a distributed run only one process calls this. The host waits for the
    device, and for the disk.

    Example::

        amp.save("checkpoint.pt", {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "amp": amp.state_dict(),
        })

    Args:
        path: the path of the file. An existing file is replaced, and the new one gets its permissions.
            A symbolic link stays, and its target is replaced.
        state: any object that `torch.save` takes, other than a string or a path.

    Raises:
        AmpTypeError: `path` is not a path; or `state` is a string or a path, as in `torch.save`, where
            the state comes first.
        AmpValueError: `path` is a folder, a pipe or a device.
        OSError: the file cannot be written. An existing file is unchanged.
    """
    if not isinstance(path, (str, os.PathLike)) or isinstance(state, (str, os.PathLike)):
        kinds = f"a {type(path).__name__} and a {type(state).__name__}"
        swapped = "; they are in torch.save's order" if isinstance(path, Mapping) else ""
        raise AmpTypeError(f"amp.save takes a path and a state, and got {kinds}{swapped}")
    target = Path(os.path.realpath(path))
    last = None
    with contextlib.suppress(FileNotFoundError):
        last = target.stat()
    if last is not None and not stat.S_ISREG(last.st_mode):
        raise AmpValueError(
            f"amp.save writes a file, and {str(path)!r} is a folder, a pipe or a device: give the path "
            "of a file, or a new path"
        )
    if not target.parent.is_dir():
        what = "amp.save found no such folder; make it first"
        raise FileNotFoundError(errno.ENOENT, what, str(target.parent))
    beginning = _beginning(target.name)
    _remove_abandoned(target.parent, beginning)
    beside = target.with_name(f"{beginning}.{os.urandom(8).hex()}.tmp")
    try:
        # A private file stays private: no other user can open the new one before `_lock` sets its mode.
        beside.touch(0o666 if last is None else 0o600, exist_ok=False)
        with beside.open("wb") as file:
            _lock(file, last)
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
            if sys.platform == "win32":  # which cannot rename an open file
                file.close()
            beside.replace(target)  # before closing the file ends its lock
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _beginning(name: str) -> str:
    """Return the beginning of the new file's name, which has at most 255 bytes in all."""
    is_short = len(os.fsencode(name)) + len(".0123456789abcdef.tmp") <= 255
    return name if is_short else hashlib.sha256(os.fsencode(name)).hexdigest()


def _lock(file: IO[bytes], last: os.stat_result | None) -> None:
    """Lock a file that is being written, and give it the group and the mode of the old one.

    Each of these is left out if the system does not support or allow it. Without locks, no save removes
    unfinished files.
    """
    if sys.platform == "win32":
        return
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if last is not None:
        with contextlib.suppress(OSError):
            os.fchown(file.fileno(), -1, last.st_gid)
        with contextlib.suppress(OSError):
            os.fchmod(file.fileno(), stat.S_IMODE(last.st_mode))


_SOON = 3600.0
"""The age in seconds from which an empty file is not one that is about to be locked."""


def _remove_abandoned(folder: Path, beginning: str) -> None:
    """Remove the unfinished files of killed processes."""
    if sys.platform == "win32":
        return
    with contextlib.suppress(OSError):  # no such folder: writing the file will raise the error
        names = re.compile(re.escape(beginning) + r"\.[0-9a-f]{16}\.tmp")
        for path in [each for each in folder.iterdir() if names.fullmatch(each.name)]:
            with contextlib.suppress(OSError), path.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = os.fstat(file.fileno())
                if found.st_size or time.time() - found.st_mtime > _SOON:
                    path.unlink()


def _sync_folder(folder: Path) -> None:
    """Wait until the new name in a folder is on the disk, if the system can do that."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
