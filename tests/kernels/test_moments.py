"""Moments are packed and unpacked with the bits of the formulas, in little memory, on every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amp.kernels import stochastic_rounding as rounding
from amp.kernels import tensor_lists
from amp.kernels.backend import uses_triton
from amp.kernels.language import INTERPRETED
from amp.kernels.moments import pack, unpack
from tests.living import Living

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize("dtype", [BF16, F32, F64])
def test_every_word_comes_back(device: torch.device, dtype: torch.dtype) -> None:
    words = torch.arange(-(2**15), 2**15, 29 if INTERPRETED else 1, device=device).short()
    both = [torch.full_like(words, 7, dtype=dtype) for _ in range(2)]
    unpack([words], [both[0]], [both[1]])
    for found, expected in zip(both, rounding.unpack(words.int()), strict=True):
        torch.testing.assert_close(found, expected.to(dtype), rtol=0, atol=0, equal_nan=True)
    back = torch.empty_like(words)
    pack([both[0]], [both[1]], [back])
    m, v = both[0].float(), both[1].float()
    assert torch.equal(back, rounding.pack(m, v, rounding.TO_NEAREST).short())
    code, ratio = words.int() >> 7 & 511, words.int() << 25 >> 25
    is_used = ((code > 0) & (ratio > -64)) | (words == 0)
    assert torch.equal(back[is_used], words[is_used])


def test_shapes_strides_and_dtypes_mix(device: torch.device) -> None:
    torch.manual_seed(0)
    firsts = [
        torch.randn(3, 5, device=device),
        torch.randn(4, 6, device=device, dtype=F16).T,
        torch.randn((), device=device),
        torch.randn(0, device=device),
        torch.randn(1, 2, 3, 4, device=device, dtype=BF16).to(memory_format=torch.channels_last),
        torch.randn(10, device=device)[1:],
        torch.randn(5, device=device).expand(3, 5),
    ]
    seconds = [x.square().float() for x in firsts]
    words = [torch.empty(x.shape, dtype=torch.int16, device=device) for x in firsts]
    pack(firsts, seconds, words)
    for m, v, word in zip(firsts, seconds, words, strict=True):
        assert torch.equal(word, rounding.pack(m.float(), v, rounding.TO_NEAREST).short())


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_little_memory_is_taken_meanwhile(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 52 bytes an element of a slice in plain torch; a kernel only needs its tables."""
    n, limit = 2**14, 2**10
    for name in ("SLICE", "SLICE_OF_DEVICE"):
        monkeypatch.setattr(tensor_lists, name, limit)
    words = torch.arange(n, dtype=torch.int16, device=device)
    both = [torch.ones_like(words, dtype=dtype) for _ in range(2)]
    lists: list[Any] = [[words], [both[0]], [both[1]]]
    meanwhile = 600 if uses_triton(device) else 52 * limit
    for operation, arguments in ((unpack, lists), (pack, [*lists[1:], lists[0]])):
        with Living([words, *both]) as living:
            before = living.now()
            operation(*arguments)
            assert living.peak - before <= meanwhile
