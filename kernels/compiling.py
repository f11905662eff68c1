"""Libraries that are compiled on the machine that runs them, and kept in the user's cache folder."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

_running: set[subprocess.Popen[str]] = set()
_stopped = threading.Event()


class Language(NamedTuple):
    """What a source is written in.

    Attributes:
        variable: the environment variable that names a compiler.
        compilers: those that are looked for without it.
        suffix: of a source.
    """

    variable: str
    compilers: tuple[str, ...]
    suffix: str


C = Language("CC", ("cc", "gcc", "clang"), ".c")
CPP = Language("CXX", ("c++", "g++", "clang++"), ".cpp")


def library(
    language: Language,
    source: str,
    flags: Sequence[str],
    load: Callable[[str], T],
    announce: Callable[[str], Any],
    depends_on: object = None,
) -> T:
    """Return the library that a source compiles to, from the cache where it is there.

    Args:
        language: the source's.
        source: the source.
        flags: the compiler's; libraries to link with last.
        load: loads the library at a path, OSError or ImportError where it cannot be.
        announce: called with the compiler's name before it runs.
        depends_on: what else the library is made for; its repr tells one from another.

    Raises:
        OSError: it could not be compiled or loaded.
    """
    compiler = _compiler(language)
    key = repr((source, compiler, tuple(flags), _processor(), depends_on))
    path = _cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.so"
    if path.exists():
        with suppress(OSError, ImportError):  # a damaged file
            return load(str(path))
    announce(compiler[0])
    return _compile([*compiler], source, language.suffix, flags, path, load)


def stop() -> None:
    """Stop the compilers of other threads, which find that theirs failed, and start no more."""
    _stopped.set()
    for run in list(_running):
        _kill(run)


def _kill(run: subprocess.Popen[str]) -> None:
    """Kill a compiler that this process has started, with all that it has started itself."""
    if run.poll() is None:  # a forked process has no children yet
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)


def _compiler(language: Language) -> list[str]:
    name = language.variable
    try:
        asked = shlex.split(os.environ.get(name, ""))
    except ValueError as error:
        raise OSError(f"{name}={os.environ[name]!r} cannot be read: {error}") from None
    found = asked or [path for name in language.compilers if (path := shutil.which(name))][:1]
    if not found:
        raise FileNotFoundError(f"no compiler was found; install gcc or clang, or set {name}")
    return found


def _processor() -> str:
    """Return what a machine's code depends on: a home folder may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


@functools.cache
def _cache_folder() -> Path:
    """Return where libraries are kept; if that cannot be written to, a folder for this process."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "reamp"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # no home
        pass
    return Path(_own_folder().name)


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder that is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="reamp-")


def _compile(
    compiler: Sequence[str],
    source: str,
    suffix: str,
    flags: Sequence[str],
    path: Path,
    load: Callable[[str], T],
) -> T:
    """Compile a source to a library, which is there as a whole or not at all."""
    folder = Path(tempfile.mkdtemp(dir=path.parent))  # this process's own, not a forked one's
    try:
        text, compiled = folder / f"source{suffix}", folder / path.name
        text.write_text(source)
        _run([*compiler, str(text), "-o", str(compiled), *flags])
        load(str(compiled))  # what cannot be loaded is not kept
        with compiled.open("rb") as file:
            os.fsync(file)  # nor half a file, if the machine stops
        compiled.replace(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return load(str(path))


def _run(command: Sequence[str]) -> None:
    """Run a compiler, in a session of its own, which Ctrl-C does not reach."""
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as run:
        _running.add(run)
        try:
            if _stopped.is_set():
                _kill(run)
            _, errors = run.communicate()
        except BaseException:
            _kill(run)
            raise
        finally:
            _running.discard(run)
    if run.returncode:
        raise OSError(f"{command[0]} failed: {errors.strip() or run.returncode}")
