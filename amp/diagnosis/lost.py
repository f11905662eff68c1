"""Numbers that ops have lost: constants, integers, and changes of what training keeps."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp.casting.cast_hooks import EXACT_IN_FP32, EXACT_INTEGERS
from amp.diagnosis.memories import Value
from amp.diagnosis.places import Place
from amp.diagnosis.records import Op, Owned
from amp.diagnosis.twins import floats_in, has_minus_inf_alone, largest
from amp.dtypes import LOW_PRECISION

FAR = 0.2
"""How far off a count is named: most uses bear less."""
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}


class LossyCast(NamedTuple):
    """A cast or a count that rounded integers, or a cast that made -inf of a finite number.

    Attributes:
        op: the cast, the range, or what made the integers.
        argument: the name of the model's argument, or an empty text.
        largest: the largest magnitude.
        before: a number that was changed.
        after: what became of it; the same where it may have been rounded before the watch.
    """

    op: Op
    argument: str
    largest: float
    before: float
    after: float

    @property
    def is_mask(self) -> bool:
        """Whether a finite number became -inf."""
        return math.isinf(self.after)


class Still(NamedTuple):
    """A tensor of before the watch that an op has written to, and that stayed as it was where it moved.

    Attributes:
        op: the op.
        owned: what it is.
        memory: its memory.
        dtype: its dtype.
        numbers: how many numbers it has.
        share: the share of them that did not change, and their twins did.
    """

    op: Op
    owned: Owned
    memory: int
    dtype: torch.dtype
    numbers: int
    share: float

    @property
    def is_decay(self) -> bool:
        """Whether it is a weight that was multiplied."""
        return self.owned.kind == "weight" and "mul_" in self.op.aten


class Lost:
    """Numbers that ops have lost.

    Attributes:
        scalars: Python numbers among the arguments of ops that are 0 in float16, as their tensors are,
            and where these ops were called.
        casts: casts that changed integers or masks.
        still: tensors that an op was to change, and did not, by memory and op.
    """

    def __init__(self) -> None:
        self.scalars: list[tuple[float, Place]] = []
        self.casts: list[LossyCast] = []
        self.still: dict[tuple[int, str], Still] = {}

    def note_still(self, op: Op, owned: Owned, before: Value, x: Tensor, exact: Tensor) -> None:
        """Note a tensor in 16 bits that a write has left as it was, where its twin has moved."""
        if x.dtype not in LOW_PRECISION:
            return
        stays = x.isfinite() & (x == before.real) & (exact != before.exact)  # inf + 1 is inf
        share = float(stays.count_nonzero()) / x.numel()
        key = before.memory.key
        known = self.still.get((key, op.aten))
        if share > 0 and (known is None or known.share < share):
            self.still[key, op.aten] = Still(op, owned, key, x.dtype, x.numel(), share)

    def note_scalars(self, place: Place, func: Any, args: Any) -> None:
        """Note Python numbers among the arguments of an op that are 0 there.

        Only pointwise ops are checked: norms take an eps too, but compute with it in FP32.
        """
        given = floats_in(args)
        is_half = bool(given) and given[0].dtype is torch.float16
        is_by_element = torch.Tag.pointwise in func.tags or re.search("fill|_foreach_", func.name())
        if is_half and is_by_element and func.overloadpacket.__name__ not in _COMPARISONS:
            small = [x for x in args if isinstance(x, float) and 0 < abs(x) <= 2.0**-25]
            self.scalars += [(x, place) for x in small]

    def note_cast(self, op: Op, name: str, y: Tensor, x: Tensor) -> None:
        """Note integers that a cast or a range has rounded to 16 bits, and masks that are -inf now."""
        most = largest(x)
        if y.dtype not in LOW_PRECISION or not math.isfinite(most):
            return
        if most > torch.finfo(y.dtype).max and has_minus_inf_alone(y):
            self.casts.append(LossyCast(op, name, most, -most, -math.inf))
        elif EXACT_INTEGERS[y.dtype] < most <= EXACT_IN_FP32 and bool((x == x.round()).all()):
            changed = (y.to(x.dtype) != x) & y.isfinite() & (x != -most)  # as -10000 of a mask
            if bool(changed.any()):
                numbers = most, x[changed][-1].item(), y[changed][-1].item()
                self.casts.append(LossyCast(op, name, *numbers))

    def note_integers(self, made: Op, value: Value, y: Any) -> None:
        """Note integers that a tensor of integers takes from numbers which were rounded before."""
        x = value.exact
        is_integer = isinstance(y, Tensor) and not (y.is_floating_point() or y.is_complex())
        if is_integer and y.dtype is not torch.bool and y.shape == x.shape and not x.is_complex():
            is_lost = (x == x.round()) & (x != value.rounded) & (x.to(y.dtype) != y)
            self._note_changed(made, x, value.real, is_lost)
            most = largest(x)
            is_large = most > EXACT_INTEGERS.get(value.real.dtype, math.inf)
            if is_large and bool((x == x.round()).all()) and not self.casts:  # rounded before
                self.casts.append(LossyCast(made, "", most, most, most))

    def note_count(self, op: Op, y: Tensor, x: Tensor) -> None:
        """Note whole numbers that are far off, as of ones that were added up in 16 bits."""
        if y.dtype in LOW_PRECISION and bool((x == x.round()).all()):
            self._note_changed(op, x, y, (y.to(x.dtype) - x).abs() > FAR * x.abs())

    def _note_changed(self, op: Op, x: Tensor, y: Tensor, changed: Tensor) -> None:
        if op.gives is not None and bool((changed & y.isfinite()).any()):
            before, after = x[changed][-1].item(), y[changed][-1].item()
            self.casts.append(LossyCast(op, "", largest(x), before, after))
