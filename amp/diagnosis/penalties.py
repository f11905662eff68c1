"""Finding losses that are computed from scaled gradients, such as penalties.

A scaled gradient has the degree 1 in the scale, its square 2, and a ratio of two gradients 0. A result
of degree 1 is unscaled by a factor of 1 / scale, or of less, since it may hold a learning rate too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch.utils._pytree import tree_leaves

from amp.diagnosis.memories import Value, inputs_of
from amp.diagnosis.records import Op
from amp.diagnosis.twins import largest

EPS = 1e-3
"""A number that is added to keep a divisor from 0 is at most so large."""


class _Scaled(NamedTuple):
    """What an op makes of scaled gradients.

    Attributes:
        degree: in the scale; NaN for a sum of several.
        taker: the first op of a forward that takes them; the op itself in a backward, and None for a
            loss that is scaled.
    """

    degree: float
    taker: Op | None


def takes_scaled(ops: Mapping[int, Op], losses: Iterable[int], scale: float) -> Op | None:
    """Return the op of a forward through which a loss depends on scaled gradients, or None."""
    if scale == 1.0:
        return None
    scaled: dict[int, _Scaled] = {}
    for number, op in ops.items():
        of = [scaled[x] for x in op.parents if x in scaled]
        if op.phase == "backward" and op.loss_scale != 1.0:
            scaled[number] = _Scaled(1.0, op)
        elif op.phase == "forward" and not of and _scales(op, scale):
            scaled[number] = _Scaled(1.0, None)
        elif op.phase == "forward" and of and (degree := _degree(op, scaled, scale)):
            takers = [x.taker for x in of if x.taker is not None]
            first = next((x for x in takers if x.phase == "forward"), op)
            scaled[number] = _Scaled(degree, first if takers else None)
    wrong = [scaled[x] for x in losses if x in scaled and scaled[x].degree != 1.0]
    return next((x.taker for x in wrong if x.taker is not None and x.taker.phase == "forward"), None)


def _scales(op: Op, scale: float) -> bool:
    """Whether an op multiplies a loss by the loss scale."""
    factors = [x for x in inputs_of(op) if x.real.numel() == 1] if op.aten == "mul" else []
    return any(_size(x) == scale for x in factors)


def _degree(op: Op, scaled: Mapping[int, _Scaled], scale: float) -> float:
    """Return the degree of the result of an op; 0 if it is unscaled."""
    if "foreach" in op.aten:  # as a gradient scaler unscales
        return 0.0
    if op.args is None:
        return next(scaled[x].degree for x in op.parents if x in scaled)
    given = [x for x in tree_leaves((op.args, op.kwargs)) if x is not None]
    made = [x.made if isinstance(x, Value) else 0 for x in given]
    degrees = [scaled[x].degree if x in scaled else 0.0 for x in made]
    degree, name = next(filter(None, degrees), 0.0), op.aten.rstrip("_")
    if name in ("mul", "div"):
        total = degrees[0] + (degrees[1] if name == "mul" else -degrees[1])
        factor = next((_size(x) for x, of in zip(given[:2], degrees, strict=False) if not of), 1.0)
        factor = 1 / factor if name == "div" and factor else factor
        return 0.0 if total == 1.0 and factor <= 1.001 / scale else total
    if name == "pow":
        return degree * given[1] if isinstance(given[1], (int, float)) else math.nan
    if name in ("add", "sub", "rsub"):
        others = [x for x, of in zip(given[:2], degrees, strict=False) if of != degree]
        is_shifted = any(not isinstance(x, (int, float)) or abs(x) > EPS for x in others)
        return math.nan if is_shifted else degree
    return {"sqrt": degree / 2, "reciprocal": -degree, "square": 2 * degree}.get(name, degree)


def _size(x: Any) -> float:
    """Return the largest magnitude of a factor, and 1 of what is neither a number nor floating."""
    if isinstance(x, Value):
        return largest(x.real)
    return abs(x) if isinstance(x, (int, float)) else 1.0
