"""The step without Triton: sliced and gathered in eager torch, and as a loop in C++."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from amp.kernels import cpu_loop, master_copy, plainstep
from amp.kernels.foreach import by_dtypes
from amp.kernels.lamb import LAMB
from amp.kernels.language import INTERPRETED
from amp.kernels.novograd import NOVOGRAD
from amp.kernels.rule import Numbers, Origin, UpdateRule
from amp.kernels.stepping import step
from tests.covering import covering
from tests.kernels.formulas import CASES
from tests.kernels.numbers_of import numbers_of
from tests.kernels.operations import OPERATIONS, run

if INTERPRETED:
    pytest.skip("plain torch needs no interpreter", allow_module_level=True)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SHAPES = [(300, 300), (7,), (70_000,), (5, 3, 2, 2), (0,), (1,), (66_000,)]
RULES: dict[str, tuple[UpdateRule, Numbers]] = {
    name: (CASES[name].rule, numbers_of(CASES[name].rule, nesterov=True))
    for name in ("adagrad", "adam", "lion", "momentum", "novograd", "sgd")
}


class Launches(TorchDispatchMode):
    """Counts what would be launches on a GPU."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = ("empty", "detach", "view", "strided", "record_function", "profiler", "alias")
        names += ("promote_types", "select", "slice", "unbind", "lift_fresh")
        self.count += not any(name in str(function) for name in names)
        return function(*args, **(kwargs or {}))


