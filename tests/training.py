"""A small net and scripts that train it: at a level, and in FP32 without amp.

A script may write to weights: without a trace, with one, or not at all.

torch counts a write to `p.detach()` in the version of `p`, and a write to `p.data` nowhere. So one
script can be run in three ways, which must end alike or not; see `Training.seen`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import amp
from amp.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedLion, FusedNovoGrad, FusedSGD
from tests.models import run_backward

Way = Literal["unseen", "seen", "lost"]
WIDTH = 16
"""Of a layer: O7 computes those in FP8."""

WHOLE: dict[str, dict[str, Any]] = {"O2": {"loss_scale": 128.0}, "O5": {}, "O7": {}}
"""Levels whose masters are FP32 tensors, with options so that no step is skipped."""
LEAN: dict[str, dict[str, Any]] = {
    f"{level} {kind}": {**WHOLE[level], "master_weights": kind}
    for level in ("O2", "O5")
    for kind in ("split16", "split24", "kahan")
}
LEVELS = {"O1": {"loss_scale": 128.0}} | WHOLE | LEAN

_ADAM: dict[str, Any] = {"lr": 0.02, "eps": 1e-2, "weight_decay": 0.01}
_SGD: dict[str, Any] = {"lr": 0.02, "momentum": 0.9}
_ADAGRAD: dict[str, Any] = {"lr": 0.05, "initial_accumulator_value": 0.1}
TORCHS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, **_SGD),
    "AdamW": lambda p: torch.optim.AdamW(p, **_ADAM),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True, **_ADAM),
}
FUSED: dict[str, Any] = {
    "FusedAdam": lambda p: FusedAdam(p, **_ADAM),
    "FusedSGD": lambda p: FusedSGD(p, **_SGD),
    "FusedLAMB": lambda p: FusedLAMB(p, 0.05),
    "FusedLion": lambda p: FusedLion(p, 0.005),
    "FusedNovoGrad": lambda p: FusedNovoGrad(p, 0.5),
    "FusedAdagrad": lambda p: FusedAdagrad(p, **_ADAGRAD),
}
OPTIMIZERS = TORCHS | FUSED
TORCHS_FOR = {"FusedAdam": "AdamW", "FusedSGD": "SGD", "FusedAdagrad": "Adagrad"}
"""Whose steps are the same in FP32; the others are compared with themselves, without amp."""
IN_FP32 = OPTIMIZERS | {"Adagrad": lambda p: torch.optim.Adagrad(p, **_ADAGRAD)}


def fitting(optimizer: str, level: str) -> str:
    """Return an optimizer, or another one in its place where the level needs stochastic rounding."""
    return "FusedSGD" if "split24" in level and optimizer in TORCHS else optimizer


class Net(nn.Module):
    """Two layers, and another one that the loss need not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        return (self.other if other else self.second)(torch.tanh(self.first(x)))


Script = Callable[["Training"], None]
Wrap = Callable[["Training"], Any]


