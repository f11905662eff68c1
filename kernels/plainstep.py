"""The optimizer step without Triton, in eager torch, or as a loop in C++ (`amp.kernels.cpu_loop`).

A formula in eager torch goes through memory for each of its operations, although a step needs to read
and write each tensor only once. So on the CPU eager torch steps large tensors in slices that fit in the
cache, and gathers all small ones into one. On other devices, where each operation is a launch, it steps
whole tensors by foreach operations.
"""

import functools
import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from amp.kernels import host_lists
from amp.kernels.cpu_loop import Update, plan_loop
from amp.kernels.foreach import TensorGroup, by_dtypes, norms_of, on_each
from amp.kernels.host_lists import InPython
from amp.kernels.interrupts import Change, Changes, at_once, without_grad
from amp.kernels.language import plain
from amp.kernels.launch_plans import are_flat
from amp.kernels.master_copy import merged
from amp.kernels.rule import Origin, Prepared, StepArguments, Streams, plus_product_plainly, singles
from amp.kernels.split import decode, encode
from amp.kernels.stochastic_rounding import (
    EXACT,
    IN_TORCH,
    TO_NEAREST,
    after_one,
    bfloat16_bits,
    keys_of,
    mixed,
    pack,
    unpack,
)
from amp.kernels.tensor_lists import SLICE

_data: Any = Tensor.data.__get__  # type: ignore[attr-defined]  # also where a subclass has another one

LARGE = 2**16
"""The number of elements from which a tensor is not gathered with others."""
TEMPORARIES = 72
"""How many bytes of temporaries a step takes for each element of tensors that are stepped together."""


@without_grad
def plan_step(arguments: StepArguments, groups: Sequence[Sequence[int]], changes: Changes) -> None:
    """Plan the step of some tensors, in FP32 or FP64, and the increment of their step counts.

    `groups` has their indices, one group for each device and combination of dtypes.
    """
    rule, lists, steps = arguments.rule, arguments.lists, arguments.steps
    of_tensor, origins = arguments.of_tensor, arguments.origins
    are_whole = rule.direction is not None and of_tensor is None  # a norm needs the whole tensor
    formula = rule.plain_update or plain(rule.update)
    scale = _scale_of(arguments)
    own: list[Any] = [] if of_tensor is None else of_tensor.tolist()
    if len(own) > len(steps):
        own = list(zip(own[: len(steps)], own[len(steps) :], strict=True))
    for group in groups:
        numbers = _numbers_for(arguments, group)
        on_cpu = is_on_cpu(lists["param"][group[0]])
        add = host_lists.lists.add if on_cpu else torch._foreach_add_
        changes.add(functools.partial(add, [steps[i] for i in group], 1.0))
        for t, same in _alike(steps, group, own if on_cpu else ()):
            if t > EXACT:  # where 1 is not enough
                changes.add(functools.partial(torch._foreach_maximum_, [steps[i] for i in same], t))
            if rule.at is None:
                prepared = plain(rule.prepare)(numbers, t, None, 0)
            elif own:
                at = functools.cache(functools.partial(rule.at, numbers, t))
                prepared = _together([at(own[i]) for i in same])
            else:
                prepared = rule.at(numbers, t, None)
            own_bits = None
            if origins is not None:
                own_bits = keys_of([origin.seed for origin in origins], t), origins
            update = Update(formula, (scale, *prepared), arguments.merges, own_bits)
            left: Sequence[int] = same
            if rule.direction is None:
                left, loop = plan_loop(update, lists, same, arguments.backend)
                if loop is not None:
                    changes.add(loop)
            for pieces in _pieces(lists, left, are_whole):
                changes.add_later(functools.partial(_work_out, update, pieces))


