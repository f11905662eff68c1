"""Whole iterations of small models on the CPU, where the host's time is all there is to see.

    python docs/benchmarks/bench_small.py      # `make bench` runs it

Beside each level stands what a script would have without it, with the same AdamW(fused=True): plain
FP32 at O0, torch.autocast with a GradScaler in float16 at O1 and O2, torch.autocast in bfloat16 at O4
and O5, where nothing checks gradients and amp does. Each contender runs in a process of its own, one
thread, in turns; a row is the median of the ratios of rounds, in process time.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from bench_kernels import setting, table
from torch import nn

import amp
from amp.optimizers import FusedAdam

LEVELS = ("O0", "O1", "O2", "O4", "O5")
LAYERS = (2, 50)
ROUNDS, CALLS, WARM_UP = 40, 10, 40
WAYS = ("without amp", "AdamW(fused=True)", "FusedAdam")


def training(way: str, level: str, layers: int) -> Callable[[], None]:
    """Return one iteration: zero_grad, forward, backward and step."""
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(32, 32), nn.ReLU())]
    model: nn.Module = nn.Sequential(*parts, nn.Linear(32, 1))
    x, y = torch.randn(8, 32), torch.randn(8, 1)
    optimizer: torch.optim.Optimizer
    if way == "FusedAdam":
        optimizer = FusedAdam(model.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    dtype = torch.float16 if level in ("O1", "O2") else torch.bfloat16
    scaler = torch.amp.GradScaler("cpu", enabled=level in ("O1", "O2"))

    def without() -> None:
        optimizer.zero_grad()
        with nullcontext() if level == "O0" else torch.autocast("cpu", dtype):
            loss = (model(x).float() - y).pow(2).mean()
        if not scaler.is_enabled():
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()

    if way == WAYS[0]:
        return without
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def iteration() -> None:
        optimizer.zero_grad()
        loss = (model(x).float() - y).pow(2).mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return iteration


def serve(way: str, level: str, layers: int) -> None:
    """Print the microseconds of an iteration for each line of the standard input."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    run = training(way, level, layers)
    for _ in range(WARM_UP):
        run()
    for _ in sys.stdin:
        start = time.process_time_ns()
        for _ in range(CALLS):
            run()
        print((time.process_time_ns() - start) / CALLS / 1e3, flush=True)


def measured(level: str, layers: int) -> list[list[float]]:
    """Return the microseconds of each round, for each of `WAYS`."""
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, way, level, str(layers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for way in WAYS
    ]
    times: list[list[float]] = [[] for _ in WAYS]
    for _ in range(ROUNDS):
        for process, column in zip(processes, times, strict=True):
            assert process.stdin is not None
            assert process.stdout is not None
            print(file=process.stdin, flush=True)
            column.append(float(process.stdout.readline()))
    for process in processes:
        process.communicate()
    return times


def main() -> None:
    """Measure, print, and write the rows."""
    rows = [["tensors", "level", *(f"{way}, µs" for way in WAYS), *(f"ratio, {x}" for x in WAYS[1:])]]
    for layers in LAYERS:
        for level in LEVELS:
            beside, *ours = measured(level, layers)
            ratios = [
                statistics.median(a / b for a, b in zip(each, beside, strict=True)) for each in ours
            ]
            micros = [f"{statistics.median(each):.0f}" for each in (beside, *ours)]
            rows.append([str(2 * layers + 2), level, *micros, *(f"{ratio:.2f}" for ratio in ratios)])
    header = f"# Small models on the CPU\n\n{setting(torch.device('cpu'))}\n\n"
    text = header + table(rows) + "\n"
    Path(__file__).with_name("small-models.md").write_text(text)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        main()
