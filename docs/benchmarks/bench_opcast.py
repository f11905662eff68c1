"""What O1 and O4 cost on the CPU, beside torch.autocast in the same process.

    python docs/benchmarks/bench_opcast.py      # `make bench` runs it

Calls are timed in loops of equal length, one thread, contenders in shuffled turns round by round; a row
is the median over the rounds. `reamp` is the patched function in a model's forward, with warm weight
casts; `torch.autocast` the function as torch made it, in a region with warm weight casts; `plain` the
function as torch made it, on arguments that need no cast. Training steps are whole ones, and a ratio is
the median of the ratios of neighbouring steps.
"""

from __future__ import annotations

import copy
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amp
from amp.casting.by_op import CastOps

sys.path.insert(0, str(Path(__file__).parent))
from bench_kernels import setting

LOOP, ROUNDS = 500, 101

Call = Callable[[], Any]


class Forward(nn.Module):
    """A model whose forward is any function."""

    def forward(self, function: Call) -> Any:
        """Call it."""
        return function()


def loop(call: Call) -> float:
    """Return the microseconds of one call."""
    start = time.perf_counter()
    for _ in range(LOOP):
        call()
    return (time.perf_counter() - start) / LOOP * 1e6


@contextmanager
def without_amp(session: amp.Session) -> Iterator[None]:
    """Give torch its functions back for the block."""
    assert isinstance(session.casts, CastOps)
    sites = list(dict.fromkeys(session.casts._patches._sites))
    layers = [site.layers for site in sites]
    for site in sites:
        site.layers = []
        site.show()
    try:
        yield
    finally:
        for site, own in zip(sites, layers, strict=True):
            site.layers = own
            site.show()


class Contenders:
    """Ways to time a call: by torch alone, by torch.autocast, by a session in and out of a forward."""

    def __init__(self, level: str, dtype: torch.dtype) -> None:
        self.session = amp.Session(level, verbosity=0)
        self.model: Any = self.session.initialize(Forward())
        self.dtype = dtype

    def plain(self, call: Call) -> float:
        """Time torch alone."""
        with without_amp(self.session):
            return loop(call)

    def autocast(self, call: Call) -> float:
        """Time torch in an autocast region, weights cast before."""
        with without_amp(self.session), torch.autocast("cpu", self.dtype):
            call()
            return loop(call)

    def reamp(self, call: Call) -> float:
        """Time the patched function in a forward, weights cast before."""

        def warm() -> float:
            call()
            return loop(call)

        return float(self.model(warm))

    def reamp_outside(self, call: Call) -> float:
        """Time the patched function where no forward is."""
        return loop(call)


def compare(ways: dict[str, Callable[[], float]]) -> tuple[dict[str, float], Callable[[str, str], str]]:
    """Let the contenders take turns; return each one's median, and how to compare two of them."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for _ in range(ROUNDS):
        random.shuffle(names)
        for name in names:
            times[name].append(ways[name]())

    def ratio(a: str, b: str) -> str:
        return f"{statistics.median(x / y for x, y in zip(times[a], times[b], strict=True)):.2f}"

    return {name: statistics.median(values) for name, values in times.items()}, ratio


def calls(dtype: torch.dtype) -> dict[str, tuple[Call, Call]]:
    """Return ops on 8x8 tensors: with arguments to cast, and with none."""
    x, weight, bias = torch.randn(8, 8), nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))
    image, kernel = torch.randn(1, 8, 8, 8), nn.Parameter(torch.randn(8, 8, 3, 3))

    def cast(tensor: Tensor) -> Tensor:
        return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)

    xh, wh, bh, ih, kh = map(cast, (x, weight, bias, image, kernel))
    return {
        "linear": (lambda: F.linear(x, weight, bias), lambda: F.linear(xh, wh, bh)),
        "matmul": (lambda: torch.matmul(x, weight), lambda: torch.matmul(xh, wh)),
        "x @ w": (lambda: x @ weight, lambda: xh @ wh),
        "conv2d": (lambda: F.conv2d(image, kernel), lambda: F.conv2d(ih, kh)),
        "softmax": (lambda: F.softmax(x, dim=-1), lambda: F.softmax(x, dim=-1)),
        "exp": (lambda: torch.exp(x), lambda: torch.exp(x)),
        "layer_norm": (lambda: F.layer_norm(x, (8,)), lambda: F.layer_norm(x, (8,))),
    }


def op_rows(level: str, dtype: torch.dtype) -> Iterator[list[str]]:
    """Time each op in all the ways."""
    contenders = Contenders(level, dtype)
    x = torch.randn(8, 8)
    no_rule = {"add (no rule)": (lambda: torch.add(x, x), lambda: torch.add(x, x))}
    for name, (casting, idle) in (calls(dtype) | no_rule).items():
        found, ratio = compare(
            {
                "autocast": lambda call=casting: contenders.autocast(call),  # type: ignore[misc]
                "reamp": lambda call=casting: contenders.reamp(call),  # type: ignore[misc]
                "plain": lambda call=idle: contenders.plain(call),  # type: ignore[misc]
                "idle": lambda call=idle: contenders.reamp_outside(call),  # type: ignore[misc]
            }
        )
        yield [
            level,
            name,
            f"{found['autocast']:.2f}",
            f"{found['reamp']:.2f}",
            ratio("reamp", "autocast"),
            f"{found['plain']:.2f}",
            f"{found['idle']:.2f}",
            ratio("idle", "plain"),
        ]
    contenders.session.close()


def transformer(activation: str) -> nn.Module:
    """Make a language model of 6 layers."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        128, 4, 512, dropout=0.0, activation=activation, batch_first=True, norm_first=True
    )
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(64, 128), encoder, nn.Linear(128, 64))


