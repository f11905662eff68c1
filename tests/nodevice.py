"""A GPU that is not there, for all of Triton but the launch itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class _Utils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, name: str, *_: Any) -> tuple[int, str, int, int, int]:
        return 1, name, 0, 0, 1024


class NoDevice:
    """A driver for an sm_90 that is not there: kernels are compiled for it, and not launched."""

    number = 1000  # of no real device: Triton keeps what it compiled by this number
    utils = _Utils()

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: None

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: Any = None) -> int:
        return 0