class Training:
    """A net under an optimizer, at a level or in FP32 without amp.

    Args:
        level: a key of `LEVELS`, or None for FP32.
        optimizer: a key of `OPTIMIZERS`.
        way: "unseen" for a script that writes through `.data`, "seen" for one whose writes torch
            counts, and "lost" for one whose writes go nowhere.
        wrap: makes a wrapper of the optimizer, which `initialize` gets.
        slow: whether steps are so small that weights end about where they were written.
        options: others for `initialize`.
    """

    def __init__(
        self,
        level: str | None,
        optimizer: str,
        way: Way = "unseen",
        wrap: Wrap | None = None,
        slow: bool = False,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model: Any = Net()
        if level is None:
            self.optimizer = IN_FP32[TORCHS_FOR.get(optimizer, optimizer)](self.model.parameters())
        else:
            self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.level, self.way = level, way
        self.x, self.y = torch.randn(32, WIDTH), torch.randn(32, WIDTH)
        self.results: list[Tensor] = []
        if slow:
            self.set_rate(0.05 * self.optimizer.param_groups[0]["lr"])
        if wrap is not None:
            self.optimizer = wrap(self)
        if level is not None:
            options = {"opt_level": level.split()[0], "verbosity": 0, **LEVELS[level], **options}
            amp.initialize(self.model, self.optimizer, **options)

    # Training.

    def iterate(self, times: int = 1, other: bool = False) -> None:
        for _ in range(times):
            self.backward(other)
            self.optimizer.step()

    def backward(self, other: bool = False, accumulates: bool = False, factor: float = 1.0) -> Tensor:
        if not accumulates:
            self.optimizer.zero_grad()
        loss = (self.model(self.x, other).float() - self.y).square().sum(1).mean() * factor
        self.backward_of(loss)
        return loss

    def backward_of(self, loss: Tensor) -> None:
        run_backward(loss, None if self.level is None else self.optimizer)

    def tasks(self) -> list[Tensor]:
        """Return two losses, each of a forward of its own, which reach the parameters `trained`."""
        one, other = [self.model(self.x).float() for _ in range(2)]
        return [(one - self.y).square().mean(), (other + 1).abs().mean()]

    def evaluate(self) -> None:
        """Note what the model returns."""
        self.model.eval()
        with torch.no_grad():
            self.results.append(self.model(self.x).float())
        self.model.train()

    def skip(self, then: Callable[[], None] = lambda: None) -> None:
        """Take a step that is skipped for an overflow, after something else."""
        if self.level is not None:
            self.backward(factor=torch.inf)
        then()
        if self.level is not None:
            self.optimizer.step()

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    # What there is to write to.

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @property
    def trained(self) -> list[Any]:
        """The parameters that losses reach, unless they go through the other layer."""
        return self.parameters[:4]

    @property
    def stepped(self) -> list[Any]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def masters(self) -> list[Any]:
        """Those of `amp.master_params`, which looks at them."""
        return self.stepped if self.level is None else list(amp.master_params(self.optimizer))

    @property
    def weights(self) -> list[Tensor]:
        """Tensors to which a script writes in order to write to the model's parameters."""
        return self.written(self.parameters)

    def written(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return tensors to which a script writes in order to write to these."""
        if self.way == "unseen":
            return [tensor.data for tensor in tensors]
        tensors = [tensor.detach() for tensor in tensors]
        return tensors if self.way == "seen" else [tensor.clone() for tensor in tensors]

    @property
    def state(self) -> list[Tensor]:
        """Copies of all entries of the model's state dict, FP32."""
        return [value.detach().float().clone() for value in self.model.state_dict().values()]


# Scripts that write somewhere, at some time.

Write = Callable[[], None]
TARGETS: dict[str, Callable[[Training], Callable[[], Iterable[Tensor]]]] = {
    "weights": lambda t: lambda: t.parameters,
    "the groups": lambda t: lambda: t.stepped,
    "a list of masters that was kept": lambda t: t.masters.copy,
    "masters": lambda t: lambda: t.masters,
    "entries": lambda t: lambda: t.model.state_dict().values(),
}
"""What a script writes to: functions that return it when it is written."""


def before_the_first_step(t: Training, write: Write) -> None:
    write()
    t.iterate(2)


def after_the_step(t: Training, write: Write) -> None:
    for _ in range(4):
        t.iterate()
        write()


def before_the_step(t: Training, write: Write) -> None:
    for _ in range(4):
        t.backward()
        write()
        t.optimizer.step()


def between_blocks(t: Training, write: Write) -> None:
    for _ in range(3):
        t.backward()
        write()
        t.backward(accumulates=True)
        t.optimizer.step()


def in_a_hook_before_the_step(t: Training, write: Write) -> None:
    t.optimizer.register_step_pre_hook(lambda *_: write())
    t.iterate(4)


def in_a_hook_after_the_step(t: Training, write: Write) -> None:
    t.optimizer.register_step_post_hook(lambda *_: write())
    t.iterate(4)


def in_a_hook_of_all_optimizers(t: Training, write: Write) -> None:
    hook = register_optimizer_step_post_hook(lambda *_: write())
    try:
        t.iterate(4)
    finally:
        hook.remove()


def saved_before(t: Training, write: Write) -> None:
    for _ in range(4):
        t.iterate()
        t.results += t.state
        write()


def saved_after(t: Training, write: Write) -> None:
    for _ in range(4):
        t.iterate()
        write()
        t.results += t.state


def evaluated_after(t: Training, write: Write) -> None:
    for _ in range(3):
        t.iterate()
        write()
        t.evaluate()


def in_a_closure(t: Training, write: Write) -> None:
    def closure() -> Tensor:
        loss = t.backward()
        write()
        return loss

    for _ in range(4):
        t.optimizer.step(closure)


def first_in_a_closure(t: Training, write: Write) -> None:
    def closure() -> Tensor:
        write()
        return t.backward()

    for _ in range(4):
        t.optimizer.step(closure)


def in_a_hook_before_a_step_with_a_closure(t: Training, write: Write) -> None:
    t.optimizer.register_step_pre_hook(lambda *_: write())
    for _ in range(4):
        t.optimizer.step(t.backward)


def in_a_hook_after_a_step_with_a_closure(t: Training, write: Write) -> None:
    t.optimizer.register_step_post_hook(lambda *_: write())
    for _ in range(4):
        t.optimizer.step(t.backward)


def before_a_skipped_step(t: Training, write: Write) -> None:
    for _ in range(3):
        t.iterate()
        write()
        t.skip()
    t.iterate()


def after_a_skipped_step(t: Training, write: Write) -> None:
    for _ in range(3):
        t.iterate()
        t.skip()
        write()
    t.iterate()


def between_block_and_skipped_step(t: Training, write: Write) -> None:
    for _ in range(3):
        t.iterate()
        t.skip(then=write)
    t.iterate()


PLAIN_TIMES = (
    *(before_the_first_step, after_the_step, before_the_step, between_blocks),
    *(in_a_hook_before_the_step, in_a_hook_after_the_step, in_a_hook_of_all_optimizers),
    *(saved_before, saved_after, evaluated_after),
)
TIMES_WITH_A_CLOSURE = (
    *(in_a_closure, first_in_a_closure),
    *(in_a_hook_before_a_step_with_a_closure, in_a_hook_after_a_step_with_a_closure),
)
TIMES_OF_A_SKIPPED_STEP = (before_a_skipped_step, after_a_skipped_step, between_block_and_skipped_step)


@functools.cache
def writing(target: str, when: Callable[[Training, Write], None]) -> Script:
    """Return a script that shrinks a target at some time."""

    def script(t: Training) -> None:
        find = TARGETS[target](t)

        def write() -> None:
            for tensor in t.written(find()):
                tensor.mul_(0.75)

        when(t, write)

    script.__name__ = when.__name__
    return script


def run(script: Script, level: str | None, optimizer: str, way: Way, **options: Any) -> Tensor:
    """Run a script, and return what it has noted and all weights at its end, as one vector."""
    training = Training(level, optimizer, way, **options)
    script(training)
    result = vector(training.results + training.state)
    if level is not None:
        amp.get_session(training.optimizer).close()
    return result


@functools.cache
def run_in_fp32(
    script: Script, optimizer: str, way: Way, wrap: Wrap | None = None, slow: bool = False
) -> Tensor:
    return run(script, None, optimizer, way, wrap=wrap, slow=slow)


def vector(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors])


def distance(one: Tensor, other: Tensor) -> float:
    """Return how far one vector is from another, in lengths of this."""
    return float((one - other).norm() / other.norm())


def check(script: Script, level: str, optimizer: str, wrap: Wrap | None = None, **options: Any) -> None:
    """Run a script in all ways: what is written without a trace must be in all that comes after it.

    Lean masters are compared with FP32 alone: low bits that a write leaves may be any.
    """
    found = check_with_fp32(script, level, optimizer, wrap=wrap, **options)
    if level in WHOLE:
        assert torch.equal(found, run(script, level, optimizer, "seen", wrap=wrap, **options))


def check_with_fp32(
    script: Script,
    level: str,
    optimizer: str,
    *,
    wrap: Wrap | None = None,
    slow: bool = False,
    **options: Any,
) -> Tensor:
    """Compare what a script finds that writes without a trace with FP32, and return it."""
    in_fp32 = run_in_fp32(script, optimizer, "unseen", wrap, slow)
    without = run_in_fp32(script, optimizer, "lost", wrap, slow)
    assert distance(without, in_fp32) > 0.05, "nobody would notice a write that is lost"
    found = run(script, level, optimizer, "unseen", wrap=wrap, slow=slow, **options)
    tolerance = 0.1 if level == "O7" else 0.02  # of which FP8 takes 0.06
    assert distance(found, in_fp32) < tolerance
    return found
