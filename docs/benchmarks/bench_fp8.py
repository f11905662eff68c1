"""How fast matrices are quantized to FP8 and FP4 and multiplied, beside the counted floor, in one run.

    python docs/benchmarks/bench_fp8.py --device cpu      # what `make bench` runs
    python docs/benchmarks/bench_fp8.py --device cuda     # what `make bench-gpu` runs
    python docs/benchmarks/bench_fp8.py --device cuda --parts layers blocks
    python docs/benchmarks/bench_fp8.py --device cpu --small --parts layers   # a dry run

A part is a table, whose rows are written as they are measured, and a text that says what a row is.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor, nn

import amp
from amp.kernels.fp8 import BLOCKS, Fp4Granularity, Granularity, Operand, Quantized
from amp.kernels.philox import Draw
from amp.kernels.quantize import quantize
from amp.kernels.quantize_fp4 import quantize_fp4
from amp.kernels.scaled_mm import scaled_mm
from docs.benchmarks.bench_kernels import (
    copy_rate,
    device_seconds,
    host_seconds,
    launches,
    setting,
    turns,
)
from docs.benchmarks.fp8_training import SMALL, Sizes, block_rows, layer_rows, model_rows

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FULL = Sizes()

RECIPES: dict[str, tuple[Granularity, Granularity]] = {
    "current": ("tensor", "tensor"),
    "rowwise": ("row", "row"),
    "block": ("1x128", "128x128"),
    "mxfp8": ("1x32", "1x32"),
}
"""What shares a scale in activations, and in weights."""

PASSES = {"tensor": 2, "row": 2, "1x128": 1, "128x128": 1, "1x32": 1}
"""How often a number is read."""


def bytes_of(granularity: Granularity, dtype: torch.dtype, results: int = 2) -> int:
    """Return the bytes that quantizing one number moves."""
    return PASSES[granularity] * dtype.itemsize + results


def floor_seconds(
    width: int, tokens: int, flops: float, bandwidth: float, weight_bytes: int = 2
) -> tuple[float, float]:
    """Return the least time of a square layer's three products in BF16 and, with `current`, in FP8.

    Args:
        width: of the layer.
        tokens: in a batch.
        flops: that products reach in BF16, for each second; twice that in FP8.
        bandwidth: bytes for each second.
        weight_bytes: of a weight before it is quantized: 4 at O6, 2 at O7.
    """
    products = 6 * tokens * width**2
    # Input and gradient: read twice, written both ways. The weight: read and written once, in the
    # forward and again in the backward.
    moved = 12 * tokens * width + 2 * (weight_bytes + 1) * width**2
    return products / flops, products / (2 * flops) + moved / bandwidth


def quantizing(x: Tensor, granularity: Granularity) -> Callable[[], object]:
    """Return what quantizes a matrix, both ways."""
    return lambda: quantize(x, E4M3, granularity)


FP4_KINDS: dict[str, tuple[Fp4Granularity, bool, bool]] = {
    "FP4 1x16, transformed": ("1x16", True, False),
    "FP4 1x16, transformed, random": ("1x16", True, True),
    "FP4 16x16": ("16x16", False, False),
    "FP4 1x32, transformed": ("1x32", True, False),
    "FP4 1x32, transformed, random": ("1x32", True, True),
}
"""What shares a scale, whether the transpose is transformed, and whether rounding is stochastic."""


def fp4_bytes_of(granularity: Fp4Granularity, dtype: torch.dtype) -> float:
    """Return the bytes that quantizing one number to FP4 both ways moves."""
    passes = 1 if granularity == "1x32" else 2
    height, width = BLOCKS[granularity]
    return passes * dtype.itemsize + 2 * (0.5 + 1 / ((height or 1) * (width or 1)))


def quantizing_to_fp4(x: Tensor, kind: str) -> Callable[[], Quantized]:
    """Return what quantizes a matrix to FP4, both ways."""
    granularity, hadamard, is_random = FP4_KINDS[kind]
    draw = Draw(torch.zeros((), dtype=torch.int64, device=x.device), seed=0, name=1)
    drawn = draw if is_random else None
    return lambda: quantize_fp4(x, granularity, hadamard=hadamard, draw=drawn)


def layer_in_fp4(x: Tensor, weight: Tensor, grad: Tensor, recipe: str) -> Callable[[], object]:
    """Return what does a layer's three products in FP4, quantization included."""
    of_x = "FP4 1x16, transformed" if recipe == "nvfp4" else "FP4 1x32, transformed"
    of_weight: Fp4Granularity = "16x16" if recipe == "nvfp4" else "1x32"
    inputs, grads = quantizing_to_fp4(x, of_x), quantizing_to_fp4(grad, f"{of_x}, random")

    def multiply(a: Operand | None, b: Operand | None, out_dtype: torch.dtype) -> None:
        assert a is not None
        assert b is not None
        scaled_mm(a, b, out_dtype)

    def run() -> None:
        both = inputs()
        multiply(both.by_row, quantize_fp4(weight, of_weight, by_column=False).by_row, torch.bfloat16)
        of_grad = grads()
        by_column = quantize_fp4(weight, of_weight, by_row=False).by_column
        multiply(of_grad.by_row, by_column, torch.bfloat16)
        multiply(of_grad.by_column, both.by_column, torch.float32)

    return run


