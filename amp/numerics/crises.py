"""Demonstrations of the three ways in which half precision fails, each with its cure.

Source: Micikevicius et al. 2018, "Mixed Precision Training".
"""

import math
from typing import NamedTuple

import torch
from torch import nn

from amp.casting.regions import disable_casts
from amp.profiles.options import Level
from amp.session import Session


class Crisis(NamedTuple):
    """The result of one demonstration.

    Attributes:
        name: the name of the failure.
        exact: the exact number.
        broken: the number in float16.
        cured: the number with the cure.
        cure: what prevents the failure.
        code: lines of code that show the failure and the cure.
    """

    name: str
    exact: float
    broken: float
    cured: float
    cure: str
    code: str


def underflow(gradient: float = 1e-8, scale: float = 1024.0) -> Crisis:
    """Show that a gradient too small for float16 becomes 0, and that a scaled loss keeps it."""
    exact = torch.tensor(gradient, dtype=torch.float32, device="cpu")
    broken = exact.half()
    cured = (exact * scale).half().float() / scale
    return Crisis(
        *("underflow", gradient, broken.item(), cured.item()),
        cure=f"scale the loss by {scale:g}, and unscale the gradients in FP32",
        code="torch.tensor(1e-8).half()                          # 0\n"
        "(torch.tensor(1e-8) * 1024).half().float() / 1024  # 1.0012e-08",
    )


def overflow(x: float = 12.0) -> Crisis:
    """Show that an exponential too large for float16 becomes inf, and that O1 runs it in FP32."""
    half = torch.tensor(x, dtype=torch.float16, device="cpu")
    with disable_casts():  # in case a session is open already
        broken = half.exp()
    with Session("O1", verbosity=0) as session:
        session.initialize(None)
        cured = half.exp()
    return Crisis(
        *("overflow", math.exp(half.item()), broken.item(), cured.item()),
        cure="run exp, softmax, losses and norms in FP32, as O1's table does",
        code="torch.tensor(12.).half().exp()        # inf\n"
        "amp.initialize(model, opt_level='O1')\n"
        "torch.tensor(12.).half().exp()        # 162754.8, in float32",
    )


def vanishing_update(steps: int = 1000, lr: float = 1e-4) -> Crisis:
    """Show that small updates do not change a float16 weight, and that FP32 masters add them up."""

    @torch.inference_mode(False)
    @torch.enable_grad()
    def train(level: Level) -> float:
        model = nn.Linear(1, 1, bias=False, dtype=torch.float32, device="cpu")
        nn.init.ones_(model.weight)
        x = torch.ones(1, 1, dtype=torch.float32, device="cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        with Session(level, loss_scale=1.0, verbosity=0) as session:
            session.initialize(model, optimizer)
            for _ in range(steps):
                optimizer.zero_grad()
                with session.scale_loss(model(x).sum(), optimizer) as loss:
                    loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            return float(model.weight.detach())

    return Crisis(
        *("vanishing update", 1.0 - steps * lr, train("O3"), train("O2")),
        cure="keep FP32 master weights, as O2 does",
        code="w = torch.ones(1).half()\n"
        "for _ in range(1000): w -= 1e-4       # stays 1\n"
        "w = torch.ones(1)\n"
        "for _ in range(1000): w -= 1e-4       # 0.9; the model gets w.half()",
    )


def crises() -> list[Crisis]:
    """Run all three. Functions are patched as at O1 meanwhile, and restored at the end."""
    return [underflow(), overflow(), vanishing_update()]
