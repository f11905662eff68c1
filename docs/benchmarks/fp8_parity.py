"""Loss parity of FP8 and FP4: what every recipe reaches, beside BF16, over several seeds.

    PYTHONPATH=. python docs/benchmarks/fp8_parity.py            # writes docs/benchmarks/fp8-parity.md

Two tasks: examples/char_gpt.py, of which the held-out loss counts, and a small network on
scikit-learn's digits, of which the training loss counts. The last rows are what scales are for:
gradients in E4M3 without any, and NVFP4 without the scale of a tensor.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import io
import logging
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from sklearn.datasets import load_digits
from torch import Tensor, nn

import amp
from amp.casting import fp8_linear
from amp.casting.fp8_history import GRADIENT
from amp.kernels import fp4
from amp.kernels.fp8 import LARGEST_FLOAT
from amp.profiles.fp8_recipe import FP4, RECIPES

ROOT = Path(__file__).parents[2]
ROWS = Path(__file__).with_name("fp8-parity.md")
SEEDS = (0, 1, 2)
HALF = "BF16 (O4)"
UNSCALED = "gradients in E4M3 without scales"
ONE_LEVEL = "nvfp4 without the tensor's scale"
BROKEN = UNSCALED, ONE_LEVEL

WAYS: dict[str, dict[str, Any]] = {
    HALF: {"opt_level": "O4"},
    **{name: {"opt_level": "O6", "fp8": name} for name in RECIPES},
    UNSCALED: {"opt_level": "O6", "fp8": {"format": "e4m3"}},
    ONE_LEVEL: {"opt_level": "O8"},
}
"""The rows, and what `amp.initialize` is given for them."""

TOLERANCE = {"char_gpt": (0.02, 0.03), "digits": (0.05, 0.15)}
"""How much above BF16's a mean loss may be, in FP8 and in FP4."""


def reaches(task: str, way: str, ratio: float) -> bool:
    """Whether a loss that is so many times that of BF16 is as good."""
    return ratio <= 1 + TOLERANCE[task][way in (*FP4, ONE_LEVEL)]


def _without_the_tensors_scale(amax: Tensor, *_: Any) -> Any:
    scale = (amax / 6).clamp(max=448).to(torch.float8_e4m3fn)
    return scale, (1 / scale.float()).clamp(max=LARGEST_FLOAT), torch.ones((), device=amax.device)


@contextlib.contextmanager
def without_scales(way: str) -> Iterator[None]:
    """Quantize gradients as they are, or leave out the tensor's scale, where a row says so."""
    original, two_levels = fp8_linear.Layer.quantize, fp4.two_levels

    def quantize(self: Any, x: Tensor, entry: int, **more: Any) -> Any:
        if entry == GRADIENT:
            more["factor"] = torch.ones((), device=x.device)
        return original(self, x, entry, **more)

    if way == UNSCALED:
        fp8_linear.Layer.quantize = quantize  # type: ignore[method-assign]
    if way == ONE_LEVEL:
        fp4.two_levels = _without_the_tensors_scale
    try:
        yield
    finally:
        fp8_linear.Layer.quantize = original  # type: ignore[method-assign]
        fp4.two_levels = two_levels


@functools.cache
def _char_gpt() -> Any:
    folder = ROOT / "examples"
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location("char_gpt", folder / "char_gpt.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["char_gpt"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def char_gpt(options: dict[str, Any], seed: int, steps: int = 150) -> float:
    """Return the held-out loss of the example, wide enough for every recipe."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump({"amp": options}))
        arguments = {
            "config": config,
            "seed": seed,
            "steps": steps,
            "width": 128,
            "sample": 1,
            "eval-every": steps,
            "save-every": steps,
            "checkpoint": f"{folder}/run.pt",
            "plot": f"{folder}/run.png",
        }
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run = _char_gpt().main([str(x) for k, v in arguments.items() for x in (f"--{k}", v)])
    amp.get_session().close()
    loss: float = run.held_out_losses[-1]
    return loss


def digits(options: dict[str, Any], seed: int, steps: int = 300) -> float:
    """Return the mean training loss of the last 50 steps of a network with three hidden layers."""
    pixels, targets = load_digits(return_X_y=True)
    x = F.pad(torch.tensor(pixels, dtype=torch.float32) / 16, (0, 64))  # 128 wide, for every recipe
    y = torch.tensor(targets)
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(128, 128), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, verbosity=0, **options)
    losses = []
    for _ in range(steps):
        rows = torch.randint(0, len(x), (64,), generator=generator)
        loss = F.cross_entropy(model(x[rows]).float(), y[rows])
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    amp.get_session().close()
    return statistics.mean(losses[-50:])


TASKS: dict[str, Callable[..., float]] = {"char_gpt": char_gpt, "digits": digits}


def mean_loss(task: str, way: str, **more: Any) -> float:
    """Return a task's loss, the mean of all seeds."""
    with without_scales(way):
        return statistics.mean(TASKS[task](WAYS[way], seed, **more) for seed in SEEDS)


def table(losses: dict[str, dict[str, float]]) -> str:
    """Return the rows in Markdown."""
    lines = [
        f"| | {' | '.join(f'{task} | to BF16' for task in TASKS)} |",
        "|---|" + "---|" * 2 * len(TASKS),
    ]
    for way, of_task in losses.items():
        cells = [
            f"{of_task[task]:.4f} | {of_task[task] / losses[HALF][task] - 1:+.1%}" for task in TASKS
        ]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure every row, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROWS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("amp").setLevel(logging.ERROR)
    losses: dict[str, dict[str, float]] = {}
    for way in WAYS:
        losses[way] = {task: mean_loss(task, way) for task in TASKS}
        print(way, losses[way], flush=True)
    text = (
        "# Loss parity of FP8 and FP4\n\n"
        f"Means over {len(SEEDS)} seeds, emulated on a CPU, torch {torch.__version__}.\n"
        "char_gpt: the held-out loss of examples/char_gpt.py, 128 wide, 150 steps, in nats per\n"
        "character. digits: the training loss of a network with three hidden layers on\n"
        "scikit-learn's digits, the last 50 of 300 steps.\n\n"
        "    PYTHONPATH=. python docs/benchmarks/fp8_parity.py\n\n"
    )
    args.out.write_text(f"{text}{table(losses)}\n")
    print(table(losses))


if __name__ == "__main__":
    main()
