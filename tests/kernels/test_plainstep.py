"""The step without Triton: sliced and gathered in plain torch, and as a loop in C."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from amp.kernels import native
from amp.kernels.adagrad import ADAGRAD, adagrad_numbers
from amp.kernels.adam import ADAM, adam_numbers
from amp.kernels.language import INTERPRETED
from amp.kernels.lion import LION, lion_numbers
from amp.kernels.novograd import NOVOGRAD, novograd_numbers
from amp.kernels.sgd import MOMENTUM_SGD, SGD, sgd_numbers
from amp.kernels.stepping import Rule, step

if INTERPRETED:
    pytest.skip("plain torch needs no interpreter", allow_module_level=True)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SHAPES = [(300, 300), (7,), (70_000,), (5, 3, 2, 2), (0,), (1,), (66_000,)]
BETAS = (0.9, 0.999)
OF_SGD = sgd_numbers(0.01, 0.9, 0.0, 0.1, nesterov=True, after_momentum=False)
RULES: dict[str, tuple[Rule, tuple[float | Tensor, ...]]] = {
    "adagrad": (ADAGRAD, adagrad_numbers(0.01, 0.1, 1e-10, 0.1, decoupled=False)),
    "adam": (ADAM, adam_numbers(0.01, BETAS, 1e-8, 0.1, decoupled=True, bias_correction=True)),
    "lion": (LION, lion_numbers(0.01, BETAS, 0.1)),
    "momentum": (MOMENTUM_SGD, OF_SGD),
    "novograd": (
        NOVOGRAD,
        novograd_numbers(0.01, BETAS, 1e-8, 0.1, bias_correction=True, averages=True, inside=False),
    ),
    "sgd": (SGD, OF_SGD),
}


class Tensors:
    """Weights of many sizes, some channels-last, one with gaps, with scaled gradients."""

    def __init__(self, rule: Rule, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        params = [torch.randn(shape) for shape in SHAPES]
        self.params = [
            p.contiguous(memory_format=torch.channels_last) if p.dim() == 4 else p for p in params
        ]
        self.params.append(torch.randn(40, 40)[:, ::2])
        self.models = None if dtype is F32 else [torch.empty_like(p, dtype=dtype) for p in self.params]
        self.moments = [[torch.zeros_like(p) for p in self.params] for _ in range(rule.moments)]
        self.steps = [torch.zeros(()) for _ in self.params]
        self.steps[2] += 5  # that parameter came first
        self.dtype = dtype

    def run(self, rule: Rule, numbers: tuple[float | Tensor, ...], backend: str | None) -> list[Tensor]:
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


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("name", RULES)
def test_the_loop_and_plain_torch_agree(
    name: str, dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, numbers = RULES[name]
    in_torch = Tensors(rule, dtype).run(rule, numbers, "reference")
    runs = []
    run = native.Loop.__call__
    monkeypatch.setattr(native.Loop, "__call__", lambda *args: runs.append(1) or run(*args))
    monkeypatch.setattr(native, "WORTH_COMPILING", 100_000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    in_c = Tensors(rule, dtype).run(rule, numbers, None)
    assert len(runs) == 3
    for c, t in zip(in_c, in_torch, strict=True):
        tolerance = {F16: 1e-3, BF16: 8e-3, F32: 1e-5}[c.dtype]
        torch.testing.assert_close(c, t, rtol=tolerance, atol=1e-6)


def test_small_steps_have_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "loop", None)
    rule, numbers = RULES["adam"]
    Tensors(rule, F32).run(rule, numbers, None)


def test_without_a_compiler_the_step_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    rule, numbers = RULES["momentum"]
    in_torch = Tensors(rule, F16).run(rule, numbers, "reference")
    monkeypatch.setenv("CC", "/nowhere/cc")
    monkeypatch.setattr(native, "WORTH_COMPILING", 100_000)
    native.loop.cache_clear()
    with caplog.at_level(logging.WARNING, "amp"):
        without = Tensors(rule, F16).run(rule, numbers, None)
    native.loop.cache_clear()
    assert all(map(torch.equal, without, in_torch))
    assert caplog.text.count("no loop could be compiled") == 1
    assert "/nowhere/cc" in caplog.text
