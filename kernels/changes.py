"""Changes of tensors that are made all, or none, whenever an interrupt comes.

Python raises KeyboardInterrupt between any two instructions. A step that has changed some tensors by
then can be neither repeated nor left. So it is planned first, as a list of changes, each made by one
call, which no interrupt divides. Once the first is made, so are the others before the interrupt goes
on.
"""

import operator
from collections import deque
from collections.abc import Callable
from typing import Any

from amp.kernels.grad_mode import without_grad

Change = Callable[[], Any]
"""Makes one change: by one call of a function that is not written in Python, at its end, or in a way
that may be repeated, for it is called again if an interrupt has ended it."""


def at_once(*changes: Change) -> None:
    """Call functions that are not written in Python, without an interrupt between them."""
    deque(map(operator.call, changes), maxlen=0)


class Changes:
    """What is going to be changed, in order."""

    def __init__(self) -> None:
        self._planned: list[Callable[[], Change]] = []
        self._made: list[Any] = []

    def add(self, change: Change) -> None:
        """Plan a change that needs nothing else."""
        self._planned.append(lambda: change)

    def add_later(self, work_out: Callable[[], Change]) -> None:
        """Plan a change that is to be computed when its turn comes.

        Args:
            work_out: computes what the change needs, changes nothing, and returns the change. It is
                called again if an interrupt has ended it.
        """
        self._planned.append(work_out)

    @property
    def are_made(self) -> bool:
        """Whether all of them are made, and there are any."""
        return 0 < len(self._planned) == len(self._made)

    @without_grad
    def make(self) -> None:
        """Make them. After an interrupt, the rest is made before the interrupt goes on."""
        try:
            self._make_rest()
        finally:
            self._make_rest()

    def _make_rest(self) -> None:
        while len(self._made) < len(self._planned):
            change = self._planned[len(self._made)]()
            # Made and noted by one call: a signal that comes during the change is handled after both.
            self._made.extend(map(operator.call, [change]))
