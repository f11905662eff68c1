"""How long the host is busy between backward and the next forward, measured without a GPU.

    python docs/benchmarks/bench_host.py                      # part of `make bench`
    python docs/benchmarks/bench_host.py --beside CHECKOUT    # and the step of another commit, too

The step of 161 tensors of two elements, so that nothing but the host's own time counts. This library's
takes the way that it takes on a GPU: plans, tables, and Triton's dispatch of its three launches, to a
driver that only names a GPU and starts nothing; that `.grad` is set, as backward would, counts. Torch's
operations run on the CPU: the same dispatch to kernels that have next to nothing to do. What a real
driver's launches cost comes on top of either.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from bench_kernels import setting, table
from bench_step import Shapes, Weights, with_amp, with_grad_scaler

import amp
from amp.kernels import launch_plans, stepping, update_scale
from amp.kernels.language import triton
from amp.optimizers import FusedAdam
from tests.nodevice import NoDevice

TENSORS = 161
WRAPPED: dict[str, tuple[str, str, bool]] = {
    "plain": ("float32, scaled loss", "O1", False),
    "dtensors": ("the same as DTensors: FSDP2 at every level with masters", "O1", True),
    "plain-masters": ("float16, float32 masters", "O2", False),
    "dtensor-masters": ("the same as DTensors: tensor parallelism", "O2", True),
}
"""Steps of plain tensors, each before that of DTensors: its name, and `with_zero_grad`'s arguments."""

TURNS, CALLS = 10, 300


class Contender:
    """One way to step, in a process of its own like all others; it measures when it is told to."""

    def __init__(self, name: str, way: str, checkout: Path) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", way],
            env={**os.environ, "PYTHONPATH": str(checkout)},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def least(self) -> float:
        """Return the least seconds of some calls."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())


class ShardedWeights(torch.nn.Module):
    """FP32 DTensors, cut over a mesh of this one process."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        from torch import distributed
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        for i, shape in enumerate(shapes):
            sharded = distribute_tensor(torch.zeros(shape), mesh, [Shard(0)])
            self.register_parameter(f"weight{i}", torch.nn.Parameter(sharded))


def with_zero_grad(level: str, sharded: bool) -> Callable[[], None]:
    """Return this library's step and `zero_grad`, of plain tensors or of DTensors."""
    shapes: Shapes = [(2,)] * TENSORS
    model = ShardedWeights(shapes) if sharded else Weights(shapes, torch.device("cpu"))
    session = amp.Session(level, verbosity=0, loss_scale={"init": 1.0})
    _, optimizer = session.initialize(model, FusedAdam(model.parameters(), lr=1e-4))
    params = list(model.parameters())
    grads = [torch.zeros_like(parameter, requires_grad=False) for parameter in params]
    loss = torch.ones(())

    def run() -> None:
        with session.scale_loss(loss, optimizer):
            for parameter, grad in zip(params, grads, strict=True):
                parameter.grad = grad
        optimizer.step()
        optimizer.zero_grad()

    return run


def pretend_a_gpu() -> None:
    """Let Triton launch to a driver that starts nothing."""
    triton.runtime.driver.set_active(NoDevice())
    for module in (launch_plans, update_scale):
        module.uses_triton = lambda device, backend=None: True
    # Tensors are on the CPU in truth.
    for module in (launch_plans, stepping):
        module.takes_at_once = lambda lists, backend=None: False
    launch_plans.Elementwise.run_in_cpp = lambda *_, **__: False
    update_scale.is_on_host = lambda tensor: False


def reamp() -> Callable[[], None]:
    """Return this library's step."""
    pretend_a_gpu()
    scale: dict[str, Any] = {"loss_scale": {"init": 1.0}}
    shapes, cpu = [(2,)] * TENSORS, torch.device("cpu")
    return with_amp(shapes, cpu, lambda params: FusedAdam(params, lr=1e-4), "O2", **scale)


def of_torch(way: str) -> Callable[[], None]:
    """Return the step of torch's GradScaler and AdamW."""
    shapes: Shapes = [(2,)] * TENSORS
    options: dict[str, Any] = {way: True}
    return with_grad_scaler(
        shapes, torch.device("cpu"), lambda params: torch.optim.AdamW(params, lr=1e-4, **options)
    )


def serve(way: str) -> None:
    """Measure once for each line of the standard input."""
    if way == "reamp":
        run = reamp()
    elif way in WRAPPED:
        pretend_a_gpu()
        run = with_zero_grad(*WRAPPED[way][1:])
    else:
        run = of_torch(way)
    for _ in sys.stdin:
        least = float("inf")
        for _ in range(CALLS):
            start = time.perf_counter()
            run()
            least = min(least, time.perf_counter() - start)
        print(least, flush=True)


def least_of(contenders: Sequence[Contender]) -> list[float]:
    """Return the least seconds of each, measured in turns."""
    least = [float("inf")] * len(contenders)
    for turn in range(TURNS):
        for i in [*range(len(contenders))][:: 1 if turn % 2 else -1]:
            least[i] = min(least[i], contenders[i].least())
    return least


def main() -> None:
    """Measure, print, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--beside", type=Path, help="a checkout of another commit")
    parser.add_argument("--serve", metavar="WAY", help="measure for another process")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.serve:
        serve(arguments.serve)
        return
    here = Path(__file__).parents[2]
    contenders = [Contender("reamp O2, FusedAdam", "reamp", here)]
    if arguments.beside:
        there = arguments.beside.resolve()
        command = ["git", "-C", str(there), "rev-parse", "--short", "HEAD"]
        commit = subprocess.check_output(command, text=True).strip()
        contenders.append(Contender(f"the same at {commit}", "reamp", there))
    contenders += [
        Contender(f"copy, GradScaler, AdamW({way}), copy", way, here) for way in ("fused", "foreach")
    ]
    least = least_of(contenders)
    header = f"# The step on the host\n\n{setting(torch.device('cpu'))}\n\n"
    rows = [["tensors", "operation", "by", "host µs", "ratio"]]
    rows += [
        [
            str(TENSORS),
            "AdamW, float16, float32 masters",
            one.name,
            f"{s * 1e6:.0f}",
            f"{s / least[0]:.2f}",
        ]
        for one, s in zip(contenders, least, strict=True)
    ]
    wrapped = [Contender(what, way, here) for way, (what, *_) in WRAPPED.items()]
    of_wrapped = least_of(wrapped)
    more = [["tensors", "FusedAdam, with zero_grad", "host µs", "ratio"]]
    more += [
        [str(TENSORS), one.name, f"{s * 1e6:.0f}", f"{s / of_wrapped[i - i % 2]:.2f}"]
        for i, (one, s) in enumerate(zip(wrapped, of_wrapped, strict=True))
    ]
    text = header + table(iter(rows)) + "\n\n" + table(iter(more)) + "\n"
    Path(__file__).with_name("step-host.md").write_text(text)


if __name__ == "__main__":
    if triton is None:
        sys.exit("Triton is not installed: pip install triton")
    main()
