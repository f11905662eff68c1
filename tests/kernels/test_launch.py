"""What the launchers hand to Triton compiles, without a GPU: all but the launch itself happens.

A driver that only names a device stands in for a GPU's, and kernels are compiled from the very
arguments that an operation passes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from amp.kernels import (
    adam,
    axpby,
    fp4_tiles,
    l2norm,
    lamb,
    language,
    launch_plans,
    master_copy,
    moments,
    quantize,
    quantize_fp4,
    quantize_tiles,
    split,
    stepping,
    unscale,
    update_scale,
)
from amp.kernels.fp8 import Part
from amp.kernels.language import INTERPRETED, tl, triton
from amp.kernels.philox import Draw
from amp.kernels.rule import Origin

if triton is None or INTERPRETED:
    pytest.skip("needs Triton's compiler", allow_module_level=True)

from triton.runtime import driver

from tests.kernels.numbers_of import numbers_of
from tests.nodevice import NoDevice

pytestmark = pytest.mark.slow


def kernels_in(*modules: Any) -> list[Any]:
    """Return the kernels that are defined in modules."""
    return [
        kernel
        for module in modules
        for name, kernel in vars(module).items()
        if name.endswith("_kernel") and kernel.fn.__module__ == module.__name__
    ]


KERNELS = kernels_in(axpby, l2norm, master_copy, moments, split, stepping, unscale, update_scale)
QUANTIZING, QUANTIZING_FP4 = kernels_in(quantize_tiles), kernels_in(fp4_tiles)


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How many variants of each kernel have been compiled."""
    compiled: dict[str, int] = {}

    def compile_only(
        kernel: Any, programs: int, device: Any, warps: int = 8, registers: Any = None, **arguments: Any
    ) -> None:
        given = {name: language.in_triton(value) for name, value in arguments.items()}
        assert kernel.warmup(**given, grid=(programs,), num_warps=warps) is not None
        compiled[kernel.__name__] = len(kernel.device_caches[NoDevice.number][0])

    for cache in (quantize_tiles._tensor_plan, quantize_tiles._measure):
        cache.cache_clear()
    for module in (language, launch_plans, l2norm, update_scale, quantize_tiles, fp4_tiles):
        monkeypatch.setattr(module, "launch", compile_only)
    for module in (launch_plans, update_scale, quantize_tiles):
        monkeypatch.setattr(module, "uses_triton", lambda *_: True)
    monkeypatch.setattr(launch_plans.Elementwise, "run_in_cpp", lambda *_, **__: False)
    for module in (launch_plans, stepping):
        monkeypatch.setattr(module, "takes_at_once", lambda *_: False)
    monkeypatch.setattr(update_scale, "is_on_host", lambda _: False)
    monkeypatch.setattr(quantize_tiles, "rounds_by_bits", lambda _: False)
    for kernel in (*KERNELS, *QUANTIZING, *QUANTIZING_FP4):
        kernel.device_caches.pop(NoDevice.number, None)
    monkeypatch.setattr(driver, "_active", NoDevice())
    launch_plans._places.cache_clear()
    yield compiled
    launch_plans._places.cache_clear()


def tensors(n: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.ones(10 + i, dtype=dtype) for i in range(n)]


FLAGS = torch.zeros(8)


def step(rule: Any, params: list[Tensor], grads: list[Tensor], **options: Any) -> None:
    moments = [[torch.zeros_like(p) for p in params] for _ in rule.moments]
    steps = [torch.zeros(()) for _ in params]
    stepping.step(rule, numbers_of(rule), params, grads, moments, steps, **options)


class Recorder:
    """A kernel that only notes with what it is launched, by Triton and as it was compiled."""

    arg_names = ("table", "number", "BLOCK")

    @staticmethod
    def fn(table: Any, number: Any, BLOCK: tl.constexpr) -> None:  # noqa: N803
        """Stand in for the kernel's function."""

    def __init__(self) -> None:
        self.compilations: list[Any] = []
        self.launches: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile(*args: Any, **options: Any) -> Any:
            self.compilations.append((grid, args, options))
            return self

        return lambda *a, **o: compile(*a, **o) if o else self.launches.append((grid, a))


def test_every_launch_rounds_products_before_it_adds_them() -> None:
    kernel = Recorder()
    language.launch(kernel, 3, torch.device("cpu"), table="table", number=1, BLOCK=4)
    options = {"num_warps": 8, "enable_fp_fusion": False}
    assert kernel.compilations == [((3,), ("table", 1, 4), options)]


def test_what_was_compiled_runs_again_for_arguments_that_it_is_right_for() -> None:
    """Kernels are compiled for constants, for dtypes and for what is not there, at any address."""
    kernel, memory = Recorder(), torch.zeros(64)

    def launch(table: Any, number: int = 1, block: int = 4) -> int:
        arguments = {"table": table, "number": number, "BLOCK": block}
        language.launch(kernel, 3, torch.device("cpu"), **arguments)
        return len(kernel.compilations)

    assert launch(memory) == 1
    assert launch(memory[4:]) == 1
    assert kernel.launches[0][0] == (3, 1, 1)
    assert kernel.launches[0][1][0].data_ptr() == memory[4:].data_ptr()
    assert launch(memory[1:]) == 1
    assert launch(memory.half()) == 2
    assert launch(None) == 3
    assert launch(memory, number=16) == 3
    assert launch(memory, number=2**31 - 1) == 3
    assert launch(memory, number=2**31) == 4  # of 64 bits
    assert launch(memory, block=8) == 5
    assert launch(memory) == 5


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_triton_compiles_no_kernel_for_a_value_or_an_address(kernel: Any) -> None:
    """`launch` runs what was compiled for other values and addresses again."""
    variables = [param for param in kernel.params if not param.is_constexpr]
    assert variables
    assert all(param.do_not_specialize for param in variables)


