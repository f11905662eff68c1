"""The kernels, bit for bit against plain torch on the CPU."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amp.kernels import (
    axpby,
    backend,
    host_lists,
    l2norm,
    language,
    master_copy,
    split,
    unscale,
    update_scale,
)
from amp.kernels.launch_plans import BadSteps
from amp.selftest.check_registry import (
    CHECKS,
    Check,
    Outcome,
    SkipError,
    assert_same_bits,
    check,
    needs_gpu,
)

SIZES = (0, 1, 7, 8, 1023, 2049, 70_001)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
INV_SCALE = 2.0**-7


def tensors_on(device: torch.device, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Return tensors of many sizes: aligned, at odd addresses, and channels-last."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for size in SIZES:
        values = (torch.randn(size, generator=generator) * 3).to(dtype)
        found += [placed(values, device), placed(values, device, offset=1)]
    picture = torch.randn(3, 5, 7, 9, generator=generator).to(dtype)
    found.append(picture.to(device).contiguous(memory_format=torch.channels_last))
    return found


def placed(values: Tensor, device: torch.device, offset: int = 0) -> Tensor:
    """Return values on a device, at an address that is `offset` elements off an aligned one."""
    memory = torch.empty(values.numel() + offset, dtype=values.dtype, device=device)[offset:]
    return memory.copy_(values)


def on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies on the CPU."""
    return [tensor.detach().cpu().clone() for tensor in tensors]


@check("kernels: a launch", 60)
def _launch(device: torch.device) -> Outcome:
    """Which kernels run, and why."""
    if backend.uses_triton(device):
        return Outcome("Triton's interpreter" if language.INTERPRETED else "Triton")
    if device.type == "cpu":
        return Outcome("plain torch, as on every CPU")
    asked = backend.requested()[0] or language.INTERPRETED
    raise SkipError(f"plain torch runs: {'as asked' if asked else backend.obstacle(device)}")


def _unscale(dtype: torch.dtype, device: torch.device) -> Outcome:
    sources = tensors_on(device, dtype, 1)
    targets = [torch.empty_like(source, dtype=torch.float32) for source in sources]
    inv_scale, found = torch.full((1,), INV_SCALE, device=device), torch.zeros(1, device=device)
    unscale.unscale(sources, targets, inv_scale, found)
    expected = [source.float() * INV_SCALE for source in on_cpu(sources)]
    assert_same_bits(targets, expected, "unscaled")
    assert found.item() == 0, "an overflow was found where there is none"
    unscale.unscale(sources, sources, inv_scale, found)
    assert_same_bits(sources, [each.to(dtype) for each in expected], "unscaled in place")
    return Outcome(bits=targets)


def _overflow(dtype: torch.dtype, device: torch.device) -> None:
    """Find an inf or NaN at the ends of tensors and of each program's part, and name the tensor."""
    size = unscale.CHECK_BLOCK + 5
    places = (0, 7, 8, unscale.BLOCK - 1, unscale.BLOCK, unscale.CHECK_BLOCK, size - 1)
    for bad, place in itertools.product((torch.inf, -torch.inf, torch.nan), places):
        sources = [torch.ones(size, dtype=dtype, device=device) for _ in range(2)]
        sources[1][place] = bad
        for name, (found, *steps) in _flags(sources).items():
            assert found == 1, f"{name} has not found {bad} at element {place} of {size}"
            named = [0.0, 9.0 if backend.uses_triton(device) else 0.0]
            assert steps == named, f"{name} names the wrong one of two tensors: {steps}"
    ones, largest = torch.ones(size, dtype=dtype, device=device), torch.finfo(dtype).max
    for sources, factor in (([ones] * 2, INV_SCALE), ([ones * largest] * 2, 1.0)):
        for name, (found, *_) in _flags(sources, factor).items():
            assert found == 0, f"{name} has found an overflow where there is none"
    # A scale below 1 has a factor above 1, which may take a finite number beyond FP32's largest.
    for name, (found, *_) in _flags([ones, ones * largest], 2.0**113).items():
        assert found == 1, f"{name} has not found that {largest} * 2^113 overflows"


