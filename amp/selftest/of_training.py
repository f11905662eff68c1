"""Opt levels, host waits and CUDA graphs."""

from __future__ import annotations

import functools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from amp.kernels import adam, language, stepping
from amp.selftest.check_registry import (
    CHECKS,
    Check,
    Outcome,
    SkipError,
    assert_same_bits,
    check,
    needs_gpu,
    needs_triton,
)
from amp.selftest.of_steps import GROUP, SCALE, Run, gradients, starting

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5", "O6", "O7", "O8", "O9")


def _level(level: Any, device: torch.device) -> Outcome:
    try:
        import yaml  # noqa: F401
    except ImportError:
        raise SkipError("PyYAML, which reads the levels, is missing") from None
    import amp
    from amp.arguments import advise_on_devices
    from amp.optimizers import FusedAdam

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 16)).to(
        device
    )
    optimizer: Any = FusedAdam(model.parameters(), lr=1e-2)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(device)
    skipped, losses = [], []
    # O3 has no loss scale: with gradients that float16 rounds to 0, what it learns is left to chance.
    times = 512.0 if level == "O3" else 1.0
    with warnings.catch_warnings(), amp.Session(level, verbosity=0) as session:
        warnings.simplefilter("ignore")
        model, optimizer = session.initialize(model, optimizer)
        checks = bool(session.properties.loss_scaling.check)
        for i in range(5):
            loss = times * (model(x).float() - 1).square().mean()
            losses.append(float(loss))
            with session.scale_loss(
                loss * (math.inf if i == 2 and checks else 1.0), optimizer
            ) as scaled:
                scaled.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            skipped.append(bool(amp.step_was_skipped(optimizer)))
            optimizer.zero_grad()
    assert skipped == [i == 2 and checks for i in range(5)], f"skipped steps: {skipped}"
    assert all(map(math.isfinite, losses)), f"losses: {losses}"
    assert losses[-1] < 0.95 * losses[0], f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}"
    notes = [each for each in advise_on_devices(session.properties, [model]) if "emulate" in each]
    return Outcome("; ".join([f"loss {losses[0]:.3f} to {losses[-1]:.3f}", *notes]))


for _of_level in LEVELS:
    _full_name = f"levels: {_of_level}"
    CHECKS[_full_name] = Check(_full_name, functools.partial(_level, _of_level), 90, False)


def _host_times(device: torch.device, call: Callable[[], Any]) -> float:
    """Return the median time of a call on the host, in microseconds."""
    times = []
    for _ in range(20):
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return statistics.median(times) * 1e6


def _fused(device: torch.device) -> Any:
    from amp.optimizers import FusedAdam

    optimizer = FusedAdam(
        [nn.Parameter(torch.ones(100 + i, device=device)) for i in range(161)], lr=1e-3
    )
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@check("host: no wait in a step")
def _waits(device: torch.device) -> Outcome:
    if language.INTERPRETED:
        raise SkipError("the interpreter takes long")
    optimizer = _fused(device)
    micros = _host_times(device, optimizer.step)
    figure = f"{micros:.0f} us for 161 tensors"
    needs_gpu(device, f"to see whether the host waits; a step takes {figure}")
    needs_triton(device, f"a step takes {figure}")
    before = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        optimizer.step()
        torch.cuda.synchronize(device)
    launches = sum(event.count for event in profile.key_averages() if "Sync" not in event.key)
    return Outcome(f"{figure}, {launches} events on the device")


@check("graphs: a captured step", 60)
def _captured(device: torch.device) -> None:
    needs_gpu(device, "CUDA graphs")
    needs_triton(device, "a step cannot be captured")
    grads = gradients(0, device)
    runs: Sequence[Run] = [starting(adam.ADAM, "masters", device) for _ in range(2)]

    def take(run: Run) -> None:
        arguments = adam.ADAM, adam.ADAM.numbers(GROUP), run.params, grads, run.moments, run.steps
        stepping.step(*arguments, models=run.models, inv_scale=inv_scale)

    inv_scale = torch.full((1,), 1 / SCALE, device=device)
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for run in runs:
            take(run)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        take(runs[0])
    for i in range(50):
        kept = torch.full((1000 + i,), 1.0, device=device)
        pinned = torch.ones(100 + i).pin_memory()
        graph.replay()
        del kept, pinned
        take(runs[1])
    assert_same_bits(runs[0].tensors, [each.cpu() for each in runs[1].tensors], "after 50 replays")
