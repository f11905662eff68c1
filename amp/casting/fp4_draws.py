"""How often each layer in FP4 has drawn random bits, so that a resumed run draws the same ones.

A layer draws for its gradient, once for each backward through it. Recomputation runs forwards only, and
a module that is called twice has two backwards, so neither needs care. The bits depend on this count,
on the seed, on the layer's name, on the rank, and on where in the gradient they are used
(`amp.kernels.philox`), so torch's generator is not touched, and other layers change nothing.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from amp import distributed
from amp.kernels.philox import Draw
from amp.profiles.fp8_recipe import Fp8Recipe


class Draws:
    """The counts of the layers of a session.

    Attributes:
        names: the layers' names, in the order of their counts.
        counts: int64 `[layers]`.
    """

    def __init__(self, recipe: Fp8Recipe) -> None:
        self.recipe = recipe
        self.names: list[str] = []
        self.counts = torch.zeros(0, dtype=torch.int64, device="cpu")
        self._words: list[int] = []

    def add(self, names: Sequence[str], *devices: torch.device) -> int:
        """Add counts for layers on these devices, and return the index of the first new layer.

        The lists and tensors are new ones: setting the old attributes again removes the counts.
        """
        first = len(self.names)
        counts = self.counts.to(devices[0])
        self.counts = torch.cat([counts, counts.new_zeros(len(names))])
        self.names = [*self.names, *names]
        self._words = [zlib.crc32(name.encode()) for name in self.names]
        return first

    def next(self, layer: int, device: torch.device) -> Draw:
        """Return the next draw of a layer, and count it. The host does not wait for the device."""
        if self.counts.device != device:  # the model has been moved
            self.counts = self.counts.to(device)
        count = self.counts[layer].clone()
        self.counts[layer].add_(1)
        assert self.recipe.seed is not None
        return Draw(count, self.recipe.seed, self._words[layer], distributed.rank())

    # Saving.

    def state_dict(self) -> dict[str, Any]:
        """Return the recipe, its seed, and the counts of layers by name. The host waits."""
        draws = dict(zip(self.names, self.counts.tolist(), strict=True))
        return {"recipe": self.recipe.recipe, "seed": self.recipe.seed, "draws": draws}

    def load_state_dict(self, state: Mapping[str, Any], first: int = 0) -> None:
        """Load the counts of layers by name, for the layers from index `first` on."""
        for i, name in list(enumerate(self.names))[first:]:
            if name in state["draws"]:
                self.counts[i] = state["draws"][name]
