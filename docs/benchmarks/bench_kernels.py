"""How fast the kernels are, beside torch's own operations and the memory's own speed, in one run.

    python docs/benchmarks/bench_kernels.py --device cuda     # what `make bench-gpu` runs
    python docs/benchmarks/bench_kernels.py --device cpu      # what `make bench` runs

Each row is an operation on one set of tensors. Its bytes are those that it cannot do without: every
input read once, every output written once. On a GPU they are set against a device-to-device copy of the
same run, timed with events; ResNet-50's set fits into a large L2 cache, and may beat the copy. On the
CPU, with one thread and
in process time, against an in-place multiplication, and all contenders take turns round by round.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp.kernels.adam import ADAMW
from amp.kernels.axpby import axpby
from amp.kernels.l2norm import l2norm
from amp.kernels.language import triton
from amp.kernels.master_copy import master_copy, merge
from amp.kernels.stepping import step
from amp.kernels.unscale import check, unscale

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def resnet50() -> list[tuple[int, ...]]:
    """The 161 parameters of torchvision's ResNet-50, 25.6e6 elements."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    width = 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions = [(planes, width, 1, 1), (planes, planes, 3, 3), (4 * planes, planes, 1, 1)]
            if block == 0:
                convolutions.append((4 * planes, width, 1, 1))
            for shape in convolutions:
                shapes += [shape, (shape[0],), (shape[0],)]
            width = 4 * planes
    return [*shapes, (1000, 2048), (1000,)]


def gpt2(d: int, layers: int) -> list[tuple[int, ...]]:
    """The parameters of GPT-2: 1.56e9 elements for XL, 0.77e9 for large."""
    layer = [
        (d,),
        (d,),
        (d, 3 * d),
        (3 * d,),
        (d, d),
        (d,),
        (d,),
        (d,),
        (d, 4 * d),
        (4 * d,),
        (4 * d, d),
        (d,),
    ]
    return [(50257, d), (1024, d), *(layers * layer), (d,), (d,)]


SETS: tuple[dict[str, list[tuple[int, ...]]], ...] = (
    {"ResNet-50": resnet50()},
    {"GPT-2 XL": gpt2(1600, 48), "GPT-2 large": gpt2(1280, 36)},
    {"flat 1e9": [(10**9,)], "flat 5e8": [(5 * 10**8,)]},
)
"""The sets of tensors by name, each with a smaller one for GPUs with less memory."""
BYTES = 30
"""The memory that the largest contender takes for each element: AdamW with masters and temporaries."""


def elements_in(shapes: list[tuple[int, ...]]) -> int:
    """Return how many elements tensors of these shapes have."""
    return sum(torch.Size(shape).numel() for shape in shapes)


def sets_for(memory: int) -> dict[str, list[tuple[int, ...]]]:
    """Return the largest sets that a GPU with so many bytes has room for."""
    found = {}
    for sets in SETS:
        fitting = {name: each for name, each in sets.items() if BYTES * elements_in(each) <= memory}
        found |= dict([*fitting.items()][:1])
    return found


class Contender(NamedTuple):
    """One way to do an operation; `run` takes tensors that were made for it."""

    name: str
    run: Callable[[], object]


class Operation(NamedTuple):
    """An operation on a set of tensors, ours first. Contenders may be made as they are asked for."""

    name: str
    bytes_per_element: int
    contenders: Iterable[Contender]


