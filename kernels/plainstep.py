"""The optimizer step without Triton, in eager torch, or as a loop in C++ (`amp.kernels.cpu_loop`).

A formula in eager torch goes through memory for each of its operations, although a step needs to read
and write each tensor only once. So on the CPU eager torch steps large tensors in slices that fit in the
cache, and gathers all small ones into one. On other devices, where each operation is a launch, it steps
whole tensors by foreach operations.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from amp.kernels.changes import Change, Changes, at_once
from amp.kernels.cpu_loop import plan_loop, suits_loop
from amp.kernels.foreach import TensorGroup, by_dtypes, norms_of, on_each
from amp.kernels.grad_mode import without_grad
from amp.kernels.language import plain
from amp.kernels.rule import Formula, Prepared, StepArguments, Streams
from amp.kernels.split import decode, encode
from amp.kernels.tables import are_flat

LARGE = 2**16
"""The number of elements from which a tensor is not gathered with others."""
SLICE = 2**16
"""The number of elements whose FP32 temporaries fit in a core's cache."""
TEMPORARIES = 40
"""How many bytes of temporaries a step takes for each element of tensors that are stepped together."""

Noise = Callable[[int, int, Tensor], Tensor]
"""Returns random bits for the i-th tensor, for a pair of its moments, in the shape of a third
argument."""


@without_grad
def plan_step(arguments: StepArguments, groups: Sequence[Sequence[int]], changes: Changes) -> None:
    """Plan the step of some tensors, in FP32 or FP64, and the increment of their step counts.

    `groups` has their indices, one group for each device and combination of dtypes.
    """
    rule, lists, steps = arguments.rule, arguments.lists, arguments.steps
    of_tensor, seeds = arguments.of_tensor, arguments.seeds
    are_whole = rule.direction is not None and of_tensor is None  # a norm needs the whole tensor
    formula = rule.plain_update or plain(rule.update)
    numbers, scale = list(map(float, arguments.numbers)), _scale_of(arguments)
    own: list[Any] = [None] * len(steps) if of_tensor is None else of_tensor.tolist()
    if len(own) > len(steps):
        own = list(zip(own[: len(steps)], own[len(steps) :], strict=True))
    counted = [steps[i] for i in itertools.chain.from_iterable(groups)]
    changes.add(functools.partial(torch._foreach_add_, counted, 1.0))
    for group in groups:
        loops = not are_whole and seeds is None and suits_loop(lists, group, arguments.backend)
        on_cpu = is_on_cpu(lists["param"][group[0]])
        for t, same in _alike(steps, group, own if on_cpu else None):
            if rule.at is None:
                prepared = plain(rule.prepare)(numbers, t, None, 0)
            else:
                prepared = _together([rule.at(numbers, t, own[i]) for i in same])
            left: Sequence[int] = same
            if loops:
                left, loop = plan_loop(formula, lists, same, (scale, *prepared))
                if loop is not None:
                    changes.add(loop)
            noise = None if seeds is None else _noise_of(seeds, t)
            for pieces in _pieces(lists, left, are_whole):
                work_out = functools.partial(_work_out, formula, pieces, scale, prepared, noise)
                changes.add_later(work_out)


def _alike(
    steps: Sequence[Tensor], group: Sequence[int], own: Sequence[Any] | None = None
) -> Iterator[tuple[float, list[int]]]:
    """Yield the numbers of the next steps, and the tensors of a group that take this one.

    Those with other numbers of their `own` come apart.
    """
    alike: defaultdict[Any, list[int]] = defaultdict(list)
    for i, t in zip(group, torch.stack([steps[i] for i in group]).tolist(), strict=True):
        alike[t + 1, own and own[i]].append(i)
    for (t, _), same in alike.items():
        yield t, same


def _together(prepared: Sequence[Prepared]) -> Sequence[Any]:
    """Return the numbers of several tensors as those of a group: a list where they differ."""
    return [each[0] if len(set(each)) == 1 else list(each) for each in zip(*prepared, strict=True)]


@without_grad
def measure_plainly(arguments: StepArguments, groups: Sequence[Sequence[int]], norms: Tensor) -> None:
    """Write the norms of some parameters, then of their directions, to `norms`, float32 `[2n]`."""
    rule, steps, scale = arguments.rule, arguments.steps, _scale_of(arguments)
    numbers = list(map(float, arguments.numbers))
    of_params, of_directions = norms.split(len(steps))
    assert rule.at is not None
    for t, same in itertools.chain.from_iterable(_alike(steps, group) for group in groups):
        *prepared, _ = rule.at(numbers, t, None)
        for pieces in _pieces(arguments.lists, same, are_whole=True):
            streams = _as_one([piece.streams() for piece in pieces])
            p, direction, _ = _applied(plain(rule.direction), streams, scale, prepared)
            indices = [piece.tensor for piece in pieces]
            of_params[indices] = norms_of(p).to(norms)
            of_directions[indices] = norms_of(direction).to(norms)


def _scale_of(arguments: StepArguments) -> float:
    factors = arguments.inv_scale, arguments.clip
    scale = math.prod(float(factor) for factor in factors if factor is not None)
    return -scale if arguments.maximize else scale


def _noise_of(seeds: Sequence[int], t: float) -> Noise:
    """Return a function that makes 32 random bits, int32, for each element of a tensor at step t.

    The latest tensor's bits are kept for its next slice.
    """

    @functools.lru_cache(maxsize=1)
    def noise(i: int, pair: int, like: Tensor) -> Tensor:
        seed = hash((seeds[i], t, pair) if pair else (seeds[i], t)) % 2**32
        generator = torch.Generator(like.device).manual_seed(seed)
        return torch.empty_like(like, dtype=torch.int32).random_(-(2**31), 2**31, generator=generator)

    return noise


