"""Steps of the optimizers."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp.kernels import (
    adagrad,
    adam,
    backend,
    cpu_loop,
    lamb,
    lion,
    master_copy,
    novograd,
    sgd,
    split,
    stepping,
    stochastic_rounding,
)
from amp.kernels.rule import Origin, UpdateRule
from amp.selftest.check_registry import CHECKS, Check, Outcome, SkipError, assert_same_bits, check

STEPS, FEW, SKIPPED = 20, 9, 7
SHAPES = [(60, 50), (7,), (1,), (66_000,), (0,)]
GROUP: dict[str, Any] = {
    "lr": 1e-2,
    "lr_decay": 1e-2,
    "betas": (0.9, 0.99),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "momentum": 0.9,
    "dampening": 0.0,
    "nesterov": True,
    "bias_correction": True,
    "decoupled_weight_decay": True,
    "adam_w_mode": True,
    "adagrad_w_mode": False,
    "wd_after_momentum": False,
    "grad_averaging": True,
    "reg_inside_moment": False,
    "use_nvlamb": False,
}
RULES = {
    "Adam": adam.ADAMW,
    "LAMB": lamb.LAMB,
    "momentum SGD": sgd.MOMENTUM_SGD,
    "SGD": sgd.SGD,
    "Adagrad": adagrad.ADAGRAD,
    "Lion": lion.LION,
    "NovoGrad": novograd.NOVOGRAD,
    "Adam, L2": adam.ADAM,
    "momentum SGD, apex's": sgd.MOMENTUM_SGD,
    "NovoGrad, inside": novograd.NOVOGRAD,
}
CHANGES: dict[str, dict[str, Any]] = {
    "Adam, L2": {"decoupled_weight_decay": False},
    "momentum SGD, apex's": {"dampening": 0.2, "nesterov": False, "wd_after_momentum": True},
    "NovoGrad, inside": {"reg_inside_moment": True},
}
"""Hyper-parameters that are not those of `GROUP`."""
MODES = (
    *("masters", "split16", "bfloat16 moments", "split24, packed moments"),
    "split24, bfloat16 moments",
)
SCALE, CLIP = 128.0, 0.5


class Run(NamedTuple):
    """The tensors of a training.

    Attributes:
        params: the masters, or the high halves of them.
        models: the model's weights, or None.
        lows: the low halves, or None.
        moments: one list for each moment.
        steps: the counts of steps.
    """

    params: list[Tensor]
    models: list[Tensor] | None
    lows: list[Tensor] | None
    moments: list[list[Tensor]]
    steps: list[Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that a step writes."""
        every = [self.params, self.models or [], self.lows or [], *self.moments, self.steps]
        return [tensor for tensors in every for tensor in tensors]

    def masters(self) -> list[Tensor]:
        """The masters, float32."""
        if self.lows is None:
            return self.params
        return list(map(split.decode, self.params, self.lows))


