"""Train a DCGAN on real handwritten digits: two models, two optimizers, three losses.

    python examples/dcgan.py                         # O2; run it again to go on where it stopped
    python examples/dcgan.py --opt-level O5 --fresh
    python examples/dcgan.py --config examples/dcgan.yaml

The digits are the 1,797 8x8 images that ship inside scikit-learn. Each loss has its own scale: 0 for
the discriminator on real images, 1 for it on generated ones, 2 for the generator.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import yaml
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import amp

REAL, FAKE, GENERATOR = range(3)
NOISE = 16
PICTURES = (".png", ".svg", ".pdf")


def make_generator() -> nn.Module:
    """Return a net from noise `[B, 16, 1, 1]` to images `[B, 1, 8, 8]` in -1 to 1."""
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 64, 4, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def make_discriminator() -> nn.Module:
    """Return a net from images `[B, 1, 8, 8]` to logits `[B, 1]`, positive for real ones."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 1),
    )


def initialize_weights(module: nn.Module) -> None:
    """Draw the weights as the DCGAN paper does (Radford et al. 2016)."""
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.05)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


@dataclass
class Run:
    """The history of a run."""

    step: int = 0
    discriminator_losses: list[float] = field(default_factory=list)
    generator_losses: list[float] = field(default_factory=list)
    scales: list[list[float]] = field(default_factory=list)


