"""Complex numbers have twins: rotary embeddings, spectra and Fourier layers are seen through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp
from tests.diagnosis.users_scripts import here, steps

BF16 = torch.bfloat16


class Rotary(nn.Module):
    """Attention with angles of positions in a dtype, as LLaMA's first code has it in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.lines = dtype, range(0)
        self.q, self.k, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        t = torch.arange(x.shape[1]) + 1000.5
        angles = t.to(self.dtype)[:, None] / torch.arange(1.0, 9).to(self.dtype)
        self.lines = range(here(2), here())
        turn = torch.polar(torch.ones(angles.shape), angles.float())

        def turned(y: Tensor) -> Tensor:
            return torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (8, 2))) * turn).flatten(-2)

        return self.out((turned(self.q(x)) @ turned(self.k(x)).mT).softmax(-1) @ x)


class Fourier(nn.Module):
    """Multiplies a spectrum by complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.out = nn.Parameter(torch.randn(9, dtype=torch.complex64)), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.fft.rfft(x) * self.w
        y = y + 0.1 * y.conj()
        y[..., 0] *= 0.5
        return self.out(torch.fft.irfft(y, n=16) + (y * y.conj()).real.mean() + y.imag.sum())


def trained(model: nn.Module, is_watched: bool = True) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(1)
    watch: Any = amp.watch(at=[1, 3])
    if is_watched:
        watch.__enter__()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in steps(optimizer, 3):
        x = torch.randn(4, 24, 16)
        (model(x) - x[..., :4]).square().mean().backward()
    if is_watched:
        watch.__exit__(None, None, None)
    return watch.report, model.state_dict()


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_positions_that_were_rounded_before_they_are_angles(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Rotary(dtype)
    report, _ = trained(model)
    assert report.is_healthy is (dtype is torch.float32)
    for one in report.findings[:1]:
        assert one.line in model.lines
        assert "it shows at torch.polar" in one.what


def test_a_fourier_layer_is_healthy_and_keeps_its_bits() -> None:
    ends = []
    for is_watched in (True, False):
        torch.manual_seed(0)
        report, state = trained(Fourier(), is_watched)
        assert report.is_healthy is is_watched
        ends.append(state)
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize(("level", "cause"), [(0.0, "mathematics"), (8.0, "range")])
def test_a_spectrum_that_is_silent_or_too_loud(level: float, cause: str) -> None:
    """The derivative of its root is infinite at 0; NaN and inf go through complex numbers."""
    layer = nn.Conv1d(1, 1, 3, padding=1, bias=False)
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD(layer.parameters(), 1e-3)
        for _ in steps(optimizer, 1):
            y = layer(torch.zeros(2, 1, 64))[:, 0] + level
            spectrum = 1e38 * torch.stft(y, 16, window=torch.hann_window(16), return_complex=True)
            (spectrum.real**2 + spectrum.imag**2).sqrt().mean().backward()
            made_at = here(2 if level else 1)
    (found,) = [x for x in watch.report.findings if x.reached]
    assert (found.cause, found.line) == (cause, made_at)