def _flags(sources: list[Tensor], factor: float = INV_SCALE) -> dict[str, list[float]]:
    """Return what each operation says about overflows in two tensors: at all, and in which step."""
    device = sources[0].device
    inv_scale, step = torch.full((1,), factor, device=device), torch.full((1,), 9.0, device=device)
    targets = [torch.zeros_like(source, dtype=torch.float32) for source in sources]
    found = torch.zeros(4, 3, device=device)
    noted = [BadSteps(each[1:], step) for each in found]
    unscale.check(sources, inv_scale, found[0, :1], bad_steps=noted[0])
    l2norm.l2norm(sources, inv_scale, found_inf=found[1, :1], bad_steps=noted[1])
    axpby.axpby(inv_scale, sources, 0.5, targets, targets, found[2, :1], bad_steps=noted[2])
    unscale.unscale(sources, targets, inv_scale, found[3, :1], bad_steps=noted[3])
    return dict(zip(("check", "l2norm", "axpby", "unscale"), found.tolist(), strict=True))


def _axpby(dtype: torch.dtype, device: torch.device) -> Outcome:
    xs, ys = tensors_on(device, dtype, 2), tensors_on(device, torch.float32, 3)
    outs = [torch.empty_like(y) for y in ys]
    axpby.axpby(0.375, xs, -1.75, ys, outs)
    pairs = zip(on_cpu(xs), on_cpu(ys), strict=True)
    assert_same_bits(outs, [0.375 * x.float() + -1.75 * y for x, y in pairs], "a * x + b * y")
    return Outcome(bits=outs)


def _l2norm(dtype: torch.dtype, device: torch.device) -> Outcome:
    tensors = tensors_on(device, dtype, 4)
    inv_scale = torch.full((1,), INV_SCALE, device=device)
    norms = l2norm.l2norm(tensors, inv_scale, max_norm=1.0)
    exact = torch.stack([(tensor.double() * INV_SCALE).norm() for tensor in on_cpu(tensors)])
    torch.testing.assert_close(norms.each.cpu().double(), exact, rtol=1e-5, atol=1e-9)
    total = exact.norm().reshape(1)
    torch.testing.assert_close(norms.total.cpu().double(), total, rtol=1e-5, atol=0)
    clip = (1.0 / (total + l2norm.CLIP_EPS)).clamp(max=1)
    torch.testing.assert_close(norms.clip.cpu().double(), clip, rtol=1e-5, atol=0)
    clip = l2norm.l2norm(tensors, inv_scale, max_norm=2 * float(total)).clip
    assert clip.item() == 1, f"a norm below the largest is clipped by {clip.item()}"
    return Outcome(bits=[norms.each, norms.total, norms.clip])


def _master_copy(dtype: torch.dtype, device: torch.device) -> Outcome:
    sources = tensors_on(device, torch.float32, 5)
    whole = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    for bits in (whole * 2**16 + 2**15, whole * 2**13 + 2**12 + (120 << 23)):  # ties of both dtypes
        sources.append(bits.view(torch.float32).to(device))
    targets = [torch.empty_like(source, dtype=dtype) for source in sources]
    master_copy.master_copy(sources, targets)
    assert_same_bits(
        targets, [source.to(dtype) for source in on_cpu(sources)], "rounded to nearest even"
    )
    return Outcome(bits=targets)


def _merge(dtype: torch.dtype, device: torch.device) -> Outcome:
    masters = tensors_on(device, torch.float32, 8)
    parameters = [master.to(dtype) for master in masters]
    expected = on_cpu(masters)
    assert not master_copy.differ(parameters, masters).item(), "rounded masters differ from themselves"
    for parameter, master in zip(parameters, expected, strict=True):
        if parameter.dim() == 1:
            parameter[::3] = master[::3] = 100.0  # which no master rounds to
    assert master_copy.differ(parameters, masters).item(), "a difference was not seen"
    master_copy.merge(parameters, masters)
    assert_same_bits(masters, expected, "merged masters")
    return Outcome(bits=masters)


