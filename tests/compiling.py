"""What is compiled in other threads while tests run."""

from __future__ import annotations

import functools
import threading
from typing import Any

from amp.kernels import host_lists
from amp.kernels.compiled_library import THREAD


def wait_for_compilers() -> None:
    """Wait until what earlier tests compile in the background has ended."""
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(timeout=60)


@functools.cache
def lists_in_cpp() -> Any:
    """Return the functions of lists in C++; no thread that a test has begun loads others later."""
    host_lists._has_begun = True
    wait_for_compilers()
    return host_lists.compiled()