def starting(rule: UpdateRule, mode: str, device: torch.device) -> Run:
    """Return the weights before the first step, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    values[1].zero_()  # as biases are: the ratio of LAMB's norms is 1 then
    params, models, lows = [value.to(device) for value in values], None, None
    if mode.startswith("split"):
        low = torch.int16 if mode == "split16" else torch.int8
        halves = [split.encode(value, torch.bfloat16, low) for value in values]
        params, lows = [[half.to(device) for half in each] for each in zip(*halves, strict=True)]
    else:
        models = [value.half().to(device) for value in values]
    dtype = torch.bfloat16 if mode.endswith("bfloat16 moments") else torch.float32
    count = len(rule.moments)
    if mode.endswith("packed moments"):
        dtype, count = (torch.int16, 1) if count == 2 else (torch.bfloat16, count)
    moments = [[torch.zeros(x, dtype=dtype, device=device) for x in SHAPES] for _ in range(count)]
    return Run(params, models, lows, moments, [torch.zeros((), device=device) for _ in SHAPES])


def gradients(i: int, device: torch.device) -> list[Tensor]:
    """Return the scaled gradients of the i-th step, the same on every device."""
    generator = torch.Generator().manual_seed(100 + i)
    return [(torch.randn(shape, generator=generator) * SCALE).half().to(device) for shape in SHAPES]


def _norms(device: torch.device) -> Tensor:
    """Return the running norms of gradients, one for each weight, as NovoGrad takes them."""
    return torch.arange(1.0, len(SHAPES) + 1, device=device)


def take_step(
    name: str, run: Run, i: int, device: torch.device, on_host: bool = False, of_ranks: bool = False
) -> None:
    """Take the i-th step, or skip it where it overflows.

    With `of_ranks` other ranks may have parts of the tensors, here without elements.
    """
    rule = RULES[name]
    is_random = any(moment[0].dtype is not torch.float32 for moment in run.moments)
    origins = [Origin(i) for i in range(len(SHAPES))] if is_random else None
    stepping.step(
        *(
            rule,
            rule.numbers(GROUP | CHANGES.get(name, {})),
            run.params,
            gradients(i, device),
            run.moments,
            run.steps,
        ),
        models=run.models,
        lows=run.lows,
        origins=origins,
        of_tensor=_norms(device) if name.startswith("NovoGrad") else None,
        inv_scale=torch.full((1,), 1 / SCALE, device=device),
        clip=torch.full((1,), CLIP, device=device),
        found_inf=torch.full((1,), float(i == SKIPPED), device=device),
        maximize=name == "SGD",
        norms_of_all_ranks=(lambda norms: norms) if of_ranks else None,
        backend="reference" if on_host else None,
    )


def trained(name: str, mode: str, device: torch.device, steps: int = STEPS, **options: bool) -> Run:
    """Return the weights after some steps, with the options of `take_step`."""
    run = starting(RULES[name], mode, device)
    for i in range(steps):
        take_step(name, run, i, device, **options)
    return run


def exact(name: str, steps: int = STEPS) -> list[Tensor]:
    """Return the weights in FP64 after the steps that were taken, by formulas that are not ours."""
    cpu = torch.device("cpu")
    parameters = [nn.Parameter(p.double()) for p in starting(RULES[name], "masters", cpu).params]
    optimizer: torch.optim.Optimizer = {
        "Adam": torch.optim.AdamW(parameters, 1e-2, (0.9, 0.99), weight_decay=0.1),
        "Adagrad": torch.optim.Adagrad(parameters, 1e-2, 0.01, 0.1, eps=1e-8),
        "SGD": torch.optim.SGD(parameters, 1e-2, weight_decay=0.1, maximize=True),
        "momentum SGD": torch.optim.SGD(parameters, 1e-2, 0.9, weight_decay=0.1, nesterov=True),
        "LAMB": _ByFormula(parameters, _lamb),
        "Lion": _ByFormula(parameters, _lion),
        "NovoGrad": _ByFormula(parameters, _novograd),
        "Adam, L2": torch.optim.Adam(parameters, 1e-2, (0.9, 0.99), weight_decay=0.1),
        "momentum SGD, apex's": _ByFormula(parameters, _apex_sgd),
        "NovoGrad, inside": _ByFormula(parameters, _novograd_inside),
    }[name]
    for i in range(steps):
        if i == SKIPPED:
            continue
        for parameter, grad in zip(parameters, gradients(i, cpu), strict=True):
            parameter.grad = grad.double() / SCALE * CLIP
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


class _ByFormula(torch.optim.SGD):
    """An optimizer that torch does not have, with the hyper-parameters of `GROUP`."""

    def __init__(self, params: list[nn.Parameter], formula: Callable[..., Tensor]) -> None:
        super().__init__(params, 1e-2)
        self._formula = formula

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step."""
        for i, p in enumerate(self.param_groups[0]["params"]):
            state = self.state[p]
            state["t"] = state.get("t", 0) + 1
            p.sub_(self._formula(p, p.grad, state, i), alpha=1e-2)