class Tensors:
    """Weights of many sizes, some channels-last, one with gaps, with scaled gradients."""

    def __init__(self, rule: UpdateRule, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        params = [torch.randn(shape) for shape in SHAPES]
        self.params = [
            p.contiguous(memory_format=torch.channels_last) if p.dim() == 4 else p for p in params
        ]
        self.params.append(torch.randn(40, 40)[:, ::2])
        self.models = None if dtype is F32 else [torch.empty_like(p, dtype=dtype) for p in self.params]
        self.moments = [[torch.zeros_like(p) for p in self.params] for _ in rule.moments]
        self.steps = [torch.zeros(()) for _ in self.params]
        self.steps[2] += 5  # that parameter came first
        self.dtype = dtype

    def run(self, rule: UpdateRule, numbers: Numbers, backend: str | None) -> list[Tensor]:
        norms = torch.arange(1.0, len(self.params) + 1) if rule is NOVOGRAD else None
        for i in range(3):
            torch.manual_seed(i)
            grads = [(8 * torch.randn_like(p)).to(self.dtype) for p in self.params]
            inv_scale = torch.tensor([1 / 8])
            step(
                *(rule, numbers, self.params, grads, self.moments, self.steps),
                models=self.models,
                of_tensor=norms,
                inv_scale=inv_scale,
                backend=backend,
            )
        return [*self.params, *(self.models or []), *(m for moment in self.moments for m in moment)]


ONE_LARGE, MANY = [2**18], [5, 90_000, 7, 1, 100_000, 0]


@pytest.mark.parametrize(
    ("name", "low", "state_dtype", "sizes"),
    covering([*RULES, "lamb"], [None, torch.int16, BF16], [None, BF16], [ONE_LARGE, MANY]),
)
def test_other_devices_than_the_cpu_step_whole_tensors_in_few_launches(
    name: str,
    sizes: list[int],
    state_dtype: torch.dtype | None,
    low: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit as the slices of the CPU."""
    rule, numbers = (LAMB, numbers_of(LAMB)) if name == "lamb" else RULES[name]
    monkeypatch.setattr(plainstep, "plan_loop", lambda _, lists, indices, *__: (indices, None))
    found = []
    for on_cpu in (True, False):
        monkeypatch.setattr(plainstep, "is_on_cpu", lambda tensor, on_cpu=on_cpu: on_cpu)
        torch.manual_seed(0)
        params = [torch.randn(size, dtype=BF16 if low else F32) for size in sizes]
        lows = None if low is None else [torch.zeros(size, dtype=low) for size in sizes]
        moments = [
            [torch.zeros(size, dtype=state_dtype or F32) for size in sizes] for _ in rule.moments
        ]
        steps = [torch.zeros(()) for _ in sizes]
        grads = [torch.randn(size, dtype=F16) for size in sizes]
        origins = None if state_dtype is None else list(map(Origin, range(len(sizes))))
        norms = torch.arange(1.0, len(sizes) + 1) if rule is NOVOGRAD else None
        with Launches() as launches:
            step(
                rule,
                numbers,
                params,
                grads,
                moments,
                steps,
                lows=lows,
                of_tensor=norms,
                origins=origins,
                backend="reference",
            )
        found.append([*params, *(lows or ()), *(m for moment in moments for m in moment)])
    assert all(map(torch.equal, *found))
    # Halves and noise are worked out in integers.
    assert launches.count <= (200 if low or state_dtype else 45)


def test_lists_are_copied_by_dtype() -> None:
    """CUDA writes a list of several dtypes as if all had the first one's, in torch before 2.11."""
    targets = [torch.zeros(3, dtype=dtype) for dtype in (F32, F16, F32, BF16)]
    sources = [torch.full((3,), float(i)) for i in range(4)]
    lists: list[list[torch.dtype]] = []
    for change in by_dtypes(targets, sources):
        lists.append([x.dtype for x in change.args[0]])  # type: ignore[attr-defined]
        change()
    assert lists == [[F32, F32], [F16], [BF16]]
    assert [x.tolist() for x in targets] == [[float(i)] * 3 for i in range(4)]


def test_tensors_are_stepped_together_as_far_as_memory_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    rule, numbers = RULES["adam"]
    whole = Tensors(rule, F16).run(rule, numbers, "reference")
    counts: list[int] = []
    as_one = plainstep._as_one

    def note(each: Any) -> Any:
        counts.append(len(each))
        return as_one(each)

    monkeypatch.setattr(plainstep, "is_on_cpu", lambda tensor: False)
    monkeypatch.setattr(plainstep, "_as_one", note)
    for room, expected in ((math.inf, [6, 1]), (90_000, [1, 5, 1]), (1, 7 * [1])):
        monkeypatch.setattr(plainstep, "_room_on", lambda device, room=room: room)
        counts.clear()
        found = Tensors(rule, F16).run(rule, numbers, "reference")
        assert all(map(torch.equal, found, whole))
        assert counts == 3 * expected


def test_room_is_asked_of_the_device_of_what_is_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def room_on(device: torch.device) -> float:
        asked.append(device)
        return math.inf

    monkeypatch.setattr(plainstep, "_room_on", room_on)
    lists = {"param": [torch.ones(3), torch.ones(3, device="meta")]}
    assert [len(pieces) for pieces in plainstep._pieces(lists, [1], are_whole=False)] == [1]
    assert list(plainstep._pieces(lists, [], are_whole=False)) == []
    assert asked == [torch.device("meta")]


@pytest.mark.parametrize("operation", [*OPERATIONS, "merge", "differ"])
def test_operations_on_many_tensors_take_few_launches(operation: str) -> None:
    halves = [torch.ones(i, dtype=F16, device="meta") for i in range(1, 201)]
    floats = [torch.ones(i, device="meta") for i in range(1, 201)]
    inv_scale, found = torch.ones(1, device="meta"), torch.zeros(1, device="meta")
    with Launches() as launches:
        if operation in OPERATIONS:
            run(operation, halves, floats, inv_scale, found)
        else:
            getattr(master_copy, operation)(halves, floats)
    assert launches.count <= 20


@pytest.mark.parametrize("dtype", [F16, F32])
def test_norms_over_all_ranks_are_measured_in_few_launches(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit as those of the CPU, which measures one tensor after the other."""
    found = []
    for on_cpu in (True, False):
        monkeypatch.setattr(plainstep, "is_on_cpu", lambda tensor, on_cpu=on_cpu: on_cpu)
        tensors = Tensors(LAMB, dtype)
        counts: list[int] = []

        def same(norms: Tensor, counts: list[int] = counts) -> Tensor:
            counts.append(launches.count)
            return norms.clone()

        with Launches() as launches:
            step(
                *(LAMB, numbers_of(LAMB), tensors.params, [p.to(dtype) for p in tensors.params]),
                *(tensors.moments, tensors.steps),
                models=tensors.models,
                norms_of_all_ranks=same,
                backend="reference",
            )
        found.append([*tensors.params, *(m for moment in tensors.moments for m in moment)])
    assert all(map(torch.equal, *found))
    assert counts[0] <= 70  # of two groups, for one parameter came first


def tensors_left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compile steps of this size, and return a list of all that the loop leaves to eager torch."""
    left: list[int] = []

    def plan_loop(*args: Any) -> Any:
        rest, loop = cpu_loop.plan_loop(*args)
        left.extend(rest)
        return rest, loop

    monkeypatch.setattr(cpu_loop, "WORTH_COMPILING", 100_000)
    monkeypatch.setattr(plainstep, "plan_loop", plan_loop)
    return left


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("adam", F16),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("adagrad", BF16), ("lion", F16), ("momentum", BF16), ("novograd", F32))
        ),
    ],
)
def test_the_loop_does_what_eager_torch_does(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit."""
    rule, numbers = RULES[name]
    eager = Tensors(rule, dtype).run(rule, numbers, "reference")
    left = tensors_left(monkeypatch)
    looped = Tensors(rule, dtype).run(rule, numbers, None)
    assert left == 3 * [7]  # the one with gaps
    for x, y in zip(looped, eager, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("is_kept", [False, True])
def test_the_loop_for_small_steps_is_compiled_beside_a_long_training(
    is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then eager torch does them, unless an earlier process has compiled the loop."""
    rule, numbers = RULES["adam"]
    in_eager, looped = Tensors(rule, F32), Tensors(rule, F32)
    load, compiled = cpu_loop.load_or_log, list[threading.Thread]()

    def load_noting(source: str, purpose: str) -> Any:
        compiled.append(threading.current_thread())
        return load(source, purpose)

    monkeypatch.setattr(cpu_loop, "load_or_log", load_noting)
    monkeypatch.setattr(cpu_loop, "load_kept", lambda source: load(source, "") if is_kept else None)
    monkeypatch.setattr(cpu_loop, "LONG", 8)  # times that two groups of three steps ask for it
    monkeypatch.setattr(cpu_loop, "_loops", loops := {})
    monkeypatch.setattr(cpu_loop, "_asked", Counter())
    for i in range(3):
        looped.run(rule, numbers, None)
        in_eager.run(rule, numbers, "reference")
        assert len(compiled) == (i > 0 and not is_kept)
        for thread in compiled:
            assert thread is not threading.main_thread()
            thread.join()
        assert len(loops) == (i > 0 or is_kept)
    assert all(map(torch.equal, looped.params, in_eager.params))


def test_tensors_with_values_elsewhere_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a tensor has no memory of its own that a loop could go through."""
    monkeypatch.setattr(cpu_loop, "WORTH_COMPILING", 100_000)
    rule, numbers = RULES["adam"]
    plain, grad = torch.ones(70_000), torch.ones(70_000)
    pair = TwoTensor(torch.ones(70_000), torch.ones(70_000))
    for param in (plain, pair):
        params, grads = [param, torch.ones(70_000)], [grad * param, grad]
        moments = [[torch.zeros_like(p) for p in params] for _ in rule.moments]
        step(rule, numbers, params, grads, moments, [torch.zeros(()), torch.zeros(())])
    assert torch.equal(pair.a, plain)
    assert torch.equal(pair.b, plain)
    assert not torch.equal(plain, grad)


SCRIPT = """
import torch
from amp.kernels.sgd import MOMENTUM_SGD
from amp.kernels.stepping import step

torch.set_num_threads(1)
group = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.1}
numbers = MOMENTUM_SGD.numbers({**group, "nesterov": False, "wd_after_momentum": False})
ends = []
for backend in (None, "reference"):
    torch.manual_seed(0)
    params = [torch.randn(2**20), torch.randn(7)]
    grads = [torch.randn_like(p).half() for p in params]
    moments, steps = [[torch.zeros_like(p) for p in params]], [torch.zeros(()) for _ in params]
    for _ in range(2):
        step(MOMENTUM_SGD, numbers, params, grads, moments, steps, backend=backend)
    ends.append(params)
