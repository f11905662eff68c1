"""Layers and models that train in FP8, FP4 and BF16, for the rows of bench_fp8.py.

A way of training is compared with the BF16 that has the same weights: O5, O7, O9 and torchao with a
model cast to BF16, O6 with `torch.autocast`, which casts weights from FP32 in each forward as O6 does.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import amp
from docs.benchmarks.bench_kernels import device_seconds, host_seconds, launches


class Sizes(NamedTuple):
    """What is measured. The defaults are for a GPU; the model has 1.5e9 parameters.

    Attributes:
        widths: of square layers.
        tokens: in a batch of such a layer.
        block_widths: of the transformer's layer that is measured alone.
        layers: of the model.
        width: of the model.
        heads: of the model, and of the layer.
        vocabulary: of the model.
        sequence: tokens in a sequence.
        batch: sequences in a batch.
    """

    widths: tuple[int, ...] = (1024, 2048, 4096, 8192)
    tokens: int = 4096
    block_widths: tuple[int, ...] = (2048, 4096)
    layers: int = 28
    width: int = 2048
    heads: int = 16
    vocabulary: int = 32000
    sequence: int = 2048
    batch: int = 4


SMALL = Sizes((64,), 32, (64,), 2, 64, 4, 96, 16, 2)
"""Sizes with which a CPU finds in a minute that all parts run."""


class Way(NamedTuple):
    """A way of training.

    Attributes:
        name: how rows call it.
        beside: the name of the way in BF16 that it is compared with.
        level: of `amp.Session`, or None without one.
        fp8: the session's.
    """

    name: str
    beside: str
    level: str | None = None
    fp8: Any = None


PLAIN, AUTOCAST, TORCHAO = "BF16", "BF16, autocast", "torchao float8, tensorwise"
WAYS = (
    Way(PLAIN, PLAIN),
    Way("O5", PLAIN, "O5"),
    Way("O7", PLAIN, "O7", {"recipe": "current"}),
    Way("O7, keep_weights", PLAIN, "O7", {"recipe": "current", "keep_weights": True}),
    Way("O7, delayed", PLAIN, "O7", {"recipe": "delayed"}),
    Way("O9", PLAIN, "O9", {"recipe": "nvfp4"}),
    Way(TORCHAO, PLAIN),
    Way(AUTOCAST, AUTOCAST),
    Way("O6", AUTOCAST, "O6", {"recipe": "current"}),
)
"""The ways, each BF16 before those that are compared with it."""
OF_STEPS = tuple(way for way in WAYS if way.name in (PLAIN, "O5", "O7", "O7, delayed", "O9", TORCHAO))
"""Those whose steps are measured."""
MODES = False, True
"""Eager, and compiled."""


class Block(nn.Module):
    """A layer of a Llama-like transformer, but with LayerNorm, `[B, T, C]` in and out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        hidden = width * 11 // 4 // 16 * 16
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend, and transform each token."""
        batch, tokens, width = x.shape
        of_heads = self.qkv(self.attention_norm(x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = of_heads.transpose(1, 3).unbind(2)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        y = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """A Llama-like language model, `[B, T]` in, `[B, T, vocabulary]` out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.Sequential(*(Block(sizes.width, sizes.heads) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        return self.head(self.norm(self.blocks(self.embedding(tokens))))  # type: ignore[no-any-return]


class Training:
    """A model that one way trains, until `close`.

    Args:
        way: how.
        model: in FP32.
        skip: the layers that stay in half precision.
        is_compiled: whether `torch.compile` compiles it.
        steps: whether it gets an optimizer's steps.
    """

    def __init__(
        self, way: Way, model: nn.Module, skip: Sequence[str], is_compiled: bool, steps: bool
    ) -> None:
        self._way, self._session = way, None
        self.device = next(model.parameters()).device
        if way.level is None and way.name != AUTOCAST:
            model = model.bfloat16()
        if way.name == TORCHAO:
            from torchao.float8 import convert_to_float8_training

            last = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)][
                -1:
            ]
            left = {name for name in last if "last" in skip}
            convert_to_float8_training(model, module_filter_fn=lambda _, name: name not in left)
        options = {"fused": True} if self.device.type == "cuda" else {}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **options) if steps else None
        if way.level is not None:
            fp8 = {**way.fp8, "skip": list(skip)} if way.fp8 else way.fp8
            self._session = amp.Session(way.level, fp8=fp8, verbosity=0)
            if optimizer is None:
                model = self._session.initialize(model)
            else:
                model, optimizer = self._session.initialize(model, optimizer)
        self._model, self._optimizer = model, optimizer
        self._run: Any = torch.compile(model) if is_compiled else model

    def output(self, x: Tensor) -> Tensor:
        """Return what the model makes of a batch."""
        is_cast = self._way.name == AUTOCAST
        with torch.autocast(self.device.type, torch.bfloat16) if is_cast else contextlib.nullcontext():
            return self._run(x)  # type: ignore[no-any-return]

    def forward_and_backward(self, x: Tensor, grad: Tensor) -> None:
        """Compute all gradients, for the gradient of the output."""
        self._model.zero_grad()
        x.grad = None
        y = self.output(x)
        y.backward(grad.to(y.dtype))

    def step(self, tokens: Tensor) -> None:
        """Make a step of a language model."""
        optimizer = self._optimizer
        assert optimizer is not None
        logits = self.output(tokens).flatten(0, 1)
        loss = functional.cross_entropy(logits.float(), tokens.roll(-1, 1).flatten())
        if self._session is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            with self._session.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    def end_iterations(self, run: Callable[[], object]) -> None:
        """Fill the history of `delayed`, whose first iterations take more kernels."""
        history = (
            None if self._session is None or self._session.fp8 is None else self._session.fp8.history
        )
        for _ in range(0 if history is None else 20):
            run()
            history.end()  # type: ignore[union-attr]

    def close(self) -> None:
        """Undo what the session has changed."""
        if self._session is not None:
            self._session.close()