def cpu_rows() -> Iterator[list[str]]:
    """Yield a header and the rows of plain torch, measured now."""
    torch.set_num_threads(1)
    memory = torch.randn(2**22)
    yield ["shape", "from", "scales", "B/number", "GB/s", "x of in-place time", "process ms"]
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(1024, 1024).to(dtype)
        granularities: tuple[Granularity, ...] = ("tensor", "row", "1x128", "128x128", "1x32")
        in_place, *seconds = turns(
            [lambda: memory.mul_(1.0), *(quantizing(x, g) for g in granularities)]
        )
        rate = 8 * memory.numel() / in_place
        for granularity, spent in zip(granularities, seconds, strict=True):
            moved = bytes_of(granularity, dtype) * x.numel()
            yield [
                "1024 x 1024",
                str(dtype).removeprefix("torch."),
                granularity,
                str(bytes_of(granularity, dtype)),
                f"{moved / spent / 1e9:.2f}",
                f"{spent / (moved / rate):.1f}",
                f"{spent * 1e3:.1f}",
            ]


def training_step(level: str, recipe: str | None = None) -> Callable[[], None]:
    """Return a training step at a level, of five layers, four of them 512 wide."""
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(512, 512), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(512, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    session = amp.Session(level, fp8=recipe, verbosity=0)
    model, optimizer = session.initialize(model, optimizer)
    x, y = torch.randn(512, 512), torch.randint(16, (512,))

    def run() -> None:
        loss = nn.functional.cross_entropy(model(x), y)
        with session.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def step_rows() -> Iterator[list[str]]:
    """Yield a header and the rows of training steps on the CPU, measured now, in turns."""
    yield ["step of", "process ms", "times O0", "times O4"]
    recipes = [*RECIPES, "delayed", "nvfp4", "mxfp4"]
    names = ["O0", "O4", *(f"O4 with {recipe}" for recipe in recipes)]
    steps = [training_step("O0"), training_step("O4"), *(training_step("O4", x) for x in recipes)]
    for _, run in itertools.product(range(3), steps):  # loops are compiled, and scales are known
        run()
    seconds = turns(steps, rounds=20)
    for name, spent in zip(names, seconds, strict=True):
        yield [name, f"{spent * 1e3:.1f}", *(f"{spent / first:.2f}" for first in seconds[:2])]


def layer_in_fp8(
    x: Tensor, weight: Tensor, grad: Tensor, recipe: str, guesses: bool = True
) -> Callable[[], object]:
    """Return what does a layer's three products in FP8, quantization included.

    With `guesses` the factor that a weight had last is tried, as a module does with `current`.
    """
    of_x, of_weight = RECIPES[recipe]
    of_grad = E5M2 if recipe == "current" else E4M3
    is_known = recipe == "current"
    last: list[Tensor | None] = [None]

    def multiply(a: Operand | None, b: Operand | None, dtype: torch.dtype, **options: bool) -> None:
        assert a is not None
        assert b is not None
        scaled_mm(a, b, dtype, **options)

    def run() -> None:
        both = quantize(x, E4M3, of_x)
        forward = quantize(weight, E4M3, of_weight, by_column=False, guess=last[0])
        if guesses and recipe == "current":
            last[0] = forward.factor
        multiply(both.by_row, forward.by_row, torch.bfloat16, fast_accum=True)
        grads = quantize(grad, of_grad, of_x)
        backward = quantize(
            weight, E4M3, of_weight, by_row=False, factor=forward.factor, is_known=is_known
        )
        multiply(grads.by_row, backward.by_column, torch.bfloat16)
        multiply(grads.by_column, both.by_column, weight.dtype)

    return run


def quantization_rows(device: torch.device, sizes: Sizes = FULL) -> Iterator[list[str]]:
    """Yield a header and the rows of quantization on a GPU."""
    rate = copy_rate(device)
    yield ["h", "what", "device µs", "kernels + copies", "host µs", "GB/s", "of the floor"]
    yield ["", "copy of 2 GiB, by torch", "", "", "", f"{rate / 1e9:.0f}", ""]
    for width in sizes.widths:
        x = torch.randn(sizes.tokens, width, device=device).bfloat16()
        runs: dict[str, tuple[Callable[[], object], float]] = {}
        for granularity, passes in PASSES.items():
            if granularity != "128x128":
                moved = passes * 2 + 2
                runs[granularity] = quantizing(x, granularity), moved  # type: ignore[arg-type]
        for kind, (of_blocks, _, _) in FP4_KINDS.items():
            runs[kind] = quantizing_to_fp4(x, kind), fp4_bytes_of(of_blocks, x.dtype)
        for name, (run, moved) in runs.items():
            seconds = device_seconds(run)
            yield [
                str(width),
                f"quantize {name}, bfloat16",
                f"{seconds * 1e6:.1f}",
                launches(run),
                f"{host_seconds(run) * 1e6:.0f}",
                f"{moved * x.numel() / seconds / 1e9:.0f}",
                f"{moved * x.numel() / rate / seconds:.0%}",
            ]


def product_rows(device: torch.device, sizes: Sizes = FULL) -> Iterator[list[str]]:
    """Yield a header and the rows of three products on a GPU, with weights of O7 and of O6."""
    rate = copy_rate(device)
    yield [
        *("h", "weights", "by", "device µs", "kernels + copies", "host µs", "TFLOP/s"),
        *("speed beside BF16", "of the floor"),
    ]
    for width in sizes.widths:
        x, grad = (torch.randn(sizes.tokens, width, device=device).bfloat16() for _ in range(2))
        products = 6 * sizes.tokens * width**2
        for level, dtype in (("O7: bfloat16", torch.bfloat16), ("O6: float32", torch.float32)):
            weight = torch.randn(width, width, device=device).to(dtype)

            def in_bf16(x: Tensor = x, weight: Tensor = weight, grad: Tensor = grad) -> None:
                low = weight.bfloat16()  # nothing at O7
                x @ low.t()
                grad @ low
                (grad.t() @ x).to(weight.dtype)

            runs: dict[str, Callable[[], object]] = {"torch, BF16": in_bf16}
            for recipe in RECIPES:
                runs[f"reamp, {recipe}"] = layer_in_fp8(x, weight, grad, recipe)
            for recipe in ("nvfp4", "mxfp4"):
                runs[f"reamp, {recipe}"] = layer_in_fp4(x, weight, grad, recipe)
            half = 0.0
            for name, run in runs.items():
                seconds = device_seconds(run)
                half = half or seconds
                _, floor = floor_seconds(width, sizes.tokens, products / half, rate, dtype.itemsize)
                yield [
                    *(str(width), level, name, f"{seconds * 1e6:.1f}", launches(run)),
                    f"{host_seconds(run) * 1e6:.0f}",
                    f"{products / seconds / 1e12:.0f}",
                    f"{half / seconds:.2f}",
                    f"{floor / seconds:.0%}" if name == "reamp, current" else "",
                ]


Part = Callable[[torch.device, Sizes], Iterator[list[str]]]
TRAINING: dict[str, Part] = {"layers": layer_rows, "blocks": block_rows, "models": model_rows}
ON_A_GPU: dict[str, Part] = {
    "quantization": quantization_rows,
    "products": product_rows,
    **TRAINING,
}
ON_A_CPU: dict[str, Part] = {
    "quantization": lambda device, sizes: cpu_rows(),
    "steps": lambda device, sizes: step_rows(),
    **TRAINING,
}
"""The parts. Those of training run on a CPU too: with `--small`, to see that they run."""
_OF_TRAINING = (
    "Forward and backward through modules and autograd, as a script has them. O5, O7, O9 and torchao, "
    "where it is installed, are set beside a model cast to BF16, and O6 beside `torch.autocast`, which "
    "casts the weights in each forward, too; what is compiled is set beside what is compiled."
)
TEXTS = {
    "quantization": (
        "Quantization",
        "A row is one matrix, quantized both ways. It counts the bytes that cannot be done without: "
        "each number read once, twice where the scale is of a tensor or a row, and 1 byte written for "
        "each result; in FP4 half a byte and the scales of blocks, and twice read for `1x16` and "
        "`16x16`.",
    ),
    "products": (
        "Three products of a layer, with quantization",
        "A row is the three products of a square layer by this library's operations alone, with all "
        "quantization, as a module has it from the second step on: with `current` the weight is "
        "quantized in the forward by the factor that it had last, in the backward by the forward's. "
        "Beside it, the three products of the same matrices in BF16. At O7 weights and their gradients "
        "are in BF16, at O6 in FP32, and BF16 casts the weight once. The floor is what `floor_seconds` "
        "counts.",
    ),
    "steps": (
        "A step in plain torch",
        "A row is a step of five layers, four of them 512 wide, a batch of 512, `torch.optim.AdamW`.",
    ),
    "layers": (
        "A linear layer",
        "A row is a square `nn.Linear` without a bias. "
        f"{_OF_TRAINING} `delayed` has a history already.",
    ),
    "blocks": (
        "A layer of a transformer",
        "A row is attention and a gated MLP, as in Llama, all linear layers in FP8. "
        f"{_OF_TRAINING} `delayed` has a history already.",
    ),
    "models": (
        "The step of a language model",
        "A row is a whole step with `torch.optim.AdamW`, fused on a GPU. "
        f"{_OF_TRAINING} BF16 has no FP32 masters, which the levels have; the last layer stays in half "
        "precision.",
    ),
}
"""The title of each part, and what its rows are."""


def write_part(file: TextIO, name: str, rows: Iterable[list[str]]) -> None:
    """Write a part: its title, its text and its table, each row as soon as it is measured."""
    file.write("\n## {}\n\n{}\n\n".format(*TEXTS[name]))
    for i, row in enumerate(rows):
        lines = "| " + " | ".join(row) + " |\n"
        print(lines, end="", flush=True)
        lines += "" if i else "|" + " --- |" * len(row) + "\n"
        file.write(lines)
        file.flush()


def main() -> None:
    """Measure, print, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where to write")
    parser.add_argument("--parts", nargs="+", choices=list(TEXTS), help="which; all by default")
    parser.add_argument("--small", action="store_true", help="small layers and models, for a dry run")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU here: --device cpu measures what plain torch does")
    on_gpu = options.device == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    parts = ON_A_GPU if on_gpu else ON_A_CPU
    names = options.parts or list(parts if on_gpu else parts.keys() - TRAINING.keys())
    names = [name for name in TEXTS if name in names]
    if unknown := [name for name in names if name not in parts]:
        sys.exit(f"no part {', '.join(unknown)} on {options.device}: {', '.join(parts)}")
    if not on_gpu:
        torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / f"fp8-{options.device}.md").open("w") as file:
        file.write(f"# FP8 on {'a GPU' if on_gpu else 'the CPU'}\n\n{setting(device)}\n")
        for name in names:
            write_part(file, name, parts[name](device, SMALL if options.small else FULL))


if __name__ == "__main__":
    main()
