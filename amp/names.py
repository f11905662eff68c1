"""Names of modules and parameters without the prefixes of wrappers, from which random bits follow."""

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

Model = TypeVar("Model", int, str)

_OF_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_OF_MODULES_TOO = {"module"}
"""The part that DDP and DataParallel add, and that a model may have itself."""


def bare_names(names: Iterable[tuple[Model, str]]) -> dict[tuple[Model, str], str]:
    """Return names without the parts that wrappers add.

    Names of one model that would become equal keep each `module`, except those with which all begin.

    Args:
        names: pairs of an object that stands for a model, and a name in it.
    """
    of_models: dict[Model, list[str]] = {}
    for model, name in names:
        of_models.setdefault(model, []).append(name)
    found: dict[tuple[Model, str], str] = {}
    for model, given in of_models.items():
        kept = [_without(_OF_WRAPPERS, name) for name in given]
        while all(name.split(".")[0] in _OF_MODULES_TOO for name in kept):
            kept = [name.partition(".")[2] for name in kept]
        bare = [_without(_OF_MODULES_TOO, name) for name in kept]
        count = Counter(bare)
        for name, long, short in zip(given, kept, bare, strict=True):
            found[model, name] = long if count[short] > 1 else short
    return found


def unwrapped_name(name: str) -> str:
    """Return a name without the parts that only wrappers add, as by `torch.compile`."""
    return _without(_OF_WRAPPERS, name)


def _without(parts: set[str], name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in parts)
