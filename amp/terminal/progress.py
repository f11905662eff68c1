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
        runs: how many runs are expected; 0 if that is not known.
    """

    def __init__(self, is_quiet: bool, runs: int = 0) -> None:
        self._is_quiet = is_quiet or not sys.stderr.isatty()
        self._runs, self._made, self._began = runs, 0, time.monotonic()

    @contextmanager
    def of_run(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Show a run in the block; yield a function that takes the steps made and their total."""
        self._made += 1
        if self._is_quiet:
            yield lambda steps, of: None
            return
        number = f", run {self._made} of {max(self._runs, self._made)}" if self._runs else ""
        left = ""
        if 1 < self._made <= self._runs:
            each = (time.monotonic() - self._began) / (self._made - 1)
            left = f", about {each * (self._runs - self._made + 1):.0f} s left"
        title = f"{what}{number}{left}"
        try:
            from tqdm import tqdm
        except ImportError:
            print(title, file=sys.stderr)
            yield lambda steps, of: None
            return
        with tqdm(desc=title, unit="step", leave=False, ncols=80, mininterval=0) as bar:

            def tell(steps: int, of: int) -> None:
                bar.total = of
                bar.update(steps - bar.n)

            yield tell
