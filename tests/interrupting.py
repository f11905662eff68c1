"""An interrupt at a chosen line of the library."""

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import amp

AMP = str(Path(amp.__file__).parent)
KERNELS = str(Path(amp.__file__).parent.parent / "kernels")


def is_in_formula_of_torch(frame: Any) -> bool:
    """Whether an optimizer of torch is changing tensors one by one, which nobody can divide rightly."""
    while frame is not None:
        code = frame.f_code
        if "torch/optim/" in code.co_filename and code.co_name.startswith("_single_tensor"):
            return True
        frame = frame.f_back
    return False


class Interrupter:
    """Counts the lines of the library that run, and raises KeyboardInterrupt at one of them."""

    def __init__(self, at: int = -1) -> None:
        self.at = at
        self.lines = 0
        self.place = ""
        self.first: list[int] = []
        """The numbers of lines that had not run before, or once."""
        self._seen: Counter[tuple[Any, int]] = Counter()

    def trace(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith((AMP, KERNELS)):
            return None
        if event == "line" and not is_in_formula_of_torch(frame):
            self._seen[frame.f_code, frame.f_lineno] += 1
            if self._seen[frame.f_code, frame.f_lineno] < 3:
                self.first.append(self.lines)
            self.lines += 1
            if self.lines - 1 == self.at:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self.trace

    @contextmanager
    def active(self) -> Iterator[None]:
        gc.disable()  # what an interrupt meets in a finalizer is swallowed
        sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(None)
            gc.enable()
