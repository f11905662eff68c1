"""Digits that are lost before the op that shows it: what is said, where, and whether it cures."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import amp
from amp.diagnosis.findings import Finding

Function = Callable[[Tensor], Tensor]


def flushed(x: Tensor) -> Tensor:
    return torch.log(torch.softmax(x * 14, -1))


def rounded_to_1(x: Tensor) -> Tensor:
    return torch.log(1 - torch.sigmoid(x * 6))


def cancelled(x: Tensor) -> Tensor:
    x = x + 60
    variance = (x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2
    return (x - 60) / torch.sqrt(variance + 1e-5)


def without_eps(x: Tensor) -> Tensor:
    x = x * (torch.arange(len(x)) > 0)[:, None]  # one zero vector
    return F.cosine_similarity(x, x.roll(1, -1), dim=-1)[:, None]


def underflowed(x: Tensor) -> Tensor:
    return (x * 1e-4).pow(2).sum(-1, keepdim=True).sqrt() * 1e4


class Head(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def trained(function: Function, level: str, **overrides: Any) -> tuple[bool, list[Finding], str]:
    """Return whether a step has finite gradients, its findings, and what a doctor says."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8), Head(function))
    optimizer: Any = torch.optim.SGD(model.parameters(), 1e-3)
    x = torch.randn(64, 8)
    with amp.Session(level, verbosity=0, **overrides) as session:
        model, optimizer = session.initialize(model, optimizer)

        def step() -> None:
            optimizer.zero_grad()
            with session.scale_loss(model(x).float().mean() * 1e-2, optimizer) as scaled:
                scaled.backward()

        with amp.diagnose(model, optimizer) as report:
            step()
        grads = [p.grad for p in amp.master_params(optimizer)]
        is_finite = all(bool(grad.isfinite().all()) for grad in grads if grad is not None)
        said = "" if is_finite else str(amp.doctor(step, model, optimizer))
    return is_finite, report.findings, said


@pytest.mark.parametrize(
    ("function", "causes"),
    [
        (flushed, {"underflow"}),
        (rounded_to_1, {"rounding", "cancellation"}),
        (cancelled, {"cancellation"}),
        (without_eps, {"eps", "underflow"}),
        (underflowed, {"underflow"}),
    ],
)
def test_rounding_is_not_called_mathematics(function: Function, causes: set[str]) -> None:
    """Each is finite at O0, and one rule cures it."""
    assert trained(function, "O0")[0]
    is_finite, findings, said = trained(function, "O2", loss_scale={"init": 64})
    assert not is_finite
    assert findings[0].cause in causes
    assert findings[0].module == "1"
    assert findings[0].file == __file__
    lines = range(function.__code__.co_firstlineno, function.__code__.co_firstlineno + 5)
    assert findings[0].line in lines
    assert "mathematics" not in said
    assert "module: '1', cast: float32" in said
    rules = [{"module": "1", "cast": "float32"}]
    assert trained(function, "O2", loss_scale={"init": 64}, rules=rules)[0]


def inf_minus_inf(x: Tensor) -> Tensor:
    scores = (x @ x.mT).masked_fill(torch.ones(64, 64, dtype=torch.bool).triu(), -math.inf)
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)) @ x


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
@pytest.mark.parametrize("function", [inf_minus_inf, lambda x: torch.log(x * (x > 0))])
def test_what_is_not_finite_in_float64_is_mathematics(function: Function, level: str) -> None:
    is_finite, findings, said = trained(
        function, level, **({"loss_scale": 1.0} if level != "O0" else {})
    )
    assert not is_finite
    assert findings[0].cause == "mathematics"
    assert "rules:" not in said


