"""The optimizer step in plain torch, in one loop that is compiled where it pays.

A step reads and writes each tensor once, and a formula in eager torch goes through memory for each of
its operations. So large tensors are done in slices that stay in the cache, and all small ones are
gathered into one; on the CPU, where there is a C++ compiler, `torch.compile` makes of the formula one
loop over a tensor of any size, which then takes a large tensor in one go.

The compiler takes ten to forty seconds, once for a formula and its dtypes; later processes find the
result in torch's cache. So nothing is compiled for steps of fewer than `WORTH_COMPILING` elements, nor
with `AMP_KERNELS=reference`. Where compiling fails, the loop stays eager, and a message says so.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp.kernels.backend import requested
from amp.kernels.split import decode, encode
from amp.kernels.tables import are_flat

logger = logging.getLogger("amp")

LARGE = 2**16
"""Elements from which a tensor is not worth being gathered with others."""
SLICE = 2**16
"""Elements whose FP32 temporaries stay in a core's cache."""
WORTH_COMPILING = 2**21

Formula = Callable[
    [Tensor, Tensor, Tensor, Tensor, Sequence[Any]], tuple[Tensor, Tensor | None, Tensor | None]
]
"""From a parameter, gradient, two moments and the rule's numbers for this step to the new parameter and
moments; a moment that the rule does not have comes as an empty tensor, and its result is not used."""


Run = Callable[["Streams", Any, "int | None"], None]
"""A formula for the streams of one piece, with the numbers and the seed of this step."""


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
    alike: dict[tuple[object, int | None], list[int]] = {}
    for i, (of_tensor, tensors) in enumerate(zip(numbers, zip(*lists.all(), strict=True), strict=True)):
        alone = i if whole or not are_flat(tensors) else None
        alike.setdefault((of_tensor, alone), []).append(i)
    for (_, alone), indices in alike.items():
        run: Run = functools.partial(_step, formula)
        prepared: Any = (scale, *numbers[indices[0]])
        if alone is not None:
            run(lists.map(operator.itemgetter(alone)), prepared, _noise(seed, alone, steps[alone]))
            continue
        some = lists.map(lambda tensors, indices=indices: [tensors[i] for i in indices])  # type: ignore[misc]
        slice_size = SLICE
        if _is_worth_compiling(some, seed, backend):
            dtypes = tuple(tensors[0].dtype for tensors in some.all())
            has_model = some.model is not None
            compiled = _compiled(formula, len(some.moments), has_model, len(prepared), dtypes)
            if compiled is not None:
                run, slice_size = compiled, sum(param.numel() for param in some.param)
                prepared = torch.tensor(prepared, dtype=torch.float32)
        for piece, streams in enumerate(_pieces(some, slice_size)):
            run(streams, prepared, _noise(seed, indices[0] + piece, steps[indices[0]]))


def _noise(seed: int | None, piece: int, t: float) -> int | None:
    """Return the seed for one piece in one step."""
    return None if seed is None else hash((seed, piece, t)) % 2**62


def _pieces(lists: Streams, slice_size: int) -> Iterator[Streams]:
    """Yield 1-d tensors to step: slices of large tensors, and all small ones together."""
    sizes = [param.numel() for param in lists.param]
    small = [i for i, size in enumerate(sizes) if size < LARGE]
    for i, size in enumerate(sizes):
        if size >= LARGE:
            vectors = lists.map(lambda tensors, i=i: _as_vector(tensors[i]))  # type: ignore[misc]
            for first in range(0, size, slice_size):
                yield vectors.map(operator.itemgetter(slice(first, first + slice_size)))
    if small:
        few = lists.map(lambda tensors: [_as_vector(tensors[i]) for i in small])
        together = few.map(torch.cat)
        yield together
        for tensors, result in zip(few.written(), together.written(), strict=True):
            torch._foreach_copy_(tensors, result.split([sizes[i] for i in small]))


def _as_vector(tensor: Tensor) -> Tensor:
    """Return a dense tensor's elements in the order in which they are in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _step(formula: Formula, streams: Streams, prepared: Any, seed: int | None) -> None:
    """Step tensors of one shape, in eager torch."""
    scale, *numbers = prepared
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


def _is_worth_compiling(lists: Streams, seed: int | None, backend: str | None) -> bool:
    return (
        lists.param[0].device.type == "cpu"
        and lists.low is None
        and seed is None
        and all(tensors[0].dtype is not torch.float64 for tensors in lists.all())
        and sum(param.numel() for param in lists.param) >= WORTH_COMPILING
        and not requested(backend)[0]
        and not torch.compiler.is_compiling()
    )


@functools.cache
def _compiled(
    formula: Formula, moments: int, has_model: bool, n_numbers: int, dtypes: tuple[torch.dtype, ...]
) -> Run | None:
    """Return a formula's compiled loop over vectors of given dtypes, None if there is no compiler."""
    logger.warning(
        "compiling the optimizer step for this CPU: ten to forty seconds, once, or one or two if torch "
        "has it in its cache. AMP_KERNELS=reference leaves it out"
    )

    def step(prepared: Tensor, param: Tensor, grad: Tensor, *rest: Tensor) -> None:
        model = rest[-1] if has_model else None
        _step(formula, Streams(param, grad, rest[:moments], model, None), prepared, None)

    compiled: Any = torch.compile(step, dynamic=True, fullgraph=True)
    # Tensors of no account: nothing may be half done when it fails.
    example = (torch.ones(n_numbers), *[torch.zeros(1024, dtype=dtype) for dtype in dtypes])
    try:
        if hasattr(compiled, "aot_compile"):
            compiled = compiled.aot_compile((example, {}))
            compiled.disable_guard_check()  # all that it asks is the same at every call
        compiled(*example)
    except Exception as error:  # no C++ compiler, one that fails, a build of torch without it
        reason = str(error).strip().splitlines()
        logger.warning(
            "it did not compile and runs in eager torch, slower: %s: %s",
            type(error).__name__,
            reason[0] if reason else "",
        )
        return None
    return lambda streams, prepared, seed: compiled(prepared, *streams.all())
