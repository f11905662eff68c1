"""The optimizer step without Triton: the plain formula, compiled on the CPU where that pays.

A step reads and writes each tensor once, and a formula in eager torch goes through memory for each of
its operations. So a large model on the CPU is stepped by the formula as torch's Inductor compiles it,
which finds the compiler, keeps what it has compiled for later processes, and takes care that several
processes may do so at once. It is given a graph directly: `torch.compile` would take 90 us more for
each call, and what it made is lost when a session opens or closes, which resets Dynamo. In eager
torch large tensors are done in slices that stay in the cache, and all small ones are gathered into one.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from amp.kernels.backend import requested
from amp.kernels.language import plain
from amp.kernels.rule import Prepared, Settings
from amp.kernels.split import decode, encode
from amp.kernels.tables import are_flat, numbers_on
from amp.kernels.tensor_lists import are_plain

Streams = dict[str, Any]
"""What a step works on, tensors of one shape or lists of them: `param`, `grad`, and what there is of
`first` and `second` (the moments), `model` (16-bit weights to write) and `low` (the low half of a
parameter that is the high half of a master)."""

Formula = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""A rule's update in plain torch; see `amp.kernels.rule.Rule`."""

logger = logging.getLogger("amp")

INDUCTOR_CONFIG = {"cpp.dynamic_threads": True}
"""As many threads as torch has when the function is called, and not when it is compiled."""

WORTH_COMPILING = 2**20
"""Elements from which a compiled step soon saves more time than its compilation takes."""
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
    rule, of_tensor, seed = settings.rule, settings.of_tensor, settings.seed
    scale = math.prod(float(x) for x in (settings.inv_scale, settings.clip) if x is not None)
    own = [None] * len(steps) if of_tensor is None else of_tensor.tolist()
    numbers = list(map(float, settings.numbers))
    prepare = plain(rule.prepare)

    @functools.cache
    def at(t: float, own: float | None) -> Prepared:
        return prepare(numbers, t, None, 0) if rule.at is None else rule.at(numbers, t, own)

    for number, group in enumerate(groups):
        # What is written by way of `.data` has no version: autograd is told of the whole step once.
        of_group = _map(lambda tensors: [tensors[i].data for i in group], lists)  # noqa: B023
        ts = [float(steps[i]) for i in group]
        prepared = [at(t, own[i]) for t, i in zip(ts, group, strict=True)]
        new = settings._replace(seed=None if seed is None else seed + number)
        _step_group(new, of_group, prepared, -scale if settings.maximize else scale, ts)


def _map(function: Callable[[Any], Any], streams: Streams) -> Streams:
    return {name: function(stream) for name, stream in streams.items()}


def _step_group(
    settings: Settings, lists: Streams, prepared: Sequence[Prepared], scale: float, ts: Sequence[float]
) -> None:
    """Step lists of tensors of one device and combination of dtypes.

    `prepared` is what the rule's update needs, for each tensor, and `ts` which step of it this is.
    """
    rule, seed = settings.rule, settings.seed
    formula = rule.plain_update or plain(rule.update)
    is_whole = rule.direction is not None  # a norm is one of all of a tensor
    compiles = not is_whole and seed is None and _is_worth_compiling(lists, settings.backend)
    alike: dict[Prepared, list[int]] = {}
    for i, own in enumerate(prepared):
        one = _map(operator.itemgetter(i), lists)
        if is_whole or not are_flat(list(one.values())):
            _step(formula, one, scale, own, _noise(seed, i, ts[i]))
        elif not (compiles and _step_compiled(formula, _map(_as_vector, one), (scale, *own))):
            alike.setdefault(own, []).append(i)
    for own, same in alike.items():
        some = _map(lambda tensors: [tensors[i] for i in same], lists)  # noqa: B023
        for piece, vectors in enumerate(_pieces(some)):
            _step(formula, vectors, scale, own, _noise(seed, same[0] + piece, ts[same[0]]))


def _is_worth_compiling(lists: Streams, backend: str | None) -> bool:
    return (
        sum(map(Tensor.numel, lists["param"])) >= WORTH_COMPILING
        and lists["param"][0].device.type == "cpu"
        and torch.float64 not in {tensors[0].dtype for tensors in lists.values()}
        and all(map(are_plain, lists.values()))
        and not any(map(Tensor.is_neg, lists["grad"]))  # whose memory holds other numbers
        and not requested(backend)[0]
    )