def _mean(state: dict[str, Any], name: str, new: Tensor, beta: float) -> Tensor:
    state[name] = beta * state.get(name, 0.0) + (1 - beta) * new
    corrected: Tensor = state[name] / (1 - beta ** state["t"])
    return corrected


def _lamb(p: Tensor, g: Tensor, state: dict[str, Any], i: int) -> Tensor:
    mean, square = _mean(state, "m", g, 0.9), _mean(state, "v", g**2, 0.99)
    direction = mean / (square.sqrt() + 1e-8) + 0.1 * p
    return direction * (p.norm() / direction.norm() if p.any() else 1.0)


def _lion(p: Tensor, g: Tensor, state: dict[str, Any], i: int) -> Tensor:
    direction: Tensor = 0.9 * state.get("m", 0.0) + 0.1 * g
    _mean(state, "m", g, 0.99)
    return direction.sign() + 0.1 * p


def _apex_sgd(p: Tensor, g: Tensor, state: dict[str, Any], i: int) -> Tensor:
    mean: Tensor = 0.9 * state["m"] + 0.8 * g if "m" in state else g
    state["m"] = mean
    return mean + 0.1 * p


def _novograd(p: Tensor, g: Tensor, state: dict[str, Any], i: int) -> Tensor:
    return _mean(state, "m", g, 0.9) / _norm(state, i) + 0.1 * p


def _novograd_inside(p: Tensor, g: Tensor, state: dict[str, Any], i: int) -> Tensor:
    return _mean(state, "m", g / _norm(state, i) + 0.1 * p, 0.9)


def _norm(state: dict[str, Any], i: int) -> float:
    norm = float(_norms(torch.device("cpu"))[i])
    return norm / math.sqrt(1 - 0.99 ** state["t"]) + 1e-8


def _trains(name: str, mode: str, device: torch.device) -> Outcome:
    rule, of_all = RULES[name], FEW if name in CHANGES else STEPS
    run = trained(name, mode, device, of_all)
    found = [master.detach().cpu().double() for master in run.masters()]
    largest = 0.0
    for a, b, begun in zip(
        found, exact(name, of_all), starting(rule, "masters", torch.device("cpu")).params, strict=True
    ):
        moved = (b - begun).norm()
        if b.numel():
            largest = max(largest, float((a - b).norm() / moved.clamp_min(1e-12)))
    bound = 5e-5 if mode in MODES[:2] else 0.2
    assert largest < bound, f"the weights are {largest:.1e} off the same steps in FP64"
    counts = [int(steps) for steps, p in zip(run.steps, run.params, strict=True) if p.numel()]
    assert set(counts) == {of_all - 1}, (
        f"{of_all - 1} of {of_all} steps were taken, and counted: {counts}"
    )
    if run.models is not None:
        rounded = [master.half() for master in run.masters()]
        assert_same_bits(run.models, [each.cpu() for each in rounded], "the model's weights")
    if name not in ("LAMB", "NovoGrad", "NovoGrad, inside"):  # whose norms differ between backends
        plain = trained(name, mode, torch.device("cpu"), of_all, on_host=True)
        assert_same_bits(run.tensors, plain.tensors, "what the steps have written")
    return Outcome(f"{largest:.1e} off", run.tensors)


for _name in RULES:
    for _mode in MODES[:4] if _name in ("Adam", "LAMB", "momentum SGD") else MODES[:1]:
        _full_name = f"training: {_name}, {_mode}"
        CHECKS[_full_name] = Check(_full_name, functools.partial(_trains, _name, _mode), 90, False)


@check("training: LAMB, norms of ranks", 60)
def _adapts_on_ranks(device: torch.device) -> None:
    found, whole = (trained("LAMB", MODES[0], device, 3, of_ranks=x).params for x in (True, False))
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)


