"""`UpdateRule`, the formula of an optimizer; `adam.py`, `sgd.py` and other modules define the rules.

A module with a formula imports `tl`, also where it does not use it: Triton's interpreter looks for it.
"""

import ctypes
import functools
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp.kernels.language import jit, plain, tl
from amp.kernels.update_scale import widest

Numbers = tuple[float | Tensor, ...]
"""Hyper-parameters, in a rule's order: each a Python number or a tensor of one element."""

Prepared = tuple[float, ...]
"""The numbers that an update takes, the same for all elements of a tensor."""

Streams = dict[str, Any]
"""The tensors of a step by name, each a `TensorList`, or a tensor, all of one shape: `param`, `grad`,
and if present `moment0`, `moment1`, ... (the rule's moments, or two of them packed in `moment0`),
`model` (16-bit weights to write) and `low` (the low half of a master whose high half is `param`)."""

Formula = Callable[..., tuple[Any, tuple[Any, ...]]]
"""A rule's update in plain torch; see `UpdateRule`."""


class Moment(NamedTuple):
    """Optimizer state with one number for each element of a parameter.

    Attributes:
        name: in the optimizer's state, as `torch.optim` calls it.
        is_signed: whether its values may be negative.
    """

    name: str
    is_signed: bool = True


class Origin(NamedTuple):
    """Where a tensor's random bits begin; see `amp.kernels.stochastic_rounding`.

    Attributes:
        seed: of 31 bits.
        first: the index of its first element in the whole tensor, of which it may be a shard.
        run: how many elements follow on each other both here and in the whole tensor; 0 where all do.
        pitch: how far apart such runs begin in the whole tensor.
    """

    seed: int
    first: int = 0
    run: int = 0
    pitch: int = 0


class Origins(tuple[Origin, ...]):
    """The origins of some tensors. A cache finds them by identity, since hashing all takes long."""

    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class UpdateRule(NamedTuple):
    """The formula of one optimizer.

    Attributes:
        moments: the moments, in the order in which `update` takes them.
        numbers: takes the hyper-parameters of a group, by the names that the fused optimizer gives
            them, each a number or a tensor of one element; returns the numbers that `prepare` and `at`
            take. The host does not wait for the device.
        prepare: for Triton, in FP32: takes the numbers, t, a pointer to the tensor's own numbers and
            the distance between them; returns the prepared numbers for `update`.
        at: the same for plain torch, on the host: takes the numbers, each a `Single` or for FP64 a
            float, t and the tensor's own number, or None. A rule with a direction gets two norms, or
            None if they are unknown, and returns as its last number whether they are to be computed.
            None where `prepare` serves both.
        update: takes a parameter, its gradient, a tuple of its moments, the prepared numbers and
            functions for a square root, a division and `plus_product`; returns the new parameter and a
            tuple of new moments. Triton and plain torch both run it.
        direction: as `update`, but returns the direction of the step instead of the new parameter. A
            rule with a direction uses the norms of parameters and directions as the tensor's own
            numbers.
        plain_update: replaces `update` in plain torch, where it may compute the norms itself.
        packs: whether both moments fit into one word of 16 bits, as Adam's do: the first is kept as its
            ratio to the root of the second.
    """

    moments: tuple[Moment, ...]
    numbers: Callable[[Mapping[str, Any]], Numbers]
    prepare: Any
    at: Callable[[list[float], float, Any], Prepared] | None
    update: Any
    direction: Any = None
    plain_update: Any = None
    packs: bool = False


class StepArguments(NamedTuple):
    """The arguments of `amp.kernels.stepping.step`; see there. `lists` has all lists but the steps.

    `merges` is true only if there is a list of models.
    """

    rule: UpdateRule
    numbers: Sequence[float | Tensor]
    lists: Streams
    steps: Sequence[Tensor]
    of_tensor: Tensor | None
    origins: tuple[Origin, ...] | None
    inv_scale: Tensor | None
    clip: Tensor | None
    found_inf: Tensor | None
    maximize: bool
    merges: bool
    backend: str | None


