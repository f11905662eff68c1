"""Loops in C: how they are compiled and kept, and the numbers they convert."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from amp.kernels import compiling, native
from amp.kernels.language import INTERPRETED
from amp.kernels.unscale import check

if INTERPRETED:
    pytest.skip("the interpreter has no loops in C", allow_module_level=True)

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caches: tuple[Callable[[], None], ...] = (
        compiling._cache_folder.cache_clear,
        native.loop.cache_clear,
    )
    for clear in caches:
        clear()
    yield tmp_path / "reamp"
    for clear in caches:
        clear()


def test_an_interrupted_caller_waits_for_what_it_started() -> None:
    """Otherwise weights would go on changing, from tables that are gone."""
    done = []

    def part(first: int, last: int) -> int:
        if first == 0:
            raise KeyboardInterrupt
        time.sleep(0.2)
        done.append(first)
        return 0

    with pytest.raises(KeyboardInterrupt):
        native._in_threads(part, [(0, 1), (1, 2), (2, 3)])
    assert sorted(done) == [1, 2]


AFTER_THE_MAIN_THREAD = """
import threading, time, torch
from amp.kernels import native
torch.set_num_threads(3)
def work():
    threading.main_thread().join()
    time.sleep(0.2)
    print(native._in_threads(lambda first, last: last, [(0, 1), (1, 2), (2, 3)]), flush=True)
threading.Thread(target=work).start()
"""


def test_a_thread_that_outlives_the_main_one_can_step() -> None:
    run = subprocess.run(
        [sys.executable, "-c", AFTER_THE_MAIN_THREAD],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    assert run.stdout == "[1, 2, 3]\n", run.stderr


def test_a_damaged_file_is_compiled_anew(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doubled()
    (whole,) = cache.iterdir()
    damaged = cache.parent / "other" / "reamp" / whole.name
    damaged.parent.mkdir(parents=True)
    damaged.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(damaged.parents[1]))
    compiling._cache_folder.cache_clear()
    native.loop.cache_clear()
    assert doubled()
    assert damaged.stat().st_size == whole.stat().st_size


@pytest.mark.parametrize("compiler", ['"', "/nowhere/cc", "true", "cc -c"])
def test_a_compiler_that_does_not_work_leaves_nothing_behind(
    compiler: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.WARNING, "amp"):
        assert native.loop(*DOUBLE) is None
    assert "no loop could be compiled" in caplog.text
    assert not list(cache.glob("*.so"))


DOUBLE = (("float",), "for (int64_t i = 0; i < length; i++) x0[i] *= 2;")


def doubled() -> bool:
    twice = native.loop(*DOUBLE)
    x = torch.ones(1000)
    return twice is not None and twice([[x]]) is not None and bool((x == 2).all())


def test_a_loop_is_compiled_once_and_that_is_announced(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        native.loop.cache_clear()  # as another process would
        assert doubled()
    assert [record.message[:9] for record in caplog.records] == ["compiling"]
    assert len(list(cache.iterdir())) == 1


def test_a_cache_that_cannot_be_written_to_is_done_without(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.joinpath("reamp").write_text("in the way")
    assert doubled()


def test_an_error_of_the_compiler_is_shown(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "amp"):
        assert native.loop(("float",), "this is not C") is None
    assert "no loop could be compiled" in caplog.text
    assert "error" in caplog.text
    assert not list(cache.iterdir())


@pytest.mark.parametrize("flags", [(), ("-mno-f16c", "-mno-avx512f")])
@pytest.mark.parametrize("kind", HALVES)
def test_conversions_are_exact(
    kind: str, flags: tuple[str, ...], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, *flags))
    dtype = HALVES[kind]
    there = native.loop((kind, "float"), f"widen_{kind}(x0, x1, length);")
    back = native.loop(("float", kind), f"narrow_{kind}(x0, x1, length);")
    assert there is not None
    assert back is not None
    every = torch.arange(2**16).to(torch.int16).view(dtype)
    wide = torch.empty(2**16)
    there([[every], [wide]])
    torch.testing.assert_close(wide, every.float(), rtol=0, atol=0, equal_nan=True)

    torch.manual_seed(0)
    finite = every.float()[every.isfinite()].sort().values
    halfway = (finite[1:].double() + finite[:-1].double()).div(2).float()
    above, below = [halfway.nextafter(torch.tensor(x)) for x in (torch.inf, -torch.inf)]
    some = torch.randint(-(2**31), 2**31, (10**6,)).to(torch.int32).view(torch.float32)
    numbers = torch.cat([every.float(), halfway, above, below, some])
    narrow = torch.empty_like(numbers, dtype=dtype)
    back([[numbers], [narrow]])
    torch.testing.assert_close(narrow, numbers.to(dtype), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(narrow.signbit()[~narrow.isnan()], numbers.signbit()[~narrow.isnan()])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, None])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_check_sees_every_element(
    bad: float | None, dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "WORTH_COMPILING", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for at in (0, 1, 999, 5000, 9998, 9999):
        grads = [torch.randn(n).to(dtype) for n in (1000, 0, 4001, 4999)]
        versions = [grad._version for grad in grads]
        if bad is not None:
            flat = torch.cat(grads)
            flat[at] = bad
            grads = list(flat.split([1000, 0, 4001, 4999]))
            versions = [grad._version for grad in grads]
        found_inf = torch.zeros(1)
        check(grads, torch.tensor([0.5]), found_inf)
        assert bool(found_inf) is (bad is not None)
        assert [grad._version for grad in grads] == versions


def test_the_check_sees_products_that_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "WORTH_COMPILING", 1000)
    grads = [torch.ones(5000), -torch.full((10,), 1e30)]
    for inv_scale, overflows in ((1e8, False), (1e9, True)):
        found_inf = torch.zeros(1)
        check(grads, torch.tensor([inv_scale]), found_inf)
        assert bool(found_inf) is overflows
