"""An interrupt at a chosen line of the library.

`AMP_INTERRUPTS=1 pytest tests -k interrupt` tries every line, 2 every other one.
"""

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from torch.autograd import grad_mode

import amp
from amp import active, patching
from tests.tried import TRIED

AMP = str(Path(amp.__file__).parent)
GRAD_MODES = str(grad_mode.__file__)
KERNELS = str(Path(amp.__file__).parent.parent / "kernels")

EVERY = int(os.environ.get("AMP_INTERRUPTS", "0"))


def every_nth_line(quick: int, slow: int) -> pytest.MarkDecorator:
    """Give a test `every`: it tries every so manieth line, or as the environment says."""
    slow_one = pytest.param(EVERY or slow, marks=pytest.mark.slow)
    return pytest.mark.parametrize("every", [slow_one] if EVERY else [quick, slow_one])


def is_in_formula_of_torch(frame: Any) -> bool:
    """Whether an optimizer of torch is changing tensors one by one, which nobody can divide rightly."""
    for _ in range(4):  # the wrapper of a function of torch's is near
        frame = frame and frame.f_back
        if frame is not None and frame.f_code.co_name.startswith("_single_tensor"):
            return True
    return False


class Interrupter:
    """Counts the lines of the library that run, and raises KeyboardInterrupt at one of them.

    Args:
        at: the number of the line.
        torchs: files of torch whose lines count, too.
    """

    def __init__(self, at: int = -1, torchs: tuple[str, ...] = ()) -> None:
        self.at = at
        self._files = (AMP, KERNELS, *torchs)
        self.lines = 0
        self.place = ""
        self.first: list[int] = []
        """The numbers of lines that had not run before, or once."""
        self._seen: Counter[tuple[Any, int]] = Counter()

    def trace(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._files) or is_in_formula_of_torch(frame):
            return None
        return self._count if self.at < 0 else self._strike

    def _count(self, frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            self._seen[frame.f_code, frame.f_lineno] += 1
            if self._seen[frame.f_code, frame.f_lineno] < 3:
                self.first.append(self.lines)
            self.lines += 1
        return self._count

    def _strike(self, frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            if self.lines == self.at:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
            self.lines += 1
        return self._strike

    @contextmanager
    def active(self) -> Iterator[None]:
        TRIED["interrupts"] += self.at >= 0
        gc.disable()  # what an interrupt meets in a finalizer is swallowed
        sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(None)
            gc.enable()
            # A tracer may raise where a `with` is about to release its lock, and a signal cannot.
            for lock in (active.opening, patching._lock):
                while lock._is_owned():  # type: ignore[attr-defined]
                    lock.release()


def interrupt(at: int, work: Callable[[], object], torchs: tuple[str, ...] = ()) -> Interrupter:
    """Do some work, up to a line of the library if it has so many, and return what has counted them."""
    interrupter = Interrupter(at, torchs)
    with interrupter.active(), suppress(KeyboardInterrupt):
        work()
    return interrupter