def in_double(number: float | Tensor) -> float | Tensor:
    """Return a hyper-parameter in FP64; a tensor on a device without FP64 in FP32."""
    return widest(number) if isinstance(number, Tensor) else float(number)


def log_of(beta: float | Tensor) -> float | Tensor:
    """Return the logarithm of a beta, -inf for 0."""
    if not isinstance(beta, Tensor):
        return math.log(beta) if beta > 0 else -math.inf
    return beta.log()


class Single(float):
    """A float32 on the host: the result of each operation is rounded to float32, as on a device.

    `singles` makes them of other numbers; `Single` itself takes a number that is rounded already.
    """


def singles(numbers: Sequence[float]) -> list[Single]:
    """Return numbers, each rounded to float32."""
    return list(map(Single, array("f", numbers)))


def _rounded(operation: Callable[..., Any]) -> Callable[..., Any]:
    def rounded(*operands: Any) -> Any:
        result = operation(*operands)
        return result if result is NotImplemented else Single(ctypes.c_float(result).value)

    return rounded


for _name in ("neg", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow"):
    setattr(Single, f"__{_name}__", _rounded(getattr(float, f"__{_name}__")))


@jit
def square_root(x):
    """Return the square root, rounded to nearest even; tl.sqrt would treat subnormal numbers as 0."""
    return tl.sqrt_rn(x)


@jit
def quotient(x, y):
    """Return x / y, rounded to nearest even, as torch has it."""
    return tl.div_rn(x, y)


@jit
def plus_product(x, factor, y):
    """Return x + factor * y, but x where the factor is 0, even if y is infinite or NaN.

    So a term whose hyper-parameter is 0 is left out, as in `torch.optim`, and is no 0 * inf.
    """
    return tl.where(factor == 0.0, x, x + factor * y)


def plus_product_plainly(x: Any, factor: float, y: Any) -> Any:
    """Do what `plus_product` does in plain torch, where the factor is a number of the host."""
    return x if factor == 0 else x + factor * y


@jit
def bias_correction(t, log_beta, corrects_bias):
    """Return 1 - beta^t, or 1 if there is nothing to correct."""
    x = tl.maximum(t * log_beta, -20.0)
    return tl.where(corrects_bias == 0.0, 1.0, -_expm1(x))


TOGETHER = 64
"""For how many steps `corrections_at` computes at once: that takes no longer than for one."""


def corrections_at(t: float, *log_betas: float) -> Sequence[float]:
    """Return 1 - beta^t of each beta on the host: of `Single`s the same numbers as on a device."""
    if not isinstance(log_betas[0], Single):
        return [-math.expm1(t * log_beta) for log_beta in log_betas]
    first = t // TOGETHER * TOGETHER
    return [Single(numbers[int(t - first)]) for numbers in _corrections_from(first, t % 1.0, log_betas)]


@functools.lru_cache(maxsize=64)
def _corrections_from(first: float, part: float, log_betas: tuple[float, ...]) -> list[list[float]]:
    """Return the corrections of each beta for `TOGETHER` steps from a whole number on, plus a part."""
    times = torch.arange(TOGETHER, dtype=torch.float32, device="cpu") + (first + part)
    x = torch.tensor(log_betas, dtype=torch.float32, device="cpu")[:, None] * times
    return (-plain(_expm1)(x.clamp(min=-20.0))).tolist()  # type: ignore[no-any-return]


@jit
def _expm1(x):
    """Return e^x - 1 for x from -20 to 0, to a few units in the last place, also near 0."""
    y = x * 0.015625
    # The factors are 1 / 2!, 1 / 3!, and so on.
    e = 0.008333334 + y * 0.0013888889
    e = 0.16666667 + y * (0.041666668 + y * e)
    e = y * (1.0 + y * (0.5 + y * e))
    for _ in range(6):  # from e^y - 1 to e^2y - 1
        e = e * (e + 2.0)
    return e
