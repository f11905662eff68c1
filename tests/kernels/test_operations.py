"""Every operation against FP64, on every backend at hand.

Plain torch on the CPU here; the same tests run again in Triton's interpreter (test_interpreter.py), and
on a GPU, in Triton and in plain torch, with `make test-gpu`.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import amp.kernels.unscale as unscale_module
from amp.kernels.axpby import axpby
from amp.kernels.backend import uses_triton
from amp.kernels.l2norm import clip_factor, l2norm
from amp.kernels.launch_plans import BadSteps, UnsupportedTensorError
from amp.kernels.master_copy import master_copy
from amp.kernels.unscale import BLOCK, check, unscale
from amp.kernels.update_scale import update_scale
from amp.training.scaler import FOUND_INF
from tests.kernels.operations import CHECKED, OPERATIONS, run, scalar

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = (F16, BF16, F32, F64)
EPS = {dtype: torch.finfo(dtype).eps for dtype in DTYPES}
SIZES: tuple[tuple[int, ...], ...] = (
    (),
    (0,),
    (1,),
    (7,),
    (8,),
    (63,),
    (1000,),
    (33, 65),
    (16384 + 9,),
)
BAD = (math.inf, -math.inf, math.nan)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch 2.11


def random_like_gradients(
    device: torch.device, dtype: torch.dtype, sizes: Any = SIZES, misaligned: bool = False
) -> list[Tensor]:
    """Return random tensors; misaligned ones begin 1 element after a multiple of 16 bytes."""
    tensors = []
    for shape in sizes:
        values = torch.randn(shape, dtype=F64).to(dtype).to(device)
        tensors.append(shifted(values) if misaligned else values)
    return tensors


def shifted(values: Tensor) -> Tensor:
    storage = torch.empty(values.numel() + 1, dtype=values.dtype, device=values.device)
    copy = storage[1:].view_as(values).copy_(values)
    assert values.numel() == 0 or copy.data_ptr() % 16
    return copy


def poisoned(tensors: list[Tensor], dtype: torch.dtype, misaligned: bool = False) -> list[Tensor]:
    """Return NaNs for an operation to overwrite."""
    nans = [torch.full_like(tensor, math.nan, dtype=dtype) for tensor in tensors]
    return [shifted(nan) for nan in nans] if misaligned else nans


def assert_rounded(actual: Tensor, exact: Tensor, ulps: float = 1.0) -> None:
    """Assert that `actual` is `exact`, FP64, rounded to `actual`'s dtype, up to FP32 arithmetic."""
    tolerance = EPS[actual.dtype] / 2 * ulps + 4 * EPS[F32] * (actual.dtype is not F64)
    tiny = torch.finfo(actual.dtype).tiny * EPS[actual.dtype]  # subnormals
    torch.testing.assert_close(actual.to(F64), exact, rtol=tolerance, atol=tiny, equal_nan=True)


# unscale, check


@pytest.mark.parametrize("misaligned", [False, True])
@pytest.mark.parametrize(("source", "target"), [*itertools.product(DTYPES, DTYPES)])
def test_unscale_rounds_the_product_once(
    device: torch.device, source: torch.dtype, target: torch.dtype, misaligned: bool
) -> None:
    sources = random_like_gradients(device, source, misaligned=misaligned)
    targets = poisoned(sources, target, misaligned)
    found_inf = scalar(device, 0)
    inverse = scalar(device, 1 / 3)
    unscale(sources, targets, inverse, found_inf)
    for s, t in zip(sources, targets, strict=True):
        wide = F64 if F64 in (source, target) else F32
        assert torch.equal(t, (s.to(wide) * inverse.to(wide)).view_as(s).to(target))
    assert found_inf.item() == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_unscale_in_place(device: torch.device, dtype: torch.dtype) -> None:
    tensors = random_like_gradients(device, dtype)
    expected = [t.clone().to(F64) / 4 for t in tensors]
    unscale(tensors, tensors, scalar(device, 0.25), None)
    for t, e in zip(tensors, expected, strict=True):
        assert_rounded(t, e)


