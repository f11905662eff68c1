"""Names of modules and parameters without the parts that wrappers add, by which random bits go."""

from collections import Counter
from collections.abc import Sequence

_OF_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_OF_MODULES_TOO = {"module"}
"""The part that DDP and DataParallel add, and that a model may have itself."""


def bare_names(names: Sequence[str]) -> list[str]:
    """Return the names of one model without the parts that wrappers add.

    Names that would become one keep each `module`, but for those with which all names begin.
    """
    kept = [_without(_OF_WRAPPERS, name) for name in names]
    while kept and all(name.split(".")[0] in _OF_MODULES_TOO for name in kept):
        kept = [name.partition(".")[2] for name in kept]
    bare = [_without(_OF_MODULES_TOO, name) for name in kept]
    count = Counter(bare)
    return [own if count[name] > 1 else name for own, name in zip(kept, bare, strict=True)]


def _without(parts: set[str], name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in parts)
