"""`Rule`, the formula of an optimizer; `adam.py`, `sgd.py` and other modules define the rules."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp.kernels.language import jit, tl
from amp.kernels.update_scale import widest

Numbers = tuple[float | Tensor, ...]
"""Hyper-parameters, in a rule's order: each a Python number or a tensor of one element."""

Prepared = tuple[float | None, ...]
"""The numbers that an update takes, the same for all elements of a tensor. None leaves a term out."""

Streams = dict[str, Any]
"""The tensors of a step by name, each a `TensorList`, or a tensor, all of one shape: `param`, `grad`,
and if present `moment0`, `moment1`, ... (the rule's moments), `model` (16-bit weights to write) and
`low` (the low half of a master whose high half is `param`)."""

Formula = Callable[..., tuple[Any, tuple[Any, ...]]]
"""A rule's update in plain torch; see `Rule`."""


class Moment(NamedTuple):
    """Optimizer state with one number for each element of a parameter.

    Attributes:
        name: in the optimizer's state, as `torch.optim` calls it.
        is_signed: whether its values may be negative.
        narrow: the dtypes, other than the parameter's, in which it may be kept, rounded stochastically.
    """

    name: str
    is_signed: bool = True
    narrow: tuple[torch.dtype, ...] = (torch.bfloat16,)


class Rule(NamedTuple):
    """The formula of one optimizer.

    Attributes:
        moments: the moments, in the order in which `update` takes them.
        numbers: takes the hyper-parameters of a group, by the names that the fused optimizer gives
            them, each a number or a tensor of one element; returns the numbers that `prepare` and `at`
            take. The host does not wait for the device.
        prepare: for Triton, in FP32: takes the numbers, t, a pointer to the tensor's own numbers and
            the distance between them; returns the prepared numbers for `update`.
        at: the same for plain torch, on the host in FP64: takes the numbers, t and the tensor's own
            number, or None. A rule with a direction gets two norms, or None if they are unknown, and
            returns as its last number whether the norms are still to be computed. None where `prepare`
            serves both.
        update: takes a parameter, its gradient, a tuple of its moments, the prepared numbers and a
            square root function; returns the new parameter and a tuple of new moments. Triton and plain
            torch both run it.
        direction: as `update`, but returns the direction of the step in place of the new parameter. A
            rule with a direction uses the norms of parameters and directions as the tensor's own
            numbers.
        plain_update: replaces `update` in plain torch, where it may compute the norms itself.
    """

    moments: tuple[Moment, ...]
    numbers: Callable[[Mapping[str, Any]], Numbers]
    prepare: Any
    at: Callable[[list[float], float, Any], Prepared] | None
    update: Any
    direction: Any = None
    plain_update: Any = None


class StepArguments(NamedTuple):
    """The arguments of `amp.kernels.stepping.step`; see there. `lists` has all lists but the steps."""

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
    """Return the square root, rounded to nearest even; tl.sqrt would treat subnormal numbers as 0."""
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
