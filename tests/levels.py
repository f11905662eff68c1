"""The levels that there are, and those of some property: a new one is tested where it belongs."""

from __future__ import annotations

from collections.abc import Callable

from amp.profiles import levels
from amp.profiles.levels import load_profile
from amp.profiles.properties import Properties

FP8 = [level for level in levels.LEVELS if load_profile(level).fp8]
"""Those whose linear layers run in FP8: all else is as at the level that they extend."""
LEVELS = [level for level in levels.LEVELS if level not in FP8]


def levels_where(has: Callable[[Properties], object]) -> list[str]:
    """Return the levels whose properties are so, without those in FP8."""
    return [level for level in LEVELS if has(load_profile(level))]


DYNAMIC = levels_where(lambda properties: properties.loss_scaling.dynamic)
"""Those with a loss scale that moves."""
CHECKED = levels_where(lambda properties: bool(properties.loss_scaling.check))
"""Those whose gradients are checked, on the CPU and where the optimizer skips on the device."""
STATIC = [level for level in LEVELS if level not in DYNAMIC]
BY_OP = levels_where(lambda properties: properties.patch_torch_functions)
"""Those at which functions cast their arguments."""
WITH_MASTERS = levels_where(lambda properties: properties.master_weights)
