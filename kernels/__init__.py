"""The kernels. Each is loaded when it is first named, and Triton with it; `import amp` loads none."""

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"amp.kernels.{name}")
    except ModuleNotFoundError as error:
        raise AttributeError(f"amp.kernels has no module {name!r}") from error
