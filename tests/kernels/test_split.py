"""Masters split into 16-bit weights and 16 bits more come back; on every backend at hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from amp.kernels.language import INTERPRETED
from amp.kernels.split import Kind, decode, encode, join, low_dtype, split

F16, BF16 = torch.float16, torch.bfloat16
ALL_LOW_BITS = torch.arange(2**16)
TINY, HUGE = 2.0**-16, 65792.0 - 2.0**-7


def from_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def round_trip(masters: Tensor, dtype: torch.dtype, kind: Kind = "split16") -> tuple[Tensor, Tensor]:
    """Return the weights and what comes back, as the operations on lists have it."""
    weight = torch.empty_like(masters, dtype=dtype)
    low = torch.empty_like(masters, dtype=low_dtype(kind, dtype))
    back = torch.full_like(masters, 7.0)
    split([masters], [weight], [low])
    join([weight], [low], [back])
    return weight, back


def same_bits(one: Tensor, other: Tensor) -> Tensor:
    return one.view(torch.int32) == other.view(torch.int32)


def around(device: torch.device) -> Tensor:
    """FP32 numbers of every exponent and sign, and where either format has an edge."""
    high = torch.arange(0, 2**16, 97 if INTERPRETED else 1, dtype=torch.int64)
    low = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (high[:, None] * 2**16 + low).flatten()
    edges = torch.tensor(
        [2.0**-14, 2.0**-24, 2.0**-25, 65504.0, 65519.996, 65520.0, HUGE, 3.3895314e38]
    )
    step = torch.arange(-9, 10)
    near = (edges.view(torch.int32)[:, None] + step).flatten().view(torch.float32)
    return torch.cat([from_bits(bits), near, -near, torch.tensor([torch.inf, -torch.inf])]).to(device)


def every_exponent_and_remainder() -> Iterator[Tensor]:
    """All signs and exponents, some leading mantissas, and all 2^16 remainders of each."""
    for exponent in range(2**9):
        leading = torch.tensor([0, 1 + exponent % 126, 127])
        bits = (((exponent << 7) + leading)[:, None] << 16) + ALL_LOW_BITS
        yield from_bits(bits)


def assert_comes_back(masters: Tensor, weight: Tensor, back: Tensor) -> None:
    """With every bit; in float16 within its range alone, within 2^-40 below it, and as inf above."""
    size, is_half = masters.abs(), weight.dtype is F16
    small, large = [part & is_half for part in (size < TINY, size >= HUGE)]
    assert torch.equal(masters.isnan(), weight.isnan())
    assert torch.equal(masters.isnan(), back.isnan())
    assert bool(same_bits(back, masters)[~(masters.isnan() | small | large)].all())
    assert bool((back - masters).abs()[small].le(2.0**-40).all())
    assert torch.equal(back[large], masters.sign()[large] * torch.inf)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="plain torch's formula; `around` has fewer of them")
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_every_number_comes_back(dtype: torch.dtype) -> None:
    for masters in every_exponent_and_remainder():
        weight, low = encode(masters, dtype, torch.int16)
        assert_comes_back(masters, weight, decode(weight, low))


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_lists_come_back(device: torch.device, dtype: torch.dtype) -> None:
    masters = around(device)
    weight, back = round_trip(masters, dtype)
    assert_comes_back(masters, weight, back)
    nearest = masters.to(dtype)
    off = (weight != nearest) & ~masters.isnan()
    expected = (weight.double() - masters.double()).abs(), (nearest.double() - masters.double()).abs()
    assert torch.equal(expected[0][off], expected[1][off])  # halfway: both are as near


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_kahan_keeps_twice_the_bits(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    masters = torch.cat([torch.randn(999), torch.tensor([0.0, 1e30, torch.inf, -torch.inf])]).to(device)
    weight, back = round_trip(masters, dtype, "kahan")
    nearest = masters.to(dtype)
    finite = nearest.isfinite()
    bits = 22 if dtype is F16 else 16
    bound = masters.abs() * 2.0**-bits + (2.0**-25 if dtype is F16 else 0)
    assert bool(((back - masters).abs() <= bound)[finite].all())
    assert torch.equal(back.to(dtype), weight)
    assert torch.equal(weight[~finite], nearest[~finite])
    assert torch.equal(back[~finite], weight[~finite].float())
    assert bool((back != weight.float()).any())


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("kind", ["split16", "kahan"])
def test_what_was_joined_is_split_as_before(
    device: torch.device, kind: Kind, dtype: torch.dtype
) -> None:
    """Also where the low half is half a unit of the weight, so that nearest even is another weight."""
    torch.manual_seed(0)
    masters = torch.randn(2**14, device=device)
    weights = [torch.empty_like(masters, dtype=dtype) for _ in range(2)]
    lows = [torch.empty_like(masters, dtype=low_dtype(kind, dtype)) for _ in range(2)]
    split([masters], weights[:1], lows[:1])
    join(weights[:1], lows[:1], [masters])
    split([masters], weights[1:], lows[1:])
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(lows[0], lows[1])


@pytest.mark.parametrize("kind", ["split16", "kahan"])
def test_shapes_strides_and_dtypes_mix(device: torch.device, kind: Kind) -> None:
    torch.manual_seed(0)
    masters = [
        torch.randn(3, 5, device=device),
        torch.randn(4, 6, device=device).T,
        torch.randn((), device=device),
        torch.randn(0, device=device),
        torch.randn(1, 2, 3, 4, device=device).to(memory_format=torch.channels_last),
        torch.randn(10, device=device)[1:],
    ]
    dtypes = [F16, BF16, F16, BF16, BF16, F16]
    weights = [torch.empty_like(m, dtype=d) for m, d in zip(masters, dtypes, strict=True)]
    lows = [torch.empty_like(w, dtype=low_dtype(kind, w.dtype)) for w in weights]
    back = [torch.empty_like(m) for m in masters]
    versions = [t._version for t in (*weights, *lows, *back)]
    split(masters, weights, lows)
    join(weights, lows, back)
    assert all(t._version > v for t, v in zip((*weights, *lows, *back), versions, strict=True))
    for b, m, w in zip(back, masters, weights, strict=True):
        tolerance = 2.0**-15 if kind == "kahan" else 2.0**-40
        torch.testing.assert_close(b, m, rtol=tolerance, atol=2.0**-25 if kind == "kahan" else 2.0**-40)
        torch.testing.assert_close(w.float(), m, rtol=2.0**-8, atol=1e-7)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_a_remainder_of_another_weight_counts_as_nothing(
    device: torch.device, dtype: torch.dtype
) -> None:
    """Kahan's remainders are absolute. That of 1.0 would be half of a 1e-4 that other code writes."""
    patterns = torch.arange(0, 2**16, 53 if INTERPRETED else 1).to(torch.int16)
    written = patterns.view(dtype).to(device)
    for of in (1e-5, 1.0, -3e4):
        masters = torch.full_like(written, of, dtype=torch.float32) * (1 + 2.0**-9 * 0.8)
        weight, low = torch.empty_like(written), torch.empty_like(written)
        split([masters], [weight], [low])
        back = torch.empty_like(masters)
        join([weight], [low], [back])
        assert torch.equal(back, weight.float() + low.float())  # its own
        join([written], [low], [back])
        is_nan = written.isnan()
        assert torch.equal(back.to(dtype)[~is_nan], written[~is_nan])
        assert bool(back[is_nan].isnan().all())
        is_kept = back == written.float() + low.float()
        assert torch.equal(back[~is_kept & ~is_nan], written.float()[~is_kept & ~is_nan])
        assert not bool(is_kept.all())
