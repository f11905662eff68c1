"""Compile C++ to a library, with a time limit and a cache that no other user can write to.

The file name of a cached library has two digests: one of all that it was compiled from, one of its
content. So a truncated or changed file is never loaded, but compiled again. Processes that start at the
same time each compile; a file gets its final name only when it is complete.

The compiler is called directly. Inductor could provide the command, but it runs the compiler to find
it, without a time limit, and loads whatever its own cache holds.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger("amp")

TIME_LIMIT = 120.0
"""Seconds after which a compiler is killed; it takes two or three on an idle machine."""
ABANDONED = 3600.0
"""Seconds after which a build folder can no longer be in use."""
THREAD = "amp compiles"
"""The name of threads of `in_background`."""
_BUILDING = "reamp-building-"
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
"""The mode bits that let other users write."""

_TORCH = Path(torch.__file__).parent
_FLAGS = (
    "-std=c++2a",  # C++20, by the name that older compilers know too
    *("-O3", "-DNDEBUG", "-fPIC", "-shared"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),  # what eager torch computes
    f"-I{_TORCH / 'include'}",
)
_THREADS: tuple[str, ...] = ("-fopenmp",)
if sys.platform == "darwin":  # there compilers lack OpenMP, and torch has it
    _LIB = _TORCH / "lib"
    _THREADS = ("-Xclang", "-fopenmp", f"-L{_LIB}", "-lomp", f"-Wl,-rpath,{_LIB}")
_CPUS = {
    "AVX2": ("-DCPU_CAPABILITY_AVX2", "-mavx2", "-mfma", "-mf16c"),
    "AVX512": (
        *("-DCPU_CAPABILITY_AVX512", "-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw"),
        *("-mfma", "-mf16c"),
    ),
}
"""The flags of torch's own CPU kernels, where they differ from a compiler's defaults.

`-march=native` would be wrong: machines that share a home directory may have different CPUs.
"""

_hanging: set[Sequence[str]] = set()
"""Compilers that took too long; they are not called again."""


def load(
    source: str, purpose: str, flags: Sequence[str] = (), opens: Callable[[str], Any] = ctypes.CDLL
) -> Any:
    """Return a library compiled from C++, by an earlier process or now.

    The library is kept in `cache_folder()`. If that cannot be used, it is compiled for this process
    alone.

    Args:
        source: C++ code, which may include torch's headers, and needs no library but OpenMP's and those
            that the flags name.
        purpose: names what is compiled, for the log; empty says nothing.
        flags: further flags of the compiler.
        opens: returns the library at a path.

    Raises:
        OSError: there is no compiler, or no safe folder to compile in.
        RuntimeError: the compiler failed, or took too long.
    """
    compiler, command, key = _how_to_make(source, flags)
    folder, why_not = None, ""
    try:
        folder = cache_folder()
        if kept := _find(folder, key):
            return opens(str(kept))
        _check_use(folder)
    except (OSError, RuntimeError) as error:
        folder, why_not = None, f", for this process alone ({error})"
    too_long = f"{compiler[0]} took more than {TIME_LIMIT:.0f} s; set CXX to a compiler that works"
    if compiler in _hanging:
        raise RuntimeError(too_long)
    said = "compiling %s for this CPU, a few seconds%s. AMP_KERNELS=reference leaves it out"
    if purpose:
        logger.warning(said, purpose, why_not)
    with _building(folder or _parent_folder(Path(tempfile.gettempdir()))) as place:
        (place / "source.cpp").write_text(source, encoding="utf-8")
        try:
            _run(command, place)
        except subprocess.TimeoutExpired:
            _hanging.add(compiler)
            raise RuntimeError(too_long) from None
        library = place / "library.so"
        if folder is not None:
            library = _keep(library, folder, key)
        return opens(str(library))


def load_kept(source: str, flags: Sequence[str] = (), opens: Callable[[str], Any] = ctypes.CDLL) -> Any:
    """Return a library that was compiled from C++ earlier and kept, or None; nothing is compiled."""
    try:
        kept = _find(cache_folder(), _how_to_make(source, flags)[2]) if _place().is_dir() else None
        return None if kept is None else opens(str(kept))
    except (OSError, RuntimeError, ImportError):
        return None


def load_or_log(source: str, purpose: str) -> ctypes.CDLL | None:
    """Do `load`; if it fails, log why and return None."""
    try:
        return load(source, purpose)  # type: ignore[no-any-return]
    except Exception as error:  # from the compiler, the folder, or this release of torch
        lines = str(error).splitlines() or [type(error).__name__]
        reason = next((line for line in lines if "error:" in line), lines[0])
        said = "%s could not be compiled, so eager torch runs it, slower: %s"
        logger.warning(said, purpose, reason)
        return None


def in_background(compiles: Callable[..., object], *args: object) -> None:
    """Call a function that compiles in another thread, without waiting for it."""
    threading.Thread(target=compiles, args=args, name=THREAD, daemon=True).start()


def _how_to_make(
    source: str, flags: Sequence[str] = ()
) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Return the compiler, the command that compiles C++ with it, and the key of the resulting library.

    Raises:
        OSError: there is no compiler.
    """
    if os.name != "posix":
        raise OSError("on this system nothing is compiled")
    compiler = _compiler()
    own = (*_FLAGS, *_CPUS.get(torch.backends.cpu.get_cpu_capability(), ()))
    command = (*compiler, *own, "source.cpp", "-o", "library.so", *_THREADS, *flags)
    made_of = "\0".join((torch.__version__, *command, source))
    return compiler, command, hashlib.sha256(made_of.encode()).hexdigest()[:32]