@check("training: state that moves away and back", 60)
def _moves(device: torch.device) -> None:
    runs = []
    for moves in (False, True):
        run = starting(adam.ADAMW, "masters", device)
        kept = []
        for i in range(6):
            if moves and i == 3:
                for moment in run.moments:
                    for tensor in moment[1:]:  # the first one stays where it is
                        kept.append(tensor.data)
                        tensor.data = tensor.data.cpu().clone()
                        tensor.data = tensor.data.to(device).clone()
            take_step("Adam", run, i, device)
        runs.append(run.tensors)
    assert_same_bits(runs[1], [tensor.cpu() for tensor in runs[0]], "after its memory has moved")


def _assert_mean(found: Tensor, value: float, what: str) -> None:
    """Raise AssertionError if the mean of many numbers is not a value."""
    off = abs(float(found.mean()) - value) / float(found.std()) * len(found) ** 0.5
    assert off < 4, f"the mean of {what} is {float(found.mean())}, {off:.1f} deviations from {value}"


def _assert_rounded(found: Tensor, value: float, step: float, what: str) -> None:
    """Raise AssertionError if numbers are not the two around a value, at most `step` of it apart."""
    low, high = float(found.min()), float(found.max())
    assert low < value < high <= low * (1 + step), f"{what}, {value}, is rounded to {low} and {high}"
    assert bool(((found == low) | (found == high)).all()), f"{what} is rounded to other numbers too"
    _assert_mean(found, value, what)


@check("training: moments rounded at random", 60)
def _rounds(device: torch.device) -> None:
    """Each value of a moment becomes the one above or below it, and their mean is the value."""
    n, g = 66_001, 0.3
    params, grads = [torch.ones(n, device=device)], [torch.full((n,), g, device=device)]
    moments = [[torch.zeros(n, dtype=torch.bfloat16, device=device)] for _ in range(2)]
    steps = [torch.zeros((), device=device)]
    stepping.step(
        adam.ADAM, adam.ADAM.numbers(GROUP), params, grads, moments, steps, origins=[Origin(1)]
    )
    for (moment,), value in zip(moments, (0.1 * g, 0.01 * g**2), strict=True):
        _assert_rounded(moment.cpu().double(), value, 2.0**-7, "a moment")


OFF_GRID = GROUP | {"betas": (0.93, 0.99)}
"""So that no packed word has the first ratio of the moments."""


def _one_step(
    device: torch.device, values: Tensor, grads: Tensor, origin: Origin, backend_of: str | None
) -> list[Tensor]:
    """Return weights, low halves and packed moments after one step of Adam from moments of 0."""
    halves = split.encode(values, torch.bfloat16, torch.int8)
    weights, lows, words = *halves, torch.zeros_like(halves[0], dtype=torch.int16)
    tensors = [tensor.to(device) for tensor in (weights, lows, words)]
    stepping.step(
        *(adam.ADAMW, adam.ADAMW.numbers(OFF_GRID), tensors[:1], [grads.to(device)], [tensors[2:]]),
        [torch.zeros((), device=device)],
        lows=tensors[1:2],
        origins=[origin],
        backend=backend_of,
    )
    return [tensor.cpu() for tensor in tensors]


BACKENDS = None, "reference"
"""What runs on a device, and plain torch there. On a CPU the first may be the loop in C++."""


@check("training: small states rounded at random", 60)
def _rounds_small_states(device: torch.device) -> None:
    """Packed moments, and masters in 24 bits, are right on average."""
    n, g = 66_001, 0.3
    values, grads = torch.ones(n), torch.full((n,), g)
    one, moments = values[:1].clone(), [[torch.zeros(1)], [torch.zeros(1)]]
    numbers = adam.ADAMW.numbers(OFF_GRID)
    of_one = adam.ADAMW, numbers, [one], [grads[:1]], moments, [torch.zeros(())]
    stepping.step(*of_one, backend="reference")
    for backend_of in BACKENDS:
        weights, lows, words = _one_step(device, values, grads, Origin(1), backend_of)
        first, second = (moment.double() for moment in stochastic_rounding.unpack(words.int()))
        master = split.decode(weights, lows).double()
        _assert_rounded(second.sqrt(), 0.1 * g, 2.0**-3, "the root of a second moment")
        _assert_mean(first, 0.07 * g, "a first moment")
        _assert_rounded(master, float(one), 2.0**-15, "a master")
        of_both = torch.corrcoef(torch.stack([second, master]))[0, 1].abs() * n**0.5
        assert of_both < 4, "moments and masters are rounded up together"


