"""The optimizer step without Triton: the plain formula, compiled on the CPU where that pays.

A step reads and writes each tensor once, and a formula in eager torch goes through memory for each of
its operations. So a large model on the CPU is stepped by the formula as Inductor compiles it
(`amp.kernels.inductor`). In eager torch large tensors are done in slices that stay in the cache, and
all small ones are gathered into one.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp.kernels.backend import requested
from amp.kernels.inductor import compile_for_cpu
from amp.kernels.split import decode, encode
from amp.kernels.tables import are_flat, numbers_on
from amp.kernels.tensor_lists import are_plain

Formula = Callable[
    [Tensor, Tensor, Tensor, Tensor, Sequence[Any]], tuple[Tensor, Tensor | None, Tensor | None]
]
"""From a parameter, gradient, two moments and the rule's numbers for this step to the new parameter and
moments; a moment that the rule does not have comes as an empty tensor, and its result is not used. A
number that is None belongs to a term that is left out."""

Numbers = tuple[float | None, ...]

WORTH_COMPILING = 2**20
"""Elements from which a compiled step soon saves more time than its compilation takes."""
LARGE = 2**16
"""Elements from which a tensor is not worth being gathered with others."""
SLICE = 2**16
"""Elements whose FP32 temporaries stay in a core's cache."""


class Streams(NamedTuple):
    """What a step works on: tensors of one shape each, or lists of them.

    Attributes:
        param: what is stepped.
        grad: the gradient.
        moments: at most two.
        model: 16-bit weights to write.
        low: the low half of a parameter that is the high half of a master.
    """

    param: Any
    grad: Any
    moments: tuple[Any, ...]
    model: Any
    low: Any

    def map(self, function: Callable[[Any], Any]) -> Streams:
        """Return the streams with a function applied to each that there is."""
        return self.of(*map(function, self.all()))

    def of(self, param: Any, grad: Any, *others: Any) -> Streams:
        """Return streams of other things, given in the order of `all`."""
        moments, rest = others[: len(self.moments)], list(others[len(self.moments) :])
        model = None if self.model is None else rest.pop(0)
        return Streams(param, grad, moments, model, rest.pop(0) if rest else None)

    def all(self) -> list[Any]:
        """Return the streams that there are."""
        return [
            x for x in (self.param, self.grad, *self.moments, self.model, self.low) if x is not None
        ]

    def written(self) -> list[Any]:
        """Return those that a step writes to."""
        return [x for x in (self.param, *self.moments, self.model, self.low) if x is not None]


def step_plainly(
    formula: Formula,
    lists: Streams,
    numbers: Sequence[Numbers],
    scale: float,
    *,
    steps: Sequence[float],
    seed: int | None,
    whole: bool,
    backend: str | None,
) -> None:
    """Step lists of tensors of one device and combination of dtypes, in FP32 or FP64.

    Args:
        formula: of the rule.
        lists: the tensors.
        numbers: the rule's numbers for each tensor.
        scale: what to multiply gradients by.
        steps: which step of each tensor this is.
        seed: for stochastic rounding of moments in bfloat16.
        whole: whether the formula has to see each tensor as a whole.
        backend: see `amp.kernels.backend`.
    """
    flat = [are_flat(tensors) for tensors in zip(*lists.all(), strict=True)]
    compiles = not whole and seed is None and _is_worth_compiling(lists, backend)
    alike: dict[tuple[Numbers, int | None], list[int]] = {}
    for i in range(len(flat)):
        if compiles and flat[i]:
            vectors = lists.map(lambda tensors, i=i: _as_vector(tensors[i]))  # type: ignore[misc]
            if _step_compiled(formula, vectors, (scale, *numbers[i])):
                continue
        alone = i if whole or not flat[i] else None
        alike.setdefault((numbers[i], alone), []).append(i)
    for (of_tensor, alone), same in alike.items():
        if alone is not None:
            one = lists.map(operator.itemgetter(alone))
            _step(formula, one, scale, of_tensor, _noise(seed, alone, steps[alone]))
            continue
        some = lists.map(lambda tensors, same=same: [tensors[i] for i in same])  # type: ignore[misc]
        for piece, vectors in enumerate(_pieces(some)):
            _step(formula, vectors, scale, of_tensor, _noise(seed, same[0] + piece, steps[same[0]]))


