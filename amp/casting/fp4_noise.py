"""How large the gradients of layers in FP4 are beside the noise of their rounding.

A gradient that is smaller than sqrt(3) times its noise trains little (arXiv:2505.19115).
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from amp.kernels.fp4 import turned
from amp.kernels.fp8 import Operand, dequantize

ENOUGH = math.sqrt(3)
"""How many times its noise a gradient should be."""


class Noise:
    """The gradients of weights in a step, and the noise that rounding to FP4 has added."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}

    def note(
        self, name: str, grad: Tensor, rounded: Operand, of_input: Operand, hadamard: bool
    ) -> None:
        """Add what one backward of a layer contributes.

        Args:
            name: the name of the layer.
            grad: the gradient of its output `[M, N]`, before it was rounded.
            rounded: its transpose in FP4, `[N, M']`.
            of_input: the transpose of the layer's input in FP4, `[K, M']`.
            hadamard: whether both are transformed.
        """
        exact = turned(grad.detach(), rounded.shape[1], hadamard).float()
        x = dequantize(of_input).t()
        gradient, noise = exact @ x, (dequantize(rounded) - exact) @ x
        if name in self._sums:
            gradient, noise = (a + b for a, b in zip(self._sums[name], (gradient, noise), strict=True))
        self._sums[name] = gradient, noise

    def ratios(self) -> Iterator[tuple[str, float]]:
        """Yield layers with the norm of the gradient divided by that of its noise. The host waits."""
        for name, (gradient, noise) in self._sums.items():
            sizes = torch.stack([gradient.norm(), noise.norm()]).tolist()
            if sizes[1] > 0 and math.isfinite(sizes[0]):
                yield name, sizes[0] / sizes[1]
