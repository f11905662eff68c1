"""How lists of tensors become launches: how many, and what goes to the device for them."""

from __future__ import annotations

import logging
import math
import runpy
import sys
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from amp.kernels import backend, l2norm, language, launch_plans, master_copy, unscale, update_scale
from amp.kernels.language import launch
from tests.devices import GPU
from tests.kernels.operations import OPERATIONS, run
from tests.models import waiting_is_an_error
from tests.processes import run_python

DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_is_kept() -> None:
    launch_plans._places.cache_clear()
    launch_plans._chunks.cache_clear()


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The tables that were sent to a device, in order."""
    sent: list[Tensor] = []
    upload = launch_plans.upload

    def counted(table: Tensor, device: torch.device) -> Tensor:
        sent.append(table)
        return upload(table, device)

    monkeypatch.setattr(launch_plans, "upload", counted)
    return sent


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that were launched, in order."""
    names: list[str] = []

    def counted(kernel: Any, *args: Any, **options: Any) -> None:
        names.append(kernel.fn.__name__ if hasattr(kernel, "fn") else kernel.__name__)
        launch(kernel, *args, **options)

    for module in (launch_plans, l2norm, update_scale):
        monkeypatch.setattr(module, "launch", counted)
    return names


def ones(n: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.ones(3 + i, dtype=dtype, device=DEVICE) for i in range(n)]


HALF = torch.tensor([0.5], device=DEVICE)


def operate(name: str, tensors: list[Tensor], found_inf: Tensor) -> None:
    clip: Any = {"max_norm": 1.0} if name == "l2norm" else {}
    run(name, tensors, tensors, HALF, found_inf, **clip)


@pytest.mark.triton
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("n", [1, 40])
def test_launches_do_not_grow_with_the_number_of_tensors(
    launches: list[str], name: str, n: int
) -> None:
    """Two at most for each dtype, however the tensors lie in memory."""
    found_inf = torch.zeros(1, device=DEVICE)
    expected = 2 if name == "l2norm" else 1
    misaligned = [torch.ones(9, device=DEVICE)[1:] for _ in range(n)]
    operate(name, ones(n) + misaligned, found_inf)
    assert len(launches) == expected
    launches.clear()
    operate(name, ones(n) + ones(n, torch.float16), found_inf)
    assert len(launches) == 2 * expected


@pytest.mark.triton
def test_the_scale_moves_in_one_launch(launches: list[str]) -> None:
    state = torch.tensor([4.0, 0.25, 0, 1, 1, 0, 8], device=DEVICE)
    update_scale.update_scale(
        state,
        growth_factor=2,
        backoff_factor=0.5,
        growth_interval=10,
        hysteresis=1,
        reset_each_step=False,
        floor=1,
        ceiling=1e6,
    )
    assert launches == ["update_kernel"]
    assert state.tolist() == [2, 0.5, 0, 0, 0, 1, 9]


@pytest.mark.triton
def test_tables_are_sent_again_only_for_other_addresses(uploads: list[Tensor]) -> None:
    a, b = ones(20), ones(20)
    for _ in range(3):
        unscale.unscale(a, a, HALF, None)
    assert len(uploads) == 3  # addresses, chunks, where each tensor's chunks begin
    unscale.unscale(b, b, HALF, None)
    assert len(uploads) == 4  # addresses: the sizes are known
    unscale.unscale(a, a, HALF, None)
    unscale.unscale(b, b, HALF, None)
    assert len(uploads) == 4
    assert all(torch.equal(x, torch.full_like(x, 0.5**4)) for x in a)
    assert all(torch.equal(x, torch.full_like(x, 0.5**2)) for x in b)


