"""Showing on a terminal how far runs of a script are."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Progress:
    """Shows on stderr which run is made and how far it is: by tqdm, or by plain lines without it.

    Nothing is shown in a pipe.

    Args:
        is_quiet: whether nothing is shown on a terminal either.
    """

    def __init__(self, is_quiet: bool) -> None:
        self._is_quiet = is_quiet or not sys.stderr.isatty()
        self._began = time.monotonic()
        self._place = ""

    def note(self, done: int, of: int) -> None:
        """Say with the next runs that they are for the part after those that are `done`, of all."""
        left = (time.monotonic() - self._began) / done * (of - done)
        self._place = f", {done + 1} of {of}, about {left:.0f} s left"

    @contextmanager
    def of_run(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Show a run in the block; yield a function that takes the steps made and their total."""
        if self._is_quiet:
            yield lambda steps, of: None
            return
        waiting = f"{what}{self._place}, waits for its first step"
        try:
            from tqdm import tqdm
        except ImportError:
            print(waiting, file=sys.stderr)
            yield lambda steps, of: None
            return
        with tqdm(desc=waiting, unit="step", leave=False, ncols=80, mininterval=0) as bar:

            def tell(steps: int, of: int) -> None:
                bar.total = of
                place = self._place or f", to step {of}"
                bar.set_description_str(f"{what}{place}", refresh=False)
                bar.update(steps - bar.n)

            yield tell
