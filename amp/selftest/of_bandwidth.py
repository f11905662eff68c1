"""Memory bandwidth, in GB/s: figures without a verdict."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from amp.kernels import adam, l2norm, language, stepping, unscale
from amp.selftest.check_registry import Outcome, SkipError, check
from amp.selftest.of_steps import GROUP


def _seconds(device: torch.device, call: Callable[[], Any]) -> float:
    """Return the median time of a call on the device."""
    times = []
    for _ in range(12):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        before = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - before)
    return statistics.median(times[2:])


@check("bandwidth: unscale, l2norm, Adam", 60)
def _bandwidth(device: torch.device) -> Outcome:
    if language.INTERPRETED:
        raise SkipError("the interpreter has none")
    size = 2**26 if device.type == "cuda" else 2**22
    grads = [torch.ones(size, dtype=torch.float16, device=device)]
    masters, models = [torch.ones(size, device=device)], [torch.ones_like(grads[0])]
    moments = [[torch.zeros(size, device=device)] for _ in range(2)]
    steps, inv_scale = [torch.zeros((), device=device)], torch.full((1,), 2.0**-9, device=device)
    targets, found = [torch.empty_like(masters[0])], torch.zeros(1, device=device)
    numbers = adam.ADAM.numbers(GROUP)
    calls: dict[str, tuple[int, Callable[[], Any]]] = {
        "copy": (8, lambda: targets[0].copy_(masters[0])),
        "unscale": (6, lambda: unscale.unscale(grads, targets, inv_scale, found)),
        "l2norm": (2, lambda: l2norm.l2norm(grads, inv_scale, found_inf=found)),
        "Adam": (
            28,
            lambda: stepping.step(
                *(adam.ADAM, numbers, masters, grads, moments, steps),
                models=models,
                inv_scale=inv_scale,
            ),
        ),
    }
    rates = {name: size * each / _seconds(device, call) / 1e9 for name, (each, call) in calls.items()}
    shown = [f"copy {rates['copy']:.0f} GB/s"]
    shown += [f"{name} {rates[name] / rates['copy']:.0%}" for name in ("unscale", "l2norm", "Adam")]
    return Outcome(", ".join(shown))