def like(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return random tensors."""
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def operations(shapes: list[tuple[int, ...]], device: torch.device) -> Iterator[Operation]:
    """Yield the operations, each with tensors of its own that are freed before the next."""
    found, half, one = (torch.tensor([x], device=device) for x in (0.0, 0.5, 1.0))
    amp_foreach = torch._amp_foreach_non_finite_check_and_unscale_

    for dtype in (F16, F32):
        name = str(dtype).removeprefix("torch.")
        grads = like(shapes, dtype, device)
        yield Operation(
            f"unscale {name} in place",
            2 * dtype.itemsize,
            [
                Contender("reamp", lambda g=grads: unscale(g, g, one, found)),
                Contender("`_amp_foreach_…unscale_`", lambda g=grads: amp_foreach(g, found, one)),
            ],
        )
        yield Operation(
            f"check {name}",
            dtype.itemsize,
            [
                Contender("reamp", lambda g=grads: check(g, one, found)),
                Contender("`_amp_foreach_…unscale_`", lambda g=grads: amp_foreach(g, found, one)),
            ],
        )
        yield Operation(
            f"l2norm {name}",
            dtype.itemsize,
            [
                Contender("reamp", lambda g=grads: l2norm(g, found_inf=found, max_norm=1.0)),
                Contender("`_foreach_norm`", lambda g=grads: torch._foreach_norm(g, 2, dtype=F32)),
            ],
        )
        del grads

    grads, masters = like(shapes, F16, device), like(shapes, F32, device)

    def copy_and_unscale() -> None:
        torch._foreach_copy_(masters, grads)
        amp_foreach(masters, found, half)

    yield Operation(
        "unscale float16 to float32",
        6,
        [
            Contender("reamp", lambda: unscale(grads, masters, half, found)),
            Contender("`_foreach_copy_`, `_amp_foreach_…unscale_`", copy_and_unscale),
        ],
    )

    def copy_unscale_and_add() -> None:
        new = [grad.float() for grad in grads]
        amp_foreach(new, found, half)
        torch._foreach_add_(masters, new)

    yield Operation(
        "axpby float16 into float32",
        10,
        [
            Contender("reamp", lambda: axpby(half, grads, 1.0, masters, masters, found)),
            Contender("float(), `_amp_foreach_…unscale_`, `_foreach_add_`", copy_unscale_and_add),
        ],
    )
    for dtype in (F16, BF16):
        model = [grad.to(dtype) for grad in grads]
        yield Operation(
            f"master_copy float32 to {str(dtype).removeprefix('torch.')}",
            6,
            [
                Contender("reamp", lambda m=model: master_copy(masters, m)),
                Contender("`_foreach_copy_`", lambda m=model: torch._foreach_copy_(m, masters)),
            ],
        )
    yield from with_merges(masters)


def with_merges(masters: list[Tensor]) -> Iterator[Operation]:
    """Yield merges with parameters that nothing has written to, alone and in an optimizer's step."""
    numbers = ADAMW.numbers(
        dict.fromkeys(("bias_correction", "decoupled_weight_decay"), True)
        | {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    )
    moments = [list(map(torch.zeros_like, masters)) for _ in range(2)]
    steps = [torch.zeros((), device=master.device) for master in masters]

    def phase(models: list[Tensor], grads: list[Tensor]) -> Callable[[], None]:
        weights = list(map(torch.nn.Parameter, masters))
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        wide: list[Any] = [weight.grad for weight in weights]
        optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
        found, one = (torch.tensor([x], device=masters[0].device) for x in (0.0, 1.0))

        def run() -> None:
            unscale(grads, wide, one, found)
            optimizer.step()
            master_copy(masters, models)

        return run

    def adamw(models: list[Tensor], grads: list[Tensor], merges: bool) -> None:
        step(ADAMW, numbers, masters, grads, moments, steps, models=models, merges=merges)

    for dtype in (F16, BF16):
        name = str(dtype).removeprefix("torch.")
        models, grads = [[master.to(dtype) for master in masters] for _ in range(2)]
        yield Operation(
            f"merge {name} into float32",
            6,
            [
                Contender("reamp", lambda m=models: merge(m, masters)),
                Contender("plain torch", lambda m=models: merge(m, masters, backend="reference")),
                Contender("unscale, AdamW(fused), copy", phase(models, grads)),
            ],
        )
        yield Operation(
            f"AdamW, {name}, float32 masters",
            28,
            [
                Contender("reamp", lambda m=models, g=grads: adamw(m, g, merges=False)),
                Contender("reamp, with a merge", lambda m=models, g=grads: adamw(m, g, merges=True)),
            ],
        )


# On a GPU.


def device_seconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Return the median time between events around one call, with the queue kept full."""
    for _ in range(3):
        run()
    ahead = 2 * host_seconds(run, 5) + 1e-3
    spans = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(round(2e9 * ahead))  # cycles, so that the host's own time is not measured
        start.record()
        run()
        end.record()
        spans.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in spans) / 1e3


def host_seconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Return the median time after which a call gives the host back."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def launches(run: Callable[[], object]) -> str:
    """Return how many kernels a call starts, and how many copies and fills."""
    run()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        run()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    names = [event.name for event in profile.events() or () if event.device_type == cuda]
    copies = sum(name.startswith("Mem") for name in names)
    return f"{len(names) - copies} + {copies}"


def copy_rate(device: torch.device) -> float:
    """Return the bytes per second, read and written, of a copy of 4 GiB on the device."""
    source, target = (torch.randn(2**29, device=device) for _ in range(2))
    source.copy_(torch.randn(2**20, device=device).repeat(2**9))
    return 2**32 / device_seconds(lambda: target.copy_(source))


Operations = Callable[[list[tuple[int, ...]], torch.device], Iterator[Operation]]


def gpu_rows(device: torch.device, operations: Operations) -> Iterator[list[str]]:
    """Yield a header and the rows of every set, measured now."""
    rate = copy_rate(device)
    yield [
        *("set", "operation", "B/param", "by", "GB/s", "% of copy"),
        *("device µs", "kernels + copies", "host µs", "ratio"),
    ]
    yield ["2 GiB", "copy_", "", "torch", f"{rate / 1e9:.0f}", "100", "", "", "", ""]
    for name, shapes in sets_for(torch.cuda.get_device_properties(device).total_memory).items():
        elements = elements_in(shapes)
        for operation in operations(shapes, device):
            ours = None
            for contender in operation.contenders:
                seconds = device_seconds(contender.run)
                ours = ours or seconds
                speed = operation.bytes_per_element * elements / seconds
                yield [
                    f"{name} ({len(shapes)})",
                    operation.name,
                    str(operation.bytes_per_element),
                    contender.name,
                    f"{speed / 1e9:.0f}",
                    f"{100 * speed / rate:.1f}",
                    f"{seconds * 1e6:.1f}",
                    launches(contender.run),
                    f"{host_seconds(contender.run) * 1e6:.0f}",
                    f"{seconds / ours:.2f}",
                ]
                del contender  # before the next one is made: a model is in a reference cycle
                gc.collect()
                torch.cuda.empty_cache()
            del operation


# On the CPU.


def turns(runs: list[Callable[[], object]], rounds: int = 12) -> list[float]:
    """Return the least process time of each run, all of them taking turns."""
    least = [float("inf")] * len(runs)
    for turn in range(rounds):
        for i in [*range(len(runs))][:: 1 if turn % 2 else -1]:
            start = time.process_time()
            runs[i]()
            least[i] = min(least[i], time.process_time() - start)
    return least


def cpu_rows(device: torch.device, operations: Operations) -> Iterator[list[str]]:
    """Yield a header and the rows of ResNet-50's set, measured now."""
    torch.set_num_threads(1)
    shapes = resnet50()
    elements = elements_in(shapes)
    memory = torch.randn(elements)
    yield ["set", "operation", "B/param", "by", "GB/s", "x of in-place time", "process ms", "ratio"]
    for operation in operations(shapes, device):
        contenders = list(operation.contenders)
        runs = [lambda: memory.mul_(1.0), *(contender.run for contender in contenders)]
        in_place, *seconds = turns(runs)
        rate = 8 * elements / in_place
        for contender, spent in zip(contenders, seconds, strict=True):
            moved = operation.bytes_per_element * elements
            yield [
                f"ResNet-50 ({len(shapes)})",
                operation.name,
                str(operation.bytes_per_element),
                contender.name,
                f"{moved / spent / 1e9:.1f}",
                f"{spent / (moved / rate):.2f}",
                f"{spent * 1e3:.1f}",
                f"{spent / seconds[0]:.2f}",
            ]


def table(rows: Iterable[list[str]], file: Path | None = None) -> str:
    """Return rows as a Markdown table; print them as they come, and append them to a file at once."""
    lines: list[str] = []
    for row in rows:
        new = ["| " + " | ".join(row) + " |"]
        if not lines:
            new.append("|" + " --- |" * len(row))
        lines += new
        print("\n".join(new), flush=True)
        if file is not None:
            with file.open("a") as opened:
                opened.write("\n".join(new) + "\n")
    return "\n".join(lines)


def setting(device: torch.device) -> str:
    """Return what the numbers hold for: hardware, versions, commit."""
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        info = Path("/proc/cpuinfo")
        names = info.read_text().split("model name")[1:] if info.exists() else []
        hardware = names[0].split("\n")[0].strip("\t: ") if names else platform.processor()
        hardware += ", 1 thread"
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        commit = ""
    facts = [
        hardware,
        f"torch {torch.__version__}",
        f"triton {getattr(triton, '__version__', 'none')}",
        f"Python {platform.python_version()}",
        f"commit {commit or 'unknown'}",
        time.strftime("%Y-%m-%d"),
    ]
    return ", ".join(facts)


def main(title: str, stem: str, operations: Operations, description: str | None) -> None:
    """Measure, print, and write the rows."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where to write")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU here: --device cpu measures what plain torch does")
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    rows = (gpu_rows if device.type == "cuda" else cpu_rows)(device, operations)
    header = f"# {title} on {'a GPU' if device.type == 'cuda' else 'the CPU'}\n\n{setting(device)}\n\n"
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"{stem}-{options.device}.md"
    file.write_text(header)  # what is cut has the rows that were measured
    table(rows, file)


if __name__ == "__main__":
    main("Kernels", "kernels", operations, __doc__)