def _split(dtype: torch.dtype, device: torch.device) -> Outcome:
    values = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65519.0, 65520.0, 65791.0, 65792.0, 1e-40]
    ties = torch.arange(-(2**15), 2**15, dtype=torch.int32) * 2**16 + 2**15
    masters = [*tensors_on(device, torch.float32, 6), ties.view(torch.float32).to(device)]
    masters.append(torch.tensor(values, device=device))
    weights = [torch.empty_like(master, dtype=dtype) for master in masters]
    lows = [torch.empty_like(master, dtype=torch.int16) for master in masters]
    split.split(masters, weights, lows)
    halves = [split.encode(master, dtype, torch.int16) for master in on_cpu(masters)]
    assert_same_bits(weights, [weight for weight, _ in halves], "high halves")
    assert_same_bits(lows, [low for _, low in halves], "low halves")
    weights.append(torch.tensor([0.0, -0.0, 1.0, -1.0], dtype=dtype, device=device))
    lows.append(torch.tensor([-5, 5, -5, 5], dtype=torch.int16, device=device))
    joined = [torch.full_like(weight, torch.nan, dtype=torch.float32) for weight in weights]
    split.join(weights, lows, joined)
    for width in (torch.int16, torch.int8):
        zeros = weights[-1][:2].clone()  # written by a script, which leaves the old low halves
        low = torch.full_like(zeros, -5, dtype=width)
        split.join([zeros], [low], [found := torch.full_like(zeros, torch.nan, dtype=torch.float32)])
        assert not found.any(), f"zeros with old low halves in {width} became {found.tolist()}"
    pairs = zip(on_cpu(weights), on_cpu(lows), strict=True)
    assert_same_bits(joined, [split.decode(*pair) for pair in pairs], "joined")
    pairs = zip(on_cpu(joined), on_cpu(masters), strict=False)
    for master, before in itertools.islice(pairs, 2 * len(SIZES)):
        torch.testing.assert_close(master, before, rtol=0, atol=2.0**-40)
    return Outcome(bits=[*weights, *lows])


_OPERATIONS = {
    "unscale": _unscale,
    "overflow": _overflow,
    "axpby": _axpby,
    "l2norm": _l2norm,
    "master copy": _master_copy,
    "merge": _merge,
    "split16": _split,
}
_IN_CPP = "unscale", "overflow", "axpby", "master copy", "merge"
_CASES = [
    (operation, name)
    for name in DTYPES
    for operation in _OPERATIONS
    if not (name == "float32" and operation in ("master copy", "merge", "split16"))
]