class Piece(NamedTuple):
    """One tensor of each list, or its slice of `length` elements from `first` on."""

    tensor: int
    whole: Streams
    first: int = 0
    length: int | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Return this piece of one of the tensors."""
        if self.length is None:
            return tensor
        return tensor.as_strided((self.length,), (1,), tensor.storage_offset() + self.first)

    def streams(self) -> Streams:
        """Return this piece of each tensor."""
        return {name: self.of(tensor) for name, tensor in self.whole.items()}


def _pieces(lists: Streams, indices: Sequence[int], are_whole: bool) -> Iterator[list[Piece]]:
    """Yield the pieces to step together: a tensor, a slice of a large one, or several tensors."""
    small: list[Piece] = []
    elements, room = 0, math.inf
    if indices:
        room = _room_on(lists["param"][indices[0]].device)
    for i in indices:
        # A write through `.data` changes no version: autograd is told of the whole step once.
        one = {name: tensors[i].data for name, tensors in lists.items()}
        size = one["param"].numel()
        if not is_on_cpu(one["param"]) or (size < LARGE and not are_whole):
            if small and elements + size > room:
                yield small
                small, elements = [], 0
            small.append(Piece(i, one))
            elements += size
        elif are_whole or not are_flat(list(one.values())):
            yield [Piece(i, one)]
        else:
            for first in range(0, size, SLICE):
                yield [Piece(i, one, first, min(SLICE, size - first))]
    if small:
        yield small


def _room_on(device: torch.device) -> float:
    """Return for how many elements the temporaries of a step fit in the memory that is free."""
    if device.type != "cuda":
        return math.inf
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (torch.cuda.mem_get_info(device)[0] + cached) / TEMPORARIES


def is_on_cpu(tensor: Tensor) -> bool:
    """Return whether tensors like this one are stepped in slices."""
    return tensor.device.type == "cpu"


@without_grad
def _work_out(
    formula: Formula, pieces: Sequence[Piece], scale: Any, prepared: Sequence[Any], noise: Noise | None
) -> Change:
    """Return the change that steps some pieces, in eager torch."""
    each = [piece.streams() for piece in pieces]
    if noise is not None:
        for piece, streams in zip(pieces, each, strict=True):
            for pair in range((len(_moments_in(streams)) + 1) // 2):
                streams[f"noise{pair}"] = piece.of(noise(piece.tensor, pair, piece.whole["param"]))
    results = _results(formula, _as_one(each), scale, prepared)
    if len(each) == 1:
        targets, sources = [each[0][name] for name in results], list(results.values())
    else:
        targets, sources = [], []
        for name, result in results.items():
            parts = [one[name] for one in each]
            targets += parts
            is_flat = isinstance(result, Tensor)
            sources.extend(_unflatten_dense_tensors(result, parts) if is_flat else result)
    return functools.partial(at_once, *by_dtypes(targets, sources))


def _as_one(each: Sequence[Streams]) -> Streams:
    """Return streams as those of one tensor: several are gathered in one, or in a `TensorGroup`."""
    if len(each) == 1:
        return each[0]
    gather: Any = _flatten_dense_tensors if is_on_cpu(each[0]["param"]) else TensorGroup
    return {name: gather([one[name] for one in each]) for name in each[0]}


def _results(formula: Formula, streams: Streams, scale: Any, prepared: Sequence[Any]) -> Streams:
    """Return the new values of tensors of one shape, in their own dtypes or wider ones.

    A stream is a tensor or a `TensorGroup`.
    """
    _, p, new = _applied(formula, streams, scale, prepared)
    results = {"param": p}
    if (low := streams.get("low")) is not None:
        results["param"], results["low"] = on_each(encode, p, streams["param"].dtype, low.dtype)
    if "model" in streams:
        results["model"] = p
    for k, (name, result) in enumerate(zip(_moments_in(streams), new, strict=True)):
        noise = streams.get(f"noise{k // 2}")
        if noise is not None and streams[name].dtype is torch.bfloat16:
            result = on_each(round_stochastically, result, on_each(_half_of, noise, k % 2))
        results[name] = result
    return results


def _half_of(noise: Tensor, which: int) -> Tensor:
    return (noise >> 16 if which else noise) & 0xFFFF


def _moments_in(streams: Streams) -> list[str]:
    return [name for name in streams if name.startswith("moment")]


def _applied(formula: Formula, streams: Streams, scale: Any, prepared: Sequence[Any]) -> Sequence[Any]:
    """Return the parameter in FP32 or FP64, then the formula's results; see `_results`."""
    dtypes = {tensor.dtype for tensor in streams.values()}
    to = torch.float64 if torch.float64 in dtypes else torch.float32
    param, low = streams["param"], streams.get("low")
    p = param.to(to) if low is None else on_each(decode, param, low)
    moments = tuple([streams[name].to(to) for name in _moments_in(streams)])
    sqrt = torch.sqrt if isinstance(p, Tensor) else TensorGroup.sqrt
    return p, *formula(p, streams["grad"].to(to) * scale, moments, prepared, sqrt)


def round_stochastically(source: Tensor, noise: Tensor) -> Tensor:
    """Return float32 values in bfloat16, rounded up or down at random, with the right mean.

    `noise` has 16 random bits for each element, int32.
    """
    rounded = ((source.view(torch.int32) + noise) >> 16).short().view(torch.bfloat16)
    is_finite = source - source == 0
    return torch.where(is_finite, rounded, source.bfloat16())
