"""`amp.save`: the file under its name is whole at every moment."""

import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import amp

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
    with pytest.raises(FileNotFoundError):
        amp.save(tmp_path / "none" / "x.pt", {})


def check_kills(path: Path, kills: int) -> None:
    chance, seen = random.Random(0), []
    for _ in range(kills):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
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


def test_a_kill_leaves_a_whole_file(tmp_path: Path) -> None:
    check_kills(tmp_path / "x.pt", 1)


@pytest.mark.slow
def test_twenty_kills_leave_a_whole_file(tmp_path: Path) -> None:
    check_kills(tmp_path / "x.pt", 20)


def test_a_name_may_be_as_long_as_the_file_system_takes(tmp_path: Path) -> None:
    amp.save(tmp_path / ("x" * 253), {"a": 1})
    assert [each.name for each in tmp_path.iterdir()] == ["x" * 253]
