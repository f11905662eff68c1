"""Running a step or a training again, in other precisions, to see what helps.

`amp.doctor`, `amp.compare` and `amp.explain` return objects of classes in this package.
"""

from amp.trials.cures import Cure as Cure
from amp.trials.cures import Prescription as Prescription
from amp.trials.explaining import Explained as Explained
from amp.trials.explaining import Explanation as Explanation
from amp.trials.results import Comparison as Comparison
from amp.trials.results import LevelResult as LevelResult
from amp.trials.results import ModuleError as ModuleError
from amp.trials.results import Problem as Problem
