"""The kernels. Their modules, and Triton, are imported at their first use, not by `import amp`."""

import importlib
from types import ModuleType


class _Kernels:
    """The modules of `amp.kernels`."""

    def __getattr__(self, name: str) -> ModuleType:
        try:
            module = importlib.import_module(f"amp.kernels.{name}")
        except ModuleNotFoundError as error:
            raise AttributeError(f"there is no module amp.kernels.{name}") from error
        setattr(self, name, module)
        return module


kernels = _Kernels()