@check("training: shards rounded as the whole tensor", 60)
def _rounds_shards(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    values, grads = (torch.randn(40, 70, generator=generator) for _ in range(2))
    first = 2**32 - 1000  # some elements are beyond 2^32
    rows, columns = (slice(3, 40), slice(None)), (slice(None), slice(20, 51))
    origins = Origin(1, first + 3 * 70), Origin(1, first + 20, run=31, pitch=70)
    for backend_of in BACKENDS:
        whole = _one_step(device, values, grads, Origin(1, first), backend_of)
        for shard, origin in zip((rows, columns), origins, strict=True):
            own = values[shard].contiguous(), grads[shard].contiguous()
            found = _one_step(device, *own, origin, backend_of)
            assert_same_bits(found, [tensor[shard] for tensor in whole], f"a shard from {origin}")


# The loop in C++, which is compiled for large tensors only.


@contextlib.contextmanager
def _in_cpp(device: torch.device) -> Iterator[None]:
    """Let the loops in C++ take tensors of any size, or raise SkipError where there are none."""
    if device.type != "cpu" or backend.requested()[0]:
        raise SkipError("only plain torch on the CPU has loops in C++")
    before, cpu_loop.WORTH_COMPILING = cpu_loop.WORTH_COMPILING, 0
    try:
        yield
    finally:
        cpu_loop.WORTH_COMPILING = before
    if None in cpu_loop._loops.values():
        raise SkipError("the C++ compiler does not work, so eager torch runs instead")


def _steps_in_cpp(mode: str, device: torch.device) -> None:
    with _in_cpp(device):
        found = trained("Adam", mode, device, steps=3)
        if mode == MODES[3]:
            _rounds_shards(device)
    plain = trained("Adam", mode, device, steps=3, on_host=True)
    assert_same_bits(found.tensors, plain.tensors, "what the steps have written")


for _mode in MODES[3:]:
    _full_name = f"training: the loop in C++, {_mode}"
    CHECKS[_full_name] = Check(_full_name, functools.partial(_steps_in_cpp, _mode), 90, False)


@check("training: the loop in C++, merged masters", 90)
def _merges_in_cpp(device: torch.device) -> None:
    """A step, a merge and a write-back, with written weights and moments that do not count."""
    found = []
    for is_plain in (False, True):
        run = starting(sgd.MOMENTUM_SGD, "masters", device)
        assert run.models is not None
        backend_of = "reference" if is_plain else None
        with contextlib.nullcontext() if is_plain else _in_cpp(device):
            for tensor in run.moments[0]:
                tensor.fill_(torch.inf)  # the first step takes the gradients instead
            for i in range(2):
                for model in run.models:
                    model.view(-1)[i::5] = 100.0
                stepping.step(
                    *(sgd.MOMENTUM_SGD, sgd.MOMENTUM_SGD.numbers(GROUP), run.params),
                    *(gradients(i, device), run.moments, run.steps),
                    models=run.models,
                    merges=True,
                    backend=backend_of,
                )
            for model in run.models:
                model.view(-1)[3::5] = -100.0
            master_copy.merge(run.models, run.params, backend=backend_of)
            for master in run.params:
                master.mul_(1.1)
            both = zip(run.params, run.models, strict=True)
            rounded = [master.to(model.dtype) for master, model in both]
            master_copy.master_copy(run.params, run.models, backend=backend_of)
        assert_same_bits(run.models, rounded, "weights, not rounded masters")
        found.append(run.tensors)
    assert_same_bits(found[0], found[1], "what steps and merges have written")
