"""How long the host is busy between backward and the next forward, measured without a GPU.

    python docs/benchmarks/bench_host.py        # part of `make bench`

The step of 161 tensors of two elements, so that nothing but the host's own time counts. This library's
takes the way that it takes on a GPU: plans, tables, and Triton's dispatch of its three launches, to a
driver that only names a GPU and starts nothing; that `.grad` is set, as backward would, counts. Torch's
operations run on the CPU: the same dispatch to kernels that have next to nothing to do. What a real
driver's launches cost comes on top of either.
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
from bench_kernels import setting, table
from bench_step import Shapes, with_amp, with_grad_scaler

from amp.kernels import bulk, tables, update_scale
from amp.kernels.language import triton
from amp.optimizers import FusedAdam
from tests.nodevice import NoDevice

TENSORS = 161
TURNS, CALLS = 10, 300


def use(functions: Mapping[str, Any]) -> None:
    """Ask lists of tensors by these."""
    for name, function in functions.items():
        setattr(bulk, name, function)


def main() -> None:
    """Measure, print, and write the rows."""
    torch.set_num_threads(1)
    triton.runtime.driver.set_active(NoDevice())
    for module in (tables, update_scale):
        module.uses_triton = lambda device, backend=None: True
    bulk.compile_soon().join()
    in_cpp = {name: getattr(bulk, name) for name in bulk.IN_PYTHON}
    shapes: Shapes = [(2,)] * TENSORS
    cpu = torch.device("cpu")

    def reamp() -> Callable[[], None]:
        scale: dict[str, Any] = {"loss_scale": {"init": 1.0}}
        return with_amp(shapes, cpu, lambda params: FusedAdam(params, lr=1e-4), "O2", **scale)

    def of_torch(**options: Any) -> Callable[[], None]:
        return with_grad_scaler(
            shapes, cpu, lambda params: torch.optim.AdamW(params, lr=1e-4, **options)
        )

    contenders: list[tuple[str, Mapping[str, Any], Callable[[], None]]] = [
        ("reamp O2, FusedAdam, with kernels/bulk.cpp", in_cpp, reamp()),
        ("reamp O2, FusedAdam, in Python alone", bulk.IN_PYTHON, reamp()),
        ("copy, GradScaler, AdamW(fused), copy", {}, of_torch(fused=True)),
        ("copy, GradScaler, AdamW(foreach), copy", {}, of_torch(foreach=True)),
    ]
    least = [float("inf")] * len(contenders)
    for turn in range(TURNS):
        for i in [*range(len(contenders))][:: 1 if turn % 2 else -1]:
            _, functions, run = contenders[i]
            use(functions)
            for _ in range(CALLS):
                start = time.perf_counter()
                run()
                least[i] = min(least[i], time.perf_counter() - start)
    header = f"# The step on the host\n\n{setting(cpu)}\n\n"
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
