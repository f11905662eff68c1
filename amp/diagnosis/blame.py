"""Walking from a wrong result of a shadow to the value that the format could not hold.

At each op the guilty input is the one which, put into an otherwise exact op, ruins the result most.
Then the twin of this input, rounded correctly to its format, goes through the ops passed so far. If the
result is ruined still, the format cannot hold this value: here the digits are lost. If it is not, the
error was inherited, and the walk goes on to the op that made the value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from amp.diagnosis.memories import Value, results_from
from amp.diagnosis.records import Op
from amp.diagnosis.shadow import Shadow
from amp.diagnosis.twins import CANNOT_RUN, difference, has_twin

LONGEST = 64
"""How many ops a walk passes at most."""
_MOVES = {
    *("index", "gather", "cat", "stack", "clone", "index_select", "constant_pad_nd", "roll", "repeat"),
}
"""Ops that compute nothing: what their results have lost was lost before."""
_SUBTRACTIONS = {"sub", "sub_", "rsub", "add", "add_", "sum", "mean", "addcmul", "var", "cumsum"}


@dataclass(frozen=True)
class Loss:
    """Where digits are lost.

    Attributes:
        cause: `underflow`, `cancellation`, `rounding` or `cast`.
        value: the value that the format does not hold.
        made: the op that made it; None if it was there before.
        taken: the op that takes it.
        before: an element of the value, exactly.
        after: what the format makes of it.
    """

    cause: str
    value: Value
    made: Op | None
    taken: Op
    before: float
    after: float


def lost_before(shadow: Shadow, op: Op) -> Loss | None:
    """Return where the digits were lost that ruin the result of an op, or None if that is not known."""
    chain: list[tuple[Op, Value]] = []  # from the first op on, each with the input that is replaced
    at = op
    for _ in range(LONGEST):
        guilty = _guilty(at, chain, op)
        if guilty is None:
            return None
        chain.insert(0, (at, guilty))
        made = shadow.ops.get(guilty.made)
        is_moved = made is not None and made.args is not None and made.aten in _MOVES
        if not is_moved and _ruins(chain, guilty.rounded, op):
            by_cast = made and _of_argument(shadow, made, chain, op)
            return by_cast or _classified(guilty, made, at)
        if made is None or made.args is None:
            return None
        at = made
    return None


def _of_argument(shadow: Shadow, made: Op, chain: list[tuple[Op, Value]], op: Op) -> Loss | None:
    """Return the loss in a level's cast of an argument, if it alone ruins the result too."""
    for value in _inputs(made):
        cast = shadow.ops.get(value.made)
        is_cast = cast is not None and bool(cast.argument)
        if is_cast and _ruins([(made, value), *chain], value.rounded, op):
            return _classified(value, cast, made)
    return None


def _inputs(op: Op) -> list[Value]:
    return [x for x in tree_leaves((op.args, op.kwargs)) if isinstance(x, Value)]


def _guilty(at: Op, chain: list[tuple[Op, Value]], op: Op) -> Value | None:
    """Return the input whose rounded values ruin the result most, if any does."""
    if at.args is None or not has_twin(at.func):
        return None
    worst, most = None, 0.0
    for value in _inputs(at):
        harm = _harm([(at, value), *chain], value.real.to(value.exact.dtype), op)
        if harm > most:
            worst, most = value, harm
    return worst if _is_ruin(most, op) else None


def _ruins(chain: list[tuple[Op, Value]], replaced: Tensor, op: Op) -> bool:
    return _is_ruin(_harm(chain, replaced, op), op)


def _is_ruin(harm: float, op: Op) -> bool:
    return math.isinf(harm) if op.is_bad else harm > op.error / 3


def _harm(chain: list[tuple[Op, Value]], replaced: Tensor, op: Op) -> float:
    """Return how far the last result of a chain is off if its first value is replaced; inf for NaN."""
    found: list[Tensor] = []
    for i, (at, value) in enumerate(chain):
        try:
            found = results_from(at, lambda x, v=value, r=replaced: r if x is v else x.exact)
            if i + 1 < len(chain):
                replaced = _passed_on(found, at, chain[i + 1][1])
        except (*CANNOT_RUN, StopIteration):
            return 0.0
    exact = results_from(op, lambda x: x.exact)
    if any(bool((~x.isfinite() & y.isfinite()).any()) for x, y in zip(found, exact, strict=True)):
        return math.inf
    return max((difference(x, y) for x, y in zip(found, exact, strict=True)), default=0.0)


def _passed_on(found: list[Tensor], made: Op, value: Value) -> Tensor:
    """Return a value whose op has given other results: the value may be a view of one of them."""
    result, placed = next(
        (x, placed)
        for x, (memory, placed) in zip(found, made.outputs, strict=True)
        if memory == value.memory.key
    )
    exact = value.exact
    length = exact.untyped_storage().nbytes() // exact.element_size()
    flat = exact.as_strided((length,), (1,), 0).clone()
    flat.as_strided(placed.size(), placed.stride(), placed.storage_offset()).copy_(result)
    return flat.as_strided(exact.size(), exact.stride(), exact.storage_offset())


def _classified(value: Value, made: Op | None, taken: Op) -> Loss:
    """Return what the format does to a value."""
    exact, rounded = value.exact, value.rounded
    changed = rounded != exact
    is_gone = changed & (rounded == 0)
    if bool(is_gone.any()):
        cause, which = "underflow", is_gone
    elif bool((exact == exact.round())[changed].all()):
        cause, which = "cast", changed
    else:
        cause = "cancellation" if taken.aten in _SUBTRACTIONS else "rounding"
        which = changed & (exact.abs() == torch.where(changed, exact.abs(), 0.0).max())
    before, after = exact[which], rounded[which]
    if not before.numel():
        return Loss(cause, value, made, taken, math.nan, math.nan)
    return Loss(cause, value, made, taken, before[0].item(), after[0].item())