def _alike(
    steps: Sequence[Tensor], group: Sequence[int], own: Sequence[Any] = ()
) -> Iterator[tuple[float, list[int]]]:
    """Yield the numbers of the next steps, and the tensors of a group that take this one.

    Tensors with other numbers of their `own` are yielded separately.
    """
    of_group = [steps[i] for i in group]
    read = host_lists.lists.numbers if is_on_cpu(of_group[0]) else InPython.numbers
    numbers = read(of_group)
    alike: defaultdict[Any, list[int]] = defaultdict(list)
    if not own and numbers.count(numbers[0]) == len(numbers):  # the usual case
        alike[numbers[0], None] = list(group)
    else:
        for i, t in zip(group, numbers, strict=True):
            alike[t, own[i] if own else None].append(i)
    for (t, _), same in alike.items():
        yield t + 1 if t < EXACT else after_one(t), same


def _together(prepared: Sequence[Prepared]) -> Sequence[Any]:
    """Return the numbers of several tensors as those of a group: a list where they differ."""
    return [each[0] if len(set(each)) == 1 else list(each) for each in zip(*prepared, strict=True)]


@without_grad
def measure_plainly(arguments: StepArguments, groups: Sequence[Sequence[int]], norms: Tensor) -> None:
    """Write the norms of some parameters, then of their directions, to `norms`, float32 `[2n]`."""
    rule, steps = arguments.rule, arguments.steps
    of_params, of_directions = norms.split(len(steps))
    assert rule.at is not None
    for group in groups:
        for t, same in _alike(steps, group):
            *prepared, _ = rule.at(_numbers_for(arguments, group), t, None)
            numbers = _scale_of(arguments), *prepared
            update = Update(plain(rule.direction), numbers, arguments.merges)
            for pieces in _pieces(arguments.lists, same, are_whole=True):
                p, direction, _ = _applied(update, _as_one([piece.streams() for piece in pieces]))
                indices = [piece.tensor for piece in pieces]
                of_params[indices] = norms_of(p).to(norms)
                of_directions[indices] = norms_of(direction).to(norms)


def _numbers_for(arguments: StepArguments, group: Sequence[int]) -> list[float]:
    """Return the hyper-parameters in the precision in which a group is stepped."""
    dtypes = {tensors[group[0]].dtype for tensors in arguments.lists.values()}
    numbers = list(map(float, arguments.numbers))
    return numbers if torch.float64 in dtypes else [*singles(numbers)]


def _scale_of(arguments: StepArguments) -> float:
    factors = arguments.inv_scale, arguments.clip
    scale = math.prod(float(factor) for factor in factors if factor is not None)
    return -scale if arguments.maximize else scale


class Piece(NamedTuple):
    """One tensor of each list, or its slice of `length` elements from `first` on."""

    tensor: int
    whole: Streams
    first: int = 0
    length: int | None = None

    @property
    def size(self) -> int:
        """The number of its elements."""
        return self.whole["param"].numel() if self.length is None else self.length

    def shaped(self, values: Tensor) -> Tensor:
        """Return values of all elements, in the order of their memory, in the shape of this piece."""
        like = self.whole["param"]
        if self.length is not None:
            return values
        if not are_flat([like]):
            return values.view(like.shape)
        return values.as_strided(like.shape, like.stride(), values.storage_offset())

    def streams(self) -> Streams:
        """Return this piece of each tensor."""
        if self.length is None:
            return dict(self.whole)
        size = (self.length,)
        return {
            name: x.as_strided(size, (1,), x.storage_offset() + self.first)
            for name, x in self.whole.items()
        }


