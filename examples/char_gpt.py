"""Train a small character-level GPT on the source of Python's standard library.

    python examples/char_gpt.py                      # O2; run it again to go on where it stopped
    python examples/char_gpt.py --opt-level O5 --fresh
    python examples/char_gpt.py --config examples/char_gpt.yaml
    torchrun --nproc-per-node 2 examples/char_gpt.py --parallel fsdp2    # or ddp, tp, fsdp2+tp

Kill it whenever you like: the next run continues from the checkpoint, and ends with the weights of an
uninterrupted run, on a CPU bit for bit.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import sysconfig
import time
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import yaml
from parallel import KINDS, Parallel
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import amp
from amp.optimizers import FusedAdam

TEXT_LIMIT = 4_000_000
"""How many characters of the standard library are read."""

VOCABULARY_SIZE = 96
PICTURES = (".png", ".svg", ".pdf")

SETTINGS = (
    "steps",
    "accumulate",
    "batch_size",
    "lr",
    "warmup",
    "weight_decay",
    "clip",
    "seed",
    "device",
    "threads",
    "amp",
)
"""Options that a run must share with the one it continues, to end with the same weights."""

# idlelib, and what is not part of the library; tables of numbers; the texts of help().
SKIPPED_FOLDERS = {
    "idlelib",
    "test",
    "tests",
    "site-packages",
    "dist-packages",
    "encodings",
    "pydoc_data",
}


@dataclass(frozen=True)
class GPTConfig:
    """The shape of the model. Character 0 stands for all that are not in the vocabulary."""

    vocabulary: str
    context: int
    width: int
    layers: int
    heads: int
    dropout: float


class Block(nn.Module):
    """One pre-norm transformer block, `[B, T, C]` in and out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.attention_norm = nn.LayerNorm(config.width)
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.projection = nn.Linear(config.width, config.width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(config.width),
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
            nn.Dropout(config.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` after attention and the MLP."""
        x = x + F.dropout(self.attend(self.attention_norm(x)), self.dropout, self.training)
        return x + self.mlp(x)

    def attend(self, x: Tensor) -> Tensor:
        """Return the causal self-attention of `x`."""
        batch, length, width = x.shape
        # Head by head, of which this process may have a part.
        split = self.query_key_value(x).view(batch, length, -1, 3, width // self.heads)
        query, key, value = split.transpose(1, 2).unbind(3)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(attended.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """Characters `[B, T]` in, logits `[B, T, V]` of the next ones out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        size = 1 + len(config.vocabulary)
        self.characters = nn.Embedding(size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("projection.weight", "mlp.3.weight"))
                std = 0.02 / math.sqrt(2 * config.layers) if residual else 0.02
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        self.head.weight = self.characters.weight

    def forward(self, characters: Tensor) -> Tensor:
        """Return the logits."""
        positions = torch.arange(characters.shape[1], device=characters.device)
        x = self.characters(characters) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


@dataclass
class Run:
    """The results of the training so far."""

    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    evaluated_at: list[int] = field(default_factory=list)
    held_out_losses: list[float] = field(default_factory=list)
    skipped: int = 0
    seconds: float = 0.0


class StopRequest:
    """Notes SIGINT and SIGTERM inside a `with` block; the second one of a kind ends the process."""

    def __init__(self) -> None:
        self.signal = 0

    def __enter__(self) -> StopRequest:
        self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_DFL)


def read_library() -> str:
    """Return the source of the standard library, file after file."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths: list[Path] = []
    for folder, inner, files in os.walk(root):
        inner[:] = set(inner) - SKIPPED_FOLDERS
        paths += [Path(folder, file) for file in files if file.endswith(".py")]
    texts: list[str] = []
    total = 0
    for path in sorted(paths):
        if total < TEXT_LIMIT:
            texts.append(path.read_text(encoding="utf-8", errors="ignore"))
            total += len(texts[-1])
    if not texts:
        raise SystemExit(f"There is no Python source in {root}")
    return "".join(texts)[:TEXT_LIMIT]


def encode(text: str, vocabulary: str) -> Tensor:
    """Return the number of every character, 0 for those that are not in the vocabulary."""
    number_of = torch.zeros(sys.maxunicode + 1, dtype=torch.long)
    number_of[list(map(ord, vocabulary))] = torch.arange(1, len(vocabulary) + 1)
    return number_of[torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)]


def draw_batch(text: Tensor, step: int, args: argparse.Namespace) -> Tensor:
    """Return the windows of one step, `[accumulate, batch_size, context + 1]`.

    They depend only on the seed and the step, so a resumed run sees the same windows.
    """
    generator = torch.Generator().manual_seed(1_000_003 * args.seed + step)
    shape = (args.accumulate, args.batch_size, 1)
    starts = torch.randint(len(text) - args.context, shape, generator=generator)
    return text[starts + torch.arange(args.context + 1)].to(args.device)


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next character, in nats."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, args: argparse.Namespace) -> float:
    """Return the loss on windows spread evenly over the text."""
    starts = torch.linspace(0, len(text) - args.context - 1, args.eval_windows).long()
    windows = text[starts[:, None] + torch.arange(args.context + 1)].to(args.device)
    model.eval()
    losses = [loss_of(model, part) * len(part) for part in windows.split(args.batch_size)]
    model.train()
    return torch.stack(losses).sum().item() / len(windows)


@torch.no_grad()
def generate(model: GPT, prompt: str, length: int, args: argparse.Namespace) -> str:
    """Return the prompt and `length` characters that the model writes after it."""
    generator = torch.Generator().manual_seed(args.seed)
    characters = encode(prompt, model.config.vocabulary)
    model.eval()
    for _ in range(length):
        seen = characters[None, -model.config.context :].to(args.device)
        probabilities = F.softmax(model(seen)[0, -1].float() / args.temperature, dim=-1).cpu()
        probabilities[0] = 0  # the unknown character
        drawn = torch.multinomial(probabilities, 1, generator=generator)
        characters = torch.cat([characters, drawn])
    return "".join(model.config.vocabulary[i - 1] for i in characters.tolist())


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> FusedAdam:
    """Return AdamW that decays matrices, and neither biases nor norms; it clips by itself.

    Torch's clip takes DTensors or other tensors, and not a mixture, as tensor parallelism makes one.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return FusedAdam(groups, lr=args.lr, betas=(0.9, 0.95), max_grad_norm=args.clip)


def set_eps(optimizer: torch.optim.Optimizer) -> None:
    """Give Adam an eps that its parameters can hold: in float16 (O3) 1e-8 is 0, and 0 / 0 follows."""
    for group in optimizer.param_groups:
        half = any(parameter.dtype is torch.float16 for parameter in group["params"])
        group["eps"] = 1e-3 if half else 1e-8


def make_schedule(optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> LambdaLR:
    """Return a linear warm-up, then a cosine down to a tenth."""

    def factor(step: int) -> float:
        if step < args.warmup:
            return (step + 1) / args.warmup
        progress = (step - args.warmup) / max(args.steps - args.warmup, 1)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(progress, 1.0)))

    return LambdaLR(optimizer, factor)


class Trainer:
    """Everything that a training needs to go on, and that a checkpoint holds."""

    def __init__(self, config: GPTConfig, args: argparse.Namespace, parallel: Parallel) -> None:
        torch.manual_seed(args.seed)
        self.args = args
        self.parallel = parallel
        self.step = 0
        self.run = Run()
        model = parallel.cut(GPT(config).to(args.device))
        optimizer = make_optimizer(model, args)
        self.model, self.optimizer = amp.initialize(model, optimizer, **args.amp)
        self.wrapped = parallel.wrap(self.model)
        set_eps(self.optimizer)
        self.schedule = make_schedule(self.optimizer, args)

    def save(self, path: Path) -> None:
        """Write a checkpoint; a reader finds either the complete old one or the complete new one."""
        rest: dict[str, Any] = {
            "config": asdict(self.model.config),
            "settings": self.args.settings,
            "schedule": self.schedule.state_dict(),
            "step": self.step,
            "history": asdict(self.run),
        }
        if self.parallel.kind != "none":
            self.parallel.save(path, self.step, self.wrapped, self.optimizer, rest)
            return
        checkpoint = {
            **rest,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "amp": amp.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        amp.save(path, checkpoint)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint of the same model."""
        if self.parallel.kind != "none":
            checkpoint = self.parallel.load(path, self.wrapped, self.optimizer)
        else:
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        there, here = checkpoint["config"], asdict(self.model.config)
        if there != here:
            different = differences(there, here)
            raise SystemExit(
                f"{path} holds another model: {different}. Ask for the same one, or for another "
                "--checkpoint, or start over with --fresh."
            )
        if checkpoint["settings"] != self.args.settings:
            different = differences(checkpoint["settings"], self.args.settings)
            say(f"Not an exact continuation of {path}: {different}")
        if self.parallel.kind == "none":
            self.model.load_state_dict(checkpoint["model"])
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            amp.load_state_dict(checkpoint["amp"])
            torch.set_rng_state(checkpoint["rng"])
            if len(checkpoint["cuda_rng"]) == torch.cuda.device_count():
                torch.cuda.set_rng_state_all(checkpoint["cuda_rng"])
        set_eps(self.optimizer)
        self.schedule.load_state_dict(checkpoint["schedule"])
        self.step = checkpoint["step"]
        self.run = Run(**checkpoint["history"])

    def train_step(self, batches: Tensor) -> None:
        """Accumulate the gradients of all micro-batches, and step once."""
        losses: list[Tensor] = []
        self.parallel.seed(self.args.seed, self.step)
        self.optimizer.zero_grad()
        for i, windows in enumerate(self.parallel.part_of(batches), start=1):
            delay = i < len(batches)
            with self.parallel.reducing(not delay):
                loss = loss_of(self.wrapped, windows) / len(batches)
                with amp.scale_loss(loss, self.optimizer, delay_unscale=delay) as scaled_loss:
                    scaled_loss.backward()
            losses.append(loss.detach())
        self.run.losses.append(torch.stack(losses).sum().item())
        self.run.rates.append(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.schedule.step()
        self.run.skipped += amp.step_was_skipped(self.optimizer)
        self.run.scales.append(amp.loss_scale())
        self.step += 1

    def train(self, text: Tensor, held_out: Tensor) -> int:
        """Train until the last step or a signal, and leave a checkpoint. Return the signal or 0."""
        args, run = self.args, self.run
        name = Path(args.amp["opt_level"]).stem
        with (
            StopRequest() as stop,
            tqdm(
                total=args.steps,
                initial=self.step,
                desc=name,
                unit="step",
                disable=self.parallel.rank > 0,
            ) as progress,
        ):
            while self.step < args.steps and not stop.signal:
                started = time.perf_counter()
                self.train_step(draw_batch(text, self.step, args))
                if self.step % args.eval_every == 0 or self.step == args.steps:
                    run.evaluated_at.append(self.step)
                    run.held_out_losses.append(evaluate(self.model, held_out, args))
                run.seconds += time.perf_counter() - started
                progress.set_postfix(loss=f"{run.losses[-1]:.3f}", refresh=False)
                progress.update()
                if self.step % args.save_every == 0 or self.step == args.steps or stop.signal:
                    self.save(args.checkpoint)
        return stop.signal


def say(text: str) -> None:
    """Print it, once for all processes."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(text)


def differences(there: dict[str, Any], here: dict[str, Any]) -> str:
    """Name what differs between two mappings."""
    return ", ".join(
        f"{key} is {there.get(key)!r} there and {here.get(key)!r} here"
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key)
    )


def plot(run: Run, title: str, path: Path) -> None:
    """Draw the losses, the learning rate and the loss scale over the steps."""
    figure, (top, middle, bottom) = plt.subplots(
        3, 1, figsize=(8, 8), sharex=True, height_ratios=(3, 1, 1)
    )
    steps = range(1, len(run.losses) + 1)
    top.plot(steps, run.losses, linewidth=0.8, alpha=0.6, label="training")
    top.plot(run.evaluated_at, run.held_out_losses, "--o", markersize=4, label="held out")
    top.set(ylabel="loss (nats per character)", title=title)
    top.legend()
    middle.plot(steps, run.rates)
    middle.set(ylabel="learning rate", ylim=(0, None))
    bottom.plot(steps, run.scales)
    bottom.set(ylabel="loss scale", xlabel="step")
    bottom.set_yscale("log", base=2)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line, and before it the defaults in the config's `train:` block.

    `args.amp` is what goes to `amp.initialize`.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--opt-level", help="a level, an alias or a profile; default: O2")
    parser.add_argument("--config", type=Path, help="YAML: amp: for initialize, train: for the rest")
    parser.add_argument("--steps", type=int, default=350)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step")
    parser.add_argument("--batch-size", type=int, default=8, help="windows per micro-batch")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--warmup", type=int, default=50, help="steps")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0, help="the largest gradient norm")
    parser.add_argument("--eval-every", type=int, default=50, help="steps")
    parser.add_argument("--eval-windows", type=int, default=64)
    parser.add_argument("--sample", type=int, default=300, help="characters to generate at the end")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parallel", choices=KINDS, default="none", help="under torchrun")
    parser.add_argument("--mesh", help="such as 2x2, for fsdp2+tp: data by tensor; for fsdp2: HSDP")
    parser.add_argument("--threads", type=int, default=1, help="on the CPU; more help larger models")
    parser.add_argument("--checkpoint", type=Path, help="default: outputs/char_gpt-LEVEL.pt")
    parser.add_argument("--save-every", type=int, default=25, help="steps")
    parser.add_argument("--plot", type=Path, help="default: outputs/char_gpt-LEVEL.png")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="fail if there is no checkpoint")
    start.add_argument("--fresh", action="store_true", help="start over if there is one")
    args = parser.parse_args(argv)

    config = {} if args.config is None else yaml.safe_load(args.config.read_text()) or {}
    defaults = config.get("train") or {}
    for key in defaults:
        if key not in vars(args) or key in ("config", "opt_level", "resume", "fresh"):
            parser.error(f"{args.config}: train: has no '{key}'")
    parser.set_defaults(**{key: str(value) for key, value in defaults.items()})  # argparse parses them
    args = parser.parse_args(argv)
    if args.width % args.heads:
        parser.error(f"--heads {args.heads} does not divide --width {args.width}")
    args.amp = {"opt_level": "O2", **(config.get("amp") or {})}
    if args.opt_level is not None:
        args.amp["opt_level"] = args.opt_level
    stem = f"char_gpt-{Path(args.amp['opt_level']).stem}"
    suffix = ".pt" if args.parallel == "none" else f"-{args.parallel}"
    args.checkpoint = args.checkpoint or Path(f"outputs/{stem}{suffix}")
    args.plot = args.plot or Path(f"outputs/{stem}.png")
    if args.plot.suffix.lower() not in PICTURES:
        parser.error(f"--plot {args.plot}: a picture is a {', '.join(PICTURES)} file")
    return args


def main(argv: list[str] | None = None) -> Run:
    """Train, or go on training, and show what came out."""
    args = parse_args(argv)
    parallel = Parallel(args.parallel, args.mesh, args.device)
    args.device = parallel.device
    torch.set_num_threads(args.threads)
    library = read_library()
    common = Counter(library).most_common(VOCABULARY_SIZE)
    vocabulary = "".join(sorted(character for character, _ in common))
    text = encode(library, vocabulary)
    text, held_out = text.split([len(text) - len(text) // 10, len(text) // 10])
    config = GPTConfig(vocabulary, args.context, args.width, args.layers, args.heads, args.dropout)
    args.settings = {name: getattr(args, name) for name in SETTINGS}
    args.settings["text"] = zlib.crc32(library.encode())

    trainer = Trainer(config, args, parallel)
    latest = parallel.latest(args.checkpoint)
    if latest is not None and not args.fresh:
        trainer.load(latest)
        say(f"Going on from step {trainer.step} of {latest}")
    elif args.resume:
        raise SystemExit(f"--resume: there is no {args.checkpoint}")
    stopped_by = trainer.train(text, held_out)
    run = trainer.run
    if parallel.rank == 0:
        plot(run, f"char_gpt at {args.amp['opt_level']}", args.plot)
    if stopped_by:
        say(f"\nStopped after step {trainer.step}; the same command goes on from {args.checkpoint}")
        raise SystemExit(128 + stopped_by)

    say(f"\n{generate(trainer.model, 'def ', args.sample, args)}\n")
    held_out_loss = run.held_out_losses[-1]
    say(
        f"{args.amp['opt_level']}: {trainer.step} steps, held-out loss {held_out_loss:.3f} nats "
        f"({held_out_loss / math.log(2):.3f} bits) per character, {run.skipped} steps skipped, "
        f"final loss scale {run.scales[-1]:g}, {run.seconds:.0f} s"
    )
    say(f"Checkpoint: {args.checkpoint}  Plot: {args.plot}")
    parallel.leave()
    return run


if __name__ == "__main__":
    main()