class Timesteps(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.how = how

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = self.into(x)
        if self.how == "cast":
            t = t.to(x.dtype)
        elif self.how == "range":
            t = torch.arange(600, dtype=x.dtype)[-16:]
        return self.out(x + (t * 0.01).sin()[:, None].to(x.dtype))


@pytest.mark.filterwarnings("ignore:the argument")
@pytest.mark.parametrize("how", ["cast", "range", "argument"])
def test_integers_that_are_rounded(how: str) -> None:
    torch.manual_seed(0)
    model: Any = Timesteps(how)
    optimizer: Any = torch.optim.SGD(model.parameters(), 1e-3)
    t = torch.arange(16) * 61 + 80
    with amp.Session("O5", verbosity=0) as session:
        model, optimizer = session.initialize(model, optimizer)
        batch = torch.randn(16, 8), t.float() if how == "argument" else t
        with amp.diagnose(model, optimizer) as report:
            loss = model(*batch).float().square().mean()
            with session.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        assert "cast" in {each.cause for each in report.findings}
        assert "cast" in {each.cause for each in amp.check(model, batch).findings}


def shifted(x: Tensor) -> Tensor:
    return x + 500.0


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def stepped(
    model: Any, level: str, loss: Callable[[Tensor], Tensor], **overrides: Any
) -> tuple[list[Finding], Any]:
    """Return what is found in a step, and what the doctor says."""
    optimizer: Any = torch.optim.SGD(model.parameters(), 1e-3)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    with amp.Session(level, verbosity=0, **overrides) as session:
        model, optimizer = session.initialize(model, optimizer)

        def step() -> None:
            optimizer.zero_grad()
            with session.scale_loss(loss(model(x).float()), optimizer) as scaled:
                scaled.backward()

        with amp.diagnose(model, optimizer) as report:
            step()
        return report.findings, amp.doctor(step, model, optimizer)


def mean_square(y: Tensor) -> Tensor:
    return y.square().mean()


def test_the_module_that_rounds_is_named_and_not_the_one_that_subtracts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Head(shifted), Head(centred), nn.Linear(8, 8))
    found, said = stepped(model, "O5", mean_square)
    assert (found[0].cause, found[0].module) == ("cancellation", "1")
    assert "it shows at Tensor.sub" in found[0].what
    assert said.cure.modules == ("1",)


def test_the_range_of_bfloat16_cures_no_lost_digits() -> None:
    torch.manual_seed(0)
    found, said = stepped(nn.Linear(8, 8), "O2", lambda y: cancelled(y.half()).float().sum())
    assert found[0].cause == "cancellation"
    assert said.cure is None
    assert "where no rule helps: change the line as advised" in said.why_not


@pytest.mark.parametrize(("level", "scale"), [("O2", 2.0**-14), ("O1", 1.0), ("O1", 8.0)])
def test_a_loss_scale_that_is_too_small(level: str, scale: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    found, said = stepped(model, level, lambda y: y.square().mean() * 1e-9, loss_scale=scale)
    assert found[0].cause == "underflow"
    assert "loss_scale='dynamic'" in found[0].advice
    assert said.cure.level == {"O1": "O4", "O2": "O5"}[level]
    again = stepped(model, said.cure.level, lambda y: y.square().mean() * 1e-9)
    assert again[1].report.is_healthy


def test_a_loss_scale_does_not_help_where_weights_stand_still_then() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    found, said = stepped(model, "O3", lambda y: y.square().mean() * 1e-9, loss_scale=1.0)
    assert found[0].cause == "underflow"
    assert "Take O5, with FP32 masters" in found[0].advice
    assert (said.cure.scale, said.cure.level) == (None, "O5")


def test_gradients_that_are_0_exactly_are_not_lost() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(500, 8), nn.Embedding(500, 8))
    optimizer: Any = torch.optim.SGD(model.parameters(), 1e-3)
    with amp.Session("O3", verbosity=0, loss_scale=1.0) as session:
        model, optimizer = session.initialize(model, optimizer)
        with amp.diagnose(model, optimizer) as report:
            loss = (model[0](torch.arange(4)) * model[1](torch.arange(4))).float().square().mean()
            with session.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        assert report.is_healthy, str(report)


def overflowing_norm(x: Tensor) -> Tensor:
    x = x * 1000
    return x / x.pow(2).mean(-1, keepdim=True).sqrt()


def test_a_loss_scale_does_not_hide_the_range_before_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Head(overflowing_norm), nn.Linear(8, 8))
    found, said = stepped(model, "O2", lambda y: y.sum() * 64, loss_scale={"init": 65536})
    assert found[0].cause.endswith("range")
    assert found[0].module == "1"
    assert said.cure.modules == ("1",)


