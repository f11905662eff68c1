"""What amp costs whatever the size of a model: importing it, a forward, and a function that it patches.

    python docs/benchmarks/bench_overhead.py                      # part of `make bench`
    python docs/benchmarks/bench_overhead.py --beside CHECKOUT    # and the same of another commit

One thread. A forward is that of ten linear layers of 4 x 4, beside the same layers in the same dtype
without amp. A patched function is called with tensors that no session knows, in a session and before
it. Each row is the least of many calls, and all rows of one table were measured in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bench_kernels import setting, table
from torch import nn

TURNS, CALLS = 15, 300
LEVELS = {
    "O0": torch.float32,
    "O2": torch.float16,
    "O3": torch.float16,
    "O5": torch.bfloat16,
}
Call = Callable[[], object]


def least(call: Call, calls: int = CALLS) -> float:
    """Return the least microseconds of one call."""
    best = float("inf")
    for _ in range(calls):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best * 1e6


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return ten layers that compute next to nothing."""
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(10))).to(dtype)


def forwards() -> Iterator[tuple[str, Call, Call]]:
    """Yield what a level's forward is called, with a call of it and one of the same without amp."""
    import amp

    x = torch.ones(2, 4)
    for level, dtype in LEVELS.items():
        model: Any = net()
        amp.Session(level, verbosity=0).initialize(model, torch.optim.SGD(model.parameters(), 0.1))
        plain, given = net(dtype), x.to(dtype)

        def without(plain: nn.Module = plain, given: torch.Tensor = given) -> object:
            return plain(given).float()

        yield f"forward, {level}", lambda model=model: model(x), without


def functions() -> dict[str, Call]:
    """Return calls of what O2 and O1 patch, with tensors that are none of a session's."""
    a, b = torch.zeros(8), torch.ones(8)
    wide = [torch.zeros(8, requires_grad=True) for _ in range(10)]
    for each in wide:
        each.grad = torch.ones(8)
    average = torch.optim.swa_utils.AveragedModel(net())
    other = net()
    five_layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    utils = nn.utils
    grads = [each.grad for each in wide]
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(wide, 0.1)

    def scaled_step() -> None:
        scaler.scale(a.sum())
        scaler.step(optimizer)
        scaler.update()

    return {
        "torch.lerp": lambda: torch.lerp(a, b, 0.5),
        "Tensor.lerp": lambda: a.lerp(b, 0.5),
        "Tensor.lerp_": lambda: a.lerp_(b, 0.5),
        "torch._foreach_lerp_": lambda: torch._foreach_lerp_([a], [b], 0.5),
        "AveragedModel.update_parameters": lambda: average.update_parameters(other),
        "clip_grad_norm_, 10 tensors": lambda: utils.clip_grad_norm_(wide, 1.0),
        "clip_grad_value_, 10 tensors": lambda: utils.clip_grad_value_(wide, 1.0),
        "get_total_norm, 10 tensors": lambda: utils.get_total_norm(grads),
        "Module.zero_grad, 10 tensors": five_layers.zero_grad,
        "GradScaler.step with scale and update, 10 tensors": scaled_step,
        "Tensor.add_, not patched": lambda: a.add_(b),
    }


def session(level: str) -> Any:
    """Open a session for a model of its own."""
    import amp

    model: Any = net()
    opened = amp.Session(level, verbosity=0)
    opened.kept = opened.initialize(model, torch.optim.SGD(model.parameters(), 0.1))
    return opened


def measure() -> dict[str, tuple[float, float]]:
    """Return microseconds with amp and without it, by what they are of."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    calls = functions()
    before = {name: least(call) for name, call in calls.items()}
    opened = session("O2")
    of_functions = {name: (least(call), before[name]) for name, call in calls.items()}
    opened.close()
    with torch.no_grad():
        of_forwards = {name: (least(call), least(plain)) for name, call, plain in forwards()}
    return of_forwards | of_functions


def microseconds_of_import(checkout: Path, what: str) -> float:
    """Return the time of an import in a process that has imported torch."""
    code = f"import torch, time; a = time.perf_counter(); {what}; print(time.perf_counter() - a)"
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-c", code]
    run = subprocess.run(
        command, env=environment, cwd=checkout, capture_output=True, text=True, check=True
    )
    return float(run.stdout) * 1e6


def served(checkout: Path) -> dict[str, tuple[float, float]]:
    """Measure once, with the library in `checkout`."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    run = subprocess.run(
        [sys.executable, __file__, "--serve"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    imports = ("import amp", "import amp; amp.initialize")
    times = {what: (microseconds_of_import(checkout, what), 0.0) for what in imports}
    return {**times, **json.loads(run.stdout)}


def main() -> None:
    """Measure, print, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--beside", type=Path, help="a checkout of another commit")
    parser.add_argument("--serve", action="store_true", help="measure once, for another process")
    arguments = parser.parse_args()
    if arguments.serve:
        print(json.dumps(measure()))
        return
    checkouts = [Path(__file__).parents[2]]
    names = ["µs with amp"]
    if arguments.beside:
        there = arguments.beside.resolve()
        command = ["git", "-C", str(there), "rev-parse", "--short", "HEAD"]
        names.append(f"at {subprocess.check_output(command, text=True).strip()}")
        checkouts.append(there)
    best: list[dict[str, tuple[float, float]]] = [{} for _ in checkouts]
    for turn in range(TURNS):
        for i in range(len(checkouts))[:: 1 if turn % 2 else -1]:
            for name, times in served(checkouts[i]).items():
                known = best[i].get(name, times)
                best[i][name] = min(known[0], times[0]), min(known[1], times[1])
    rows = [
        [
            "what",
            *names,
            "µs without",
            *("on top" if i == 0 else f"{n}, on top" for i, n in enumerate(names)),
        ]
    ]
    for name in best[0]:
        without = min(each[name][1] for each in best)
        with_amp = [each[name][0] for each in best]
        rows.append(
            [
                name,
                *(f"{each:,.1f}" for each in with_amp),
                f"{without:,.1f}",
                *(f"{each - without:,.1f}" for each in with_amp),
            ]
        )
    text = f"# What a call costs on top\n\n{setting(torch.device('cpu'))}\n\n{table(iter(rows))}\n"
    Path(__file__).with_name("overhead.md").write_text(text)


if __name__ == "__main__":
    main()
