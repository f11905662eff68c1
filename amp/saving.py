"""A checkpoint file that is whole at every moment: the last one, or the new one.

The new one is written beside the last one, and takes its name at the end. The next save removes what a
killed process left of it. That is known by its name and its lock, which ends with the process that
holds it, so that what another process or thread is still writing stays.
"""

import contextlib
import hashlib
import os
import re
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from amp.errors import AmpTypeError, AmpValueError

if sys.platform != "win32":
    import fcntl


def save(path: str | os.PathLike[str], state: Any) -> None:
    """Write what `torch.save` writes, so that a kill at any moment leaves a file that loads.

    The state goes to a new file beside `path`, such as `checkpoint.pt.9f86d081884c7d65.tmp`, which is
    on the disk before it takes the name `path`. A kill may leave such a file, and the next save to
    `path` removes it. One process writes; the others of a distributed run do not call this. The host
    waits for the device, and for the disk.

    Example::

        amp.save("checkpoint.pt", {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "amp": amp.state_dict(),
        })

    Args:
        path: of the file. One that is there is replaced, and the new one has its permissions. A
            symbolic link stays, and the file that it leads to is replaced.
        state: what `torch.save` takes, but no string and no path.

    Raises:
        AmpTypeError: `path` is no path; or `state` is a string or a path, as in `torch.save`'s order.
        AmpValueError: `path` is a folder, a pipe or a device.
        OSError: the file cannot be written. What was there is as it was.
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
            f"amp.save replaces files, and {str(path)!r} is a folder, a pipe or a device: give the "
            "path of a file, or of none"
        )
    beginning = _beginning(target.name)
    _remove_abandoned(target.parent, beginning)
    beside = target.with_name(f"{beginning}.{os.urandom(8).hex()}.tmp")
    try:
        # A private file stays private: nobody opens the new one before it has the last one's mode.
        beside.touch(0o666 if last is None else 0o600, exist_ok=False)
        with beside.open("wb") as file:
            _lock(file, last)
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
            if sys.platform == "win32":  # which renames no open file
                file.close()
            beside.replace(target)  # before closing the file ends its lock
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _beginning(name: str) -> str:
    """Return how names of files begin that are written first; file systems take 255 bytes."""
    is_short = len(os.fsencode(name)) + len(".0123456789abcdef.tmp") <= 255
    return name if is_short else hashlib.sha256(os.fsencode(name)).hexdigest()


def _lock(file: IO[bytes], last: os.stat_result | None) -> None:
    """Show that a file is being written, and give it the group and the mode of the last one.

    Each of these only where the system has it and lets us. Without locks nobody removes the file.
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


def _remove_abandoned(folder: Path, beginning: str) -> None:
    """Remove files that killed processes were writing."""
    if sys.platform == "win32":
        return
    with contextlib.suppress(OSError):  # there is no such folder; writing says so
        names = re.compile(re.escape(beginning) + r"\.[0-9a-f]{16}\.tmp")
        for path in [each for each in folder.iterdir() if names.fullmatch(each.name)]:
            with contextlib.suppress(OSError), path.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(file.fileno()).st_size:  # the maker of an empty one may be about to lock it
                    path.unlink()


def _sync_folder(folder: Path) -> None:
    """Let a new name in a folder be on the disk too, where the system can tell that."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
