"""Steps of the optimizers, opt levels, host waits and CUDA graphs."""

from __future__ import annotations

import functools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp.kernels import adam, lamb, language, sgd, split, stepping
from amp.kernels.rule import Rule
from amp.selftest.checks import CHECKS, Check, Outcome, SkipError, assert_same_bits, check, needs_gpu

STEPS, SKIPPED = 20, 7
SHAPES = [(300, 300), (7,), (1,), (66_000,), (0,)]
GROUP: dict[str, Any] = {
    "lr": 1e-2,
    "betas": (0.9, 0.99),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "momentum": 0.9,
    "dampening": 0.0,
    "nesterov": False,
    "bias_correction": True,
    "decoupled_weight_decay": True,
    "adam_w_mode": True,
    "wd_after_momentum": False,
    "grad_averaging": True,
    "use_nvlamb": False,
}
RULES = {"Adam": adam.ADAM, "SGD": sgd.MOMENTUM_SGD, "LAMB": lamb.LAMB}
MODES = ("masters", "split16", "bfloat16 moments")
SCALE = 128.0


class Run(NamedTuple):
    """What a training is made of.

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
        """All that a step writes."""
        every = [self.params, self.models or [], self.lows or [], *self.moments, self.steps]
        return [tensor for tensors in every for tensor in tensors]

    def masters(self) -> list[Tensor]:
        """The masters, float32."""
        if self.lows is None:
            return self.params
        return list(map(split.decode, self.params, self.lows))


def starting(rule: Rule, mode: str, device: torch.device) -> Run:
    """Return the weights before the first step, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    params, models, lows = [value.to(device) for value in values], None, None
    if mode == "split16":
        halves = [split.encode(value, torch.bfloat16, torch.int16) for value in values]
        params, lows = [[half.to(device) for half in each] for each in zip(*halves, strict=True)]
    else:
        models = [value.half().to(device) for value in values]
    dtype = torch.bfloat16 if mode == "bfloat16 moments" else torch.float32
    moments = [
        [torch.zeros(shape, dtype=dtype, device=device) for shape in SHAPES] for _ in rule.moments
    ]
    return Run(params, models, lows, moments, [torch.zeros((), device=device) for _ in SHAPES])


def gradients(i: int, device: torch.device) -> list[Tensor]:
    """Return the scaled gradients of the i-th step, the same on every device."""
    generator = torch.Generator().manual_seed(100 + i)
    return [(torch.randn(shape, generator=generator) * SCALE).half().to(device) for shape in SHAPES]


def take_step(rule: Rule, run: Run, i: int, device: torch.device, on_host: bool = False) -> None:
    """Take the i-th step, or skip it where it overflows."""
    seeds = list(range(len(SHAPES))) if run.moments[0][0].dtype is torch.bfloat16 else None
    stepping.step(
        *(rule, rule.numbers(GROUP), run.params, gradients(i, device), run.moments, run.steps),
        models=run.models,
        lows=run.lows,
        seeds=seeds,
        inv_scale=torch.full((1,), 1 / SCALE, device=device),
        found_inf=torch.full((1,), float(i == SKIPPED), device=device),
        backend="reference" if on_host else None,
    )


def trained(rule: Rule, mode: str, device: torch.device, on_host: bool = False) -> Run:
    """Return what twenty steps make of the weights."""
    run = starting(rule, mode, device)
    for i in range(STEPS):
        take_step(rule, run, i, device, on_host)
    return run


def exact(name: str) -> list[Tensor]:
    """Return the weights in FP64 after the steps that were taken, by an optimizer of torch's."""
    cpu = torch.device("cpu")
    start = starting(RULES[name], "masters", cpu).params
    parameters = [nn.Parameter(p.double()) for p in start]
    optimizer: torch.optim.Optimizer = {
        "Adam": torch.optim.AdamW(parameters, 1e-2, (0.9, 0.99), weight_decay=0.1),
        "SGD": torch.optim.SGD(parameters, 1e-2, 0.9, weight_decay=0.1),
        "LAMB": _Lamb(parameters, 1e-2),
    }[name]
    for i in range(STEPS):
        if i == SKIPPED:
            continue
        for parameter, grad in zip(parameters, gradients(i, cpu), strict=True):
            parameter.grad = grad.double() / SCALE
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