@pytest.mark.parametrize("misaligned", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", CHECKED)
def test_one_bad_element_is_found_wherever_it_is(
    device: torch.device, operation: str, dtype: torch.dtype, misaligned: bool
) -> None:
    """At the first, the last, and around the places where a kernel's parts begin and end."""
    tensors = random_like_gradients(device, dtype, [(3,), (4096 + 13,)], misaligned)
    found_inf, half = scalar(device, 0), scalar(device, 0.5)
    run(operation, tensors, poisoned(tensors, F32), half, found_inf)
    assert found_inf.item() == 0
    places = ((0, 0), (0, 2), (1, 0), (1, 4095), (1, 4096), (1, 4103), (1, 4104), (1, -1), (0, 1))
    for (tensor, index), bad in zip(places, itertools.cycle(BAD)):
        found_inf.zero_()
        kept = tensors[tensor][index].item()
        tensors[tensor][index] = bad
        run(operation, tensors, poisoned(tensors, F32), half, found_inf)
        assert found_inf.item() == 1, (tensor, index)
        tensors[tensor][index] = kept


@pytest.mark.parametrize("target", [F16, F32])
def test_an_overflow_born_in_unscaling_is_found(device: torch.device, target: torch.dtype) -> None:
    """A scale below 1 makes an inf out of a finite gradient."""
    found_inf = scalar(device, 0)
    grads = [torch.tensor([1.0, 1e35 if target is F32 else 60000.0], device=device)]
    unscale(grads, poisoned(grads, target), scalar(device, 1.0), found_inf)
    assert found_inf.item() == 0
    unscale(grads, poisoned(grads, target), scalar(device, 2.0**20), found_inf)
    assert found_inf.item() == 1


@pytest.mark.parametrize("operation", ["unscale", "check", "l2norm"])
def test_an_overflow_by_a_negative_factor_is_found(device: torch.device, operation: str) -> None:
    grads = [torch.tensor([1.0, 1e35], device=device)]
    for factor, bad in ((-1.0, 0), (-(2.0**20), 1)):
        found_inf = scalar(device, 0)
        run(operation, grads, poisoned(grads, F32), scalar(device, factor), found_inf)
        assert found_inf.item() == bad


def test_the_check_writes_nothing_but_its_finding(device: torch.device) -> None:
    grads = random_like_gradients(device, F16)
    before = [g.clone() for g in grads]
    versions = [g._version for g in grads]
    found_inf = scalar(device, 0)
    check(grads, scalar(device, 3.0), found_inf)
    assert all(torch.equal(g, b) for g, b in zip(grads, before, strict=True))
    assert [g._version for g in grads] == versions
    assert found_inf.item() == 0
    check([torch.ones(3, device=device)], scalar(device, 3e38), found_inf)
    assert found_inf.item() == 0
    check([torch.full((3,), 2.0, device=device)], scalar(device, 3e38), found_inf)
    assert found_inf.item() == 1


def test_a_finite_gradient_whose_sum_overflows_is_no_overflow(device: torch.device) -> None:
    """apex summed the gradient, and took this for one."""
    grad, found_inf = torch.full((4,), 3e38, device=device), scalar(device, 0)
    unscale([grad], [grad], scalar(device, 1.0), found_inf)
    check([grad], scalar(device, 1.0), found_inf)
    assert found_inf.item() == 0


def test_found_inf_is_not_cleared_by_a_later_check(device: torch.device) -> None:
    found_inf = scalar(device, 0)
    for value in (math.inf, 1.0):
        grad = torch.tensor([value], device=device)
        unscale([grad], [grad], scalar(device, 1.0), found_inf)
    assert found_inf.item() == 1


def test_gaps_other_strides_sparse_and_empty(device: torch.device) -> None:
    base = torch.arange(12.0, device=device).reshape(3, 4)
    view = base[:, ::2]
    transposed = torch.arange(6.0, device=device).reshape(2, 3).t()
    channels_last = torch.arange(24.0, device=device).reshape(1, 2, 3, 4)
    channels_last = channels_last.to(memory_format=torch.channels_last)
    indices = torch.tensor([[0, 0, 2]], device=device)
    values = torch.tensor([4.0, 8.0, 2.0], device=device)
    sparse = torch.sparse_coo_tensor(indices, values, (4,), check_invariants=True)
    tensors = [view, transposed, channels_last, sparse, torch.empty(0, 3, device=device)]
    found_inf = scalar(device, 0)
    unscale(tensors, tensors, scalar(device, 0.5), found_inf)
    expected = [[0.0, 1, 1, 3], [2, 5, 3, 7], [4, 9, 5, 11]]
    assert torch.equal(base, torch.tensor(expected, device=device))
    assert torch.equal(transposed.cpu(), torch.arange(6.0).reshape(2, 3).t() / 2)
    assert torch.equal(channels_last.cpu(), torch.arange(24.0).reshape(1, 2, 3, 4) / 2)
    assert torch.equal(sparse.to_dense().cpu(), torch.tensor([6.0, 0, 1, 0]))
    assert found_inf.item() == 0
    view[2, 1] = math.inf
    unscale(tensors, tensors, scalar(device, 0.5), found_inf)
    assert found_inf.item() == 1


def test_one_source_may_have_other_strides_than_its_target(device: torch.device) -> None:
    source = torch.arange(6.0, device=device).reshape(2, 3).t()
    target = torch.full((3, 2), math.nan, device=device)
    unscale([source], [target], scalar(device, 2.0), None)
    assert torch.equal(target, source * 2)
    master_copy([source], [target])
    assert torch.equal(target, source)


# axpby


@pytest.mark.parametrize("misaligned", [False, True])
@pytest.mark.parametrize(
    ("x", "y", "out"),
    [
        (F16, F32, F32),
        (BF16, F32, F32),
        (F16, F16, F16),
        (BF16, BF16, BF16),
        (F32, F32, F32),
        (F64, F32, F32),
        (F32, F64, F64),
        (F16, BF16, F32),
        (F32, F32, BF16),
    ],
)
def test_axpby(
    device: torch.device, x: torch.dtype, y: torch.dtype, out: torch.dtype, misaligned: bool
) -> None:
    for a, b in ((scalar(device, 0.25), 1.0), (-1.5, scalar(device, 0.5))):
        xs = random_like_gradients(device, x, misaligned=misaligned)
        ys = random_like_gradients(device, y)
        outs = poisoned(xs, out)
        found_inf = scalar(device, 0)
        axpby(a, xs, b, ys, outs, found_inf)
        for p, q, r in zip(xs, ys, outs, strict=True):
            ap = p.to(F64) * float(a)
            bq = q.to(F64) * float(b)
            error = (r.to(F64) - (ap + bq)).abs()
            allowed = (ap + bq).abs() * EPS[out] / 2 + (ap.abs() + bq.abs()) * EPS[F32] + 2.0**-25
            assert (error <= allowed).all()
        assert found_inf.item() == 0


@pytest.mark.parametrize("dtype", [F16, F32])
def test_axpby_adds_in_place(device: torch.device, dtype: torch.dtype) -> None:
    xs, ys = random_like_gradients(device, dtype), random_like_gradients(device, F32)
    expected = [0.5 * x.to(F64) + y.to(F64) for x, y in zip(xs, ys, strict=True)]
    axpby(scalar(device, 0.5), xs, 1.0, ys, ys)
    for y, e in zip(ys, expected, strict=True):
        torch.testing.assert_close(y.to(F64), e, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", BAD)
def test_axpby_checks_new_gradients_and_not_those_they_are_added_to(
    device: torch.device, bad: float
) -> None:
    for place, b in itertools.product((0, 1), (1.0, 0.5)):
        xs, ys = [torch.ones(100, device=device).half()], [torch.ones(100, device=device)]
        (xs, ys)[place][0][99] = bad
        found_inf = scalar(device, 0)
        axpby(0.5, xs, b, ys, poisoned(ys, F32), found_inf)
        assert found_inf.item() == (place == 0)


def test_axpby_finds_products_that_overflow(device: torch.device) -> None:
    found_inf = scalar(device, 0)
    large, twos = [torch.full((9,), 6e4, device=device).half()], [torch.full((9,), 2.0, device=device)]
    axpby(1.0, large, 1.0, large, poisoned(large, F16), found_inf)
    assert found_inf.item() == 0
    axpby(3e38, twos, 1.0, twos, poisoned(twos, F32), found_inf)
    assert found_inf.item() == 1


# l2norm


@pytest.mark.parametrize("misaligned", [False, True])
@pytest.mark.parametrize("dtypes", [(F16,), (BF16,), (F32,), (F64,), (F16, F32, BF16)])
@pytest.mark.parametrize("inverse", [None, 0.25])
def test_l2norm(
    device: torch.device, dtypes: tuple[torch.dtype, ...], inverse: float | None, misaligned: bool
) -> None:
    tensors = [
        random_like_gradients(device, dtypes[i % len(dtypes)], [shape], misaligned)[0]
        for i, shape in enumerate(SIZES)
    ]
    found_inf = scalar(device, 0)
    scale = None if inverse is None else scalar(device, inverse)
    norms = l2norm(tensors, scale, found_inf=found_inf, max_norm=2.0)
    each = torch.stack([t.to(F64).norm() * (inverse or 1.0) for t in tensors])
    torch.testing.assert_close(norms.each.to(F64), each, rtol=2e-6, atol=0)
    torch.testing.assert_close(norms.total.to(F64), each.norm().reshape(1), rtol=2e-6, atol=0)
    torch.testing.assert_close(norms.clip, 2.0 / (norms.total + 1e-6), rtol=1e-6, atol=0)
    assert found_inf.item() == 0


def test_l2norm_of_float16_does_not_overflow(device: torch.device) -> None:
    found_inf = scalar(device, 0)
    norms = l2norm([torch.full((5000,), 65504.0, dtype=F16, device=device)], found_inf=found_inf)
    assert norms.total.item() == pytest.approx(65504 * math.sqrt(5000), rel=1e-6)
    assert found_inf.item() == 0


def test_an_infinite_norm_of_finite_elements_is_no_overflow(device: torch.device) -> None:
    found_inf = scalar(device, 0)
    norms = l2norm([torch.full((10,), 1e30, device=device)], found_inf=found_inf)
    assert norms.total.item() == math.inf
    assert found_inf.item() == 0


def test_clipping_is_that_of_torch(device: torch.device) -> None:
    for factor in (0.01, 100.0):
        parameter = torch.nn.Parameter(torch.zeros(50, device=device))
        parameter.grad = torch.randn(50, device=device) * factor
        clip = l2norm([parameter.grad], max_norm=1.5).clip
        clipped = parameter.grad * clip
        torch.nn.utils.clip_grad_norm_([parameter], 1.5)
        torch.testing.assert_close(clipped, parameter.grad)
    assert l2norm([torch.ones(3, device=device)]).clip.item() == 1
    assert clip_factor(torch.tensor([4.0]), None).item() == 1


def test_l2norm_of_nothing_of_gaps_and_of_sparse(device: torch.device) -> None:
    assert l2norm([]).total.item() == 0
    assert l2norm([torch.empty(0, device=device)]).total.item() == 0
    gaps = torch.arange(8.0, device=device)[::2]
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 0]], device=device),
        torch.tensor([1.0, 2.0], device=device),
        (4,),
        check_invariants=True,
    )
    with pytest.raises(ValueError, match=r"tensor 1 is sparse and not coalesced"):
        l2norm([gaps, sparse])
    norms = l2norm([gaps, sparse.coalesce(), torch.full((2,), 2.0, device=device)], max_norm=1.0)
    torch.testing.assert_close(norms.each.cpu(), torch.tensor([56.0, 9.0, 8.0]).sqrt())
    assert norms.total.item() == pytest.approx(math.sqrt(73))
    assert norms.clip.item() == pytest.approx(1 / math.sqrt(73))


