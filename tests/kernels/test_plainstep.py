"""The step that plain torch takes: sliced, gathered, compiled, and without a compiler."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from amp.kernels import plainstep
from amp.kernels.adam import ADAM, adam_numbers
from amp.kernels.language import INTERPRETED
from amp.kernels.sgd import MOMENTUM_SGD, sgd_numbers
from amp.kernels.stepping import Rule, step

if INTERPRETED:
    pytest.skip("plain torch needs no interpreter", allow_module_level=True)

F16, F32 = torch.float16, torch.float32
SHAPES = [(300, 300), (7,), (70_000,), (5, 3, 2, 2), (1,), (66_000,)]
NUMBERS = {
    "adam": (
        ADAM,
        adam_numbers(0.01, (0.9, 0.999), 1e-8, 0.1, decoupled=True, bias_correction=True),
    ),
    "sgd": (MOMENTUM_SGD, sgd_numbers(0.01, 0.9, 0.0, 0.1, nesterov=True, after_momentum=False)),
}


class Tensors:
    """Weights of many sizes, some of them channels-last, with scaled gradients."""

    def __init__(self, rule: Rule, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        params = [torch.randn(shape) for shape in SHAPES]
        self.params = [
            p.contiguous(memory_format=torch.channels_last) if p.dim() == 4 else p for p in params
        ]
        self.models = None if dtype is F32 else [torch.empty_like(p, dtype=dtype) for p in self.params]
        self.moments = [[torch.zeros_like(p) for p in self.params] for _ in range(rule.moments)]
        self.steps = [torch.zeros(()) for _ in self.params]
        self.steps[2] += 5  # that parameter came first
        self.dtype = dtype

    def run(self, rule: Rule, numbers: tuple[float | Tensor, ...], backend: str | None) -> list[Tensor]:
        for i in range(3):
            torch.manual_seed(i)
            grads = [(8 * torch.randn_like(p)).to(self.dtype) for p in self.params]
            inv_scale = torch.tensor([1 / 8])
            step(
                *(rule, numbers, self.params, grads, self.moments, self.steps),
                models=self.models,
                inv_scale=inv_scale,
                backend=backend,
            )
        return [*self.params, *(self.models or []), *(m for moment in self.moments for m in moment)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, in torch.compile
@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize("name", NUMBERS)
def test_compiled_and_eager_agree(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plainstep, "WORTH_COMPILING", 100_000)
    plainstep._compiled.cache_clear()
    rule, numbers = NUMBERS[name]
    eager = Tensors(rule, dtype).run(rule, numbers, "reference")
    assert "compiling" not in caplog.text
    with caplog.at_level(logging.WARNING, "amp"):
        compiled = Tensors(rule, dtype).run(rule, numbers, None)
    assert [record.message[:9] for record in caplog.records] == ["compiling"]
    for c, e in zip(compiled, eager, strict=True):
        tolerance = 1e-3 if c.dtype is F16 else 1e-5
        torch.testing.assert_close(c, e, rtol=tolerance, atol=1e-6)


def test_small_steps_are_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    rule, numbers = NUMBERS["adam"]
    Tensors(rule, F32).run(rule, numbers, None)
    assert not caplog.records


NO_COMPILER = """
import torch
from amp.kernels import plainstep
from tests.kernels.test_plainstep import F16, NUMBERS, Tensors

plainstep.WORTH_COMPILING = 100_000
rule, numbers = NUMBERS["sgd"]
eager = Tensors(rule, F16).run(rule, numbers, "reference")
for a, b in zip(eager, Tensors(rule, F16).run(rule, numbers, None), strict=True):
    assert torch.equal(a, b)
"""


def test_without_a_compiler_it_says_so_and_goes_on(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "CXX": "/nowhere/g++",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    run = subprocess.run(
        [sys.executable, "-c", NO_COMPILER],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("compiling the optimizer step for this CPU") == 1
    assert run.stderr.count("it did not compile and runs in eager torch") == 1
