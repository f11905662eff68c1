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
    before = host_lists.lists
    try:
        module = host_lists.load(host_lists._source(), "", host_lists._FLAGS, host_lists._open)
        host_lists._use(module)
        assert host_lists.lists is module, "tensors' pointers were not found in their objects"
    finally:
        host_lists.lists = before
    return module