def test_every_call_compiles_and_sizes_make_no_variants(variants: dict[str, int]) -> None:
    """Neither numbers of tensors nor the alignment of single numbers is worth another compilation."""
    for n in (1, 2, 16, 17):
        halves, floats = tensors(n, torch.float16), tensors(n, torch.float32)
        for flag, one in ((FLAGS[:1], torch.ones(1)), (FLAGS[1:2], torch.ones(2)[1:])):
            unscale.unscale(halves, floats, one, flag)
            unscale.check(halves, one, flag)
            axpby.axpby(one, halves, 1.0, floats, floats, flag)
            l2norm.l2norm(halves, one, found_inf=flag, max_norm=2)
            master_copy.master_copy(floats, halves)
            master_copy.merge(halves, floats)
            step(adam.ADAM, floats, halves, models=halves, inv_scale=one, clip=one, found_inf=flag)
            lows = [torch.zeros_like(half, dtype=torch.int16) for half in halves]
            split.split(floats, halves, lows)
            split.join(halves, lows, floats)
            moments.pack(floats, floats, lows)
            moments.unpack(lows, floats, floats)
    lists = [kernel.__name__ for kernel in KERNELS if kernel is not update_scale.update_kernel]
    assert variants == dict.fromkeys(lists, 1)


def test_arguments_that_may_be_left_out_compile_too(variants: dict[str, int]) -> None:
    halves, floats, one = tensors(3, torch.float16), tensors(3, torch.float32), torch.ones(1)
    doubles = tensors(3, torch.float64)
    unscale.unscale(halves, floats, one, None)
    unscale.unscale(doubles, floats, one, FLAGS[:1])
    axpby.axpby(2.0, halves, one, floats, floats, FLAGS[:1])
    axpby.axpby(2.0, halves, 3.0, floats, doubles)
    l2norm.l2norm(halves + floats + doubles)
    master_copy.master_copy(doubles, tensors(3, torch.bfloat16))
    step(adam.ADAM, floats, floats)
    step(adam.ADAM, halves, floats, inv_scale=one)
    assert variants["step_kernel"] == 2
    step(lamb.LAMB, floats, halves, models=halves, inv_scale=one, found_inf=one)
    assert variants["step_kernel"] == 4
    step(lamb.LAMB, floats, halves, models=halves, merges=True, inv_scale=one, found_inf=one)
    assert variants["step_kernel"] == 6
    step(adam.ADAM, floats, floats, merges=True)  # without models
    assert variants["step_kernel"] == 6
    master_copy.merge(halves, floats)
    master_copy.differ(halves, floats)
    assert variants["merge_kernel"] == 2
    lows = [torch.zeros_like(half, dtype=torch.int16) for half in halves]
    step(adam.ADAM, halves, halves, lows=lows, origins=[Origin(3)] * len(halves))
    step(adam.ADAM, halves, halves, lows=lows, origins=[Origin(1)] * len(halves))
    assert variants["step_kernel"] == 7
    for state in (torch.tensor([4.0, 0.25, 0, 1, 0, 0, 0]), FLAGS[1:8]):
        for reset_each_step, found in itertools.product(
            (False, True), (None, torch.ones(1), FLAGS[:1])
        ):
            update_scale.update_scale(
                state,
                found=found,
                growth_factor=2,
                backoff_factor=0.5,
                growth_interval=2000,
                hysteresis=1,
                reset_each_step=reset_each_step,
                floor=1,
                ceiling=float("inf"),
            )
    assert variants["update_kernel"] == 4


def test_quantizing_compiles_for_no_size(variants: dict[str, int]) -> None:
    for rows, columns in ((128, 128), (256, 384), (384, 256)):
        x = torch.ones(rows, columns, dtype=torch.bfloat16)
        for granularity in ("tensor", "row", "1x128", "128x128", "1x32"):
            quantize.quantize(x, torch.float8_e4m3fn, granularity)
        for known in (False, True):
            quantize.quantize(x, torch.float8_e4m3fn, factor=torch.ones(()), is_known=known)
        quantize.quantize(x, torch.float8_e4m3fn, part=Part(0, lambda _: None))
    # Alone, with a factor and without one; with the right factor and one to check; in E8M0.
    of_kernels = {"amax_kernel": 3, "tensor_kernel": 2, "groups_kernel": 2}
    assert variants == {kernel.__name__: of_kernels.get(kernel.__name__, 1) for kernel in QUANTIZING}


def test_quantizing_to_fp4_compiles_for_no_size_and_no_draw(variants: dict[str, int]) -> None:
    for rows, columns, seed in ((128, 128, 3), (256, 384, 2**31 + 1), (384, 256, 2**63 + 1)):
        x = torch.ones(rows, columns, dtype=torch.bfloat16)
        draw = Draw(torch.tensor(seed % 2**40), seed % 2**31, seed % 2**32, rank=seed % 2**24)
        quantize_fp4.quantize_fp4(x, "1x16", hadamard=True, draw=draw)
        quantize_fp4.quantize_fp4(x, "16x16")
    assert variants == {"amaxes_kernel": 1, "blocks_kernel": 2, "amax_kernel": 1}