def measured(run: Callable[[], object], device: torch.device) -> tuple[float, str, str]:
    """Return the seconds of a call, the number of its kernels, and the host's time, in text.

    On a CPU, which is for a dry run, the seconds are the least process time of a few calls.
    """
    for _ in range(3):  # kernels are compiled, and scales are known
        run()
    if device.type == "cuda":
        return device_seconds(run), launches(run), f"{host_seconds(run) * 1e6:.0f}"
    least = float("inf")
    for _ in range(3):
        start = time.process_time()
        run()
        least = min(least, time.process_time() - start)
    return least, "", ""


def _rate(work: float, unit: str, seconds: float) -> str:
    return f"{work / seconds:.4g} {unit}"


HEADER = ["what", "by", "device µs", "kernels + copies", "host µs", "rate", "speed beside BF16"]

Made = tuple[Training, Callable[[], object]]


def rows_of(
    what: str,
    make: Callable[[Way, bool], Made],
    device: torch.device,
    rate: Callable[[float], str],
    ways: Sequence[Way],
    modes: Sequence[bool],
) -> Iterator[list[str]]:
    """Yield a row for each way, as soon as it is measured.

    Args:
        what: the first column.
        make: makes what a way trains and a call that trains it, given whether it is compiled.
        device: where.
        rate: the text for a number of seconds.
        ways: which.
        modes: whether compiled: False, True or both.
    """
    for is_compiled in modes:
        seconds: dict[str, float] = {}
        for way in ways:
            name = f"{way.name}, compiled" if is_compiled else way.name
            training = None
            try:
                training, run = make(way, is_compiled)
                training.end_iterations(run)
                spent, kernels, host = measured(run, device)
            except Exception as error:  # one way that fails is a row, and the others are measured
                line = str(error).strip().partition("\n")[0][:100].replace("|", "/")
                yield [what, name, f"not run: {type(error).__name__}: {line}", "", "", "", ""]
                continue
            finally:
                if training is not None:
                    training.close()
                del training
                run = None  # type: ignore[assignment]
                torch._dynamo.reset()
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
            seconds[way.name] = spent
            times = f"{seconds[way.beside] / spent:.2f}" if way.beside in seconds else ""
            beside = f"{times} of {way.beside}" if times and way.name != way.beside else times
            yield [what, name, f"{spent * 1e6:.1f}", kernels, host, rate(spent), beside]


def layer_rows(
    device: torch.device, sizes: Sizes, ways: Sequence[Way] = WAYS, modes: Sequence[bool] = MODES
) -> Iterator[list[str]]:
    """Yield a header and the rows of square linear layers, forward and backward."""
    yield HEADER
    for width in sizes.widths:
        x = torch.randn(sizes.tokens, width, device=device).bfloat16().requires_grad_()
        grad = torch.randn(sizes.tokens, width, device=device).bfloat16()

        def make(
            way: Way, is_compiled: bool, x: Tensor = x, grad: Tensor = grad, width: int = width
        ) -> Made:
            model = nn.Sequential(nn.Linear(width, width, bias=False, device=device))
            training = Training(way, model, (), is_compiled, steps=False)
            return training, lambda: training.forward_and_backward(x, grad)

        flops = 6 * sizes.tokens * width**2
        rate = partial(_rate, flops / 1e12, "TFLOP/s")
        yield from rows_of(f"layer {width}", make, device, rate, ways, modes)


def block_rows(
    device: torch.device, sizes: Sizes, ways: Sequence[Way] = WAYS, modes: Sequence[bool] = MODES
) -> Iterator[list[str]]:
    """Yield a header and the rows of a transformer's layer, forward and backward."""
    yield HEADER
    for width in sizes.block_widths:
        shape = sizes.batch, sizes.sequence, width
        x = torch.randn(shape, device=device).bfloat16().requires_grad_()
        grad = torch.randn(shape, device=device).bfloat16()

        def make(
            way: Way, is_compiled: bool, x: Tensor = x, grad: Tensor = grad, width: int = width
        ) -> Made:
            model = Block(width, sizes.heads).to(device)
            training = Training(way, model, (), is_compiled, steps=False)
            return training, lambda: training.forward_and_backward(x, grad)

        rate = partial(_rate, sizes.batch * sizes.sequence, "tokens/s")
        yield from rows_of(f"transformer layer {width}", make, device, rate, ways, modes)


def model_rows(
    device: torch.device, sizes: Sizes, ways: Sequence[Way] = OF_STEPS, modes: Sequence[bool] = MODES
) -> Iterator[list[str]]:
    """Yield a header and the rows of a language model's step: forward, backward and AdamW."""
    yield HEADER
    shape = sizes.batch, sizes.sequence
    tokens = torch.randint(sizes.vocabulary, shape, device=device)

    def make(way: Way, is_compiled: bool) -> Made:
        torch.manual_seed(0)
        with device:
            model = Decoder(sizes)
        training = Training(way, model, ("last",), is_compiled, steps=True)
        return training, lambda: training.step(tokens)

    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in Decoder(sizes).parameters())
    rate = partial(_rate, tokens.numel(), "tokens/s")
    yield from rows_of(f"step of {count / 1e9:.2g}e9 parameters", make, device, rate, ways, modes)
