"""Running a step or a training again, in other precisions, to see what helps.

`amp.doctor`, `amp.compare` and `amp.explain` return objects of classes in this package.
"""

from amp.trials.cures import Cure, Prescription
from amp.trials.explaining import Explained, Explanation
from amp.trials.results import Comparison, LevelResult, ModuleError, Problem

__all__ = [
    "Comparison",
    "Cure",
    "Explained",
    "Explanation",
    "LevelResult",
    "ModuleError",
    "Prescription",
    "Problem",
]