# master_copy


@pytest.mark.parametrize("misaligned", [False, True])
@pytest.mark.parametrize(("source", "target"), [*itertools.product(DTYPES, DTYPES)])
def test_master_copy_rounds_to_nearest_even(
    device: torch.device, source: torch.dtype, target: torch.dtype, misaligned: bool
) -> None:
    sources = random_like_gradients(device, source, misaligned=misaligned)
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 65504.0, 65520.0, 1e30, 2.0**-24, 2.0**-25]
    ties = [1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20]
    sources.append(torch.tensor(special + ties, dtype=F64).to(source).to(device))
    targets = poisoned(sources, target, misaligned)
    master_copy(sources, targets)
    for s, t in zip(sources, targets, strict=True):
        torch.testing.assert_close(t, s.to(target), rtol=0, atol=0, equal_nan=True)
        signed = ~t.isnan()
        assert torch.equal(torch.signbit(t[signed]), torch.signbit(s[signed]))


# update_scale


@pytest.mark.parametrize("reset_each_step", [False, True])
@pytest.mark.parametrize("scale", [65536.0, 8.0, 2.0**30])  # within the bounds, below, and above
def test_update_scale_is_its_plain_torch_self(
    device: torch.device, scale: float, reset_each_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so is the one in Python's floats, which only a state on the CPU takes."""
    for seed in range(3):
        chance = random.Random(seed)
        options: dict[str, Any] = {
            "growth_factor": chance.choice([2.0, 1.5, 1.001]),
            "backoff_factor": chance.choice([0.5, 0.8]),
            "growth_interval": chance.choice([1, 3, 16]),
            "hysteresis": chance.choice([1, 2, 4]),
            "reset_each_step": reset_each_step,
            "floor": (2.0**-100, 32.0)[seed % 2],
            "ceiling": (2.0**24, 1e5, math.inf)[seed % 3],
        }
        start = [scale, 1 / scale, 0.0, options["hysteresis"], 0.0, 0.0, 0.0]
        state, expected, on_host = torch.tensor(start, device=device), *torch.tensor([start, start])
        seen = [torch.full((1,), 7.0, device=x.device) for x in (state, expected, on_host)]
        for _ in range(50):
            found = float(chance.random() < 0.4)
            state[FOUND_INF] = expected[FOUND_INF] = on_host[FOUND_INF] = found
            update_scale(state, **options, found=seen[0])
            update_scale(on_host, **options, found=seen[1], backend="reference")
            with monkeypatch.context() as patch:
                patch.setattr("amp.kernels.update_scale.is_on_host", lambda tensor: False)
                update_scale(expected, **options, found=seen[2], backend="reference")
            assert [x.tolist() for x in seen] == [[found]] * 3
            assert torch.equal(state.cpu(), expected)
            assert torch.equal(on_host, expected)


# Whose elements they were.


@pytest.mark.triton
@pytest.mark.parametrize("operation", CHECKED)
def test_kernels_note_the_tensors_that_are_not_finite(device: torch.device, operation: str) -> None:
    if not uses_triton(device):
        pytest.skip("plain torch notes nothing")
    sizes = (5, BLOCK + 3, 1, 2 * BLOCK, 64)
    tensors = [torch.ones(size, device=device) for size in sizes]
    tensors[3] = tensors[3].half()  # a launch of its own
    one, found_inf = scalar(device, 1), scalar(device, 0)
    entries = torch.full((5,), math.nan, device=device)

    def at_step(step: int) -> None:
        noted = BadSteps(entries, scalar(device, step))
        run(operation, tensors, [x.float() for x in tensors], one, found_inf, bad_steps=noted)

    at_step(6)
    assert entries.isnan().all()
    tensors[1][-1], tensors[3][BLOCK + 1] = math.nan, math.inf
    at_step(7)
    assert found_inf.item() == 1
    assert torch.nan_to_num(entries, -1).tolist() == [-1, 7, -1, 7, -1]
    tensors[1][-1], tensors[0][0] = 1.0, -math.inf
    at_step(8)
    assert torch.nan_to_num(entries, -1).tolist() == [8, 7, -1, 8, -1]
    # Entries on another device than the tensors are left alone.
    elsewhere = BadSteps(torch.zeros(5, device="meta"), torch.zeros(1, device="meta"))
    check(tensors, one, found_inf, bad_steps=elsewhere)


# What is refused, and left as it was.


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int32, torch.int64, torch.complex64, torch.float8_e4m3fn]
)
def test_a_dtype_that_no_kernel_takes(device: torch.device, dtype: torch.dtype) -> None:
    odd = torch.ones(4, device=device).to(dtype)
    fine = torch.ones(4, device=device)
    found_inf, half = scalar(device, 0), scalar(device, 0.5)
    for operation in OPERATIONS:
        with pytest.raises(UnsupportedTensorError, match=rf"tensor 1 .* is {dtype}; .*float64"):
            run(operation, [fine, odd], [fine, odd], half, found_inf)
    assert torch.equal(fine, torch.ones(4, device=device))


