"""`amp.save`: the file under its name is whole at every moment."""

import os
import pickle
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
import torch

import amp
from tests.processes import Forked

WRITER = """
import sys, torch, amp
i = 0
while True:
    amp.save(sys.argv[1], {"i": i, "values": [torch.full((20_000,), float(i)) for _ in range(8)]})
    i += 1
"""


def test_what_is_saved_is_what_torch_loads(tmp_path: Path) -> None:
    for state in ({"a": torch.arange(3)}, {"a": torch.ones(2)}):
        amp.save(tmp_path / "x.pt", state)
        loaded = torch.load(tmp_path / "x.pt", weights_only=True)
        assert torch.equal(loaded["a"], state["a"])
    assert [each.name for each in tmp_path.iterdir()] == ["x.pt"]


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    amp.save(path, {"a": 1})
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        amp.save(path, {"a": lambda: None})  # which cannot be pickled
    assert torch.load(path, weights_only=True) == {"a": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["x.pt"]


def test_misuse_is_named(tmp_path: Path) -> None:
    with pytest.raises(amp.AmpError, match="takes a path and a state, .*torch.save's order"):
        amp.save({"a": 1}, tmp_path / "x.pt")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes a path and a state, and got a str and a str"):
        amp.save("x.pt", "y.pt")
    with pytest.raises(ValueError, match="is a folder, a pipe or a device: give the path of a file"):
        amp.save(tmp_path, {})
    with pytest.raises(FileNotFoundError, match=r"found no such folder; make it first: .*none'"):
        amp.save(tmp_path / "none" / "x.pt", {})


def check_kills(path: Path, kills: int) -> None:
    chance, seen = random.Random(0), []
    for _ in range(kills):
        writer = Forked([sys.executable, "-c", WRITER, path])
        while not path.exists():
            assert writer.poll() is None
            time.sleep(0.01)
        time.sleep(0.5 * chance.random())
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        state = torch.load(path, weights_only=True)
        assert all(bool((values == state["i"]).all()) for values in state["values"])
        seen.append(state["i"])
    assert max(seen) > 0


def test_three_kills_leave_a_whole_file(tmp_path: Path) -> None:
    check_kills(tmp_path / "x.pt", 3)


@pytest.mark.slow
def test_twenty_kills_leave_a_whole_file(tmp_path: Path) -> None:
    check_kills(tmp_path / "x.pt", 20)


def test_a_name_may_be_as_long_as_the_file_system_takes(tmp_path: Path) -> None:
    for length in (234, 235, 253, 255):
        amp.save(tmp_path / ("x" * length), {"a": 1})
        assert [each.name for each in tmp_path.iterdir()] == ["x" * length]
        (tmp_path / ("x" * length)).unlink()


@pytest.fixture
def umask() -> Iterator[None]:
    last = os.umask(0o027)
    yield
    os.umask(last)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.mark.usefixtures("umask")
def test_the_mode_of_a_file_is_kept_and_that_of_a_new_one_is_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    amp.save(path, {"a": 1})
    assert mode(path) == 0o640
    for other in (0o600, 0o664, 0o444):
        path.chmod(other)
        amp.save(path, {"a": 2})
        assert mode(path) == other


def test_what_replaces_a_private_file_is_private_while_it_is_written(tmp_path: Path) -> None:
    seen = []

    class Looking:
        def __reduce__(self) -> tuple[type, tuple[()]]:
            seen.extend(mode(each) for each in tmp_path.glob("*.tmp"))
            return dict, ()

    amp.save(tmp_path / "x.pt", {})
    (tmp_path / "x.pt").chmod(0o600)
    amp.save(tmp_path / "x.pt", Looking())
    assert seen == [0o600]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs a second group")
def test_the_group_of_a_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    amp.save(path, {"a": 1})
    os.chown(path, -1, 12345)
    path.chmod(0o640)
    amp.save(path, {"a": 2})
    assert (path.stat().st_gid, mode(path)) == (12345, 0o640)


def test_a_link_stays_and_its_file_is_written(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    link = tmp_path / "latest.pt"
    link.symlink_to("store/x.pt")
    for value in (1, 2):  # the first makes the file
        amp.save(link, {"a": value})
        assert link.is_symlink()
        assert torch.load(store / "x.pt", weights_only=True) == {"a": value}
    assert [each.name for each in store.iterdir()] == ["x.pt"]
    circle = tmp_path / "circle.pt"
    circle.symlink_to(circle)
    with pytest.raises(OSError, match="circle"):
        amp.save(circle, {})
    assert circle.is_symlink()


def test_files_with_names_like_its_own_are_kept(tmp_path: Path) -> None:
    names = ["x.pt.tmp", "x.pt.0123456789abcdef.tmp.gz", "y.pt.0123456789abcdef.tmp", ".x.pt.tmp"]
    for name in names:
        (tmp_path / name).write_text("the user's")
    amp.save(tmp_path / "x.pt", {"a": 1})
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        amp.save(tmp_path / "x.pt", {"a": lambda: None})
    assert all((tmp_path / name).read_text() == "the user's" for name in names)
    assert len(list(tmp_path.iterdir())) == len(names) + 1


@pytest.mark.skipif(sys.platform == "win32", reason="needs locks")
def test_an_empty_file_of_a_killed_save_is_removed_an_hour_later(tmp_path: Path) -> None:
    old, new = (tmp_path / f"x.pt.{digit * 16}.tmp" for digit in "01")
    for path in (old, new):
        path.touch()
    os.utime(old, (0, time.time() - 4000))
    amp.save(tmp_path / "x.pt", {"a": 1})
    assert {each.name for each in tmp_path.iterdir()} == {"x.pt", new.name}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(amp.AmpError, match="is a folder, a pipe or a device"):
        amp.save(path, {})
    assert path.is_fifo()


STOPPING = """
import os, sys, amp
def stop(descriptor):
    print("written", flush=True)
    sys.stdin.readline()
os.fsync = stop
amp.save(sys.argv[1], {"a": 1})
"""


@contextmanager
def writer_that_stops(path: Path) -> Iterator[tuple[Forked, IO[str]]]:
    """Yield a process that has written a file, and goes on to give it its name when it is told."""
    pipes = [*os.pipe(), *os.pipe()]
    given, to_it, from_it, said = (os.fdopen(each, "rwrw"[i]) for i, each in enumerate(pipes))
    with to_it, from_it:
        with given, said:
            writer = Forked([sys.executable, "-c", STOPPING, path], stdin=given, stdout=said)
        try:
            assert from_it.readline() == "written\n"
            yield writer, to_it
        finally:
            writer.kill()
            writer.wait()


@pytest.mark.slow
def test_what_a_kill_left_is_removed_by_the_next_save_of_that_file(tmp_path: Path) -> None:
    with writer_that_stops(tmp_path / "x.pt"):
        pass  # it is killed
    (left,) = tmp_path.iterdir()
    assert re.fullmatch(r"x\.pt\.[0-9a-f]{16}\.tmp", left.name)
    amp.save(tmp_path / "y.pt", {"a": 2})
    assert left.exists()
    amp.save(tmp_path / "x.pt", {"a": 2})
    assert {each.name for each in tmp_path.iterdir()} == {"x.pt", "y.pt"}


@pytest.mark.slow
def test_what_another_process_is_writing_stays(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with writer_that_stops(path) as (writer, to_it):
        amp.save(path, {"a": 2})
        assert torch.load(path, weights_only=True) == {"a": 2}
        print("go on\n", file=to_it, flush=True)  # for the file, and for its folder
        assert writer.wait() == 0
    assert torch.load(path, weights_only=True) == {"a": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["x.pt"]