def _step_compiled(formula: Formula, streams: Streams, numbers: Prepared) -> bool:
    """Step vectors by the compiled update, if it can be compiled. `numbers` begins with the scale."""
    there = tuple([number is not None for number in numbers])
    dtypes = tuple([(name, vector.dtype) for name, vector in streams.items()])
    run = _compiled(formula, dtypes, there)
    if run is None:
        return False
    present = tuple([number for number in numbers if number is not None])
    run(*streams.values(), numbers_on(torch.device("cpu"), present))
    return True


@functools.cache
def _compiled(
    formula: Formula, dtypes: Sequence[tuple[str, torch.dtype]], there: Sequence[bool]
) -> Any:
    def run(*arguments: Tensor) -> list[Tensor]:
        *tensors, present = arguments
        left = list(present.unbind())
        scale, *numbers = [left.pop(0) if is_there else None for is_there in there]
        _step(formula, dict(zip(dict(dtypes), tensors, strict=True)), scale, numbers, None)
        return []

    examples = [torch.zeros(64, dtype=dtype, device="cpu") for _, dtype in dtypes]
    return _compile_for_cpu(run, [*examples, torch.ones(sum(there), device="cpu", dtype=torch.float32)])


def _compile_for_cpu(function: Callable[..., Sequence[Tensor]], examples: Sequence[Tensor]) -> Any:
    """Return a function that writes to its arguments, compiled; None, and say why, where that fails.

    The host works on it for some ten seconds, or two where an earlier process has done it.

    Args:
        function: of tensors alone, which it may write to; returns a list of tensors, perhaps empty.
        examples: arguments on the CPU; the compiled function takes any sizes, and these dtypes.
    """
    logger.warning(
        "compiling the optimizer step for this CPU with torch's Inductor: about ten seconds, or two if "
        "it was done before. AMP_KERNELS=reference leaves it out"
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's of itself, which a user may have made errors
            from torch._inductor import standalone_compile
            from torch.fx.experimental.proxy_tensor import make_fx

            graph: Any = make_fx(function, tracing_mode="symbolic")(*examples)
            return standalone_compile(
                graph, list(examples), options={"config_patches": INDUCTOR_CONFIG}
            )
    except Exception as error:  # of a compiler, a cache folder, a release of torch that is too old
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        logger.warning("it could not be compiled, so eager torch runs it, slower: %s", reason)
        return None


def _noise(seed: int | None, piece: int, t: float) -> int | None:
    """Return the seed for one piece in one step."""
    return None if seed is None else hash((seed, piece, t)) % 2**62


def _pieces(lists: Streams) -> Iterator[Streams]:
    """Yield 1-d tensors to step: slices of large tensors, and all small ones together."""
    sizes = [param.numel() for param in lists["param"]]
    for i, size in enumerate(sizes):
        if size >= LARGE:
            vectors = _map(lambda tensors: _as_vector(tensors[i]), lists)  # noqa: B023
            for first in range(0, size, SLICE):
                yield _map(operator.itemgetter(slice(first, first + SLICE)), vectors)
    small = [i for i, size in enumerate(sizes) if size < LARGE]
    if small:
        few = _map(lambda tensors: [_as_vector(tensors[i]) for i in small], lists)
        together = _map(torch.cat, few)
        yield together
        for name in few:
            if name != "grad":
                torch._foreach_copy_(few[name], together[name].split([sizes[i] for i in small]))


def _as_vector(tensor: Tensor) -> Tensor:
    """Return a dense tensor's elements in the order in which they are in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _step(
    formula: Formula, streams: Streams, scale: Any, prepared: Sequence[Any], seed: int | None
) -> None:
    """Step tensors of one shape, in eager torch."""
    dtypes = {tensor.dtype for tensor in streams.values()}
    to = torch.float64 if torch.float64 in dtypes else torch.float32
    param, model, low = streams["param"], streams.get("model"), streams.get("low")
    p = param.to(to) if low is None else decode(param, low)
    moments = [streams[name] for name in ("first", "second") if name in streams]
    m, v, *_ = [*(moment.to(to) for moment in moments), None, None]
    p, *new = formula(p, streams["grad"].to(to) * scale, m, v, prepared, torch.sqrt)
    for i, (moment, result) in enumerate(zip(moments, new, strict=False)):
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
