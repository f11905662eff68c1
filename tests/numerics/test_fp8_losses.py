"""What FP8 keeps of tensors, counted against rounding each number; what a delayed scale follows."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import amp
from amp.cli import main
from amp.errors import AmpTypeError, AmpValueError
from amp.kernels.fp8 import dequantize
from amp.kernels.quantize_fp4 import quantize_fp4
from amp.numerics import FORMATS, fp8_losses, fp8_scaled, round_to, simulate_fp8
from amp.numerics.fp8_simulation import SCALINGS
from amp.numerics.histograms import Histogram
from amp.terminal.text import plain

FP8 = ("float8_e4m3fn", "float8_e5m2")


def by_hand(x: torch.Tensor, name: str, part: tuple[int, int]) -> tuple[float, ...]:
    """Return what `fp8_losses` does, number by number, from the definition of a scale."""
    fmt, down, across = FORMATS[name], *part
    zero = subnormal = saturated = count = 0
    pairs: list[tuple[float, float]] = []
    for i in range(0, x.shape[0], down):
        for j in range(0, x.shape[1], across):
            block = x[i : i + down, j : j + across].flatten().tolist()
            amax = max(map(abs, block))
            factor = 2.0 ** math.floor(math.log2(fmt.max / amax)) if amax else 1.0
            for value in filter(None, block):
                scaled = value * factor
                kept = float(round_to(max(min(scaled, fmt.max), -fmt.max), fmt))
                count += 1
                zero += kept == 0
                subnormal += 0 < abs(kept) < fmt.min_normal
                saturated += abs(scaled) > fmt.max
                pairs.append((abs(value), abs(kept / factor - value)))

    def ratio(pairs: list[tuple[float, float]]) -> float:
        return math.sqrt(sum(error**2 for _, error in pairs) / sum(x**2 for x, _ in pairs))

    median = sorted(error / x for x, error in pairs)[(count - 1) // 2]
    decibels = -20 * math.log10(ratio(sorted(pairs)[: count - count // 50]))
    shares = (part / count for part in (zero, subnormal, saturated))
    return (*shares, ratio(pairs), median, decibels)


PARTS = {
    "tensor": (1000, 1000),
    "row": (1, 1000),
    "1x128": (1, 128),
    "128x128": (128, 128),
    "1x32": (1, 32),
}


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("scaling", PARTS)
@pytest.mark.parametrize("shape", [(3, 64), (130, 7), (2, 300)])
def test_losses_are_those_of_each_number(name: str, scaling: str, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.exp2(
        torch.randint(-14, 14, shape, generator=generator)
    )
    x[0, 0] = 0.0
    (found,) = fp8_losses(x, [name], [scaling])
    assert found[:2] == (name, scaling)
    assert found[2:] == pytest.approx(by_hand(x, name, PARTS[scaling]), rel=1e-9)


def test_without_a_scale_numbers_saturate_and_vanish() -> None:
    x = torch.tensor([1.0, 500.0, -1e6, 2.0**-11, 2.0**-8, 0.0])
    (found,) = fp8_losses(x, ["e4m3"], ["none"])
    assert found[2:5] == (1 / 5, 1 / 5, 2 / 5)
    assert found.error > 0.9


def test_losses_of_several_tensors_are_counted_together() -> None:
    tensors = [torch.ones(3), torch.full((2, 2), 2.0**-40), torch.zeros(0, 5), torch.tensor(3.0)]
    (alone,) = fp8_losses(tensors, ["e5m2"], ["none"])
    assert alone.zero == 4 / 8
    assert [x.zero for x in fp8_losses(tensors, ["e5m2"])[1:]] == [0.0] * 5
    assert [x[:2] for x in fp8_losses(tensors)] == [(name, how) for name in FP8 for how in SCALINGS]
    assert fp8_losses([])[0][2:] == (0.0,) * 5 + (math.inf,)


def test_scaled_numbers_have_the_shape_they_had() -> None:
    x = torch.randn(3, 5, 40, dtype=torch.bfloat16)
    scaled, kept = fp8_scaled(x, "e4m3", "1x32")
    assert scaled.shape == kept.shape == x.shape
    factors = scaled / x.float()
    assert bool((factors[..., :32] == factors[..., :1]).all())
    assert bool((factors[..., 32:] == factors[..., 32:33]).all())
    assert 224 < float(scaled.abs().max()) <= 448
    assert torch.equal(kept, round_to(scaled, "e4m3"))


def test_a_histogram_of_a_tensor() -> None:
    x = torch.tensor([[0.0, 1.0, -1.5], [math.inf, 2.0**-149, 3.0]])
    found = Histogram.of(x)
    assert found.counts == Counter({-149: 1, 0: 2, 1: 1})
    assert (found.zeros, found.not_finite, found.total) == (1, 1, 6)


@pytest.mark.parametrize(
    ("options", "factors"),
    [
        ({"amax_history": 2}, [256, 256, 256, 8, 8, 256]),
        ({"amax_history": 2, "amax_algo": "most_recent"}, [256, 256, 256, 8, 256, 256]),
        ({"amax_history": 3, "margin": 2}, [256, 64, 64, 2, 2, 2]),
    ],
)
def test_a_delayed_scale_follows_what_it_saw(options: Any, factors: list[float]) -> None:
    trace = simulate_fp8([1.0, 1.5, 40.0, 1.0, 1.0, 1.0], **options)
    assert [step.factor for step in trace] == factors
    assert [step.current for step in trace] == [256, 256, 8, 256, 256, 256]
    assert [step.saturated for step in trace] == [False, False, True, False, False, False]
    assert trace[2].largest == 40 * factors[2]


def test_an_inf_enters_no_history() -> None:
    trace = simulate_fp8([1.0, math.inf, torch.tensor([[0.5, -1.0]]), 0.0, 1.0], "e5m2")
    assert [step.factor for step in trace] == [32768.0] * 5
    assert [step.saturated for step in trace] == [False, True, False, False, False]
    assert math.isnan(trace[1].current)


@pytest.mark.parametrize(("fmt", "entry"), [("e4m3", 0), ("e5m2", 2)])
def test_it_is_the_history_that_trains(fmt: str, entry: int) -> None:
    """The factors of a layer of a model at O7, for its input and for the gradient of its output."""
    scales = [1.0, 3.0, 40.0, 0.1, 2.0, 2.0, 0.3]
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    recipe = {"recipe": "delayed", "amax_history": 3, "margin": 1}
    with amp.Session("O7", fp8=recipe, verbosity=0) as session:
        model, optimizer = session.initialize(model, optimizer)
        history = session.fp8.history
        assert history is not None
        seen, factors = [], []
        for scale in scales:
            x = torch.full((4, 16), scale, dtype=torch.bfloat16)
            out = model[0](x)
            with session.scale_loss(out.float().sum() * scale, optimizer) as loss:
                factors.append(float(history.factor(0, entry, x.device)))
                loss.backward()
                seen.append(float(history.seen[entry]))
            optimizer.step()
    trace = simulate_fp8(seen, fmt, amax_history=3, margin=1)
    assert [step.factor for step in trace[1:]] == factors[1:]
    assert len(set(factors)) > 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fp8_losses(torch.tensor([1.0, math.inf])), "holds inf or NaN"),
        (lambda: fp8_losses(torch.ones(3).long()), r"made only from .*, and this is torch.int64"),
        (lambda: fp8_losses([cast(Any, 1.0)]), "and this is float"),
        (lambda: fp8_losses(torch.ones(2, device="meta")), "the meta device"),
        (lambda: fp8_losses(torch.ones(2), ["bf16"]), "FP8 products do not support bfloat16"),
        (lambda: fp8_losses(torch.ones(2), scalings=["1x16"]), "scaling='1x16' is not one of none, "),
        (lambda: fp8_scaled(torch.ones(2), "e4m3", "1x16"), "scaling='1x16' is not one of none, "),
        (lambda: simulate_fp8([1.0], margin=17), "margin=17 must be at most 16"),
        (lambda: simulate_fp8([1.0], history=3), "simulate_fp8: got an unexpected keyword argument"),
        (lambda: simulate_fp8([1.0, -2.0]), "-2.0 of iteration 1 must be at least 0"),
        (lambda: simulate_fp8([cast(Any, "a")]), "'a' of iteration 0 must be a number or a tensor"),
    ],
)
def test_bad_input_is_named(call: Any, message: str) -> None:
    with pytest.raises((AmpValueError, AmpTypeError), match=message):
        call()


def test_losses_in_fp4_are_those_of_training() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 256)
    nvfp4, mxfp4 = fp8_losses(x, ["e2m1"])
    assert (nvfp4.scaling, mxfp4.scaling) == ("1x16", "1x32")
    for loss, granularity in ((nvfp4, "1x16"), (mxfp4, "1x32")):
        operand = quantize_fp4(x, cast(Any, granularity), by_column=False).by_row
        assert operand is not None
        error = float((dequantize(operand) - x).norm() / x.norm())
        assert loss.error == pytest.approx(error, rel=1e-5)
        assert 0.05 < loss.zero < 0.2
    assert nvfp4.error < mxfp4.error
    x[:8] *= 1e-8  # far below the largest number: the scales of such blocks are 0
    assert fp8_losses(x, ["e2m1"], ["1x16"])[0].zero > nvfp4.zero + 0.1
    with pytest.raises(AmpValueError, match="scaling='tensor' is not one of 1x16, 1x32"):
        fp8_losses(x, ["e2m1"], ["tensor"])


def test_the_command_says_the_same(capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "x.pt"
    x = torch.tensor([[1.0] * 32 + [2.0**-10] * 32])
    torch.save({"x": x, "steps": 3}, file)
    options = ["--amaxes", "1,1,40,0x1p0", "--amax-history", "1", "--format", "e5m2"]
    assert main(["simulate-fp8", str(file), *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["losses"] == [plain(loss._asdict()) for loss in fp8_losses(x, ["e5m2", "e2m1"])]
    trace = simulate_fp8([1, 1, 40, 1], "e5m2", amax_history=1)
    assert found["history"] == [step._asdict() for step in trace]
    assert main(["simulate-fp8", str(file), *options]) == 0
    shown = capsys.readouterr().out
    assert "64 numbers in float8_e5m2, and in FP4 (E2M1)" in shown
    assert "nvfp4 1x16" in shown
    assert shown.count("saturates") == 1
