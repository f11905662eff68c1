"""What overwrites a whole weight leaves nothing of its master in 16 bits.

The low half of such a master cannot tell what was written to the high half, the weight, as long as the
two fit together. So what overwrites all of a tensor, as most of `torch.nn.init` does, clears it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from amp.dtypes import LOW_PRECISION
from amp.masters.lean import LeanMasterWeights
from amp.masters.values import master_of
from amp.patching import Patches
from amp.undo import Undo

_OVERWRITE = ("fill_", "normal_", "uniform_", "zero_")


def clear_overwritten(undo: Undo) -> None:
    """Let these methods of a weight clear the low half of its master, until `undo`."""
    patches = Patches()
    undo.always(patches.undo)
    for name in _OVERWRITE:
        patches.surround(Tensor, name, _overwrite)
    patches.surround(nn.init, "eye_", _overwrite)


def _overwrite(original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    result = original(tensor, *args, **kwargs)
    found = master_of(tensor, in_any_shape=True) if tensor.dtype in LOW_PRECISION else None
    if found is not None:
        masters, master = found
        if isinstance(masters, LeanMasterWeights):
            with masters.lock:
                masters.clear_low_half(master)
    return result
