"""Wrappers around optimizers, and masters that change outside of `step`, learn as in FP32."""

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import amp
from tests.covering import covering
from tests.models import run_backward, started, step_on, train_on

LEVELS = ("O1", "O2", "O4", "O5")
STEPS = 40


class SAM(torch.optim.Optimizer):
    """Foret et al. 2021, as scripts have it: two steps, and an optimizer inside."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    def parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old"] = p.data.clone()
                    p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for p in self.parameters():
            p.data = self.state[p]["old"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


class Lookahead(torch.optim.Optimizer):
    """Zhang et al. 2019, written through `.data`, which leaves no trace."""

    def __init__(self, base: Any, k: int = 5, alpha: float = 0.5) -> None:
        self.base = base
        self.k, self.alpha, self.count = k, alpha, 0
        self.param_groups = base.param_groups
        self.defaults = base.defaults
        self.state = defaultdict(dict)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("slow", p.data.clone())
        result = self.base.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    slow = self.state[p]["slow"]
                    slow += (p.data - slow) * self.alpha
                    p.data.copy_(slow)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)


class Sometimes(torch.optim.Optimizer):
    """Steps at every `every`th call, as Accelerate's wrapper does in `accumulate`."""

    def __init__(self, optimizer: Any, every: int) -> None:
        self.optimizer, self.every, self.calls = optimizer, every, 0

    @property
    def param_groups(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.optimizer.state

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls % self.every == 0:
            self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.calls % self.every == 0:
            self.optimizer.zero_grad(set_to_none)


class Averaged(torch.optim.SGD):
    """An optimizer that is evaluated at an average of what it stepped on, as Schedule-Free is."""

    @torch.no_grad()
    def train(self) -> None:
        for p in self.param_groups[0]["params"]:
            if "stepped" in self.state[p]:
                p.copy_(self.state[p]["stepped"])

    @torch.no_grad()
    def eval(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["stepped"] = p.clone()
            p.mul_(0.5)


def problem() -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    return model, torch.randn(64, 8), torch.randn(64, 1)


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def sam_of(parameters: Any, base: Any = torch.optim.SGD) -> Any:
    return SAM(parameters, base, lr=0.05)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def backward(model: nn.Module, x: Tensor, y: Tensor, optimizer: Any) -> Tensor:
    return run_backward(loss_of(model, x, y), optimizer)


def step_sam(model: nn.Module, x: Tensor, y: Tensor, sam: Any, optimizer: Any = None) -> None:
    """Take both steps of SAM, whose losses may be scaled for the optimizer inside of it."""
    optimizer = sam if optimizer is None else optimizer
    backward(model, x, y, optimizer)
    sam.first_step(zero_grad=True)
    backward(model, x, y, optimizer)
    sam.second_step(zero_grad=True)


def train_sam(level: str, base: Any = torch.optim.SGD, scale: str = "outer", **overrides: Any) -> float:
    model, x, y = problem()
    model, sam = started(model, lambda p: sam_of(p, base), level, **overrides)
    optimizer = sam if scale == "outer" else sam.base_optimizer
    for _ in range(STEPS):
        step_sam(model, x, y, sam, optimizer)
    return loss_of(model, x, y).item()


def train_sam_by_closure(level: str) -> float:
    model, x, y = problem()
    model, sam = started(model, sam_of, level)
    for _ in range(STEPS):
        backward(model, x, y, sam)
        sam.step(lambda: backward(model, x, y, sam))
        sam.zero_grad()
    return loss_of(model, x, y).item()


def train_lookahead(level: str, base: Any = None, **overrides: Any) -> float:
    model, x, y = problem()
    make = functools.partial(base, lr=0.05) if base else sgd
    model, optimizer = started(model, lambda p: Lookahead(make(p)), level, **overrides)
    for _ in range(STEPS):
        train_on(loss_of(model, x, y), optimizer)
    return loss_of(model, x, y).item()


def train_accumulating(level: str) -> float:
    model, x, y = problem()
    model, optimizer = started(model, lambda p: Sometimes(sgd(p), every=4), level)
    for _ in range(STEPS):
        for part in range(4):
            rows = slice(16 * part, 16 * part + 16)
            train_on(loss_of(model, x[rows], y[rows]) / 4, optimizer)
    return loss_of(model, x, y).item()


@pytest.mark.parametrize(
    ("level", "train"),
    covering(
        LEVELS, [train_sam, train_sam_by_closure, train_lookahead, train_accumulating], strength=1
    ),
)
def test_wrappers_learn_as_in_fp32(level: str, train: Callable[[str], float]) -> None:
    expected = train("O0")
    amp.get_session().close()
    assert train(level) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("base", [amp.optimizers.FusedSGD, torch.optim.Adam], ids=lambda c: c.__name__)
@pytest.mark.parametrize("masters", [None, "split16"])
def test_wrappers_around_other_optimizers_and_masters(base: Any, masters: str | None) -> None:
    for train in (train_sam, train_lookahead):
        expected = train("O0", base)
        amp.get_session().close()
        assert train("O5", base, master_weights=masters) == pytest.approx(expected, abs=0.01)
        amp.get_session().close()


class Trailing:
    """Goes back a part of each step, of parameters that have a gradient, as pytorch_optimizer's do."""

    def __init__(self, base: Any) -> None:
        self.base = base
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults

    @torch.no_grad()
    def step(self) -> None:
        before = {p: p.clone() for group in self.param_groups for p in group["params"]}
        self.base.step()
        for p, old in before.items():
            if p.grad is not None:
                p.lerp_(old, 0.5)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)


def train_trailing(level: str, base: Any, made_after: bool, masters: str | None = None) -> float:
    model, x, y = problem()
    inner = base(model.parameters(), lr=0.05)
    given = inner if made_after else Trailing(inner)
    model, _ = amp.initialize(model, given, opt_level=level, verbosity=0, master_weights=masters)
    optimizer = Trailing(inner) if made_after else given
    for _ in range(STEPS):
        backward(model, x, y, inner)
        optimizer.step()
        optimizer.zero_grad()
    return loss_of(model, x, y).item()


@pytest.mark.parametrize("made_after", [False, True])
@pytest.mark.parametrize("base", [torch.optim.SGD, amp.optimizers.FusedSGD], ids=lambda c: c.__name__)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_wrapper_finds_the_gradients_that_were_stepped_on(
    level: str, base: Any, made_after: bool
) -> None:
    expected = train_trailing("O0", base, made_after)
    amp.get_session().close()
    assert train_trailing(level, base, made_after) == pytest.approx(expected, rel=0.005)


@pytest.mark.usefixtures("before_torch_2_10")
@pytest.mark.parametrize("base", [torch.optim.SGD, amp.optimizers.FusedSGD], ids=lambda c: c.__name__)
def test_gradients_that_were_stepped_on_are_not_stepped_on_again(base: Any) -> None:
    results = []
    for clear in ("optimizer", "model"):
        model, x, y = problem()
        model, optimizer = started(model, functools.partial(base, lr=0.05), "O5")
        for _ in range(3):
            backward(model, x, y, optimizer)
            optimizer.step()
            if clear == "model":
                optimizer.step()  # there is nothing new to step on
            (optimizer if clear == "optimizer" else model).zero_grad()
        results.append(list(amp.master_params(optimizer)))
    assert all(map(torch.equal, *results))


@pytest.mark.usefixtures("before_torch_2_10")
def test_gradients_that_were_stepped_on_are_free_in_the_next_forward() -> None:
    model, x, y = problem()
    model, optimizer = amp.initialize(model, sgd(model.parameters()), opt_level="O5", verbosity=0)
    backward(model, x, y, optimizer)
    optimizer.step()
    model(x)
    assert all(p.grad is None for p in amp.master_params(optimizer))


@pytest.mark.usefixtures("before_torch_2_10")
@pytest.mark.parametrize("base", [torch.optim.SGD, amp.optimizers.FusedSGD], ids=lambda c: c.__name__)
@pytest.mark.parametrize("others", [torch.zeros_like, lambda master: None], ids=["zeros", "none"])
def test_gradients_that_are_assigned_to_masters_are_stepped(base: Any, others: Any) -> None:
    model, x, y = problem()
    model, optimizer = started(model, functools.partial(base, lr=0.05), "O5")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    backward(model, x, y, optimizer)
    for master in amp.master_params(optimizer):
        master.grad = others(master)
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


def test_a_loss_is_scaled_for_the_wrapper_or_for_what_it_wraps() -> None:
    assert train_sam("O2", scale="outer") == train_sam("O2", scale="inner")


def test_an_overflow_in_sams_first_step_is_skipped() -> None:
    model, x, y = problem()
    model, sam = started(model, sam_of, "O1")
    before = [p.clone() for p in model.parameters()]
    backward(model, x * float("inf"), y, sam)
    sam.first_step(zero_grad=True)
    backward(model, x, y, sam)
    sam.second_step(zero_grad=True)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for _ in range(3):
        step_sam(model, x, y, sam)
    assert all(p.isfinite().all() for p in model.parameters())
    assert not torch.equal(before[0], next(model.parameters()))


def test_groups_that_a_wrapper_adds_get_masters() -> None:
    model, x, y = problem()
    head = nn.Linear(1, 1)
    wholes = nn.Sequential(model, head)
    sam = sam_of(model.parameters())
    wholes, sam = amp.initialize(wholes, sam, opt_level="O5", verbosity=0)
    sam.add_param_group({**sam.base_optimizer.defaults, "params": list(head.parameters())})
    assert all(p.dtype is torch.float32 for p in amp.master_params(sam))
    before = head.bias.clone()
    step_sam(wholes, x, y, sam)
    assert not torch.equal(before, head.bias)


def test_a_wrapper_is_as_before_when_its_session_is_closed() -> None:
    model, *_ = problem()
    sam = sam_of(model.parameters())
    before = set(vars(sam)), set(vars(sam.base_optimizer))
    amp.initialize(model, sam, opt_level="O5", verbosity=0)
    assert "first_step" in vars(sam)
    amp.get_session(sam).close()
    assert (set(vars(sam)), set(vars(sam.base_optimizer))) == before
    assert all(p.dtype is torch.float32 for group in sam.param_groups for p in group["params"])
    assert {id(p) for group in sam.param_groups for p in group["params"]} == set(
        map(id, model.parameters())
    )


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_methods_of_an_optimizer_reach_the_model(level: str) -> None:
    model, x, y = problem()
    model, optimizer = started(model, lambda p: Averaged(p, lr=0.05), level)
    backward(model, x, y, optimizer)
    optimizer.step()
    before = model[0].weight.float()
    optimizer.eval()
    assert torch.equal(model[0].weight.float(), before * 0.5)
    optimizer.train()
    assert torch.equal(model[0].weight.float(), before)


def scale_by_half(p: Tensor) -> None:
    p.mul_(0.5)


def assign_half(p: Tensor) -> None:
    p.data = p.data * 0.5


def lerp_to_zero(p: Tensor) -> None:
    p.lerp_(torch.zeros_like(p), 0.5)


@pytest.mark.parametrize("change", [scale_by_half, assign_half, lerp_to_zero], ids=lambda f: f.__name__)
@pytest.mark.parametrize("make", [sgd, amp.optimizers.FusedAdam], ids=["SGD", "FusedAdam"])
def test_what_is_written_to_masters_is_in_the_next_forward(change: Any, make: Any) -> None:
    model, x, y = problem()
    model, optimizer = amp.initialize(model, make(model.parameters()), opt_level="O5", verbosity=0)
    backward(model, x, y, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model[2].bias.fill_(3.0)  # masters follow this one, as before
        masters = list(amp.master_params(optimizer))
        before = masters[0].clone()
        change(masters[0])
    model(x)
    assert torch.equal(model[0].weight, (before * 0.5).bfloat16())
    backward(model, x, y, optimizer)
    optimizer.step()
    assert model[2].bias.item() == pytest.approx(3.0, abs=0.5)
    assert torch.equal(model[0].weight, masters[0].bfloat16())


@pytest.mark.parametrize("make", [sgd, amp.optimizers.FusedAdam], ids=["SGD", "FusedAdam"])
def test_what_a_hook_after_the_step_writes_to_masters_is_in_the_model_then(make: Any) -> None:
    model, x, y = problem()
    model, optimizer = amp.initialize(model, make(model.parameters()), opt_level="O5", verbosity=0)
    masters = list(amp.master_params(optimizer))

    @torch.no_grad()
    def clamp(*_: object) -> None:
        for master in masters:
            master.clamp_(-0.01, 0.01)

    optimizer.register_step_post_hook(clamp)
    backward(model, x, y, optimizer)
    optimizer.step()
    assert max(float(p.detach().abs().max()) for p in model.parameters()) <= 0.0101


@pytest.mark.parametrize("make", [sgd, amp.optimizers.FusedAdam], ids=["SGD", "FusedAdam"])
def test_a_weight_that_is_frozen_after_the_backward_is_stepped_as_in_torch(make: Any) -> None:
    model, x, y = problem()
    model, optimizer = amp.initialize(model, make(model.parameters()), opt_level="O5", verbosity=0)
    before = model[0].weight.clone()
    backward(model, x, y, optimizer)
    model[0].weight.requires_grad_(False)
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    assert torch.equal(model[0].weight, next(iter(amp.master_params(optimizer))).bfloat16())


def test_a_forward_in_compiled_code_does_not_look_and_says_so() -> None:
    model, x, y = problem()
    model, optimizer = amp.initialize(model, sgd(model.parameters()), opt_level="O5", verbosity=0)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    backward(compiled, x, y, optimizer)
    optimizer.step()
    with torch.no_grad():
        next(amp.master_params(optimizer)).mul_(0.5)
    loss = loss_of(compiled, x, y)
    with (
        pytest.warns(amp.AmpWarning, match="changed outside of optimizer.step") as seen,
        amp.scale_loss(loss, optimizer) as scaled_loss,
    ):
        scaled_loss.backward()
    assert seen[0].filename == __file__


def test_a_graph_stays_valid_while_a_method_changes_nothing() -> None:
    model, x, y = problem()
    optimizer = Sometimes(sgd(model.parameters()), every=2)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    loss = loss_of(model, x, y)
    optimizer.step()  # does nothing this time
    run_backward(loss, optimizer)


class PlainSGD:
    """An optimizer that is no `torch.optim.Optimizer`, so torch calls no hooks in its steps."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self.param_groups = [{"params": list(parameters), "lr": lr}]
        self.state: dict[Any, Any] = {}

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_an_optimizer_without_hooks_steps_while_hooks_of_all_optimizers_are_there(level: str) -> None:
    called: list[object] = []
    hooks = [
        register_optimizer_step_pre_hook(lambda *args: called.append(args)),
        register_optimizer_step_post_hook(lambda *args: called.append(args)),
    ]
    try:
        model, optimizer = started(nn.Linear(4, 2), lambda p: PlainSGD(p, 0.5), level, loss_scale=128.0)
        before = model.state_dict()["bias"].clone()
        step_on(model(torch.ones(3, 4)).float().mean(), optimizer)
        torch.testing.assert_close(model.state_dict()["bias"], before - 0.25)
    finally:
        for hook in hooks:
            hook.remove()
    assert not called
