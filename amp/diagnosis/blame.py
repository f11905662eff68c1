"""Walking from a wrong result of a shadow to the value that the format could not hold.

At each op the guilty input is the one which, put into otherwise exact ops, ruins the result most. Then
the twin of this input is rounded correctly to its format. If the result is ruined still, the format
cannot hold this value: here the digits are lost. If it is not, the error was inherited, and the walk
goes on to the op that made the value. A value is put wherever the ops up to the result read it.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from amp.diagnosis.memories import Value, inputs_of, results_from
from amp.diagnosis.records import MOVES, Op, ancestors
from amp.diagnosis.shadow import Shadow
from amp.diagnosis.twins import as_real, difference, has_twin, is_finite

LONGEST = 64
"""How many ops a walk passes at most."""
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


_Version = tuple[int, int]
"""What a memory holds between two writes: the memory's key, and the number of the op that wrote it."""


def _version(value: Value) -> _Version:
    return value.memory.key, value.made


class Walk:
    """A walk from an op whose result is wrong.

    Args:
        shadow: the shadow that has seen the op.
        op: the op.
    """

    def __init__(self, shadow: Shadow, op: Op) -> None:
        self._shadow, self._op = shadow, op

    def loss(self, known: Iterable[Loss] = ()) -> Loss | None:
        """Return where the digits were lost that ruin the result, or None if that is not found.

        It may be one of the `known` losses, which are tried first.
        """
        for loss in known:
            if self._is_ruined_by(loss.value):
                return loss
        at = self._op
        for _ in range(LONGEST):
            guilty = self._worst(at, lambda x: x.real.to(x.exact.dtype)) if has_twin(at.func) else None
            if guilty is None:
                return None
            made = self._shadow.ops.get(guilty.made)
            is_moved = made is not None and made.args is not None and made.aten in MOVES
            if not is_moved and self._is_ruined_by(guilty):
                return self._earliest(guilty, at)
            if made is None:
                return None
            at = made
        return None

    @functools.cached_property
    def _before(self) -> list[tuple[Op, set[_Version]]]:
        """The ops that the result comes from and that can run again, in order, with what they read."""
        found = ancestors(self._shadow.ops, [self._op.number])
        kept = [x for x in found if x.args is not None and has_twin(x.func)]
        return [(x, set(map(_version, inputs_of(x)))) for x in kept]

    @functools.cached_property
    def _exact(self) -> list[Tensor]:
        return results_from(self._op, lambda x: x.exact)

    def _worst(self, at: Op, other: Callable[[Value], Tensor]) -> Value | None:
        """Return the input of an op that ruins the result most with other values, if any does."""
        harms = [(self._harm(x, other(x)), x) for x in inputs_of(at)]
        most, worst = max(harms, key=lambda each: each[0], default=(0.0, None))
        return worst if self._is_ruin(most) else None

    def _is_ruined_by(self, value: Value) -> bool:
        """Whether the result is ruined by what the format of a value makes of it."""
        return self._is_ruin(self._harm(value, value.rounded))

    def _earliest(self, value: Value, taken: Op) -> Loss:
        """Return the loss in the first value that its format ruins: wider ones after it are no cure."""
        while True:
            made = self._shadow.ops.get(value.made)
            worst = None if made is None else self._worst(made, lambda x: x.rounded)
            if made is None or worst is None:
                return _classified(value, made, taken)
            value, taken = worst, made

    def _is_ruin(self, harm: float) -> bool:
        return math.isinf(harm) if self._op.is_bad else harm > self._op.error / 3

    def _harm(self, value: Value, replaced: Tensor) -> float:
        """Return how far the result is off if a value is replaced where it is read; inf for NaN."""
        if torch.equal(replaced, value.exact):
            return 0.0
        pairs = list(zip(self._with([(value, replaced)]), self._exact, strict=False))
        if any(bool((~x.isfinite() & y.isfinite()).any()) for x, y in pairs):
            return math.inf
        return max((difference(x, y) for x, y in pairs), default=0.0)

    def is_finite_if_filled(self) -> bool:
        """Whether the result is finite with the least number of the format in the place of an -inf."""
        read = [x for op, _ in self._before for x in inputs_of(op) if not op.bad.is_minus_inf]
        is_masked = [(x, x.real == -math.inf) for x in read]
        filled = [
            (x, torch.where(at, torch.finfo(x.real.dtype).min, x.exact))
            for x, at in is_masked
            if bool(at.any())
        ]
        found = self._with(filled)
        return bool(found) and all(map(is_finite, found))

    def _with(self, replaced: Iterable[tuple[Value, Tensor]]) -> list[Tensor]:
        """Return the result with other values in the place of some; none if it does not read them."""
        changed = defaultdict[_Version, list[tuple[Tensor, Tensor]]](list)
        for value, other in replaced:
            changed[_version(value)].append((as_real(value.exact), as_real(other)))
        first, found = min((made for _, made in changed), default=0), list[Tensor]()
        for op, read in self._before:
            if op.number > first and not changed.keys().isdisjoint(read):
                found = results_from(op, lambda x: _overlaid(x.exact, changed.get(_version(x), [])))
                if len(found) != len(op.outputs):  # it cannot run again
                    return []
                for (key, placed), y in zip(op.outputs, found, strict=True):
                    earlier = [part for at in read if at[0] == key for part in changed.get(at, [])]
                    if (key, op.number) not in changed:
                        changed[key, op.number] = [*earlier, (placed, as_real(y))]
        return found if any(made == self._op.number for _, made in changed) else []


