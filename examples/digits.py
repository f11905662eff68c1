"""Train a small convolutional net on real handwritten digits, at every opt level or at one.

    python examples/digits.py                        # O0 to O5, one after another
    python examples/digits.py --opt-level O2
    python examples/digits.py --config examples/digits.yaml

The digits are the 1,797 8x8 images that ship inside scikit-learn. A quarter of them is held out.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import yaml
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import amp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
PICTURES = (".png", ".svg", ".pdf")


class DigitNet(nn.Module):
    """Images `[B, 1, 8, 8]` in, logits `[B, 10]` out."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(32 * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        return self.classifier(self.features(images).flatten(1))


@dataclass
class Run:
    """The results of one training run."""

    level: str
    weight_dtype: str = ""
    accuracy: float = 0.0
    skipped: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)

    def record(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Note how a step went, for the table and the picture. The host waits for the device."""
        self.losses.append(loss.item())
        self.scales.append(amp.loss_scale())
        self.skipped += amp.step_was_skipped(optimizer)


def load_data(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set."""
    pixels, targets = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(targets)
    train, test = train_test_split(
        torch.arange(len(labels)), test_size=0.25, random_state=seed, stratify=labels
    )
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


@torch.no_grad()
def evaluate(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """Return the accuracy, 0 to 1."""
    model.eval()
    images, labels = (tensor.to(device) for tensor in data.tensors)
    return (model(images).argmax(1) == labels).float().mean().item()


def train(options: dict[str, Any], args: argparse.Namespace) -> Run:
    """Train once with these `amp.initialize` options."""
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    train_data, test_data = load_data(args.seed)
    loader = DataLoader(train_data, batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = DigitNet().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)

    model, optimizer = amp.initialize(model, optimizer, **options)

    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr, total_steps=args.epochs * len(loader)
    )
    run = Run(str(options.get("opt_level", "O1")))
    started = time.perf_counter()
    progress = tqdm(total=args.epochs * len(loader), desc=Path(run.level).stem, unit="step")
    for _ in range(args.epochs):
        model.train()
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            schedule.step()
            run.record(loss, optimizer)
            progress.set_postfix(loss=f"{run.losses[-1]:.3f}", refresh=False)
            progress.update()
    progress.close()
    run.seconds = time.perf_counter() - started
    run.accuracy = evaluate(model, test_data, device)
    run.weight_dtype = str(model.classifier.weight.dtype).removeprefix("torch.")
    return run


def table(runs: list[Run]) -> str:
    """Return one row per run, in Markdown."""
    lines = [
        "| level | weight dtype | test accuracy | skipped steps | final loss scale | seconds |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {run.level} | {run.weight_dtype} | {run.accuracy:.1%} | {run.skipped} "
        f"| {run.scales[-1]:g} | {run.seconds:.1f} |"
        for run in runs
    ]
    return "\n".join(lines)


def plot(runs: list[Run], path: Path) -> None:
    """Draw loss and loss scale over the steps, a line per run."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1))
    styles = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
    for run, style in zip(runs, styles * len(runs), strict=False):
        window = torch.tensor(run.losses).unfold(0, min(10, len(run.losses)), 1).mean(1)
        top.plot(window, linestyle=style, linewidth=1.3, label=Path(run.level).stem)
        bottom.plot(run.scales, linestyle=style, linewidth=1.3)
    top.set(yscale="log", ylabel="training loss (mean of 10 steps)", title="scikit-learn digits")
    top.legend(ncols=3)
    bottom.set(yscale="log", ylabel="loss scale", xlabel="step")
    bottom.set_yscale("log", base=2)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--opt-level", help="a level, an alias or a profile; default: O0 to O5")
    parser.add_argument("--config", type=Path, help="YAML whose amp: block is given to initialize")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plot", type=Path, default=Path("outputs/digits.png"))
    args = parser.parse_args(argv)
    if args.plot.suffix.lower() not in PICTURES:
        parser.error(f"--plot {args.plot}: a picture is a {', '.join(PICTURES)} file")
    return args


def main(argv: list[str] | None = None) -> list[Run]:
    """Train at the levels that were asked for, and show what came out."""
    args = parse_args(argv)
    options: dict[str, Any] = {}
    if args.config is not None:
        options = yaml.safe_load(args.config.read_text())["amp"]
    if args.opt_level is not None:
        options["opt_level"] = args.opt_level
    levels = [options["opt_level"]] if "opt_level" in options else LEVELS
    runs = [train({**options, "opt_level": level}, args) for level in levels]
    print(f"\n{table(runs)}\n")
    plot(runs, args.plot)
    print(f"Loss and loss scale per level: {args.plot}")
    return runs


if __name__ == "__main__":
    main()
