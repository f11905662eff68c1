"""What is compiled at run time: by whom it can be changed, and what becomes of damage, hangs and kills.

The compiler of most tests is a script that compiles C in no time. Each load is in a process of its own,
since a process that has loaded a path once does not read it again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import time
from pathlib import Path

import pytest

from tests.processes import run_python

LOAD = """
import contextlib, logging, os, signal, subprocess, threading, time
from pathlib import Path
logging.basicConfig(format="%(message)s")
from amp.kernels import compiled_library
from amp.kernels.compiled_library import load

SOURCE = "int answer(void) { return 42; }"
"""
ANSWER = 'print(load(SOURCE, "a test").answer())'
WRONG = "int answer(void) { return 13; }"
OTHER_USER = 12345


class User:
    """A user with a home, a folder for temporary files, and a compiler."""

    def __init__(self, folder: Path) -> None:
        self.home, self.temporary = folder / "home", folder / "temporary"
        self.cache = self.home / ".cache" / "reamp"
        self.calls, self.compiler = folder / "calls", folder / "compiler"
        self.home.mkdir()
        self.temporary.mkdir()
        self.calls.touch()
        self.compiles_by("exec cc -x c -shared -fPIC source.cpp -o library.so")

    def compiles_by(self, command: str) -> None:
        self.compiler.write_text(f"#!/bin/sh\necho $$ >> {self.calls}\n{command}\n")
        self.compiler.chmod(0o700)

    def runs(self, code: str = ANSWER, **environment: str) -> subprocess.CompletedProcess[str]:
        places = {"HOME": self.home, "TMPDIR": self.temporary, "CXX": self.compiler}
        settings = {"XDG_CACHE_HOME": "", **{name: str(path) for name, path in places.items()}}
        return run_python("-c", LOAD + code, **{**settings, **environment})

    def compilations(self) -> int:
        return len(self.calls.read_text().splitlines())

    def kept(self) -> list[Path]:
        return list(self.cache.iterdir())

    def finds_nothing_wrong(self, code: str = ANSWER, **environment: str) -> str:
        """Load it, expect the right answer and no folders left, and return what was logged."""
        ended = self.runs(code, **environment)
        assert ended.returncode == 0, ended
        assert ended.stdout == "42\n", ended.stderr
        assert not list(self.temporary.iterdir())
        return ended.stderr


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path)


def wrong_library(folder: Path) -> bytes:
    """Return a library that loads, and gives another answer."""
    command = ["cc", "-x", "c", "-shared", "-fPIC", "-", "-o", folder / "wrong.so"]
    subprocess.run(command, input=WRONG, text=True, check=True)
    return (folder / "wrong.so").read_bytes()


def test_a_library_is_compiled_once_and_kept_for_its_user_alone(user: User) -> None:
    log = user.finds_nothing_wrong("os.umask(0);" + ANSWER)
    assert log.startswith("compiling a test for this CPU, a few seconds. AMP_KERNELS=reference ")
    assert user.finds_nothing_wrong() == ""
    assert user.compilations() == 1
    (library,) = user.kept()
    modes = [stat.S_IMODE(each.stat().st_mode) for each in (library, user.cache, user.cache.parent)]
    assert modes == [0o600, 0o700, 0o700]


def test_other_sources_torches_and_cpus_have_libraries_of_their_own(user: User) -> None:
    user.finds_nothing_wrong()
    for change in (
        'SOURCE += " ";',
        'compiled_library.torch.__version__ = "9.9";',
        'compiled_library.torch.backends.cpu.get_cpu_capability = lambda: "NO AVX";',
    ):
        user.finds_nothing_wrong(change + ANSWER)
    assert user.compilations() == len(user.kept()) == 4


@pytest.mark.parametrize(
    "damage",
    [
        *("cut short", "another's name", "a link"),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("emptied", "changed")),
    ],
)
def test_a_damaged_or_foreign_library_is_compiled_again(
    damage: str, user: User, tmp_path: Path
) -> None:
    """A library that was cut short would end the process with SIGBUS."""
    user.finds_nothing_wrong()
    (library,) = user.kept()
    whole = library.read_bytes()
    if damage == "a link":
        library.rename(tmp_path / "elsewhere.so")
        library.symlink_to(tmp_path / "elsewhere.so")
    else:
        library.write_bytes(
            {
                "cut short": whole[: len(whole) // 2],
                "emptied": b"",
                "changed": whole[:-1] + b"x",
                "another's name": wrong_library(tmp_path),
            }[damage]
        )
    user.finds_nothing_wrong()
    assert user.compilations() == 2
    assert library.read_bytes() == whole
    assert not library.is_symlink()


def expose(user: User, what: str, how: str | int) -> None:
    """Give a file or folder to another user, exchange it for a link, or change its mode."""
    path = {"home": user.home, "cache": user.cache, "library": user.kept()[0]}[what]
    if how == "given away":
        os.chown(path, OTHER_USER, -1)
    elif how == "a link":
        path.rename(user.home / "elsewhere")
        path.symlink_to(user.home / "elsewhere")
    else:
        path.chmod(int(how))


OTHERS = "is a folder that users other than"


@pytest.mark.parametrize(
    ("what", "how", "reason"),
    [
        ("cache", "given away", OTHERS),
        pytest.param("home", "given away", OTHERS, marks=pytest.mark.slow),
        ("library", "given away", ""),
        ("library", 0o666, ""),
        pytest.param("cache", 0o777, OTHERS, marks=pytest.mark.slow),
        pytest.param("cache", 0o720, OTHERS, marks=pytest.mark.slow),
        ("cache", 0o1777, "not a folder that this user alone"),
        ("home", 0o777, OTHERS),
        ("cache", "a link", "is a link"),
    ],
)
def test_a_library_that_another_user_may_have_planted_is_not_loaded(
    what: str, how: str | int, reason: str, user: User, tmp_path: Path
) -> None:
    """One that is whole, and has the name that is looked for."""
    if how == "given away" and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    user.finds_nothing_wrong()
    (library,) = user.kept()
    planted = wrong_library(tmp_path)
    key = library.name.partition("-")[0]
    library.write_bytes(planted)
    library.rename(library.with_name(f"{key}-{hashlib.sha256(planted).hexdigest()}.so"))
    assert user.runs().stdout == "13\n"  # so the user's own would be
    expose(user, what, how)
    log = user.finds_nothing_wrong()
    assert reason in log
    assert log.startswith(f"compiling a test for this CPU, a few seconds{', for' if reason else '.'}")
    assert user.compilations() == 2
    shutil.rmtree(tmp_path / "home")  # with what pytest may not remove


def test_nothing_is_built_where_others_can_replace_it(user: User) -> None:
    user.temporary.chmod(0o777)
    ended = user.runs(ANSWER, HOME="/dev/null")
    assert f"PermissionError: {user.temporary} is a folder that users other than" in ended.stderr
    assert user.compilations() == 0


@pytest.mark.parametrize(
    ("environment", "before"),
    [
        ({"HOME": "/dev/null"}, ""),
        pytest.param({"HOME": "/nowhere/home"}, "", marks=pytest.mark.slow),
        pytest.param({"HOME": "relative"}, "", marks=pytest.mark.slow),
        ({}, "import pwd; pwd.getpwuid = {}.__getitem__; del os.environ['HOME'];"),
        ({}, "os.access = lambda path, mode: '.cache' not in str(path);"),
        (
            {},
            "old = os.statvfs; os.statvfs = lambda path: os.statvfs_result((os.ST_NOEXEC,) * 10)"
            " if '.cache' in str(path) else old(path);",
        ),
    ],
    ids=["no folder", "not there", "relative", "unset", "read-only", "noexec"],
)
def test_without_a_home_to_keep_it_in_it_is_compiled_for_the_process(
    environment: dict[str, str], before: str, user: User
) -> None:
    for _ in range(2):
        log = user.finds_nothing_wrong(before + ANSWER, **environment)
        assert log.startswith("compiling a test for this CPU, a few seconds, for this process alone (")
    assert user.compilations() == 2
    assert not list(user.home.rglob("*.so"))


def test_a_cache_folder_can_be_chosen_by_an_absolute_path(user: User, tmp_path: Path) -> None:
    user.finds_nothing_wrong(XDG_CACHE_HOME=str(tmp_path / "chosen"))
    assert len(list((tmp_path / "chosen" / "reamp").iterdir())) == 1
    user.finds_nothing_wrong(f"os.chdir({str(tmp_path)!r});" + ANSWER, XDG_CACHE_HOME="relative")
    assert len(user.kept()) == 1
    assert not (tmp_path / "relative").exists()


def test_without_a_compiler_an_error_names_what_was_looked_for(user: User) -> None:
    ended = user.runs(CXX="/nowhere/c++ -O1")
    assert "FileNotFoundError: there is no C++ compiler /nowhere/c++; install one" in ended.stderr


def test_what_a_compiler_says_is_in_the_error(user: User) -> None:
    ended = user.runs('load("no C at all", "a test")')
    assert "source.cpp:1:1: error: " in ended.stderr
    assert user.kept() == []


def is_running(process: str) -> bool:
    try:
        return Path("/proc", process, "stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("ending", ["a limit", "an interrupt"])
def test_a_hanging_compiler_is_killed_with_all_it_started(ending: str, user: User) -> None:
    user.compiles_by(f"sleep 30 & echo $! >> {user.calls}; wait")
    # A shell starts what is to run in the background with SIGINT ignored.
    interrupt = "signal.signal(signal.SIGINT, signal.default_int_handler);"
    interrupt += "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start();"
    setting = "compiled_library.TIME_LIMIT = 0.5;" if ending == "a limit" else interrupt
    code = f"""
{setting}
for _ in range(2 if {ending == "a limit"} else 1):
    try:
        load(SOURCE, "a test")
    except (RuntimeError, KeyboardInterrupt) as error:
        print(type(error).__name__, error)
"""
    began = time.monotonic()
    ended = user.runs(code)
    assert time.monotonic() - began < 25
    lines = ended.stdout.splitlines()
    if ending == "a limit":
        assert lines == 2 * [
            f"RuntimeError {user.compiler} took more than 0 s; set CXX to a compiler that works"
        ]
    else:
        assert lines == ["KeyboardInterrupt "]
    processes = user.calls.read_text().split()
    assert len(processes) == 2  # one compiler and its child: it is not called again
    assert not any(map(is_running, processes))
    assert user.kept() == []


def test_what_a_killed_process_has_left_is_removed_by_a_later_one(user: User, tmp_path: Path) -> None:
    compiles = user.compiler.read_text()
    for _ in range(2):
        user.compiles_by("kill -9 $PPID")
        assert user.runs().returncode != 0
    old, new = user.kept()
    os.utime(old, (0, 0))
    others = user.cache / "others"
    others.mkdir()
    (user.cache / "reamp-building-link").symlink_to(others)
    user.compiler.write_text(compiles)
    user.finds_nothing_wrong()
    assert not old.exists()
    assert new.exists()  # perhaps a process builds there
    assert others.exists()