def step_rows(level: str, dtype: torch.dtype, activation: str) -> Iterator[list[str]]:
    """Time training steps of a 6-layer transformer: 8 sequences of 64 tokens."""
    tokens = torch.randint(64, (8, 65), generator=torch.Generator().manual_seed(0))
    x, y = tokens[:, :-1], tokens[:, 1:]
    ours = transformer(activation)
    theirs = copy.deepcopy(ours)
    optimizers = [torch.optim.AdamW(model.parameters(), fused=True) for model in (ours, theirs)]
    session = amp.Session(level, verbosity=0)
    session.initialize(ours, optimizers[0])
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)

    def reamp() -> None:
        loss = F.cross_entropy(ours(x).flatten(0, 1), y.flatten())
        with session.scale_loss(loss, optimizers[0]) as scaled_loss:
            scaled_loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()

    def autocast() -> None:
        with torch.autocast("cpu", dtype):
            loss = F.cross_entropy(theirs(x).flatten(0, 1), y.flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizers[1])
        scaler.update()
        optimizers[1].zero_grad()

    times: dict[str, list[float]] = {"reamp": [], "autocast": []}
    for i in range(46):
        turns = [("reamp", reamp, nullcontext()), ("autocast", autocast, without_amp(session))]
        random.shuffle(turns)
        for name, run, context in turns:
            with context:
                start = time.process_time()
                run()
                if i >= 6:
                    times[name].append(time.process_time() - start)
    session.close()
    ratio = statistics.median(a / b for a, b in zip(times["reamp"], times["autocast"], strict=True))
    ms = {name: f"{statistics.median(values) * 1e3:.1f}" for name, values in times.items()}
    yield [level, activation, ms["autocast"], ms["reamp"], f"{ratio:.3f}"]


def table(header: list[str], rows: Iterator[list[str]]) -> str:
    """Return a table, and print it row by row."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header))]
    print("\n".join(lines))
    for row in rows:
        lines.append(f"| {' | '.join(row)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write the rows."""
    torch.set_num_threads(1)
    levels = {"O1": torch.float16, "O4": torch.bfloat16}
    header = ["level", "op", "torch.autocast", "reamp", "ratio", "plain", "nothing to cast", "ratio"]
    ops = table(header, (row for level, dtype in levels.items() for row in op_rows(level, dtype)))
    settings = [(level, dtype, act) for level, dtype in levels.items() for act in ("relu", "gelu")]
    header = ["level", "activation", "torch.autocast", "reamp", "ratio"]
    steps = table(header, (row for arguments in settings for row in step_rows(*arguments)))
    text = f"""# Op casting on the CPU

{setting(torch.device("cpu"))}

Microseconds for a call on 8x8 tensors; conv2d on 1x8x8x8 with 3x3. `reamp` is called in a forward
and `torch.autocast` in a region, with FP32 arguments and cached casts of weights. `plain` (torch's
function) and `nothing to cast` (the patched one) are called outside of both, in the op's dtype. Ratios
are medians over rounds in which all took turns.

{ops}

Milliseconds of process time for a training step of a 6-layer transformer, d=128, 8x64 tokens, fused
AdamW, with torch.amp.GradScaler beside O1's loss scale.

{steps}
"""
    (Path(__file__).parent / "opcast-cpu.md").write_text(text)


if __name__ == "__main__":
    main()
