"""The optimizer step on the CPU as one loop in C, made of the formula that plain torch runs.

The formula is called once, with names in place of tensors, and writes down what it does to them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from amp.kernels.native import C_TYPES, PIECE, Loop, is_worth_a_loop, loop

Formula = Callable[
    [Tensor, Tensor, Tensor, Tensor, Sequence[Any]], tuple[Tensor, Tensor | None, Tensor | None]
]
"""From a parameter, gradient, two moments and the rule's numbers for this step to the new parameter and
moments; a moment that the rule does not have comes as an empty tensor, and its result is not used."""

_GRAD = 1
"""Where in the streams the gradients are, which are not written."""


def step_loop(
    formula: Formula,
    moments: int,
    streams: Sequence[Sequence[Tensor]],
    numbers: int,
    backend: str | None,
) -> Loop | None:
    """Return the loop that steps lists of flat tensors; None where none can be or is worth it.

    Args:
        formula: of element-wise operations, those of `_Term`.
        moments: how many it has.
        streams: parameters, gradients, the moments, and perhaps 16-bit weights to write.
        numbers: how many numbers the formula takes; the loop takes the gradients' scale before them.
        backend: see `amp.kernels.backend`.
    """
    if not all(is_worth_a_loop(tensors, backend) for tensors in streams):
        return None
    types = tuple([C_TYPES[tensors[0].dtype] for tensors in streams])
    return loop(types, _body(formula, types, moments, numbers), numbers=numbers + 1)


class _Term:
    """A number in a formula that is being written in C. Operations append to its lines.

    Args:
        lines: the C so far.
        value: a C expression.
    """

    def __init__(self, lines: list[str], value: str) -> None:
        self._lines = lines
        self._name = f"t{len(lines)}"
        lines.append(f"const float {self._name} = {value};")

    def _new(self, form: str, *others: Any) -> _Term:
        return _Term(self._lines, form.format(self, *others))

    def __str__(self) -> str:
        return self._name

    def __add__(self, other: Any) -> _Term:
        return self._new("{} + {}", other)

    def __sub__(self, other: Any) -> _Term:
        return self._new("{} - {}", other)

    def __mul__(self, other: Any) -> _Term:
        return self._new("{} * {}", other)

    def __truediv__(self, other: Any) -> _Term:
        return self._new("{} / {}", other)

    def sqrt(self) -> _Term:
        return self._new("sqrtf({})")

    def sign(self) -> _Term:
        return self._new("(float)(({0} > 0) - ({0} < 0))")


@functools.cache
def _body(formula: Formula, types: Sequence[str], moments: int, numbers: int) -> str:
    """Return what a formula does to one piece, in C. 16-bit streams go by way of arrays in FP32."""
    before = [f"const float c{i} = numbers[{i}];" for i in range(1 + numbers)]
    after = []
    for i, kind in enumerate(types):
        if kind == "float":
            before.append(f"float *restrict f{i} = x{i};")
            continue
        before.append(f"float f{i}[{PIECE}];")
        if i < 2 + moments:
            before.append(f"widen_{kind}(x{i}, f{i}, length);")
        if i != _GRAD:
            after.append(f"narrow_{kind}(f{i}, x{i}, length);")
    lines: list[str] = []
    scale, *prepared = [_Term(lines, f"c{i}") for i in range(1 + numbers)]
    p, g, m, v = [_Term(lines, f"f{i}[i]" if i < 2 + moments else "0") for i in range(4)]
    p, *new = formula(p, g * scale, m, v, prepared)  # type: ignore[arg-type, assignment]
    written = [i for i in range(len(types)) if i != _GRAD]
    results = [p, *new[:moments], p]
    lines += [f"f{i}[i] = {term};" for i, term in zip(written, results, strict=False)]
    return "\n".join([*before, "for (int64_t i = 0; i < length; i++) {", *lines, "}", *after])