class _Lamb(torch.optim.SGD):
    """LAMB with the hyper-parameters of `GROUP`, which torch does not have."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step."""
        for p in self.param_groups[0]["params"]:
            new = {"t": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
            state = self.state.setdefault(p, new)
            state["t"] += 1
            state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
            state["v"].mul_(0.99).add_(p.grad**2, alpha=0.01)
            mean, square = state["m"] / (1 - 0.9 ** state["t"]), state["v"] / (1 - 0.99 ** state["t"])
            direction = mean / (square.sqrt() + 1e-8) + 0.1 * p
            ratio = p.norm() / direction.norm()
            p.sub_(1e-2 * (ratio if p.numel() else 1.0) * direction)


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
    bound = 0.1 if mode == "bfloat16 moments" else 1e-5
    assert largest < bound, f"the weights are {largest:.1e} off what torch.optim makes in FP64"
    counts = [int(steps) for steps, p in zip(run.steps, run.params, strict=True) if p.numel()]
    assert set(counts) == {STEPS - 1}, f"{STEPS - 1} of {STEPS} steps were taken, and counted: {counts}"
    if run.models is not None:
        rounded = [master.half() for master in run.masters()]
        assert_same_bits(run.models, [each.cpu() for each in rounded], "the model's weights")
    # Noise is another on each backend, and so are the last bits of norms and of beta^t.
    if name == "SGD" and mode != "bfloat16 moments":
        plain = trained(rule, mode, torch.device("cpu"), on_host=True)
        assert_same_bits(run.tensors, plain.tensors, "what the steps have written")
    return Outcome(f"{largest:.1e} off", run.tensors)


for _name in RULES:
    for _mode in MODES:
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


LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5", "O6", "O7")


def _level(level: str, device: torch.device) -> Outcome:
    try:
        import yaml  # noqa: F401
    except ImportError:
        raise SkipError("PyYAML, which reads the levels, is missing") from None
    import amp
    from amp.optimizers import FusedAdam

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 16)).to(
        device
    )
    optimizer: Any = FusedAdam(model.parameters(), lr=1e-2)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(device)
    skipped, losses = [], []
    with warnings.catch_warnings(record=True) as said, amp.Session(level, verbosity=0) as session:
        warnings.simplefilter("always")
        model, optimizer = session.initialize(model, optimizer)
        checks = bool(session.properties.loss_scaling.check)
        for i in range(5):
            loss = (model(x).float() - 1).square().mean()
            losses.append(float(loss))
            with session.scale_loss(
                loss * (math.inf if i == 2 and checks else 1.0), optimizer
            ) as scaled:
                scaled.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            skipped.append(bool(amp.step_was_skipped(optimizer)))
            optimizer.zero_grad()
    assert skipped == [i == 2 and checks for i in range(5)], f"skipped steps: {skipped}"
    assert all(map(math.isfinite, losses)), f"losses: {losses}"
    assert losses[-1] < 0.95 * losses[0], f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}"
    notes = [str(each.message) for each in said if "emulated" in str(each.message)]
    return Outcome("; ".join([f"loss {losses[0]:.3f} to {losses[-1]:.3f}", *notes]))


for _of_level in LEVELS:
    _full_name = f"levels: {_of_level}"
    CHECKS[_full_name] = Check(_full_name, functools.partial(_level, _of_level), 90, False)


def _host_times(device: torch.device, call: Callable[[], Any]) -> float:
    """Return the median time of a call on the host, in microseconds."""
    times = []
    for _ in range(20):
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return statistics.median(times) * 1e6


def _fused(device: torch.device) -> Any:
    from amp.optimizers import FusedAdam

    optimizer = FusedAdam(
        [nn.Parameter(torch.ones(100 + i, device=device)) for i in range(161)], lr=1e-3
    )
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@check("host: no wait in a step")
def _waits(device: torch.device) -> Outcome:
    if language.INTERPRETED:
        raise SkipError("the interpreter takes long")
    optimizer = _fused(device)
    micros = _host_times(device, optimizer.step)
    figure = f"{micros:.0f} us for 161 tensors"
    needs_gpu(device, f"to see whether the host waits; a step takes {figure}")
    before = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        optimizer.step()
        torch.cuda.synchronize(device)
    launches = sum(event.count for event in profile.key_averages() if "Sync" not in event.key)
    return Outcome(f"{figure}, {launches} events on the device")


@check("graphs: a captured step", 60)
def _captured(device: torch.device) -> None:
    needs_gpu(device, "CUDA graphs")
    grads = gradients(0, device)
    runs: Sequence[Run] = [starting(adam.ADAM, "masters", device) for _ in range(2)]

    def take(run: Run) -> None:
        arguments = adam.ADAM, adam.ADAM.numbers(GROUP), run.params, grads, run.moments, run.steps
        stepping.step(*arguments, models=run.models, inv_scale=inv_scale)

    inv_scale = torch.full((1,), 1 / SCALE, device=device)
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for run in runs:
            take(run)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        take(runs[0])
    for i in range(50):
        kept = torch.full((1000 + i,), 1.0, device=device)
        pinned = torch.ones(100 + i).pin_memory()
        graph.replay()
        del kept, pinned
        take(runs[1])
    assert_same_bits(runs[0].tensors, [each.cpu() for each in runs[1].tensors], "after 50 replays")