def test_lists_that_do_not_match(device: torch.device) -> None:
    a, b, one = torch.ones(4, device=device), torch.ones(5, device=device), scalar(device, 1.0)
    with pytest.raises(ValueError, match="the lists have 2, 1 tensors"):
        unscale([a, a], [a], one, None)
    with pytest.raises(ValueError, match=r"tensors 1 have shapes \[4\], \[5\]"):
        master_copy([a, a], [a, b])


def test_elements_that_overlap_are_refused(device: torch.device) -> None:
    overlapping = torch.ones(1, device=device).expand(4)
    with pytest.raises(RuntimeError, match="single memory location"):
        unscale([overlapping], [overlapping], scalar(device, 0.5), None)


@pytest.mark.parametrize("default", [F16, F64, "meta"])
def test_torchs_default_dtype_and_device_do_not_matter(device: torch.device, default: Any) -> None:
    grads = [torch.ones(4, device=device), torch.ones(6, device=device)[::2]]
    found_inf, half = scalar(device, 0), scalar(device, 0.5)
    (torch.set_default_device if default == "meta" else torch.set_default_dtype)(default)
    try:
        for operation in OPERATIONS:
            run(operation, grads, grads, half, found_inf)
        axpby(2.0, grads, 3.0, grads, grads, found_inf)
        norms = l2norm(grads, found_inf=found_inf, max_norm=1.0)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(F32)
    assert {norms.total.dtype, norms.each.dtype, norms.clip.dtype} == {F32}
    assert norms.total.item() == pytest.approx(3.75 * math.sqrt(7))
    assert found_inf.item() == 0