def _run_with(lists: Any, operation: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Check an operation while the functions of `host_lists` are these."""
    before, host_lists.lists = host_lists.lists, lists
    try:
        return _OPERATIONS[operation](dtype, device)
    finally:
        host_lists.lists = before


for _operation, _name in _CASES:
    _full_name = f"kernels: {_operation}, {_name}"
    _run = functools.partial(_run_with, host_lists.InPython, _operation, DTYPES[_name])
    CHECKS[_full_name] = Check(_full_name, _run, 60, False)


@check("kernels: passes in C++", 120)
def _in_cpp(device: torch.device) -> None:
    """The operations that C++ does on the CPU."""
    if device.type != "cpu" or backend.requested()[0]:
        raise SkipError("only the CPU has passes in C++")
    try:
        lists = host_lists.compiled()
    except (OSError, RuntimeError) as error:
        raise SkipError(f"C++ is not compiled, so plain torch runs instead: {error}") from None
    for operation, name in _CASES:
        if operation in _IN_CPP:
            _run_with(lists, operation, DTYPES[name], device)


@check("kernels: the loss scale")
def _scale(device: torch.device) -> Outcome:
    """Let the scale fall to its floor and grow to its ceiling, sometimes with hysteresis left."""
    seen = []
    for reset in (False, True):
        state, plain = torch.zeros(7, device=device), torch.zeros(7)
        state[0] = plain[0] = 3.0
        for i in range(40):
            state[4] = plain[4] = float(i % 13 in (2, 3, 5, 6, 7))
            for each, backend_of in ((state, None), (plain, "reference")):
                update_scale.update_scale(
                    each,
                    growth_factor=6.1,
                    backoff_factor=0.3,
                    growth_interval=3,
                    hysteresis=2,
                    reset_each_step=reset,
                    floor=0.5,
                    ceiling=9.0,
                    backend=backend_of,
                )
            assert_same_bits([state], [plain], f"after {i + 1} transitions")
            seen.append(state.clone())
    scales = [float(each[0]) for each in seen]
    assert (min(scales), max(scales)) == (0.5, 9.0), f"scales from {min(scales)} to {max(scales)}"
    return Outcome(bits=seen)


OVERFLOWS = 1, 0, 1, 1, 0, 0, 0, 1, 1
SCALES = {False: (4, 4, 2, 1, 1, 1, 2, 2, 1), True: (4, 4, 4, 2, 2, 2, 4, 4, 2)}
"""The scale after each step from 4 on, with a hysteresis of 2 and a growth interval of 3; and the same
where each good step restores the hysteresis."""


@check("kernels: hysteresis of the loss scale")
def _hysteresis(device: torch.device) -> None:
    for reset, expected in SCALES.items():
        state, found = torch.zeros(7, device=device), []
        state[0], state[3] = 4.0, 2.0
        for overflow in OVERFLOWS:
            state[4] = overflow
            update_scale.update_scale(
                state,
                growth_factor=2.0,
                backoff_factor=0.5,
                growth_interval=3,
                hysteresis=2,
                reset_each_step=reset,
                floor=0.5,
                ceiling=9.0,
            )
            found.append(int(state[0]))
        assert tuple(found) == expected, f"scales {found}, and {expected} are right"


@check("kernels: 10,000 tensors", 60)
def _many(device: torch.device) -> Outcome:
    count = 200 if language.INTERPRETED else 10_000  # the interpreter takes milliseconds for each
    values = torch.arange(1.0, count + 1).half()
    sources = [values[i : i + 1].to(device) for i in range(count)]
    targets = [torch.empty_like(source, dtype=torch.float32) for source in sources]
    unscale.unscale(sources, targets, torch.full((1,), 0.5, device=device), None)
    assert_same_bits([torch.cat(targets)], [values.float() * 0.5], "unscaled")
    return Outcome(f"{count:,} tensors", [torch.cat(targets)])


@check("kernels: a second stream")
def _stream(device: torch.device) -> None:
    needs_gpu(device, "streams")
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    source = torch.ones(2**22, dtype=torch.float16, device=device)
    for i in range(8):
        stream.wait_stream(torch.cuda.current_stream(device))
        target = torch.empty_like(source, dtype=torch.float32)
        with torch.cuda.stream(stream):
            unscale.unscale([source], [target], torch.full((1,), float(i), device=device), None)
        torch.cuda.current_stream(device).wait_stream(stream)
        assert bool((target == i).all()), f"the {i}-th launch on a second stream is wrong"


@check("kernels: a second GPU")
def _second_gpu(device: torch.device) -> None:
    needs_gpu(device, "a second GPU")
    if torch.cuda.device_count() < 2:
        raise SkipError("there is one GPU")
    places = [torch.device("cuda", 0), torch.device("cuda", 1)]
    sources = [torch.full((1000,), 2.0, dtype=torch.float16, device=place) for place in places]
    targets = [torch.empty_like(source, dtype=torch.float32) for source in sources]
    unscale.unscale(sources, targets, torch.full((1,), 0.5, device=places[0]), None)
    for target in targets:
        assert bool((target == 1).all()), f"unscaled wrongly on {target.device}"


@check("kernels: 2^31 + 9 elements", 120, full=True)
def _huge(device: torch.device) -> None:
    needs_gpu(device, "13 GB of its memory")
    size = 2**31 + 9
    free, _ = torch.cuda.mem_get_info(device)
    if free < 7 * size:
        raise SkipError(f"{free / 1e9:.0f} GB are free, and {7 * size / 1e9:.0f} GB are needed")
    source = torch.ones(size, dtype=torch.float16, device=device)
    target = torch.empty_like(source, dtype=torch.float32)
    unscale.unscale([source], [target], torch.full((1,), 0.5, device=device), None)
    assert bool((target == 0.5).all()), "an element beyond 2^31 is wrong"
    source[-1], found = torch.inf, torch.zeros(1, device=device)
    unscale.check([source], torch.ones(1, device=device), found)
    assert found.item() == 1, "an inf beyond 2^31 was not found"
