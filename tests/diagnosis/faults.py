"""A small transformer with faults that can be planted in it."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

T, C = 16, 32


class Attention(nn.Module):
    """Causal attention.

    Args:
        gain: what queries and keys are multiplied by.
    """

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.gain = gain

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = q * self.gain, k * self.gain
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(C)
        causal = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(causal, -math.inf)
        if mask is not None:
            scores = scores + mask
        return self.out(torch.matmul(torch.softmax(scores, -1), v))


class SquaringNorm(nn.Module):
    """RMSNorm by hand: squares in the precision that it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x * x).mean(-1, keepdim=True).sqrt()


class EpsNorm(nn.Module):
    """A norm whose eps is 0 in float16."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.norm(dim=-1, keepdim=True) + 1e-8)


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, gain: float = 1.0, norm: nn.Module | None = None, lift: float = 1.0) -> None:
        super().__init__()
        self.attn, self.norm = Attention(gain), norm or nn.LayerNorm(C)
        self.mlp = nn.Sequential(nn.Linear(C, 2 * C), nn.GELU(), nn.Linear(2 * C, C))
        self.lift = lift

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(x, mask)
        return x + self.mlp(self.norm(x * self.lift))


class Head(nn.Module):
    """The last layer, with something after it."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.proj = nn.Linear(C, C)
        self.kind = kind
        if kind == "bias":
            nn.init.constant_(self.proj.bias, 66246.39)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x)
        if self.kind == "exp":
            return torch.exp(14 * torch.tanh(x * 100))
        if self.kind == "sqrt":
            return torch.sqrt(F.relu(x) + 1e-4) * 2e4
        if self.kind == "log":
            return torch.log(F.relu(x))
        return x


class Net(nn.Module):
    """Two or three blocks and a head."""

    def __init__(self, head: str = "plain", blocks: int = 2, **of_block_1: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [Block(), Block(**of_block_1), *(Block() for _ in range(2, blocks))]
        )
        self.head = Head(head)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def batch() -> Tensor:
    """Return inputs `[8, T, C]`."""
    return torch.randn(8, T, C, generator=torch.Generator().manual_seed(1))