def _is_worth_compiling(lists: Streams, backend: str | None) -> bool:
    return (
        sum(map(Tensor.numel, lists.param)) >= WORTH_COMPILING
        and lists.param[0].device.type == "cpu"
        and torch.float64 not in {tensors[0].dtype for tensors in lists.all()}
        and all(map(are_plain, lists.all()))
        and not any(map(Tensor.is_neg, lists.grad))  # whose memory holds other numbers
        and not requested(backend)[0]
    )


def _step_compiled(formula: Formula, streams: Streams, numbers: Numbers) -> bool:
    """Step vectors by the compiled formula, if it can be compiled. `numbers` begins with the scale."""
    there = tuple([number is not None for number in numbers])
    run = _compiled(formula, streams.map(operator.attrgetter("dtype")), there)
    if run is None:
        return False
    present = tuple([number for number in numbers if number is not None])
    run(*streams.all(), numbers_on(torch.device("cpu"), 0, present, torch.float32))
    return True


@functools.cache
def _compiled(formula: Formula, dtypes: Streams, there: Sequence[bool]) -> Any:
    def run(*arguments: Tensor) -> list[Tensor]:
        *tensors, present = arguments
        left = list(present.unbind())
        scale, *numbers = [left.pop(0) if is_there else None for is_there in there]
        _step(formula, dtypes.of(*tensors), scale, numbers, None)
        return []

    examples = [torch.zeros(64, dtype=dtype, device="cpu") for dtype in dtypes.all()]
    return compile_for_cpu(run, [*examples, torch.ones(sum(there), device="cpu", dtype=torch.float32)])


def _noise(seed: int | None, piece: int, t: float) -> int | None:
    """Return the seed for one piece in one step."""
    return None if seed is None else hash((seed, piece, t)) % 2**62


def _pieces(lists: Streams) -> Iterator[Streams]:
    """Yield 1-d tensors to step: slices of large tensors, and all small ones together."""
    sizes = [param.numel() for param in lists.param]
    small = [i for i, size in enumerate(sizes) if size < LARGE]
    for i, size in enumerate(sizes):
        if size >= LARGE:
            vectors = lists.map(lambda tensors, i=i: _as_vector(tensors[i]))  # type: ignore[misc]
            for first in range(0, size, SLICE):
                yield vectors.map(operator.itemgetter(slice(first, first + SLICE)))
    if small:
        few = lists.map(lambda tensors: [_as_vector(tensors[i]) for i in small])
        together = few.map(torch.cat)
        yield together
        for tensors, result in zip(few.written(), together.written(), strict=True):
            torch._foreach_copy_(tensors, result.split([sizes[i] for i in small]))


def _as_vector(tensor: Tensor) -> Tensor:
    """Return a dense tensor's elements in the order in which they are in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _step(
    formula: Formula, streams: Streams, scale: Any, numbers: Sequence[Any], seed: int | None
) -> None:
    """Step tensors of one shape, in eager torch."""
    param, grad, moments, model, low = streams
    to = torch.float64 if torch.float64 in {x.dtype for x in streams.all()} else torch.float32
    empty = param.new_empty(0)
    p = param.to(to) if low is None else decode(param, low)
    m, v, *_ = *[x.to(to) for x in moments], empty, empty
    p, *new = formula(p, grad.to(to) * scale, m, v, numbers)
    for i, (moment, result) in enumerate(zip(moments, new, strict=False)):
        assert result is not None
        if seed is not None and moment.dtype is torch.bfloat16:
            round_stochastically(result, moment, seed + i)
        else:
            moment.copy_(result)
    if low is None:
        param.copy_(p)
    else:
        high, rest = encode(p, param.dtype, low.dtype)
        param.copy_(high)
        low.copy_(rest)
    if model is not None:
        model.copy_(p)


def round_stochastically(source: Tensor, target: Tensor, seed: int) -> None:
    """Write float32 to bfloat16, up or down with the probability that makes the mean right."""
    device = source.device
    generator = torch.Generator(device).manual_seed(seed)
    noise = torch.randint(2**16, source.shape, generator=generator, dtype=torch.int32, device=device)
    rounded = ((source.view(torch.int32) + noise) >> 16).short().view(torch.bfloat16)
    target.copy_(torch.where(source.isfinite(), rounded, source.bfloat16()))
