"""What is asked of lists of tensors: in C++ with the same answers, which comes by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp.kernels import bulk, tables


class OwnGrad(nn.Parameter):
    """A parameter whose gradient is another than torch's."""

    own: Tensor | None = None
    grad: Any = property(lambda self: self.own, lambda self, value: setattr(self, "own", value))


class Derived(Tensor):
    pass


def parameter(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    made = nn.Parameter(torch.randn(shape).to(dtype))
    made.grad = torch.ones_like(made) if grad else None
    return made


def lists() -> dict[str, Callable[[], Any]]:
    floating = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    written = torch.ones(3)
    written.add_(1).mul_(2)
    image = torch.ones(2, 3, 4, 4)
    return {
        "nothing": list,
        "parameters": lambda: [parameter(2, 3), parameter(), parameter(0), parameter(5)],
        "a tuple": lambda: (parameter(2), parameter(3)),
        "some gradients": lambda: [parameter(2, grad=False), parameter(2), parameter(2, grad=False)],
        "no gradients": lambda: [parameter(2, grad=False), parameter(3, grad=False)],
        "dtypes": lambda: [torch.ones(2, dtype=d) for d in (*floating, torch.int16, torch.bool)],
        "views": lambda: [torch.ones(4, 6).t(), torch.ones(9)[::2], torch.ones(9)[3:], torch.ones(3)],
        "channels last": lambda: [image.to(memory_format=torch.channels_last), image],
        "written to": lambda: [written, torch.ones(2)],
        "frozen": lambda: [parameter(2).requires_grad_(False), parameter(2)],
        "classes": lambda: [torch.ones(2).as_subclass(Derived), parameter(2), torch.ones(2)],
        "located": lambda: tables.Located([torch.ones(2), torch.ones(3)]),
    }


NOTHING: Any = None
QUESTIONS = (
    *("types", "dtypes", "layouts", "addresses", "sizes", "orders"),
    *("versions", "require_grad", "grads", "have_grads"),
)


@pytest.mark.parametrize("kind", lists())
@pytest.mark.parametrize("name", QUESTIONS)
def test_both_give_the_same_answer(name: str, kind: str, compiled_bulk: Any) -> None:
    tensors = lists()[kind]()
    expected, got = bulk.IN_PYTHON[name](tensors), getattr(compiled_bulk, name)(tensors)
    assert type(got) is type(expected)
    if name == "grads":
        assert list(map(id, got)) == list(map(id, expected))
    else:
        assert got == expected


@pytest.mark.usefixtures("bulk_functions")
def test_an_answer_tells_apart_what_differs() -> None:
    one = torch.ones(4, 6)
    assert bulk.addresses([one, one]) != bulk.addresses([one, one[1:]])
    assert bulk.sizes([one]) != bulk.sizes([one[:3]])
    assert bulk.orders([one]) is None
    assert bulk.orders([one.t()]) != bulk.orders([one[:, ::2]])
    assert bulk.orders([one.t(), one]) != bulk.orders([one, one.t()])
    version = bulk.versions([one])
    bulk.written([one])
    assert bulk.versions([one]) != version
    assert bulk.layouts([one, one.to_sparse(), one]) == {torch.strided, torch.sparse_coo}
    assert bulk.types([one, None, parameter(1)]) == {Tensor, type(None), nn.Parameter}
    some = [parameter(1), parameter(1)]
    assert bulk.are_same(some, list(some))
    assert bulk.are_same((), [])
    assert not bulk.are_same(some, some[::-1])
    assert not bulk.are_same(some, some[:1])


@pytest.mark.usefixtures("bulk_functions")
def test_a_class_with_a_gradient_of_its_own_is_asked() -> None:
    own = OwnGrad(torch.ones(2))
    some: list[Tensor] = [parameter(2, grad=False), own]
    assert not bulk.have_grads(some)
    own.grad = torch.full((2,), 7.0)
    assert bulk.have_grads(some)
    assert bulk.grads(some) == [None, own.grad]
    bulk.clear_grads(some)
    assert own.own is None


@pytest.mark.usefixtures("bulk_functions")
def test_gradients_are_cleared_and_entries_found() -> None:
    some = [parameter(2), parameter(3)]
    kept = bulk.grads(some)
    bulk.clear_grads(some)
    assert [p.grad for p in some] == [None, None]
    assert all(grad is not None and grad.eq(1).all() for grad in kept)
    assert bulk.entries([{"a": 1, "b": 2}, {"a": 3}], "a") == [1, 3]


@pytest.mark.usefixtures("bulk_functions")
@pytest.mark.parametrize(
    ("error", "ask"),
    [
        (KeyError, lambda: bulk.entries([{"a": 1}, {}], "a")),
        (TypeError, lambda: bulk.entries([NOTHING, {}], "a")),
        (TypeError, lambda: bulk.addresses([torch.ones(1), NOTHING])),
        (TypeError, lambda: bulk.sizes([NOTHING])),
        (RuntimeError, lambda: bulk.addresses([torch.ones(2, 2).to_sparse()])),
        (RuntimeError, lambda: bulk.versions([inference_tensor()])),
    ],
)
def test_what_cannot_be_answered_raises(error: type[Exception], ask: Callable[[], Any]) -> None:
    with pytest.raises(error):
        ask()


def inference_tensor() -> Tensor:
    with torch.inference_mode():
        return torch.ones(2)


@pytest.mark.usefixtures("bulk_functions")
def test_a_list_may_change_while_it_is_gone_through() -> None:
    class Emptying(nn.Parameter):
        def __getattribute__(self, name: str) -> Any:
            if name == "grad":
                some.clear()
            return super().__getattribute__(name)

    some: list[Any] = [Emptying(torch.ones(1)), *(parameter(1) for _ in range(50))]
    bulk.have_grads(some)
    some += [parameter(1, grad=False), Emptying(torch.ones(1)), parameter(1)]
    bulk.grads(some)


def test_no_reference_is_lost_or_kept(compiled_bulk: Any) -> None:
    """A count that falls at each call would free what is in use; one that grows would be a leak."""
    some = [parameter(2), parameter(2)]
    entries = [{"a": some[0]}, {"a": some[1]}]
    counted = [*some, *[p.grad for p in some], torch.float32, torch.strided, nn.Parameter, *entries]
    before = list(map(sys.getrefcount, counted))
    for _ in range(100):
        for name in QUESTIONS:
            getattr(compiled_bulk, name)(some)
        compiled_bulk.are_same(some, list(some))
        compiled_bulk.entries(entries, "a")
        compiled_bulk.written(some)
    grown = [after - count for after, count in zip(map(sys.getrefcount, counted), before, strict=True)]
    assert max(map(abs, grown)) < 20, grown


def in_new_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
        check=False,
        timeout=300,
    )


