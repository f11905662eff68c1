"""How fast matrices are quantized to FP8 and FP4 and multiplied, beside the counted floor, in one run.

    python docs/benchmarks/bench_fp8.py --device cpu      # what `make bench` runs
    python docs/benchmarks/bench_fp8.py --device cuda     # what `make bench-gpu` runs

A row of quantization counts the bytes that cannot be done without: each number read once, twice where
the scale is of a tensor or a row, and 1 byte written for each result; in FP4 half a byte and the scales
of blocks, and twice read for `1x16` and `16x16`. A row of a layer is its three
products with all quantization, beside BF16's three products; its floor is what `floor_seconds` counts.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

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
    table,
    turns,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WIDTHS = (1024, 2048, 4096, 8192)
TOKENS = 4096

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
    width: int, tokens: int, flops: float, bandwidth: float, weight_bytes: int = 4
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
    # Input and gradient: read twice, written both ways. The weight: likewise in the forward, written
    # once, and read and written once more in the backward.
    moved = 12 * tokens * width + (3 * weight_bytes + 2) * width**2
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


def layer_in_fp8(x: Tensor, weight: Tensor, grad: Tensor, recipe: str) -> Callable[[], object]:
    """Return what does a layer's three products in FP8, quantization included."""
    of_x, of_weight = RECIPES[recipe]
    of_grad = E5M2 if recipe == "current" else E4M3

    def operand(x: Tensor, dtype: torch.dtype, granularity: Granularity, by_row: bool) -> Operand:
        result = quantize(x, dtype, granularity, by_row=by_row, by_column=not by_row)
        found = result.by_row if by_row else result.by_column
        assert found is not None
        return found

    def run() -> None:
        both = quantize(x, E4M3, of_x)
        assert both.by_row is not None
        assert both.by_column is not None
        scaled_mm(both.by_row, operand(weight, E4M3, of_weight, True), torch.bfloat16, fast_accum=True)
        grads = quantize(grad, of_grad, of_x)
        assert grads.by_row is not None
        assert grads.by_column is not None
        scaled_mm(grads.by_row, operand(weight, E4M3, of_weight, False), torch.bfloat16)
        scaled_mm(grads.by_column, both.by_column, torch.float32)

    return run


def gpu_rows(device: torch.device) -> Iterator[list[str]]:
    """Yield a header and the rows of a GPU, measured now."""
    rate = copy_rate(device)
    yield [
        "h",
        "what",
        "by",
        "device µs",
        "kernels + copies",
        "host µs",
        "GB/s or TFLOP/s",
        "of the floor",
    ]
    yield ["", "copy of 2 GiB", "torch", "", "", "", f"{rate / 1e9:.0f} GB/s", ""]
    for width in WIDTHS:
        x, weight, grad = (torch.randn(n, width, device=device) for n in (TOKENS, width, TOKENS))
        low_x, low_grad, low_weight = (each.bfloat16() for each in (x, grad, weight))
        for granularity in ("tensor", "row", "1x128", "1x32"):
            run = quantizing(low_x, granularity)  # type: ignore[arg-type]
            seconds = device_seconds(run)
            moved = bytes_of(granularity, torch.bfloat16) * x.numel()  # type: ignore[arg-type]
            yield [
                str(width),
                f"quantize {granularity}, bfloat16",
                "reamp",
                f"{seconds * 1e6:.1f}",
                launches(run),
                f"{host_seconds(run) * 1e6:.0f}",
                f"{moved / seconds / 1e9:.0f} GB/s",
                f"{moved / rate / seconds:.0%}",
            ]

        for kind, (of_blocks, _, _) in FP4_KINDS.items():
            run = quantizing_to_fp4(low_x, kind)
            seconds = device_seconds(run)
            of_all = fp4_bytes_of(of_blocks, torch.bfloat16) * x.numel()
            yield [
                str(width),
                f"quantize {kind}, bfloat16",
                "reamp",
                f"{seconds * 1e6:.1f}",
                launches(run),
                f"{host_seconds(run) * 1e6:.0f}",
                f"{of_all / seconds / 1e9:.0f} GB/s",
                f"{of_all / rate / seconds:.0%}",
            ]

        def in_bf16(x: Tensor = low_x, weight: Tensor = low_weight, grad: Tensor = low_grad) -> None:
            x @ weight.t()
            grad @ weight
            grad.t() @ x

        half = device_seconds(in_bf16)
        products = 6 * TOKENS * width**2
        yield [
            str(width),
            "layer",
            "torch, BF16",
            f"{half * 1e6:.1f}",
            launches(in_bf16),
            f"{host_seconds(in_bf16) * 1e6:.0f}",
            f"{products / half / 1e12:.0f} TFLOP/s",
            "",
        ]
        _, floor = floor_seconds(width, TOKENS, products / half, rate)
        for recipe in (*RECIPES, "nvfp4", "mxfp4"):
            in_few_bits = layer_in_fp8 if recipe in RECIPES else layer_in_fp4
            run = in_few_bits(low_x, weight, low_grad, recipe)
            seconds = device_seconds(run)
            yield [
                str(width),
                f"layer, {half / seconds:.2f} times BF16",
                f"reamp, {recipe}",
                f"{seconds * 1e6:.1f}",
                launches(run),
                f"{host_seconds(run) * 1e6:.0f}",
                f"{products / seconds / 1e12:.0f} TFLOP/s",
                f"{floor / seconds:.0%}" if recipe == "current" else "",
            ]


def main() -> None:
    """Measure, print, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where to write")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU here: --device cpu measures what plain torch does")
    on_gpu = options.device == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    header = f"# FP8 on {'a GPU' if on_gpu else 'the CPU'}\n\n{setting(device)}\n\n"
    text = header + table(gpu_rows(device) if on_gpu else cpu_rows()) + "\n"
    if not on_gpu:
        text += "\nFive layers, four of them 512 wide, a batch of 512, `torch.optim.AdamW`:\n\n"
        text += table(step_rows()) + "\n"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"fp8-{options.device}.md").write_text(text)


if __name__ == "__main__":
    main()
