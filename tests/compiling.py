"""What is compiled in other threads while tests run."""

from __future__ import annotations

import threading

from amp.kernels.compiled_library import THREAD


def wait_for_compilers() -> None:
    """Wait until what earlier tests compile in the background has ended."""
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(timeout=60)
