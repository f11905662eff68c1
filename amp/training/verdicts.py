"""What the checks of gradients have found, and which of it a step must go by."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from amp.training.scaler import Verdict, joined

MOST_VERDICTS = 256
"""How many verdicts are kept until a step, which may never come; more than these are joined."""


class Verdicts:
    """The verdicts about the gradients of one optimizer since its last step.

    Attributes:
        of_gradients: what the checks found in the gradients that are there.
    """

    def __init__(self) -> None:
        self.of_gradients: list[Verdict] = []
        self._of_cleared: list[Verdict] = []
        """What they found in gradients that were cleared. These may be assigned again."""
        self._were_assigned = False
        self._left: set[Tensor | None] = set()
        """The gradients of parameters without a master that are not assigned, if any were cleared."""
        self._stepped = 0
        """How many of `of_gradients` the last step has gone by."""

    @property
    def has_cleared(self) -> bool:
        """Whether a check was of gradients that were cleared since the last step."""
        return bool(self._of_cleared)

    def add(self, verdict: Verdict | None, grads: Sequence[Tensor | None]) -> None:
        """Note what the check of a block has found, if there was one.

        Args:
            verdict: the verdict.
            grads: the gradients of parameters without a master now.
        """
        self.note_left(grads)
        if verdict is not None:
            self.of_gradients = _bounded([*self.of_gradients, verdict])

    def note_left(self, grads: Sequence[Tensor | None]) -> None:
        """Note gradients of parameters without a master: a block has left them, or they are zeros."""
        if self._of_cleared:
            self._left = set(grads)

    def clear(self) -> None:
        """Note that the gradients were cleared."""
        if self.of_gradients:
            self._of_cleared = _bounded([*self._of_cleared, *self.of_gradients[self._stepped :]])
            self.of_gradients, self._left, self._stepped = [], set(), 0
        self._were_assigned = False

    def look_for_assigned(self, grads: Sequence[Tensor | None]) -> None:
        """Note whether a parameter without a master was given a gradient since some were cleared."""
        if self._of_cleared and set(grads) - self._left - {None}:
            self._were_assigned = True

    def for_step(self, were_assigned: bool) -> list[Verdict]:
        """Return the verdicts that a step must go by.

        A gradient that was assigned may come from any block since the last step, although the gradients
        of that block were cleared.

        Args:
            were_assigned: whether gradients of masters were assigned.
        """
        if self._of_cleared and (were_assigned or self._were_assigned):
            self.of_gradients, self._of_cleared = [*self._of_cleared, *self.of_gradients], []
        return self.of_gradients

    def take(self) -> list[Verdict]:
        """Return the verdicts about the gradients that are there, and forget them."""
        taken, self.of_gradients, self._stepped = self.of_gradients, [], 0
        return taken

    def end_step(self) -> None:
        """Note that a step has gone by all of them."""
        self._of_cleared, self._were_assigned, self._stepped = [], False, len(self.of_gradients)


def _bounded(verdicts: list[Verdict]) -> list[Verdict]:
    return joined(verdicts) if len(verdicts) > MOST_VERDICTS else verdicts