def masked_by(kind: str) -> Function:
    def function(x: Tensor) -> Tensor:
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        scores = x @ x.mT
        if kind == "least":
            scores = scores.masked_fill(later, torch.finfo(x.dtype).min)
        elif kind == "added":
            scores = scores + torch.zeros_like(scores).masked_fill(later, torch.finfo(x.dtype).min)
        else:
            number = {"cast": -1e9, "of ten thousand": -1e4, "infinite": -math.inf}[kind]
            scores = scores + torch.zeros(later.shape).masked_fill(later, number).to(x.dtype)
        return torch.softmax(scores, -1) @ x

    return function


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        *((kind, "O2") for kind in ("least", "added", "cast", "of ten thousand", "infinite")),
        *(("least", "O1"), ("cast", "O1"), ("added", "O5"), ("cast", "O5")),
    ],
)
def test_a_mask_that_leaves_every_row_something_is_nothing_to_say(kind: str, level: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Head(masked_by(kind)), nn.Linear(8, 8))
    assert amp.check(model, torch.randn(16, 8), level).is_healthy
    scale = {} if level == "O5" else {"loss_scale": {"init": 64}}
    found, said = stepped(model, level, mean_square, **scale)
    assert found == []
    assert said.report.is_healthy


LATER = torch.ones(64, 64, dtype=torch.bool).triu(1)
WHOLE = LATER | (torch.arange(64) == 3)[:, None]  # of which a row is masked entirely


def attention(mask: Callable[[Tensor], Tensor], by_hand: bool) -> Function:
    def function(x: Tensor) -> Tensor:
        scores = mask(2 * x @ x.mT)
        if not by_hand:
            return torch.softmax(scores, -1) @ x
        weights = torch.exp(scores)
        return weights / weights.sum(-1, keepdim=True) @ x

    return function


def added(mask: Tensor, number: float) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(mask, number)


OVERFLOWS = "x.float() at"
FILL = "scores.masked_fill(mask, torch.finfo(torch.float16).min): tried"


@pytest.mark.parametrize(
    ("by_hand", "mask", "cause", "advice"),
    [
        (True, lambda x: x.masked_fill(LATER, -math.inf), "range", OVERFLOWS),
        (True, lambda x: F.dropout(x.masked_fill(LATER, -math.inf), 0.1), "range", OVERFLOWS),
        (True, lambda x: torch.where(LATER, -math.inf, x), "range", OVERFLOWS),
        (True, lambda x: x + added(LATER, -math.inf).to(x.dtype), "range", OVERFLOWS),
        (True, lambda x: x + added(LATER, -1e9).to(x.dtype), "range", OVERFLOWS),
        (False, lambda x: x + added(WHOLE, -1e9).to(x.dtype), "cast", FILL),
        (False, lambda x: x.masked_fill(WHOLE, -math.inf), "mathematics", FILL),
        (False, lambda x: x + added(WHOLE, -math.inf).to(x.dtype), "mathematics", FILL),
        (
            False,
            lambda x: x + added(WHOLE, -5e4).to(x.dtype) + added(WHOLE, -5e4).to(x.dtype),
            "range",
            FILL,
        ),
        (True, lambda x: x.clamp(max=3).masked_fill(WHOLE, -math.inf), "mathematics", "x / (y + 1e-6)"),
        (False, lambda x: x.masked_fill(WHOLE, torch.finfo(x.dtype).min), None, ""),
    ],
)
def test_a_mask_is_blamed_only_where_it_is_at_fault(
    by_hand: bool, mask: Any, cause: str | None, advice: str
) -> None:
    """Of a mask that is -inf in 16 bits one cure is said, and it was tried."""
    torch.manual_seed(0)
    first = nn.Linear(8, 8)
    nn.init.eye_(first.weight)
    model = nn.Sequential(first, Head(attention(mask, by_hand)), nn.Linear(8, 8))
    found, said = stepped(model, "O2", mean_square, loss_scale={"init": 64.0})
    assert [x.cause for x in found[:1]] == ([cause] if cause else [])
    assert all(advice in x.advice for x in found[:1])
    cures = {"range": bool(said.cure), "cast": True, "mathematics": False}
    assert bool(said.cure) == cures.get(str(cause), False)
    assert cause != "mathematics" or "with everything in FP32, as was tried" in said.why_not


def test_torch_itself_derives_prod_otherwise_under_a_mode() -> None:
    """As docs/diagnosis.md says of the results of a watched step."""

    class Empty(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    grads = []
    for mode in (contextlib.nullcontext(), Empty()):  # type: ignore[no-untyped-call]
        x = torch.full((2,), 300.0, dtype=torch.float16, requires_grad=True)
        with mode:
            (1 / (x.prod() + 1)).backward()
        assert x.grad is not None
        grads.append(bool(x.grad.isfinite().all()))
    assert grads == [False, True]