assert all(map(torch.equal, *ends))
print("stepped")
"""


def start(**environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines_of(process: subprocess.Popen[str]) -> list[str]:
    """Wait for a script that has to end well, and return what it logged."""
    output, errors = process.communicate(timeout=300)
    assert output == "stepped\n", errors
    return errors.splitlines()


@pytest.mark.slow
def test_processes_that_compile_at_once_share_a_cache(tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path), "ATEN_CPU_CAPABILITY": "avx2"}
    for process in [start(**cache), start(**cache)]:
        (line,) = lines_of(process)
        assert line.startswith("compiling the optimizer step")
    assert lines_of(start(**cache)) == []
    assert len(list((tmp_path / "reamp").iterdir())) == 1


@pytest.mark.slow
def test_the_loop_is_compiled_for_the_instructions_that_torch_uses(tmp_path: Path) -> None:
    """For AVX2 the processes above have."""
    (line,) = lines_of(start(XDG_CACHE_HOME=str(tmp_path), ATEN_CPU_CAPABILITY="default"))
    assert line.startswith("compiling the optimizer step")


@pytest.mark.parametrize("reason", ["error:", "/nowhere/c++"])
def test_a_failure_to_compile_is_said_once_and_leaves_the_results_of_eager_torch(
    reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rule, numbers = RULES["momentum"]
    eager = Tensors(rule, F16).run(rule, numbers, "reference")
    if reason == "error:":
        monkeypatch.setattr(cpu_loop, "read_source", lambda *_: "no such thing")
    else:
        monkeypatch.setenv("CXX", reason)
    monkeypatch.setattr(cpu_loop, "WORTH_COMPILING", 100_000)
    cpu_loop._loops.clear()
    with caplog.at_level(logging.WARNING, "amp"):
        without = Tensors(rule, F16).run(rule, numbers, None)
    cpu_loop._loops.clear()
    assert all(map(torch.equal, without, eager))
    said = "the optimizer step could not be compiled, so eager torch runs it, slower: "
    assert caplog.text.count(said) == 1
    assert reason in caplog.text
