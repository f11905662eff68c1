"""Steps of the optimizers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp.kernels import adagrad, adam, lamb, lion, novograd, sgd, split, stepping
from amp.kernels.rule import Origin, UpdateRule
from amp.selftest.check_registry import CHECKS, Check, Outcome, assert_same_bits, check

STEPS, SKIPPED = 20, 7
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
}
MODES = ("masters", "split16", "bfloat16 moments", "split24, packed moments")
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
    params, models, lows = [value.to(device) for value in values], None, None
    if mode.startswith("split"):
        low = torch.int16 if mode == "split16" else torch.int8
        halves = [split.encode(value, torch.bfloat16, low) for value in values]
        params, lows = [[half.to(device) for half in each] for each in zip(*halves, strict=True)]
    else:
        models = [value.half().to(device) for value in values]
    dtype, count = torch.bfloat16 if mode == "bfloat16 moments" else torch.float32, len(rule.moments)
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


def take_step(rule: UpdateRule, run: Run, i: int, device: torch.device, on_host: bool = False) -> None:
    """Take the i-th step, or skip it where it overflows."""
    is_random = any(moment[0].dtype is not torch.float32 for moment in run.moments)
    origins = [Origin(i) for i in range(len(SHAPES))] if is_random else None
    stepping.step(
        *(rule, rule.numbers(GROUP), run.params, gradients(i, device), run.moments, run.steps),
        models=run.models,
        lows=run.lows,
        origins=origins,
        of_tensor=_norms(device) if rule is RULES["NovoGrad"] else None,
        inv_scale=torch.full((1,), 1 / SCALE, device=device),
        clip=torch.full((1,), CLIP, device=device),
        found_inf=torch.full((1,), float(i == SKIPPED), device=device),
        maximize=rule is RULES["SGD"],
        backend="reference" if on_host else None,
    )


def trained(rule: UpdateRule, mode: str, device: torch.device, on_host: bool = False) -> Run:
    """Return the weights after twenty steps."""
    run = starting(rule, mode, device)
    for i in range(STEPS):
        take_step(rule, run, i, device, on_host)
    return run


def exact(name: str) -> list[Tensor]:
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
    }[name]
    for i in range(STEPS):
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
    return direction * (p.norm() / direction.norm() if p.numel() else 1.0)


def _lion(p: Tensor, g: Tensor, state: dict[str, Any], i: int) -> Tensor:
    direction: Tensor = 0.9 * state.get("m", 0.0) + 0.1 * g
    _mean(state, "m", g, 0.99)
    return direction.sign() + 0.1 * p


def _novograd(p: Tensor, g: Tensor, state: dict[str, Any], i: int) -> Tensor:
    mean, norm = _mean(state, "m", g, 0.9), float(_norms(torch.device("cpu"))[i])
    return mean / (norm / math.sqrt(1 - 0.99 ** state["t"]) + 1e-8) + 0.1 * p


def _trains(name: str, mode: str, device: torch.device) -> Outcome:
    rule = RULES[name]
    run = trained(rule, mode, device)
    found = [master.detach().cpu().double() for master in run.masters()]
    largest = 0.0
    for a, b, begun in zip(
        found, exact(name), starting(rule, "masters", torch.device("cpu")).params, strict=True
    ):
        moved = (b - begun).norm()
        if b.numel():
            largest = max(largest, float((a - b).norm() / moved.clamp_min(1e-12)))
    bound = 5e-5 if mode in MODES[:2] else 0.2
    assert largest < bound, f"the weights are {largest:.1e} off the same steps in FP64"
    counts = [int(steps) for steps, p in zip(run.steps, run.params, strict=True) if p.numel()]
    assert set(counts) == {STEPS - 1}, f"{STEPS - 1} of {STEPS} steps were taken, and counted: {counts}"
    if run.models is not None:
        rounded = [master.half() for master in run.masters()]
        assert_same_bits(run.models, [each.cpu() for each in rounded], "the model's weights")
    if name not in ("LAMB", "NovoGrad"):  # whose norms are another on each backend
        plain = trained(rule, mode, torch.device("cpu"), on_host=True)
        assert_same_bits(run.tensors, plain.tensors, "what the steps have written")
    return Outcome(f"{largest:.1e} off", run.tensors)


for _name in RULES:
    for _mode in MODES if _name in ("Adam", "LAMB", "momentum SGD") else MODES[:1]:
        _full_name = f"training: {_name}, {_mode}"
        CHECKS[_full_name] = Check(_full_name, functools.partial(_trains, _name, _mode), 90, False)


@check("training: state that moves away and back", 60)
def _moves(device: torch.device) -> None:
    runs = []
    for moves in (False, True):
        run = starting(adam.ADAM, "masters", device)
        kept = []
        for i in range(6):
            if moves and i == 3:
                for moment in run.moments:
                    for tensor in moment[1:]:  # the first one stays where it is
                        kept.append(tensor.data)
                        tensor.data = tensor.data.cpu().clone()
                        tensor.data = tensor.data.to(device).clone()
            take_step(adam.ADAM, run, i, device)
        runs.append(run.tensors)
    assert_same_bits(runs[1], [tensor.cpu() for tensor in runs[0]], "after its memory has moved")


@check("training: moments rounded at random", 60)
def _rounds(device: torch.device) -> Outcome:
    """Each value of a moment becomes the one above or below it, and their mean is the value."""
    n, g = 66_001, 0.3
    params, grads = [torch.ones(n, device=device)], [torch.full((n,), g, device=device)]
    moments = [[torch.zeros(n, dtype=torch.bfloat16, device=device)] for _ in range(2)]
    steps = [torch.zeros((), device=device)]
    stepping.step(
        adam.ADAM, adam.ADAM.numbers(GROUP), params, grads, moments, steps, origins=[Origin(1)]
    )
    for (moment,), value in zip(moments, (0.1 * g, 0.01 * g**2), strict=True):
        found = moment.cpu().double()
        low, high = float(found.min()), float(found.max())
        assert low < value < high, f"{value} is rounded to {low} and {high}"
        assert high - low < value * 2.0**-7, f"{value} is rounded to {low} and {high}"
        assert bool(((found == low) | (found == high)).all()), f"{value} is rounded to other numbers"
        off = abs(float(found.mean()) - value) / (high - low) * n**0.5
        assert off < 3, f"the mean of {value} is {float(found.mean())}"
    return Outcome()