class Trainer:
    """Both models, both optimizers, and where the run stands."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.args = args
        self.device = torch.device(args.device)
        self.run = Run()
        pixels, _ = load_digits(return_X_y=True)
        images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
        self.images = images.to(self.device)
        self.net_d = make_discriminator().apply(initialize_weights).to(self.device)
        self.net_g = make_generator().apply(initialize_weights).to(self.device)
        # 1e-8, Adam's default, is 0 in float16, and O3 has no FP32 weights to step.
        self.opt_d, self.opt_g = (
            torch.optim.Adam(net.parameters(), lr=args.lr, betas=(0.5, 0.999), eps=1e-4)
            for net in (self.net_d, self.net_g)
        )

        (self.net_d, self.net_g), (self.opt_d, self.opt_g) = amp.initialize(
            [self.net_d, self.net_g], [self.opt_d, self.opt_g], num_losses=3, **args.amp
        )

    def train_step(self) -> None:
        """Improve the discriminator on a real and a generated batch, then the generator."""
        # What is drawn is a function of the step, so that a resumed run draws the same.
        draw = torch.Generator().manual_seed(self.args.seed * 1_000_003 + self.run.step)
        size = self.args.batch_size
        chosen = torch.randint(len(self.images), (size,), generator=draw)
        real = self.images[chosen.to(self.device)]
        noise = torch.randn(size, NOISE, 1, 1, generator=draw).to(self.device)
        ones, zeros = torch.ones(size, 1, device=self.device), torch.zeros(size, 1, device=self.device)

        self.opt_d.zero_grad()
        loss_real = F.binary_cross_entropy_with_logits(self.net_d(real), ones)
        with amp.scale_loss(loss_real, self.opt_d, loss_id=REAL) as scaled_loss:
            scaled_loss.backward()
        fake = self.net_g(noise)
        loss_fake = F.binary_cross_entropy_with_logits(self.net_d(fake.detach()), zeros)
        with amp.scale_loss(loss_fake, self.opt_d, loss_id=FAKE) as scaled_loss:
            scaled_loss.backward()
        self.opt_d.step()

        self.opt_g.zero_grad()
        loss_g = F.binary_cross_entropy_with_logits(self.net_d(fake), ones)
        with amp.scale_loss(loss_g, self.opt_g, loss_id=GENERATOR) as scaled_loss:
            scaled_loss.backward()
        self.opt_g.step()

        self.run.step += 1
        self.run.discriminator_losses.append((loss_real + loss_fake).item())
        self.run.generator_losses.append(loss_g.item())
        self.run.scales.append([amp.loss_scale(i) for i in range(3)])

    def save(self, path: Path) -> None:
        """Write a checkpoint; a kill in the middle leaves the one before."""
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "net_d": self.net_d.state_dict(),
            "net_g": self.net_g.state_dict(),
            "opt_d": self.opt_d.state_dict(),
            "opt_g": self.opt_g.state_dict(),
            "amp": amp.state_dict(),
            "run": asdict(self.run),
            "seed": self.args.seed,
        }
        amp.save(path, state)

    def load(self, path: Path) -> None:
        """Go on where a checkpoint was written."""
        state = torch.load(path, weights_only=True, map_location=self.device)
        if state["seed"] != self.args.seed:
            raise SystemExit(
                f"{path} was trained with --seed {state['seed']}, not {self.args.seed}; "
                "give that seed, or --fresh to start over"
            )
        for name in ("net_d", "net_g", "opt_d", "opt_g"):
            getattr(self, name).load_state_dict(state[name])
        amp.load_state_dict(state["amp"])
        self.run = Run(**state["run"])

    @torch.no_grad()
    def generate(self, count: int) -> Tensor:
        """Return images `[count, 8, 8]` in -1 to 1, the same ones for a seed."""
        draw = torch.Generator().manual_seed(self.args.seed)
        self.net_g.eval()
        images = self.net_g(torch.randn(count, NOISE, 1, 1, generator=draw).to(self.device))
        self.net_g.train()
        return images.squeeze(1).cpu()


def plot(trainer: Trainer, path: Path) -> None:
    """Draw the losses, the loss scales and a grid of generated digits."""
    run = trainer.run
    figure = plt.figure(figsize=(11, 5))
    left, right = figure.subfigures(1, 2, squeeze=False)[0]
    top, bottom = left.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    top.plot(run.discriminator_losses, label="discriminator", linewidth=1)
    top.plot(run.generator_losses, label="generator", linewidth=1)
    top.set(ylabel="loss", title=f"DCGAN on digits, {trainer.args.amp.get('opt_level', 'O1')}")
    top.legend()
    for i, (name, style) in enumerate((("D real", "-"), ("D fake", "--"), ("G", ":"))):
        bottom.plot([scales[i] for scales in run.scales], style, label=name)
    bottom.set_yscale("log", base=2)
    bottom.set(ylabel="loss scale", xlabel="step")
    bottom.legend(ncols=3)
    axes = right.subplots(8, 8).flatten()
    for axis, image in zip(axes, trainer.generate(len(axes)), strict=True):
        axis.imshow(image.numpy(), cmap="gray_r", vmin=-1, vmax=1)
        axis.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line and the config; the command line takes precedence."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--opt-level", help="a level, an alias or a profile; default: O2")
    parser.add_argument("--config", type=Path, help="YAML with an amp: and a train: block")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpoint", type=Path, default=Path("outputs/dcgan.pt"))
    parser.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
    parser.add_argument("--fresh", action="store_true", help="start over, whatever was saved")
    parser.add_argument("--plot", type=Path, default=Path("outputs/dcgan.png"))
    config, _ = parser.parse_known_args(argv)
    options: dict[str, Any] = {"opt_level": "O2"}
    if config.config is not None:
        blocks = yaml.safe_load(config.config.read_text())
        known = vars(config).keys()
        unknown = [key for key in blocks.get("train", {}) if key not in known]
        if unknown:
            parser.error(f"{config.config}: train: has no option {', '.join(unknown)}")
        parser.set_defaults(**blocks.get("train", {}))
        options |= blocks.get("amp", {})
    args = parser.parse_args(argv)
    if args.plot.suffix.lower() not in PICTURES:
        parser.error(f"--plot {args.plot}: a picture is a {', '.join(PICTURES)} file")
    if args.opt_level is not None:
        options["opt_level"] = args.opt_level
    args.amp = options
    return args


def main(argv: list[str] | None = None) -> Run:
    """Train, or go on training, and show what came out."""
    args = parse_args(argv)
    trainer = Trainer(args)
    if args.checkpoint.exists() and not args.fresh:
        trainer.load(args.checkpoint)
        print(f"Going on at step {trainer.run.step} of {args.checkpoint}")
    run = trainer.run
    with tqdm(total=args.steps, initial=run.step, unit="step") as progress:
        while run.step < args.steps:
            trainer.train_step()
            progress.set_postfix(
                d=f"{run.discriminator_losses[-1]:.2f}",
                g=f"{run.generator_losses[-1]:.2f}",
                refresh=False,
            )
            progress.update()
            if run.step % args.save_every == 0 or run.step == args.steps:
                trainer.save(args.checkpoint)
    plot(trainer, args.plot)
    print(f"{run.step} steps at {args.amp['opt_level']}; loss scales {run.scales[-1]}; {args.plot}")
    return run


if __name__ == "__main__":
    main()