def _random_bits(
    keys: Tensor, origins: Sequence[Origin], pieces: Sequence[Piece]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield 64 random bits for the elements of each piece, in two int32."""
    device = pieces[0].whole["param"].device
    sizes = [piece.size for piece in pieces]
    indices = []
    for piece, size in zip(pieces, sizes, strict=True):
        _, begins, run, pitch = origins[piece.tensor]
        shift = 0 if run else begins
        at = torch.arange(piece.first + shift, piece.first + shift + size, device=device)
        indices.append(begins + at // run * pitch + at % run if run else at)
    index, own_keys = torch.cat(indices), keys[[piece.tensor for piece in pieces]].to(device)
    key = own_keys.repeat_interleave(torch.tensor(sizes, device=device), output_size=len(index))
    one = plain(mixed)(index.int() + key)
    other = plain(mixed)(one + key)
    for piece, *own in zip(pieces, one.split(sizes), other.split(sizes), strict=True):
        first, second = map(piece.shaped, own)
        yield first, second


def _pieces(lists: Streams, indices: Sequence[int], are_whole: bool) -> Iterator[list[Piece]]:
    """Yield the pieces to step together: a tensor, a slice of a large one, or several tensors."""
    small: list[Piece] = []
    elements, room, on_cpu = 0, math.inf, True
    if indices:
        first_one = lists["param"][indices[0]]
        room, on_cpu = _room_on(first_one.device), is_on_cpu(first_one)
    for i in indices:
        # A write through `.data` changes no version: autograd is told of the whole step once.
        one = {name: _data(tensors[i]) for name, tensors in lists.items()}
        size = one["param"].numel()
        if not on_cpu or (size < LARGE and not are_whole):
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
def _work_out(update: Update, pieces: Sequence[Piece]) -> Change:
    """Return the change that steps some pieces, in eager torch."""
    each = [piece.streams() for piece in pieces]
    if update.own_bits is not None:
        for streams, bits in zip(each, _random_bits(*update.own_bits, pieces), strict=True):
            streams["noise0"], streams["noise1"] = bits
    results = _results(update, _as_one(each))
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


def _results(update: Update, streams: Streams) -> Streams:
    """Return the new values of tensors of one shape, in their own dtypes or wider ones.

    A stream is a tensor or a `TensorGroup`.
    """
    _, p, new = _applied(update, streams)
    results = {"model": p} if "model" in streams else {}
    words = [streams[name] for name in ("noise0", "noise1") if name in streams]
    first, *_ = noise = words or [TO_NEAREST]
    names = _moments_in(streams)
    if _are_packed(streams):
        results["moment0"] = on_each(pack, *new, first)
    else:
        for k, (name, result) in enumerate(zip(names, new, strict=True)):
            results[name] = result
            if words and streams[name].dtype is torch.bfloat16:
                results[name] = on_each(round_stochastically, result, first, k)
    results["param"] = p
    if (low := streams.get("low")) is not None:
        own = noise[-1] if len(names) == 2 else first  # two moments have taken all bits of the first
        results["param"], results["low"] = on_each(encode, p, streams["param"].dtype, low.dtype, own)
    return results


def _are_packed(streams: Streams) -> bool:
    return "moment0" in streams and streams["moment0"].dtype is torch.int16


def _moments_in(streams: Streams) -> list[str]:
    return [name for name in streams if name.startswith("moment")]


def _applied(update: Update, streams: Streams) -> Sequence[Any]:
    """Return the parameter in FP32 or FP64, then the formula's results; see `_results`."""
    dtypes = {tensor.dtype for tensor in streams.values()}
    to = torch.float64 if torch.float64 in dtypes else torch.float32
    param, low = streams["param"], streams.get("low")
    p = param.to(to) if low is None else on_each(decode, param, low)
    if update.merges:
        p = on_each(merged, streams["model"], p)
    if _are_packed(streams):
        moments = on_each(_both_moments, streams["moment0"])
    else:
        moments = tuple([streams[name].to(to) for name in _moments_in(streams)])
    scale, *prepared = update.numbers
    g = streams["grad"].to(to) * scale
    functions = IN_TORCH.sqrt, operator.truediv, plus_product_plainly
    return p, *update.formula(p, g, moments, prepared, *functions)


def _both_moments(words: Tensor) -> tuple[Tensor, Tensor]:
    return unpack(words.int())


def round_stochastically(source: Tensor, noise: Tensor, k: int) -> Tensor:
    """Return the k-th moments, float32, in bfloat16, rounded up or down by 16 of 32 random bits."""
    half, of = noise >> 16 * (1 - k) & 0xFFFF, IN_TORCH
    return plain(bfloat16_bits)(source, half, of.bits, of.if_number).short().view(torch.bfloat16)  # type: ignore[no-any-return]
