"""Loss scales over time, and what they do to gradients, counted against rounding each number."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import amp
from amp.numerics import FORMATS, bits, gradient_survival, round_to, simulate_scaler
from amp.numerics.scaling import thresholds


def test_the_trace_of_the_chapter() -> None:
    trace = simulate_scaler(steps=20, overflows=[10], init=2**15, growth_interval=5)
    assert [entry.step for entry in trace] == list(range(20))
    after = [32768.0] * 4 + [65536.0] * 5 + [131072.0] + [65536.0] * 5 + [131072.0] * 5
    assert [entry.next_scale for entry in trace] == after
    assert [entry.scale for entry in trace] == [32768.0, *after[:-1]]
    assert [entry.step for entry in trace if entry.overflow] == [10]
    assert [entry.good_steps for entry in trace[8:12]] == [4, 0, 0, 1]


def test_it_is_the_scaler_that_trains() -> None:
    bad = {2, 3, 7, 8, 9, 15}
    options: dict[str, Any] = {
        "init": 64.0,
        "growth_interval": 3,
        "hysteresis": 2,
        "min": 8.0,
        "max": 128.0,
    }
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.0)
    with amp.Session("O0", loss_scale={"mode": "dynamic", **options}, verbosity=0) as session:
        session.initialize(None, optimizer)
        scales = []
        for step in range(20):
            with session.scale_loss(
                (weight * (math.inf if step in bad else 1.0)).sum(), optimizer
            ) as loss:
                loss.backward()
            optimizer.step()
            scales.append(session.loss_scale())
    trace = simulate_scaler(steps=20, overflows=bad, **options)
    assert [entry.next_scale for entry in trace] == scales
    assert min(scales) < max(scales) <= 128.0


def test_gradients_overflow_by_their_format() -> None:
    gradients = [1.0, 1.01, torch.tensor([0.5, -3.9]), math.nan, 0.9]
    half = simulate_scaler(gradients, init=2.0**15)
    assert [entry.overflow for entry in half] == [False, False, True, True, False]
    assert [entry.next_scale for entry in half] == [2.0**15, 2.0**15, 2.0**14, 2.0**13, 2.0**13]
    wide = simulate_scaler(gradients, init=2.0**15, fmt="bfloat16")
    assert [entry.overflow for entry in wide] == [False, False, False, True, False]
    narrow = simulate_scaler([1.0], init=512.0, fmt="e4m3")
    assert narrow[0].overflow
    assert len(simulate_scaler(gradients, steps=2)) == 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "give the gradients of each iteration, or steps=20"),
        ({"steps": -1}, ValueError, "steps=-1 must be an integer of at least 0"),
        ({"steps": 3, "overflows": [1, 3]}, ValueError, r"overflows=\[3\] are not among .* 0 to 2"),
        ({"steps": 3, "gradients": [1.0]}, ValueError, "there are gradients for 1 only"),
        ({"steps": 3, "init": 0}, ValueError, "init=0 must be a finite number above 0"),
        ({"steps": 3, "grow": 2}, TypeError, "loss_scale has no key 'grow'; allowed: .*growth_factor"),
        ({"steps": 3, "fmt": "fp17"}, ValueError, "'fp17' is not a number format"),
    ],
)
def test_what_the_simulator_refuses(arguments: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        simulate_scaler(**arguments)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: str(fmt.name))
def test_thresholds_are_where_fates_part(fmt: Any) -> None:
    at = thresholds(fmt)
    assert math.isnan(round_to(at.overflow, fmt, overflow="nan"))
    assert round_to(math.nextafter(at.overflow, 0.0), fmt, overflow="nan") == fmt.max
    if fmt.has_zero:
        assert round_to(at.zero, fmt) == 0.0
        assert round_to(math.nextafter(at.zero, 1.0), fmt) == fmt.min_subnormal
        assert round_to(at.normal, fmt) == fmt.min_normal
        assert round_to(math.nextafter(at.normal, 0.0), fmt) < fmt.min_normal


def test_survival_is_what_rounding_each_gradient_gives() -> None:
    generator = torch.Generator().manual_seed(0)
    grads = torch.randn(3000, generator=generator) * 1e-6
    grads *= torch.exp(3 * torch.randn(3000, generator=generator))
    grads[:10] = 0
    scales = (1.0, 100.0, 2.0**16, 2.0**24)
    found = gradient_survival([grads[:1000], grads[1000:].view(40, 50)], scales)
    assert (found.count, found.zeros, found.not_finite) == (2990, 10, 0)
    for name, survival in found.formats.items():
        for i, scale in enumerate(scales):
            each = bits(grads[10:].double() * scale, name)
            assert survival.zero[i] == each.underflow.double().mean().item()
            assert survival.subnormal[i] == each.subnormal.double().mean().item()
            assert survival.overflow[i] == each.overflow.double().mean().item()


def test_the_scale_that_loses_least() -> None:
    grads = torch.tensor([2.0**-30, -(2.0**-20), 2.0**-10])
    found = gradient_survival(grads)
    assert found.scales == tuple(2.0**i for i in range(25))
    half = found.formats["float16"]
    assert half.zero[0] == 1 / 3
    assert half.subnormal[0] == 1 / 3
    assert half.recommended == 2.0**16  # 2**-30 becomes 2**-14, the smallest normal number
    assert found.formats["bfloat16"].recommended == 1.0
    huge = gradient_survival(torch.tensor([1e30, 1.0])).formats["float16"]
    assert huge.recommended is None
    assert huge.overflow[0] == 0.5
    bad = gradient_survival(torch.tensor([math.nan, 1.0, 0.0]))
    assert (bad.count, bad.zeros, bad.not_finite) == (2, 1, 1)
    assert bad.formats["bfloat16"].recommended is None
    empty = gradient_survival([])
    assert empty.count == 0
    assert empty.formats["float16"].zero[0] == 0.0


def test_what_survival_refuses() -> None:
    with pytest.raises(TypeError, match="one is torch.int64"):
        gradient_survival(torch.ones(2).long())
    with pytest.raises(ValueError, match=r"scales=\(0.0,\) must be one or more finite"):
        gradient_survival(torch.ones(2), [0])
    with pytest.raises(ValueError, match=r"scales=\(\) must be one or more finite"):
        gradient_survival(torch.ones(2), [])
    with pytest.raises(TypeError, match="on the meta device have no values"):
        gradient_survival(torch.ones(2, device="meta"))
    values = torch.tensor([2.0**-30])
    sparse = torch.sparse_coo_tensor(torch.tensor([[3]]), values, (5,), check_invariants=True)
    assert gradient_survival(sparse).count == 1