def _overlaid(exact: Tensor, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return an exact value of which parts of its memory, each given by a view, have other numbers."""
    if not parts:
        return exact
    shown = as_real(exact)
    length = shown.untyped_storage().nbytes() // shown.element_size()
    flat = shown.as_strided((length,), (1,), 0).clone()
    for placed, numbers in parts:
        view = flat.as_strided(placed.size(), placed.stride(), placed.storage_offset())
        for dim, stride in enumerate(placed.stride()):
            if stride == 0:  # as of an expanded tensor, whose elements lie in one place
                view, numbers = view.narrow(dim, 0, 1), numbers.narrow(dim, 0, 1)
        view.copy_(numbers)
    result = flat.as_strided(shown.size(), shown.stride(), shown.storage_offset())
    return torch.view_as_complex(result) if exact.is_complex() else result


def _classified(value: Value, made: Op | None, taken: Op) -> Loss:
    """Return what the format does to a value, and to the element that matters most."""
    exact, rounded = as_real(value.exact), as_real(value.rounded)
    changed = rounded != exact
    is_gone = changed & (rounded == 0)
    is_near_another = "sub" in taken.aten and bool((changed & ~is_gone).any())  # as 0.999 near 1
    if bool(is_gone.any()) and not is_near_another:
        cause, which = "underflow", is_gone
    elif bool((exact == exact.round())[changed].all()):
        cause, which = "cast", changed
    else:
        cause, which = "cancellation" if taken.aten in _SUBTRACTIONS else "rounding", changed
    worst = torch.where(which, _harms(value, taken), -1.0).argmax()
    before, after = exact.flatten()[worst], rounded.flatten()[worst]
    return Loss(cause, value, made, taken, before.item(), after.item())


def _harms(value: Value, taken: Op) -> Tensor:
    """Return what rounding each element of a value does to what an op makes of it, relative to that.

    If the op makes nothing of the same size, return how large the elements are.
    """
    exact = as_real(value.exact)
    others = results_from(taken, lambda x: x.rounded if x is value else x.exact)
    for after, before in zip(others, results_from(taken, lambda x: x.exact), strict=True):
        if before.shape == exact.shape:
            return ((after - before) / before).abs().nan_to_num(math.inf)
    return exact.abs()
