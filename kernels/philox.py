"""Random bytes that are a function of where they are used: Philox4x32-10.

    word 0 to 3 = philox(counter, key)       for each 16 numbers of a matrix, which get 4 bytes of each
    counter     = (index of the 16 numbers, draw, name, operand | rank << 8)
    key         = seed

So the same matrix of the same layer in the same draw is rounded alike on all devices, however the work
is divided, and torch's generator is not touched.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
"""The factors of words 0 and 2 in each round."""
WEYL = 0x9E3779B9, 0xBB67AE85
"""The numbers that are added to the two words of the key after each round."""
WORD = 0xFFFFFFFF
GROUP = 16
"""How many numbers one counter serves."""


class Draw(NamedTuple):
    """Where the random bits of a matrix begin.

    Attributes:
        calls: how often the layer has drawn before, int64 `[]`.
        seed: the seed of all layers, 64 bits.
        name: a hash of the layer's name, 32 bits.
        rank: the rank of the process, 24 bits.
        operand: 0 for a matrix by row, 1 by column.
    """

    calls: Tensor
    seed: int
    name: int
    rank: int = 0
    operand: int = 0

    def of_columns(self) -> Draw:
        """Return the draw of the transpose, which has other bits."""
        return self._replace(operand=1)

    @property
    def last_word(self) -> int:
        """The last word of the counter."""
        return (self.operand | self.rank << 8) & WORD


def random_bytes(shape: torch.Size, draw: Draw) -> Tensor:
    """Return uint8 of a shape `[R, C]` on the draw's device; C is a multiple of `GROUP`.

    The host does not wait for the device.
    """
    device = draw.calls.device
    index = torch.arange(shape.numel() // GROUP, device=device)
    counter = [index & WORD, (draw.calls & WORD).expand_as(index)]
    counter += [torch.full_like(index, word) for word in (draw.name, draw.last_word)]
    words = torch.stack(philox(counter, (draw.seed & WORD, draw.seed >> 32 & WORD)), -1)
    shifts = torch.arange(0, 32, 8, device=device)
    return (words[..., None] >> shifts & 0xFF).to(torch.uint8).view(shape)


def philox(counter: list[Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Return four random words for each counter; words are int64 from 0 to 2^32 - 1."""
    a, b, c, d = counter
    for i in range(ROUNDS):
        low, high = ((k + i * weyl) & WORD for k, weyl in zip(key, WEYL, strict=True))
        high_of_a, low_of_a = _product(a, MULTIPLIERS[0])
        high_of_c, low_of_c = _product(c, MULTIPLIERS[1])
        a, b, c, d = high_of_c ^ b ^ low, low_of_c, high_of_a ^ d ^ high, low_of_a
    return [a, b, c, d]


def _product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Return the high and the low 32 bits of a product.

    The factor is less by 2^32, and the word is added to the high bits instead. Otherwise the product
    would overflow int64, which a C++ compiler behind `torch.compile` takes for impossible.
    """
    product = word * (multiplier - 2**32)
    return (product >> 32) + word & WORD, product & WORD
