"""The optimizer step without Triton: in plain torch, or on the CPU as one loop in C where it pays.

A step reads and writes each tensor once, and a formula in eager torch goes through memory for each of
its operations. So large tensors are done in slices that stay in the cache, and all small ones are
gathered into one. The loop in C does without either, see `amp.kernels.nativestep`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp.kernels.nativestep import Formula, step_loop
from amp.kernels.split import decode, encode
from amp.kernels.tables import are_flat

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
        model, low = [None if x is None else function(x) for x in (self.model, self.low)]
        moments = tuple(map(function, self.moments))
        return Streams(function(self.param), function(self.grad), moments, model, low)

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
    numbers: Sequence[tuple[float, ...]],
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
    indices = list(range(len(lists.param)))
    if not (whole or seed is not None or lists.low is not None):
        flat = [i for i, tensors in enumerate(zip(*lists.all(), strict=True)) if are_flat(tensors)]
        streams = [[tensors[i] for i in flat] for tensors in lists.all()]
        run = step_loop(formula, len(lists.moments), streams, len(numbers[0]), backend)
        if run is not None:
            run(streams, [(scale, *numbers[i]) for i in flat])
            indices = sorted({*indices} - {*flat})
    alike: dict[tuple[tuple[float, ...], int | None], list[int]] = {}
    for i in indices:
        alone = i if whole or not are_flat([tensors[i] for tensors in lists.all()]) else None
        alike.setdefault((numbers[i], alone), []).append(i)
    for (of_tensor, alone), same in alike.items():
        if alone is not None:
            one = lists.map(operator.itemgetter(alone))
            _step(formula, one, scale, of_tensor, _noise(seed, alone, steps[alone]))
            continue
        some = lists.map(lambda tensors, same=same: [tensors[i] for i in same])  # type: ignore[misc]
        for piece, vectors in enumerate(_pieces(some)):
            _step(formula, vectors, scale, of_tensor, _noise(seed, same[0] + piece, steps[same[0]]))


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
    formula: Formula, streams: Streams, scale: float, numbers: Sequence[float], seed: int | None
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
