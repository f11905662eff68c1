"""Sessions, against the same training written out by hand."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp.selftest.check_registry import CHECKS, Check, Outcome, SkipError, assert_same_bits, check

STEPS, OVERFLOW = 5, (2, 0)
"""The step and the block of it that overflows."""
SCALE, GROWTH_INTERVAL = 2.0**10, 3
"""The loss scale grows between two blocks of a step."""
LARGEST_NORM = 0.02
"""What gradients are clipped to: more than those of some steps have, and less than others."""


def _needs_levels() -> None:
    try:
        import yaml  # noqa: F401
    except ImportError:
        raise SkipError("PyYAML, which reads the levels, is missing") from None


def _loss(model: nn.Module, i: int, block: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(10 * i + block)
    x = torch.randn(8, 16, generator=generator).to(device)
    loss: Tensor = (model(x).float() - 1).square().mean() * 0.1 * (i + 1)
    return loss * math.inf if (i, block) == OVERFLOW else loss


def _model(device: torch.device) -> nn.Linear:
    values = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)) * 0.1
    model = nn.Linear(16, 4, bias=False)
    model.weight.data.copy_(values)
    return model.to(device)


class _Cast(nn.Module):
    """A model that casts its input to float16, as a session does at O2."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner: Any = inner.half()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x.half())


class Trained(NamedTuple):
    """A model's weights, their FP32 values, and the loss scale after some steps."""

    weight: Tensor
    master: Tensor
    scale: float


def _optimizer(name: str, params: Any, fused: bool) -> Any:
    from amp.optimizers import FusedSGD

    if name == "clipped SGD" and fused:
        return FusedSGD(params, lr=0.5, momentum=0.9, max_grad_norm=LARGEST_NORM)
    if name == "clipped SGD":
        return torch.optim.SGD(params, lr=0.5, momentum=0.9)
    return torch.optim.AdamW(params, lr=1e-2)


def _in_session(name: str, blocks: int, device: torch.device, **options: Any) -> Trained:
    import amp

    model: Any = _model(device)
    optimizer = _optimizer(name, model.parameters(), fused=True)
    options["loss_scale"] = {"init": SCALE, "growth_interval": GROWTH_INTERVAL}
    with warnings.catch_warnings(), amp.Session("O2", verbosity=0, **options) as session:
        warnings.simplefilter("ignore")
        model, optimizer = session.initialize(model, optimizer)
        for i in range(STEPS):
            for block in range(blocks):
                with session.scale_loss(_loss(model, i, block, device), optimizer) as scaled:
                    scaled.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        weight = model.weight.detach().clone()
        master = model.state_dict()["weight"].clone()
        return Trained(weight, master, session.scalers[0].loss_scale())


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _by_hand(name: str, blocks: int, device: torch.device) -> Trained:
    model, scale, good = _Cast(_model(device)), SCALE, 0
    weight: Any = model.inner.weight
    master = nn.Parameter(_model(device).weight.detach().clone())
    optimizer = _optimizer(name, [master], fused=False)
    for i in range(STEPS):
        total, is_good = torch.zeros_like(master), True
        for block in range(blocks):
            weight.grad = None
            (_loss(model, i, block, device) * scale).backward()  # type: ignore[no-untyped-call]
            grad = _grad(weight).float() * (1 / scale)
            total += grad
            good += 1
            if not bool(grad.isfinite().all()):
                scale, good, is_good = scale / 2, 0, False
            elif good == GROWTH_INTERVAL:
                scale, good = scale * 2, 0
        if is_good:
            master.grad = total
            if name == "clipped SGD":
                nn.utils.clip_grad_norm_(master, LARGEST_NORM)
            optimizer.step()
            weight.data.copy_(master.data)
    return Trained(weight.detach(), master.detach(), scale)


def _trains(name: str, blocks: int, options: dict[str, Any], device: torch.device) -> Outcome:
    _needs_levels()
    found, expected = _in_session(name, blocks, device, **options), _by_hand(name, blocks, device)
    assert found.scale == expected.scale, f"the loss scale is {found.scale}, not {expected.scale}"
    assert_same_bits([found.weight], [found.master.half().cpu()], "weights, not rounded masters")
    if name == "AdamW":
        assert_same_bits(found[:2], [each.cpu() for each in expected[:2]], "weights and masters")
    torch.testing.assert_close(found.master, expected.master, rtol=1e-5, atol=1e-6)
    return Outcome(f"scale {found.scale:.0f}")