def read_source(name: str, macros: Mapping[str, Any]) -> str:
    """Return the C++ of a file in this folder, with macros before it, whose names begin with REAMP_."""
    defined = "".join(f"#define REAMP_{macro} {value}\n" for macro, value in macros.items())
    return defined + Path(__file__).with_name(name).read_text(encoding="utf-8")


def _compiler() -> tuple[str, ...]:
    """Return the compiler's path, and the arguments that `CXX` gives it."""
    name, *arguments = shlex.split(os.environ.get("CXX", "")) or [""]
    for candidate in [name] if name else ["g++", "clang++", "c++"]:
        if path := shutil.which(candidate):
            return str(Path(path).absolute()), *arguments
    raise FileNotFoundError(
        f"there is no C++ compiler {name or 'g++ or clang++'}; install one, or set CXX to one"
    )


def _find(folder: Path, key: str) -> Path | None:
    """Return the path of an intact cached library, or None; damaged ones are deleted."""
    for path in folder.glob(f"{key}-*.so"):
        if _digest(path) == path.stem.removeprefix(f"{key}-"):
            return path
        with contextlib.suppress(OSError):
            path.unlink()
    return None


def _keep(library: Path, folder: Path, key: str) -> Path:
    """Move a library to where `_find` finds it, and return its path there."""
    library.chmod(0o600)  # otherwise the umask decides its mode
    return library.replace(folder / f"{key}-{_digest(library)}.so")


def _digest(path: Path) -> str | None:
    """Return the digest of a file's content; None if it is not a private regular file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        is_private = stat.S_ISREG(found.st_mode) and _is_private(found)
        return hashlib.sha256(file.read()).hexdigest() if is_private else None


def _check_use(folder: Path) -> None:
    """Raise PermissionError if nothing can be built in a folder, or loaded from it."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written to")
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
        raise PermissionError(f"{folder} is on a file system that is mounted noexec")


@contextlib.contextmanager
def _building(parent: Path) -> Iterator[Path]:
    """Make a temporary build folder, and delete those that killed processes have left."""
    _check_use(parent)
    for left in parent.glob(f"{_BUILDING}*"):
        with contextlib.suppress(OSError):
            found = left.lstat()
            is_old = found.st_mtime < time.time() - ABANDONED
            if is_old and found.st_uid == os.geteuid():
                shutil.rmtree(left)  # does not follow links
    with tempfile.TemporaryDirectory(
        prefix=_BUILDING, dir=parent, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


def _run(command: Sequence[str], folder: Path) -> None:
    """Run a compiler; on a timeout or an interrupt, kill it and all that it has started.

    Raises:
        RuntimeError: it failed.
        subprocess.TimeoutExpired: it took too long.
    """
    log = folder / "log"  # not a pipe, which the compiler's children could hold open
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its own process group, which its children join
        )
        try:
            status = process.wait(TIME_LIMIT)
        except BaseException:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    if status:
        with log.open(encoding="utf-8", errors="replace") as file:
            said = file.read(2**16).strip()
        raise RuntimeError(said or f"{command[0]} ended with status {status}")


# Folders that no other user can write to.


def cache_folder() -> Path:
    """Return the folder in which libraries are kept for later processes; create it if missing.

    It is `$XDG_CACHE_HOME/reamp`, or `~/.cache/reamp` where that variable is unset or not an absolute
    path.

    Raises:
        OSError: it cannot be made, or another user could write to it.
        RuntimeError: the user has no home.
    """
    folder = _place()
    for missing in (folder.parent, folder):
        with contextlib.suppress(FileExistsError):
            missing.mkdir(0o700)
    if folder.is_symlink():
        raise PermissionError(f"{folder} is a link")
    folder = _parent_folder(folder)
    if not _is_private(folder.lstat()):
        raise PermissionError(f"{folder} is not a folder that this user alone can write to")
    return folder


def _place() -> Path:
    """Return where the folder of `cache_folder` is, or would be."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the XDG specification says to ignore it then
        base = Path("~/.cache").expanduser()
    if not base.is_absolute():
        raise FileNotFoundError(f"{base} is no absolute path; set HOME or XDG_CACHE_HOME to one")
    return base / "reamp"


def _is_private(found: os.stat_result) -> bool:
    """Whether a file belongs to this user, and others cannot write to it."""
    return found.st_uid == os.geteuid() and not found.st_mode & _OTHERS


def _parent_folder(folder: Path) -> Path:
    """Return the real path of a folder in which other users cannot replace this user's files.

    Others may be able to write to it, or to a folder above it, only if they cannot rename files of this
    user there, as in `/tmp`.

    Raises:
        OSError: there is no such folder, or others could replace it or its files.
    """
    real = folder.resolve(strict=True)
    for each in (real, *real.parents):
        found = each.lstat()
        by_others = found.st_mode & _OTHERS and not found.st_mode & stat.S_ISVTX
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(f"{each} is not a folder")
        if found.st_uid not in (os.geteuid(), 0) or by_others:
            raise PermissionError(f"{each} is a folder that users other than this one can write to")
    return real