def plans_made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that gets each plan that is made from now on."""
    made, make = list[Any](), launch_plans._make_plan
    monkeypatch.setattr(launch_plans, "_make_plan", lambda *args: made.append(make(*args)) or made[-1])
    return made


@pytest.mark.triton
def test_lists_that_differ_in_their_addresses_alone_take_one_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients of one model, step by step; the sizes, dtypes and strides of another are not theirs."""
    flat = torch.ones(6, 6, device=DEVICE)
    mixed = [torch.ones(0, device=DEVICE), *ones(2), *ones(3, torch.float16), *ones(2)]
    kinds: list[list[Tensor]] = [ones(5), ones(4), ones(5, torch.float16), [flat], mixed]
    kept, made = [], plans_made(monkeypatch)
    for at, inf in ((0, False), (1, True), (2, False), (0, True)):
        for like in kinds:
            tensors = [torch.empty_like(t).fill_(1.0) for t in like]
            tensors[-1].view(-1)[at] = torch.inf if inf else 1.0
            kept.append(tensors)
            found = torch.zeros(1, device=DEVICE)
            unscale.check(tensors, HALF, found)
            assert found.item() == inf
    assert len(made) == len(kinds)


@pytest.mark.triton
def test_new_tensors_at_old_addresses_are_not_taken_for_the_old_ones() -> None:
    """An allocator hands the same memory out again, to tensors of other dtypes, sizes and strides."""
    storage = torch.zeros(64, device=DEVICE)
    for dtype, shape in (
        (torch.float32, (8, 8)),
        (torch.float16, (8, 8)),
        (torch.bfloat16, (8, 8)),
        (torch.bfloat16, (8, 7)),
        (torch.float16, (128,)),
        (torch.float32, (3,)),
    ):
        storage.fill_(7.0)
        view = storage.view(dtype)[: math.prod(shape)].view(shape).fill_(3.0)
        unscale.unscale([view], [view], HALF, None)
        assert torch.equal(view, torch.full_like(view, 1.5)), (dtype, shape)
        used = view.numel() * view.itemsize
        untouched = torch.full_like(storage, 7.0).view(torch.uint8)[used:]
        assert torch.equal(storage.view(torch.uint8)[used:], untouched)
    storage.fill_(1.0)
    for shape in ((4, 2), (2, 4)):  # the strides are the same, and the memory is not
        strided = storage.as_strided(shape, (1, 4))
        unscale.unscale([strided], [strided], HALF, None)
    expected = torch.ones(64, device=DEVICE)
    for shape in ((4, 2), (2, 4)):
        expected.as_strided(shape, (1, 4)).mul_(0.5)
    assert torch.equal(storage, expected)
    storage.fill_(1.0)
    dense, gaps = storage[:32], storage[::2]
    unscale.unscale([dense], [dense], HALF, None)
    unscale.unscale([gaps], [gaps], HALF, None)
    expected = torch.ones(64, device=DEVICE)
    expected[:32] *= 0.5
    expected[::2] *= 0.5
    assert torch.equal(storage, expected)


