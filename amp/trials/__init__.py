"""Running a step or a training again, in other precisions, to see what helps.

`amp.doctor`, `amp.check`, `amp.compare` and `amp.explain` return objects of classes in this package.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amp.trials.checking import Checkup as Checkup
    from amp.trials.cures import Cure as Cure
    from amp.trials.cures import Prescription as Prescription
    from amp.trials.explaining import Explained as Explained
    from amp.trials.explaining import Explanation as Explanation
    from amp.trials.results import Comparison as Comparison
    from amp.trials.results import LevelResult as LevelResult
    from amp.trials.results import ModuleError as ModuleError
    from amp.trials.results import Problem as Problem

__all__ = [
    "Checkup",
    "Comparison",
    "Cure",
    "Explained",
    "Explanation",
    "LevelResult",
    "ModuleError",
    "Prescription",
    "Problem",
]

_MODULES = {
    "Checkup": "checking",
    "Comparison": "results",
    "Cure": "cures",
    "Explained": "explaining",
    "Explanation": "explaining",
    "LevelResult": "results",
    "ModuleError": "results",
    "Prescription": "cures",
    "Problem": "results",
}


def __getattr__(name: str) -> Any:
    """Import a class on first use: some modules are slow to load."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"amp.trials.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'amp.trials' has no attribute '{name}'")