@pytest.mark.parametrize("operation", ["unscale", "axpby", "master_copy"])
def test_autograd_learns_of_what_is_written(device: torch.device, operation: str) -> None:
    """Backward through a graph that saved a weight must notice that the weight has changed."""
    source, target = [torch.ones(9, device=device)], [torch.ones(9, device=device).half()]
    version = target[0]._version
    run(operation, source, target, scalar(device, 0.5), scalar(device, 0))
    assert target[0]._version > version


def test_a_norm_that_is_nan_clips_to_nan(device: torch.device) -> None:
    """As torch's clipping does: a gradient that is not a number must not look like one that is."""
    for value, clip in ((math.nan, math.nan), (math.inf, 0.0), (0.0, 1.0)):
        norms = l2norm([torch.full((3,), value, device=device)], max_norm=1.0)
        torch.testing.assert_close(norms.clip.item(), clip, equal_nan=True, rtol=0, atol=0)


def test_a_dtype_that_torch_cannot_check_is_checked_all_the_same(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own operation knows no bfloat16 on CUDA."""
    unchecked = itertools.product(["cpu", "cuda"], DTYPES)
    monkeypatch.setattr(unscale_module, "UNCHECKED", set(unchecked))
    for dtype in DTYPES:
        for factor in (1 / 3, 2.0):
            grads = random_like_gradients(device, dtype)
            expected = [(g.to(F64) * scalar(device, factor).to(F64)) for g in grads]
            found_inf = scalar(device, 0)
            unscale(grads, grads, scalar(device, factor), found_inf, backend="reference")
            assert found_inf.item() == 0
            for g, e in zip(grads, expected, strict=True):
                assert_rounded(g, e.view_as(g), ulps=1.5)
            grads[6][3] = math.nan
            unscale(grads, grads, scalar(device, factor), found_inf, backend="reference")
            assert found_inf.item() == 1