for _name, _blocks, _options in (
    ("AdamW", 2, {}),
    ("AdamW, split16", 2, {"master_weights": "split16"}),
    ("clipped SGD", 1, {}),
    ("clipped SGD, two blocks", 2, {}),
):
    _full_name = f"sessions: O2, {_name}"
    _run = functools.partial(_trains, _name.partition(",")[0], _blocks, _options)
    CHECKS[_full_name] = Check(_full_name, _run, 60, False)


@check("sessions: NovoGrad's norms")
def _novograd(device: torch.device) -> None:
    from amp.optimizers import FusedNovoGrad

    parameter: Any = nn.Parameter(torch.arange(1.0, 9.0, device=device))
    optimizer = FusedNovoGrad([parameter], lr=0.1, betas=(0.9, 0.5), weight_decay=0.1)
    p, m, norm = parameter.detach().double(), torch.zeros(8, device=device).double(), 0.0
    for t in range(1, 5):
        parameter.grad = torch.sin(torch.arange(8.0, device=device) * t) * t
        g = parameter.grad.double()
        norm = float(g.norm()) if t == 1 else math.sqrt(0.5 * norm**2 + 0.5 * float(g.norm()) ** 2)
        m = 0.9 * m + 0.1 * g
        direction = m / (1 - 0.9**t) / (norm / math.sqrt(1 - 0.5**t) + 1e-8)
        p = p - 0.1 * (direction + 0.1 * p)
        optimizer.step()
    torch.testing.assert_close(parameter.detach().double(), p, rtol=1e-5, atol=1e-6)


@check("sessions: each tensor has random bits of its own")
def _seeds(device: torch.device) -> None:
    from amp.optimizers import FusedAdam

    params = [nn.Parameter(torch.ones(5000, device=device)) for _ in range(2)]
    optimizer = FusedAdam(params, lr=1e-2, state_dtype=torch.bfloat16)
    for parameter in params:
        parameter.grad = torch.full_like(parameter, 0.3)
    optimizer.step()
    moments = [optimizer.state[parameter]["exp_avg"].float() for parameter in params]
    of_both = float(torch.corrcoef(torch.stack(moments))[0, 1])
    assert abs(of_both) < 0.1, f"two tensors are rounded alike: their correlation is {of_both:.2f}"


def _layer(level: Any, recipe: str, bound: float, device: torch.device) -> Outcome:
    """Run a linear layer forward, and backward twice; in FP4 gradients are rounded at random."""
    _needs_levels()
    import amp

    generator = torch.Generator().manual_seed(0)
    values, inputs, grads = (torch.randn(128, 128, generator=generator) for _ in range(3))
    exact = [inputs @ values.t(), grads @ values, grads.t() @ inputs]
    model: Any = nn.Sequential(nn.Linear(128, 128, bias=False)).to(device)
    model[0].weight.data.copy_(values)
    fp8: Any = {"recipe": recipe, "skip": []}
    with warnings.catch_warnings(), amp.Session(level, verbosity=0, fp8=fp8) as session:
        warnings.simplefilter("ignore")
        model = session.initialize(model)
        found = []
        for _ in range(2):
            x: Any = inputs.clone().to(device).requires_grad_()
            model.zero_grad()
            output = model(x)
            output.backward(grads.to(output))
            found.append(
                [each.detach().float().cpu() for each in (output, x.grad, model[0].weight.grad)]
            )
    off = [float((a - b).norm() / b.norm()) for a, b in zip(found[0], exact, strict=True)]
    assert max(off) < bound, f"the output and gradients are {off} off, and {bound} may be"
    are_same = torch.equal(found[0][2], found[1][2])
    assert are_same is (level == "O6"), "two backwards round alike" if are_same else "bits differ"
    return Outcome(f"{max(off):.3f} off")


for _level, _recipe, _bound in (("O6", "current", 0.08), ("O8", "nvfp4", 0.25)):
    _full_name = f"sessions: a layer at {_level}"
    CHECKS[_full_name] = Check(
        _full_name, functools.partial(_layer, _level, _recipe, _bound), 60, False
    )
