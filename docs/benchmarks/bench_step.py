"""What lies between backward and the next forward: check, unscale, step, 16-bit weights, loss scale.

    python docs/benchmarks/bench_step.py --device cuda        # part of `make bench-gpu`
    python docs/benchmarks/bench_step.py --device cpu         # part of `make bench`

Each row is this phase for all parameters of a model, by one way of training; its bytes are those that
a fused step with these weights, masters and moments moves, which checks gradients first, and merges
masters that are not split with the weights. Rows are made and set against
the memory's speed as in bench_kernels.py. One of this library's kernels scales the loss; its small
copies keep the scale and the verdict for the step, and tell the host of overflows later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from bench_kernels import Contender, Operation, like, main
from torch import Tensor, nn

import amp
from amp.optimizers import FusedAdam, FusedSGD

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
Shapes = list[tuple[int, ...]]


class Weights(nn.Module):
    """A model that is nothing but its parameters."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        super().__init__()
        weights = [nn.Parameter(0.01 * torch.randn(shape, device=device)) for shape in shapes]
        self.weights = nn.ParameterList(weights)


def with_amp(
    shapes: Shapes, device: torch.device, make: Callable[[Any], Any], level: str, **overrides: Any
) -> Callable[[], None]:
    """Return the phase as a script with this library has it."""
    model: Any = Weights(shapes, device)
    optimizer = make(model.parameters())
    session = amp.Session(level, verbosity=0, **overrides)
    model, optimizer = session.initialize(model, optimizer)
    params = list(model.parameters())
    grads = like(shapes, params[0].dtype, device)
    loss = torch.ones((), device=device)

    def run() -> None:
        with session.scale_loss(loss, optimizer):
            for parameter, grad in zip(params, grads, strict=True):
                parameter.grad = grad
        optimizer.step()
        optimizer.zero_grad()

    return run


def with_grad_scaler(
    shapes: Shapes, device: torch.device, make: Callable[[Any], Any]
) -> Callable[[], None]:
    """Return the phase with torch's own parts, and copies to and from FP32 masters."""
    weights = list(map(nn.Parameter, like(shapes, F16, device)))
    grads = like(shapes, F16, device)
    masters = [nn.Parameter(weight.float()) for weight in weights]
    for master in masters:
        master.grad = torch.zeros_like(master)
    wide: list[Any] = [master.grad for master in masters]
    optimizer = make(masters)
    scaler = torch.amp.GradScaler(device.type, init_scale=1.0)
    scaler.scale(torch.ones((), device=device))

    @torch.no_grad()
    def run() -> None:
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad
        torch._foreach_copy_(wide, [weight.grad for weight in weights])
        scaler.step(optimizer)
        scaler.update()
        torch._foreach_copy_(weights, masters)
        for weight in weights:
            weight.grad = None

    return run


def phases(shapes: Shapes, device: torch.device) -> Iterator[Operation]:
    """Yield the phase for AdamW and SGD, whole masters and halves."""

    def fused_adam(params: Any) -> Any:
        return FusedAdam(params, lr=1e-4)

    def fused_sgd(params: Any) -> Any:
        return FusedSGD(params, lr=1e-4, momentum=0.9)

    def adamw(**options: Any) -> Callable[[Any], Any]:
        return lambda params: torch.optim.AdamW(params, lr=1e-4, **options)

    def sgd(params: list[Tensor]) -> Any:
        return torch.optim.SGD(params, lr=1e-4, momentum=0.9, fused=True)

    def ours(make: Callable[[Any], Any], level: str, **overrides: Any) -> Contender:
        name = f"reamp {level}, {'FusedAdam' if make is fused_adam else 'FusedSGD'}"
        return Contender(name, with_amp(shapes, device, make, level, **overrides))

    def torchs(name: str, make: Callable[[Any], Any]) -> Contender:
        return Contender(f"copy, GradScaler, {name}, copy", with_grad_scaler(shapes, device, make))

    def with_adamw() -> Iterator[Contender]:
        yield ours(fused_adam, "O2", loss_scale={"init": 1.0})
        yield torchs("AdamW(fused)", adamw(fused=True))
        yield torchs("AdamW(foreach)", adamw(foreach=True))

    def with_sgd() -> Iterator[Contender]:
        yield ours(fused_sgd, "O2", loss_scale={"init": 1.0})
        yield torchs("SGD(fused)", sgd)

    def with_small(level: str, **options: Any) -> Iterator[Contender]:
        scale = {"loss_scale": {"init": 1.0}} if level == "O2" else {}
        yield ours(fused_adam, level, **options, **scale)

    yield Operation("AdamW, float16, float32 masters", 32, with_adamw())
    yield Operation("SGD, float16, float32 masters", 24, with_sgd())
    if device.type == "cuda":
        yield Operation("AdamW, bfloat16, split16", 26, with_small("O5", master_weights="split16"))
    for level, dtype in (("O5", "bfloat16"), ("O2", "float16")):
        medium = with_small(level, master_weights="split16", state_dtype="bfloat16")
        yield Operation(f"AdamW, {dtype}, split16, bfloat16 moments", 18, medium)
        small = with_small(level, master_weights="split24", state_dtype="packed16")
        yield Operation(f"AdamW, {dtype}, split24, packed16", 12, small)


if __name__ == "__main__":
    main("The step", "step", phases, __doc__)
