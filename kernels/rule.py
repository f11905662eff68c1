"""What the formula of an optimizer is made of; `adam.py`, `sgd.py` and the others are such formulas."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp.kernels.language import jit, tl
from amp.kernels.update_scale import widest

Numbers = tuple[float | Tensor, ...]
"""Hyper-parameters, in a rule's order: each on the host, or a tensor of one element."""

Prepared = tuple[float | None, ...]
"""What an update needs of the numbers, the same for all of a tensor. None leaves a term out."""

Streams = dict[str, Any]
"""What a step works on, each a `TensorList`, or a tensor, all of one shape: `param`, `grad`, and what
there is of `moment0`, `moment1`, ... (the rule's moments), `model` (16-bit weights to write) and `low`
(the low half of a parameter that is the high half of a master)."""

Formula = Callable[..., tuple[Any, tuple[Any, ...]]]
"""A rule's update in plain torch; see `Rule`."""


class Moment(NamedTuple):
    """What an optimizer keeps of each element of a parameter, besides the element.

    Attributes:
        name: in the optimizer's state, as `torch.optim` calls it.
        is_signed: whether its values may be negative.
        narrow: the dtypes in which it may be kept instead of the parameter's, rounded stochastically.
    """

    name: str
    is_signed: bool = True
    narrow: tuple[torch.dtype, ...] = (torch.bfloat16,)


class Rule(NamedTuple):
    """The formula of one optimizer.

    Attributes:
        moments: what it keeps, in the order in which `update` takes them.
        numbers: from the hyper-parameters of a group, by the names that the fused optimizer gives them,
            each a number or a tensor of one element, to the numbers that `prepare` and `at` take. The
            host does not wait for the device.
        prepare: for Triton, in FP32: from the numbers, t, a pointer to the tensor's own numbers and how
            far apart they are to what `update` needs of them.
        at: the same for plain torch, on the host in FP64: from the numbers, t and the tensor's own:
            one, or None; the two norms, for a rule with a direction, if they are known. Such a rule
            says besides, as the last, whether the norms are still to be found.
            None where `prepare` is right for both.
        update: from a parameter, its gradient, a tuple of its moments, what was prepared and a square
            root to the new parameter and a tuple of new moments. Triton and plain torch both run it.
        direction: as `update`, to the direction of the step in place of the parameter. A rule that has
            it goes by the norms of parameters and directions: they are the tensor's own numbers.
        plain_update: for plain torch instead of `update`, where it finds the norms itself.
    """

    moments: tuple[Moment, ...]
    numbers: Callable[[Mapping[str, Any]], Numbers]
    prepare: Any
    at: Callable[[list[float], float, Any], Prepared] | None
    update: Any
    direction: Any = None
    plain_update: Any = None


class StepArguments(NamedTuple):
    """The arguments of `amp.kernels.stepping.step`; see there. `lists` has all but the steps."""

    rule: Rule
    numbers: Sequence[float | Tensor]
    lists: Streams
    steps: Sequence[Tensor]
    of_tensor: Tensor | None
    seeds: Sequence[int] | None
    inv_scale: Tensor | None
    clip: Tensor | None
    found_inf: Tensor | None
    maximize: bool
    backend: str | None


def in_double(number: float | Tensor) -> float | Tensor:
    """Return a hyper-parameter in FP64; a tensor on a device without FP64 in FP32."""
    return widest(number) if isinstance(number, Tensor) else float(number)


def log_of(beta: float | Tensor) -> float | Tensor:
    """Return the logarithm of a beta, -inf for 0."""
    if not isinstance(beta, Tensor):
        return math.log(beta) if beta > 0 else -math.inf
    return beta.log()


@jit
def square_root(x):
    """Return a root, rounded to nearest even; tl.sqrt would take subnormal squares for 0."""
    return tl.sqrt_rn(x)


@jit
def bias_correction(t, log_beta, corrects_bias):
    """Return 1 - beta^t, or 1 if there is nothing to correct."""
    return tl.where(corrects_bias == 0.0, 1.0, -_expm1_of_negative(t * log_beta))


@jit
def _expm1_of_negative(x):
    """Return e^x - 1 for x <= 0, to a few units in the last place, also near 0."""
    near = 1.0
    for k in tl.static_range(8, 1, -1):
        near = 1.0 + x / k * near
    return tl.where(x > -0.4, x * near, tl.exp(x) - 1.0)
