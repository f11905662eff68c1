"""Freezing and unfreezing: a parameter and its master require a gradient, or both do not."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class Freezing:
    """Knows which masters required no gradient when their parameters last agreed."""

    def __init__(self) -> None:
        self._frozen: set[Tensor] = set()

    def note(self, master: Tensor) -> None:
        """Note whether a new master requires a gradient."""
        if not master.requires_grad:
            self._frozen.add(master)

    def forget(self, master: Tensor) -> None:
        """Forget a master that is released."""
        self._frozen.discard(master)

    def agree(self, masters: Sequence[Tensor], models: Sequence[Tensor]) -> list[Tensor]:
        """Let both be as other code has changed one; return the masters that were unfrozen."""
        unfrozen = []
        for master, model in zip(masters, models, strict=True):
            was_frozen, is_trained = bool(self._frozen) and master in self._frozen, master.requires_grad
            if is_trained is not model.requires_grad:
                changed, other = (master, model) if is_trained is was_frozen else (model, master)
                is_trained = changed.requires_grad
                other.requires_grad_(is_trained)
            if is_trained and was_frozen:
                self._frozen.discard(master)
                unfrozen.append(master)
            elif not is_trained:
                self._frozen.add(master)
        return unfrozen
