"""The optimizer step without Triton, in eager torch, or as a loop in C++ (`amp.kernels.cpu_loop`).

A step reads and writes each tensor once, and a formula in eager torch goes through memory for each of
its operations. So eager torch does large tensors in slices that stay in the cache, and all small ones
gathered into one.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from amp.kernels.cpu_loop import step_in_loop, suits_loop
from amp.kernels.language import plain
from amp.kernels.rule import Formula, Settings, Streams
from amp.kernels.split import decode, encode
from amp.kernels.tables import are_flat

LARGE = 2**16
"""Elements from which a tensor is not worth being gathered with others."""
SLICE = 2**16
"""Elements whose FP32 temporaries stay in a core's cache."""


@torch.no_grad()
def step_plainly(
    settings: Settings, lists: Streams, steps: Sequence[Tensor], groups: Sequence[Sequence[int]]
) -> None:
    """Step some of the tensors of lists, in FP32 or FP64, and count their steps.

    `groups` says which: the indices of those of one device and combination of dtypes together.
    """
    torch._foreach_add_([steps[i] for i in itertools.chain.from_iterable(groups)], 1.0)
    rule, of_tensor, seeds = settings.rule, settings.of_tensor, settings.seeds
    are_whole = rule.direction is not None and of_tensor is None  # a norm is one of all of a tensor
    formula = rule.plain_update or plain(rule.update)
    numbers, scale = list(map(float, settings.numbers)), _scale_of(settings)
    own = [None] * len(steps) if of_tensor is None else of_tensor.tolist()
    if len(own) > len(steps):
        own = list(zip(own[: len(steps)], own[len(steps) :], strict=True))
    for group in groups:
        loops = not are_whole and seeds is None and suits_loop(lists, group, settings.backend)
        alike: defaultdict[Any, list[int]] = defaultdict(list)
        for i, t in zip(group, torch.stack([steps[i] for i in group]).tolist(), strict=True):
            alike[t, own[i]].append(i)
        for (t, number), same in alike.items():
            if rule.at is None:
                prepared = plain(rule.prepare)(numbers, t, None, 0)
            else:
                prepared = rule.at(numbers, t, number)
            left = step_in_loop(formula, lists, same, (scale, *prepared)) if loops else same
            noise = None if seeds is None else functools.partial(_noise, seeds, t)
            for tensors in _pieces(lists, left, are_whole, noise):
                _step(formula, tensors, scale, prepared)


@torch.no_grad()
def measure_plainly(
    settings: Settings,
    lists: Streams,
    steps: Sequence[Tensor],
    groups: Sequence[Sequence[int]],
    norms: Tensor,
) -> None:
    """Write the norms of some parameters, and then of their directions, to float32 `[2n]`."""
    rule, numbers, scale = settings.rule, list(map(float, settings.numbers)), _scale_of(settings)
    assert rule.at is not None
    for i in itertools.chain.from_iterable(groups):
        *prepared, _ = rule.at(numbers, float(steps[i]) + 1, None)
        one = {name: tensors[i] for name, tensors in lists.items()}
        p, direction, *_ = _applied(plain(rule.direction), one, scale, prepared)
        norms[i], norms[len(steps) + i] = p.norm(), direction.norm()


def _scale_of(settings: Settings) -> float:
    scale = math.prod(float(x) for x in (settings.inv_scale, settings.clip) if x is not None)
    return -scale if settings.maximize else scale


def _noise(seeds: Sequence[int], t: float, i: int, like: Tensor) -> Tensor:
    """Return 32 random bits for each element of a tensor in its step number t, int32."""
    generator = torch.Generator(like.device).manual_seed(hash((seeds[i], t)) % 2**32)
    return torch.empty_like(like, dtype=torch.int32).random_(-(2**31), 2**31, generator=generator)


def _pieces(
    lists: Streams,
    indices: Sequence[int],
    are_whole: bool,
    noise: Callable[[int, Tensor], Tensor] | None,
) -> Iterator[Streams]:
    """Yield tensors to step: each as it is, or slices of the large ones and all small ones as one.

    With them goes `noise(i, parameter)`, if moments are to be rounded by it.
    """
    small = []
    for i in indices:
        # What is written by way of `.data` has no version: autograd is told of the whole step once.
        one = {name: tensors[i].data for name, tensors in lists.items()}
        size = one["param"].numel()
        if noise is not None:
            one["noise"] = noise(i, one["param"])
        if not are_whole and size < LARGE:
            small.append(one)
        elif are_whole or not are_flat(list(one.values())):
            yield one
        else:
            for first in range(0, size, SLICE):
                length = min(SLICE, size - first)
                yield {
                    name: tensor.as_strided((length,), (1,), tensor.storage_offset() + first)
                    for name, tensor in one.items()
                }
    if small:
        few = {name: [one[name] for one in small] for name in small[0]}
        together = {name: _flatten_dense_tensors(tensors) for name, tensors in few.items()}
        yield together
        for name, tensors in few.items():
            if name not in ("grad", "noise"):
                torch._foreach_copy_(tensors, _unflatten_dense_tensors(together[name], tensors))


def _step(formula: Formula, streams: Streams, scale: Any, prepared: Sequence[Any]) -> None:
    """Step tensors of one shape, in eager torch."""
    _, p, *new = _applied(formula, streams, scale, prepared)
    param, model, low = streams["param"], streams.get("model"), streams.get("low")
    moments = [streams[name] for name in ("first", "second") if name in streams]
    noise = streams.get("noise")
    for i, (moment, result) in enumerate(zip(moments, new, strict=False)):
        if noise is not None and moment.dtype is torch.bfloat16:
            round_stochastically(result, moment, noise >> 16 * i & 0xFFFF)
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


def _applied(formula: Formula, streams: Streams, scale: Any, prepared: Sequence[Any]) -> Sequence[Any]:
    """Return parameters in FP32 or FP64, and what a formula makes of tensors of one shape."""
    dtypes = {tensor.dtype for tensor in streams.values()}
    to = torch.float64 if torch.float64 in dtypes else torch.float32
    param, low = streams["param"], streams.get("low")
    p = param.to(to) if low is None else decode(param, low)
    moments = [streams[name].to(to) for name in ("first", "second") if name in streams]
    m, v, *_ = [*moments, None, None]
    return p, *formula(p, streams["grad"].to(to) * scale, m, v, prepared, torch.sqrt)


def round_stochastically(source: Tensor, target: Tensor, noise: Tensor) -> None:
    """Write float32 to bfloat16, up or down with the probability that makes the mean right.

    `noise` has 16 random bits for each element, int32.
    """
    rounded = ((source.view(torch.int32) + noise) >> 16).short().view(torch.bfloat16)
    target.copy_(torch.where(source.isfinite(), rounded, source.bfloat16()))
