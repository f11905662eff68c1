"""A checkpoint file that is whole at every moment: the last one, or the new one."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from amp.errors import AmpTypeError


def save(path: str | os.PathLike[str], state: Any) -> None:
    """Write what `torch.save` writes, so that a kill at any moment leaves a file that loads.

    The state goes to a file beside `path`, which is on the disk before it takes that name. One process
    writes; the others of a distributed run do not call this. The host waits for the device, and for the
    disk.

    Example::

        amp.save("checkpoint.pt", {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "amp": amp.state_dict(),
        })

    Args:
        path: of the file. One that is there is replaced.
        state: anything that `torch.save` takes.

    Raises:
        AmpTypeError: `path` is no path.
        OSError: the file cannot be written. What was there is as it was.
    """
    if not isinstance(path, (str, os.PathLike)) or isinstance(state, (str, os.PathLike)):
        kinds = f"a {type(path).__name__} and a {type(state).__name__}"
        swapped = "; they are in torch.save's order" if isinstance(path, Mapping) else ""
        raise AmpTypeError(f"amp.save takes a path and a state, and got {kinds}{swapped}")
    target = Path(path)
    beside = target.with_name(_beside(target.name))
    try:
        with beside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _beside(name: str) -> str:
    """Return the name of the file that is written first; file systems take 255 bytes."""
    beside = f"{name}.tmp"
    if len(os.fsencode(beside)) <= 255:
        return beside
    return f"{hashlib.sha256(os.fsencode(name)).hexdigest()}.tmp"


def _sync_folder(folder: Path) -> None:
    """Let a new name in a folder be on the disk too, where the system can tell that."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
