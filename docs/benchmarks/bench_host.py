"""How long the host is busy between backward and the next forward, measured without a GPU.

    python docs/benchmarks/bench_host.py        # part of `make bench`

The step of 161 tensors of two elements, so that nothing but the host's own time counts. This library's
takes the way that it takes on a GPU: plans, tables, and Triton's dispatch of its three launches, to a
driver that only names a GPU and starts nothing. Torch's operations run on the CPU: the same dispatch to
kernels that have next to nothing to do. What a real driver's launches cost comes on top of either.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from bench_kernels import like, setting, table
from bench_step import Weights, with_grad_scaler

import amp
from amp.kernels import bulk, tables, update_scale
from amp.kernels.language import triton
from amp.optimizers import FusedAdam

TENSORS = 161
TURNS, CALLS = 10, 300


class NoDevice:
    """A driver for an sm_90 that is not there."""

    class utils:  # noqa: D106, N801 (Triton's names)
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:  # noqa: D102
            return {"max_shared_mem": 232448}

        @staticmethod
        def load_binary(name: str, *_: Any) -> tuple[int, str, int, int, int]:  # noqa: D102
            return 1, name, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Return what launches nothing."""
        return lambda *arguments: None

    def get_current_target(self) -> Any:
        """Return the GPU's name."""
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """Return its number."""
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        """Return its only stream."""
        return 0


def use(functions: Mapping[str, Any]) -> None:
    """Ask lists of tensors by these."""
    for name, function in functions.items():
        setattr(bulk, name, function)


def timed(run: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def with_amp(shapes: list[tuple[int, ...]]) -> Callable[[], float]:
    """Return the phase, which returns how long it took; backward's part, `.grad`, does not count."""
    cpu = torch.device("cpu")
    model: Any = Weights(shapes, cpu)
    optimizer: Any = FusedAdam(model.parameters(), lr=1e-4)
    session = amp.Session("O2", verbosity=0, loss_scale={"init": 1.0})
    model, optimizer = session.initialize(model, optimizer)
    params = list(model.parameters())
    grads = like(shapes, torch.float16, cpu)
    loss = torch.ones(())

    def run() -> float:
        block = session.scale_loss(loss, optimizer)
        seconds = timed(block.__enter__)
        for parameter, grad in zip(params, grads, strict=True):
            parameter.grad = grad
        return seconds + timed(lambda: block.__exit__(None, None, None)) + timed(optimizer.step)

    return run


def with_torch(shapes: list[tuple[int, ...]], **options: Any) -> Callable[[], float]:
    """Return the phase with torch's own parts, which returns how long it took."""
    run = with_grad_scaler(
        shapes, torch.device("cpu"), lambda params: torch.optim.AdamW(params, lr=1e-4, **options)
    )
    return lambda: timed(run)


def main() -> None:
    """Measure, print, and write the rows."""
    torch.set_num_threads(1)
    triton.runtime.driver.set_active(NoDevice())
    for module in (tables, update_scale):
        module.uses_triton = lambda device, backend=None: True
    bulk.compile_soon().join()
    in_cpp = {name: getattr(bulk, name) for name in bulk.IN_PYTHON}
    shapes: list[tuple[int, ...]] = [(2,)] * TENSORS
    contenders: list[tuple[str, Mapping[str, Any], Callable[[], float]]] = [
        ("reamp O2, FusedAdam, with kernels/bulk.cpp", in_cpp, with_amp(shapes)),
        ("reamp O2, FusedAdam, in Python alone", bulk.IN_PYTHON, with_amp(shapes)),
        ("copy, GradScaler, AdamW(fused), copy", {}, with_torch(shapes, fused=True)),
        ("copy, GradScaler, AdamW(foreach), copy", {}, with_torch(shapes, foreach=True)),
    ]
    least = [float("inf")] * len(contenders)
    for turn in range(TURNS):
        for i in [*range(len(contenders))][:: 1 if turn % 2 else -1]:
            _, functions, run = contenders[i]
            use(functions)
            least[i] = min(least[i], *(run() for _ in range(CALLS)))
    header = f"# The step on the host\n\n{setting(torch.device('cpu'))}\n\n"
    rows = [["tensors", "operation", "by", "host µs", "ratio"]]
    rows += [
        [str(TENSORS), "AdamW, float16, float32 masters", name, f"{s * 1e6:.0f}", f"{s / least[0]:.2f}"]
        for (name, _, _), s in zip(contenders, least, strict=True)
    ]
    Path(__file__).with_name("step-host.md").write_text(header + table(iter(rows)) + "\n")


if __name__ == "__main__":
    if triton is None:
        sys.exit("Triton is not installed: pip install triton")
    main()