USE = """
import logging; logging.basicConfig(level="INFO", format="%(message)s")
import torch
from amp.kernels import bulk
bulk.compile_soon().join()
assert bulk.compile_soon() is bulk.compile_soon()
some = [torch.ones(3)]
print(type(bulk.sizes).__name__, bulk.sizes(some) == bulk.IN_PYTHON["sizes"](some))
"""


@pytest.mark.usefixtures("compiled_bulk")
def test_it_is_compiled_once_and_taken_into_use(tmp_path: Path) -> None:
    first, second = [in_new_process(USE, XDG_CACHE_HOME=str(tmp_path)) for _ in range(2)]
    assert first.stdout == second.stdout == "builtin_function_or_method True\n", first.stderr
    assert "compiling in the background" in first.stderr
    assert "compiling" not in second.stderr
    assert len(list((tmp_path / "reamp").iterdir())) == 1


@pytest.mark.parametrize("compiler", ["/nowhere/c++", "false", "true", '"'])
def test_without_a_compiler_python_goes_on(compiler: str, tmp_path: Path) -> None:
    run = in_new_process(USE, XDG_CACHE_HOME=str(tmp_path), CXX=compiler)
    assert run.stdout == "function True\n", run.stderr
    assert "in Python, slower" in run.stderr
    assert not list((tmp_path / "reamp").glob("*"))


AT_ONCE = """
import os, pathlib, time
from amp.kernels import bulk
bulk.compile_soon()
"""
WHILE_IT_RUNS = """
process = pathlib.Path(os.environ["CXX"]).with_name("process")
while not (process.exists() and process.read_text().endswith("\\n")):
    time.sleep(0.01)
assert os.getsid(int(process.read_text())) != os.getsid(0), "Ctrl-C would reach it"
"""


def script(path: Path, lines: str) -> str:
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("code", [AT_ONCE, AT_ONCE + WHILE_IT_RUNS], ids=["at once", "while it runs"])
def test_a_process_that_ends_before_it_is_compiled_does_not_wait_for_it(
    code: str, tmp_path: Path
) -> None:
    """Neither for the compiler nor for what that has started, whatever they do about signals."""
    lines = f"trap '' TERM\nsleep 1000 &\necho $$ > {tmp_path}/process\nwait"
    compiler = script(tmp_path / "slow", lines)
    run = in_new_process(code, XDG_CACHE_HOME=str(tmp_path), CXX=compiler)
    assert run.returncode == 0, run.stderr
    assert not list((tmp_path / "reamp").iterdir())
    if (tmp_path / "process").exists():
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "process").read_text()), 0)


FORKED = """
if os.fork() == 0:
    raise SystemExit
os.wait()
process.with_name("go").touch()
bulk.compile_soon().join()
"""


def test_a_forked_process_leaves_the_compiler_and_its_folder_alone(tmp_path: Path) -> None:
    there = f'ls "$1" > {tmp_path}/seen'
    lines = f"echo $$ > {tmp_path}/process\nuntil test -e {tmp_path}/go; do sleep 0.02; done\n{there}"
    compiler = script(tmp_path / "waiting", lines)
    code = AT_ONCE + WHILE_IT_RUNS + FORKED
    run = in_new_process(code, XDG_CACHE_HOME=str(tmp_path), CXX=compiler)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "seen").read_text().endswith("source.cpp\n")


def test_a_message_in_another_encoding_is_shown(tmp_path: Path) -> None:
    compiler = script(tmp_path / "latin", "printf '\\374bel' >&2; exit 1")
    run = in_new_process(USE, XDG_CACHE_HOME=str(tmp_path), CXX=compiler)
    assert "in Python, slower" in run.stderr
    assert "bel" in run.stderr
    assert "Traceback" not in run.stderr


def test_where_no_thread_can_be_started_python_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    bulk.compile_soon.cache_clear()
    monkeypatch.setattr(bulk.threading.Thread, "start", refuse)
    assert not bulk.compile_soon().is_alive()
    bulk.compile_soon.cache_clear()


@pytest.mark.parametrize("n", [bulk.WORTH_COMPILING - 1, bulk.WORTH_COMPILING])
def test_it_is_compiled_where_triton_has_many_tensors(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(bulk, "compile_soon", lambda: started.append(1))
    monkeypatch.setattr(tables, "uses_triton", lambda device, backend: True)
    monkeypatch.setattr(tables, "INTERPRETED", False)
    tables.plan([torch.ones(2) for _ in range(n)], block=64)
    assert started == [1] * (n >= bulk.WORTH_COMPILING)