def test_gradients_that_move_with_each_step_take_one_plan_without_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the CPU an allocator hands out other addresses each time, and no table holds them."""
    kept, made = [], plans_made(monkeypatch)
    for _ in range(5):
        kept.append([torch.ones(3), torch.ones(4, 4).half()])
        unscale.unscale(kept[-1], kept[-1], torch.tensor([0.5]), None, backend="reference")
        assert len(made) == 1
    assert all((tensor == 0.5).all() for tensors in kept for tensor in tensors)
    with pytest.raises(ValueError, match=r"tensors 1 have shapes \[4, 4\], \[16\]"):
        master_copy.master_copy(kept[0], [kept[1][0], torch.ones(16)], backend="reference")


def bounded_places(monkeypatch: pytest.MonkeyPatch, size: int) -> list[Any]:
    """Let the cache hold plans under so many keys only, and return where they are."""
    assert 0 < launch_plans._places.cache_parameters()["maxsize"] <= 64
    made, make = list[Any](), launch_plans._places.__wrapped__
    bounded = lru_cache(size)(lambda *key: made.append(make(*key)) or made[-1])
    monkeypatch.setattr(launch_plans, "_places", bounded)
    return made


@pytest.mark.triton
def test_the_cache_of_plans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    places = bounded_places(monkeypatch, 5)
    for n in (2, 3, 4, 5, 6, 7, 8):
        alike = [ones(n) for _ in range(10)]
        for tensors in alike:
            unscale.unscale(tensors, tensors, HALF, None)
        unscale.unscale(alike[0], alike[0], HALF, None)
        assert torch.equal(alike[0][0], torch.full((3,), 0.25, device=DEVICE))
    assert launch_plans._places.cache_info().currsize == 5
    assert {len(each) for each in places} == {launch_plans._PLACES}


@pytest.mark.triton
def test_a_backend_that_is_switched_is_switched_at_once(
    launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = ones(3)
    monkeypatch.setenv("AMP_KERNELS", "triton")
    unscale.unscale(tensors, tensors, HALF, None)
    monkeypatch.setenv("AMP_KERNELS", "reference")
    unscale.unscale(tensors, tensors, HALF, None)
    monkeypatch.setenv("AMP_KERNELS", "triton")
    unscale.unscale(tensors, tensors, HALF, None, backend="reference")
    assert launches == ["unscale_kernel"]


def test_plans_are_made_in_several_threads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_plans, "uses_triton", lambda device, backend: True)
    bounded_places(monkeypatch, 3)
    lists = [ones(n) for n in (1, 2, 3, 4) for _ in range(8)]

    def work(seed: int) -> None:
        for i in range(300):
            tensors = lists[(i * seed) % len(lists)]
            (launch,) = launch_plans.plan(tensors, block=1).launches
            assert launch.rows[:, 0].tolist() == [tensor.data_ptr() for tensor in tensors]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, (1, 3, 5, 7)))
    assert launch_plans._places.cache_info().currsize == 3


def test_plans_hold_no_tensor_of_the_caller() -> None:
    import gc
    import weakref

    tensors = ones(3)
    reference = weakref.ref(tensors[0])
    unscale.unscale(tensors, tensors, HALF, None)
    del tensors
    gc.collect()
    assert reference() is None


@language.jit
def vector_length_kernel(address, length, result):  # Triton reads annotations
    language.tl.store(result, language.vector_length(language.tl.load(address), length))


@pytest.mark.triton
def test_only_multiples_of_16_bytes_move_128_bits_at_a_time() -> None:
    for address in (0, 16, 4096, 2, 4, 8, 24, 4097):
        for length in (0, 7, 8, 8191, 8192):
            where = torch.tensor([address], dtype=torch.int64, device=DEVICE)
            result = torch.full((1,), -1, dtype=torch.int32, device=DEVICE)
            arguments = {"address": where, "length": length, "result": result}
            launch(vector_length_kernel, 1, DEVICE, **arguments)
            assert result.item() == (length // 8 * 8 if address % 16 == 0 else 0)


# Backends.


def test_backends_are_chosen_by_device_variable_and_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    monkeypatch.delenv("AMP_KERNELS", raising=False)
    monkeypatch.setattr(backend, "INTERPRETED", False)
    monkeypatch.setattr(backend, "_works", lambda device: True)
    assert not backend.uses_triton(cpu)
    assert backend.uses_triton(cuda)
    assert not backend.uses_triton(torch.device("mps"))
    monkeypatch.setenv("AMP_KERNELS", "reference")
    assert not backend.uses_triton(cuda)
    assert backend.uses_triton(cuda, "triton")
    monkeypatch.setenv("AMP_KERNELS", "triton")
    assert backend.uses_triton(cuda)
    assert not backend.uses_triton(cuda, "reference")
    monkeypatch.setenv("AMP_KERNELS", "")
    assert backend.uses_triton(cuda)


def test_a_backend_that_does_not_exist_or_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(3)
    with pytest.raises(ValueError, match="backend='cuda' is not one of triton, reference"):
        master_copy.master_copy([tensor], [tensor], backend="cuda")
    monkeypatch.setenv("AMP_KERNELS", "tritn")
    with pytest.raises(ValueError, match="AMP_KERNELS='tritn' is not one of triton, reference"):
        master_copy.master_copy([tensor], [tensor])
    monkeypatch.setattr(backend, "INTERPRETED", False)
    with pytest.raises(
        RuntimeError, match=r"backend='triton' cannot run tensors on cpu: .* TRITON_INTER"
    ):
        backend.uses_triton(tensor.device, "triton")
    monkeypatch.setattr(backend, "triton", None)
    with pytest.raises(
        RuntimeError, match=r"AMP_KERNELS='triton', and Triton is not installed \(pip inst"
    ):
        monkeypatch.setenv("AMP_KERNELS", "triton")
        backend.uses_triton(tensor.device)


@pytest.mark.parametrize(
    "missing", ["Triton is not installed", "Triton finds no C compiler", "Triton fails on cuda:0"]
)
def test_where_triton_cannot_run_the_reference_does_and_says_so_once(
    missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("AMP_KERNELS", "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(backend, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    if "fails" in missing:  # as without Python.h: gcc is there, and the launcher cannot be built

        def launch(*args: Any, **arguments: Any) -> None:
            raise RuntimeError("main.c:4:10: fatal error: Python.h: No such file or directory")

        monkeypatch.setattr(backend, "triton", object())
        monkeypatch.setattr(backend, "launch", launch)
        monkeypatch.setattr(torch, "empty", lambda *args, **options: torch.ones(1))
    elif "compiler" in missing:
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setattr(backend, "triton", None)
    for function in (backend._works, backend.obstacle):
        function.cache_clear()
    try:
        for _ in range(3):
            assert not backend.uses_triton(torch.device("cuda", 0))
        assert not backend.uses_triton(torch.device("cpu"))
    finally:
        for function in (backend._works, backend.obstacle):
            function.cache_clear()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(missing)
    assert record.getMessage().endswith(": kernels run in plain torch, slower")
    assert ("Python.h" in record.getMessage()) is ("fails" in missing)


def test_a_triton_that_is_too_old_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    words: Any = types.ModuleType("triton.language")
    fake: Any = types.ModuleType("triton")
    fake.language, fake.jit, words.constexpr = words, lambda **_: lambda f: f, lambda value: value
    monkeypatch.setitem(sys.modules, "triton", fake)
    monkeypatch.setitem(sys.modules, "triton.language", words)
    for version, missing in (("3.5.1", "Triton 3.5.1 is older than 3.6"), ("3.10.0", "")):
        fake.__version__ = version
        read = runpy.run_path(language.__file__)
        assert (read["triton"] is None) == bool(missing)
        assert not missing or read["MISSING"] == missing


def test_the_interpreter_never_gets_addresses_of_another_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backend, "INTERPRETED", True)
    monkeypatch.delenv("AMP_KERNELS", raising=False)
    assert not backend.uses_triton(torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match=r"cannot run tensors on cuda:0: .* the CPU instead"):
        backend.uses_triton(torch.device("cuda", 0), "triton")


def test_a_session_trains_where_triton_is_not_installed() -> None:
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, amp\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "amp.initialize(model, optimizer, opt_level='O2', verbosity=0)\n"
        "with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as loss: loss.backward()\n"
        "optimizer.step()\n"
        "from amp.kernels import axpby, l2norm\n"
        "print(amp.kernels.language.triton)\n"
    )
    run = run_python("-c", script, AMP_KERNELS="", TRITON_INTERPRET="")
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "None"


# Only a GPU can show these.


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_operation_waits_for_the_device(name: str) -> None:
    tensors, found_inf = ones(50, torch.float16), torch.zeros(1, device=DEVICE)
    operate(name, tensors, found_inf)
    launch_plans._places.cache_clear()
    launch_plans._chunks.cache_clear()
    torch.cuda.synchronize()
    more = ones(51, torch.float16)
    with waiting_is_an_error():
        operate(name, tensors, found_inf)
        operate(name, more, found_inf)


@pytest.mark.gpu
def test_the_profiler_counts_the_same_launches() -> None:
    tensors, found_inf = ones(161, torch.float16), torch.zeros(1, device=DEVICE)
    for name in OPERATIONS:
        operate(name, tensors, found_inf)
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            operate(name, tensors, found_inf)
            torch.cuda.synchronize()
        kernels = [
            e.name for e in profile.events() or () if e.device_type == torch.autograd.DeviceType.CUDA
        ]
        ours = [kernel for kernel in kernels if not kernel.startswith("void at::")]
        # For l2norm torch fills the sums, and makes the total, the clip factor and the check.
        expected = (2, 6) if name == "l2norm" else (1, 0)
        assert (len(ours), len(kernels) - len(ours)) == expected, (name, kernels)


@pytest.mark.gpu
def test_a_table_is_not_read_on_a_stream_that_did_not_wait_for_it(uploads: list[Tensor]) -> None:
    tensors = ones(10)
    unscale.unscale(tensors, tensors, HALF, None)
    sent = len(uploads)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        unscale.unscale(tensors, tensors, HALF, None)
    assert len(uploads) == sent + 3
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(tensors[0], torch.full((3,), 0.25, device=DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_captured_operation_reads_the_right_addresses_in_every_replay(name: str) -> None:
    """Tables that later calls push out, and memory that others take, do not touch the graph."""
    sources = [torch.ones(3 + i, device=DEVICE) for i in range(20)]
    targets = [torch.zeros_like(s) for s in sources]
    norms = torch.zeros(1, device=DEVICE)
    found_inf = torch.zeros(1, device=DEVICE)

    def operation() -> None:
        result = run(name, sources, targets, HALF, found_inf)
        if name == "l2norm":
            norms.copy_(result.total)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        operation()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operation()
    for i in range(300):
        others = ones(5 + i % 7)
        unscale.unscale(others, others, HALF, None)
        if i % 30 == 0:
            for source in sources:
                source.fill_(float(i + 1))
            for target in targets:
                target.fill_(math.nan)
            graph.replay()
            factor = {"unscale": 0.5, "axpby": 1.5, "master_copy": 1.0}.get(name)
            if factor is not None:
                assert all((t == factor * (i + 1)).all() for t in targets)
            elif name == "l2norm":
                n = sum(s.numel() for s in sources)
                assert norms.item() == pytest.approx((i + 1) / 2 * math.sqrt(n), rel=1e-5)
    assert found_inf.item() == 0
    sources[7].fill_(math.inf)
    graph.replay()
    assert found_inf.item() == (name != "master_copy")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_several_devices() -> None:
    found_inf = torch.zeros(1, device="cuda:0")
    tensors = [torch.ones(5, device=f"cuda:{i % 2}") for i in range(4)]
    tensors[3][2] = math.inf
    unscale.unscale(tensors, tensors, HALF, found_inf)
    assert found_inf.item() == 1
    assert l2norm.l2norm(tensors[:3]).total.item() == pytest.approx(math.sqrt(15 * 0.25))


def test_pinned_memory_that_the_replays_of_a_graph_read_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[weakref.ref[Tensor]] = []

    def pin_memory(tensor: Tensor) -> Tensor:
        pinned = tensor.clone()
        made.append(weakref.ref(pinned))
        return pinned

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    for stream in (0, None):  # None while a graph is captured
        monkeypatch.setattr(launch_plans, "stream_of", lambda device, stream=stream: stream)
        launch_plans.upload(torch.ones(3), torch.device("meta"))
    assert made[0]() is None
    kept = made[1]()
    assert kept is not None
    assert kept.tolist() == [1, 1, 1]
