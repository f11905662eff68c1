"""Models for the tests of FP8, and a few steps of training."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amp
from amp.profiles.fp8_recipe import RECIPES
from tests.models import step_on
from tests.states import load, saved_of

RECIPE_NAMES = tuple(RECIPES)
BASES = ("O1", "O2", "O4", "O5")
"""The levels that FP8 goes on top of."""

WIDTH = 128


class Attention(nn.Module):
    """Attention and a gated MLP as in Llama, `[B, T, C]` in and out: three and two shared inputs."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (layer(y)[:, None] for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Net(nn.Module):
    """Two blocks of linear layers and a head, `[N, WIDTH]` in, `[N, 10]` out."""

    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 10)
        self.recompute = recompute

    def body(self, x: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.third(torch.relu(self.third(x)))  # twice

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and self.training:
            x = checkpoint(self.body, x, use_reentrant=self.recompute == "reentrant")
        else:
            x = self.body(x)
        return self.head(x)


def net(**more: Any) -> Net:
    torch.manual_seed(0)
    return Net(**more)


def batches(size: int = 24, seed: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches, of growing magnitude, that never end."""
    generator = torch.Generator().manual_seed(seed)
    step = 0
    while True:
        x = torch.randn(size, WIDTH, generator=generator) * (1 + step % 3)
        yield x.requires_grad_(), torch.randint(0, 10, (size,), generator=generator)
        step += 1


def initialize(model: Any, level: str, fp8: Any, optimizer: Any = None, **more: Any) -> Any:
    """Return model and optimizer in FP8, with a loss scale that overflows in no test."""
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if level in ("O1", "O2"):
        more.setdefault("loss_scale", {"init": 1024})
    return amp.initialize(model, optimizer, opt_level=level, fp8=fp8, verbosity=0, **more)


def train(model: Any, optimizer: Any, data: Iterator[tuple[Tensor, Tensor]], steps: int) -> list[float]:
    """Train, and return the losses."""
    losses = []
    for _ in range(steps):
        x, y = next(data)
        optimizer.zero_grad()
        losses.append(step_on(F.cross_entropy(model(x).float(), y), optimizer).item())
    return losses


def trained(
    recipe: Any,
    steps: range = range(4),
    state: Any = None,
    *,
    level: str = "O5",
    recompute: str = "",
    before_step: Callable[[int, Any], object] = lambda i, model: None,
    **options: Any,
) -> tuple[list[Tensor], list[Any]]:
    """Return weights and history after some steps of a run, and its state dicts.

    Args:
        recipe: that of FP8 or FP4.
        steps: the numbers of the steps: those before them were trained before.
        state: the state dicts to begin with.
        level: the level.
        recompute: how activations are checkpointed.
        before_step: is called with the number of each step and the model.
        options: others for `initialize`.
    """
    model, optimizer = initialize(net(recompute=recompute), level, recipe, **options)
    if state is not None:
        load(state, model, optimizer)
    for i, batch in zip(steps, itertools.islice(batches(), steps.start, None), strict=False):
        before_step(i, model)
        train(model, optimizer, iter([batch]), 1)
    remembered = [] if history() is None else [history().amaxes]
    found = [value.clone() for value in (*model.state_dict().values(), *remembered)]
    saved = saved_of(model, optimizer)
    amp.get_session().close()
    return found, saved


def history() -> Any:
    """Return what `delayed` remembers in the default session."""
    return amp.get_session().fp8.history


def factors_of(remembered: Any) -> Tensor:
    """Return the factors of all entries of a history, float32 `[3 * layers]`."""
    device, entries = remembered.amaxes.device, range(3 * len(remembered.names))
    return torch.stack([remembered.factor(*divmod(i, 3), device) for i in entries])


def quiet(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function, without warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)
