"""What an optimizer that takes scaled gradients does, and what anybody sees, is what without it is."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp
from amp.errors import AmpValueError
from amp.kernels import unscale
from amp.optimizers import FusedAdam, FusedSGD
from amp.training.scaler import LossScaler
from tests.levels import DYNAMIC, WITH_MASTERS
from tests.models import initialize, run_backward

LEVELS = ["O1", "O2", "O3", "O4", "O5"]
SCALES: dict[str, Any] = {"dynamic": {"init": 2.0**10, "growth_interval": 3}, "static": 128.0}


class Plain(FusedAdam):
    """The same optimizer, which does not take scaled gradients."""

    _step_takes_scaled_grads = False


def make(level: str, optimizer_class: Any = FusedAdam, **kwargs: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    kwargs.setdefault("loss_scale", SCALES["dynamic"])
    optimizer = optimizer_class(
        [{"params": model[0].parameters()}, {"params": model[1:].parameters(), "lr": 0.02}], lr=0.01
    )
    return initialize(model, optimizer, level, **kwargs)


def loss_of(model: nn.Module, i: int = 0) -> Tensor:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(i))
    return model(x).float().square().mean()


def block(model: nn.Module, optimizer: Any, i: int = 0, **kwargs: Any) -> None:
    run_backward(loss_of(model, i), optimizer, **kwargs)


def overflow(model: nn.Module, optimizer: Any, i: int = 0) -> None:
    with amp.scale_loss(loss_of(model, i), optimizer) as scaled_loss:
        (scaled_loss * torch.inf).backward()


def assert_same(one: tuple[nn.Module, Any], other: tuple[nn.Module, Any]) -> None:
    for p, q in zip(one[0].parameters(), other[0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0, equal_nan=True)
    for p, q in zip(amp.master_params(one[1]), amp.master_params(other[1]), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0, equal_nan=True)
        assert one[1].state[p].keys() == other[1].state[q].keys()
        for name, value in one[1].state[p].items():
            assert torch.equal(value.nan_to_num(), other[1].state[q][name].nan_to_num()), name


@pytest.fixture
def no_gradient_of_a_master_is_unscaled(monkeypatch: pytest.MonkeyPatch) -> None:
    original = unscale.unscale

    def refuse(sources: Any, *args: Any, **kwargs: Any) -> None:
        assert all(source.dtype is torch.float32 for source in sources), "a gradient was written"
        original(sources, *args, **kwargs)  # of batch norm, which is FP32 and has no master

    monkeypatch.setattr(unscale, "unscale", refuse)


@pytest.mark.usefixtures("no_gradient_of_a_master_is_unscaled")
@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("loss_scale", SCALES)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_no_gradient_is_written_between_backward_and_step(
    level: str, loss_scale: str, is_frozen: bool
) -> None:
    model, optimizer = make(level, loss_scale=SCALES[loss_scale])
    model[0].weight.requires_grad_(not is_frozen)
    for i in range(5):
        block(model, optimizer, i)
        optimizer.step()
        optimizer.zero_grad()
    if loss_scale == "dynamic":
        assert amp.loss_scale() == SCALES["dynamic"]["init"] * 2


def test_a_subclass_with_a_step_of_its_own_is_skipped() -> None:
    class Signs(FusedAdam):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in amp.master_params(self):
                p.sub_(p.grad.sign(), alpha=0.01)

    model, optimizer = make("O2", Signs)
    before = [p.detach().clone() for p in model.parameters()]
    overflow(model, optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.zero_grad()
    block(model, optimizer)
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)


def test_a_block_that_cannot_be_entered_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when there is no memory for the loss in FP32."""
    model, optimizer = make("O2")

    def fail(self: Any, loss: Tensor) -> Any:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(LossScaler, "scale_and_remember", fail)
        with pytest.raises(torch.OutOfMemoryError):
            block(model, optimizer)
    block(model, optimizer)
    optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
def test_no_parameter_of_the_users_changes_its_class(level: str) -> None:
    model, optimizer = make(level)
    for i in range(3):
        block(model, optimizer, i)
        assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
        if level in ("O1", "O3", "O4"):
            assert all(p.grad.abs().max() < 10 for p in model.parameters()), "still scaled"
        optimizer.step()
        assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}


def failing_step(model: nn.Module, optimizer: Any) -> None:
    lr, optimizer.param_groups[1]["lr"] = optimizer.param_groups[1]["lr"], float("nan")
    with pytest.raises(AmpValueError, match="lr=nan"):
        optimizer.step()
    optimizer.param_groups[1]["lr"] = lr


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("when", ["before the step", "after the step"])
def test_who_looks_sees_unscaled_gradients(level: str, when: str) -> None:
    seen = []
    for optimizer_class in (Plain, FusedAdam):
        model, optimizer = make(level, optimizer_class)
        block(model, optimizer)
        if when == "after the step":
            optimizer.step()
        seen += [[p.grad for p in ps] for ps in (model.parameters(), amp.master_params(optimizer))]
        assert all(isinstance(p, nn.Parameter) for p in amp.master_params(optimizer))
    for plain, fused in ((seen[0], seen[2]), (seen[1], seen[3])):
        for expected, grad in zip(plain, fused, strict=True):
            assert (expected is None) == (grad is None)
            assert expected is None or torch.equal(expected, grad)


@pytest.mark.parametrize("level", DYNAMIC)
def test_hooks_and_steps_of_subclasses_see_unscaled_gradients(level: str) -> None:
    norms: list[Tensor] = []

    def measure(optimizer: Any) -> None:
        norms.append(torch.stack([p.grad.norm() for p in amp.master_params(optimizer)]))

    class Subclass(FusedAdam):
        def step(self, closure: Any = None) -> Any:
            measure(self)
            return super().step(closure)

    for optimizer_class, hook in ((FusedAdam, "pre"), (FusedAdam, "post"), (Subclass, None)):
        model, optimizer = make(level, optimizer_class)
        if hook is not None:
            register = getattr(optimizer, f"register_step_{hook}_hook")
            register(lambda optimizer, args, kwargs: measure(optimizer))
        block(model, optimizer)
        optimizer.step()
    expected, *others = norms
    assert expected.max() < 10
    assert len(others) == 2
    for other in others:
        assert torch.equal(expected, other)


def test_a_copy_made_in_between_is_an_ordinary_model() -> None:
    model, optimizer = make("O1")
    block(model, optimizer)
    copied = copy.deepcopy(model)
    assert all(type(p) is nn.Parameter and p.grad is None for p in copied.parameters())
    torch.testing.assert_close(list(model.parameters()), list(copied.parameters()))
    restored = pickle.loads(pickle.dumps(list(model.parameters())))
    assert all(type(p) is nn.Parameter for p in restored)
    amp.get_session().close()
    assert all(p.grad is not None and p.grad.abs().max() < 10 for p in model.parameters())


@pytest.mark.parametrize("level", DYNAMIC)
def test_optimizers_that_share_parameters(level: str) -> None:
    """Neither counts a gradient twice, nor takes a scaled one of the other's for an unscaled one."""
    ends = []
    for optimizer_class in (Plain, FusedAdam):
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        torch.manual_seed(0)
        for p in model.parameters():
            nn.init.normal_(p)
        first = optimizer_class(model.parameters(), lr=0.01)
        second = FusedSGD(model[1].parameters(), lr=0.01)
        model, (first, second) = initialize(model, [first, second], level, loss_scale=SCALES["dynamic"])
        for i in range(4):
            for optimizers in ([first, second], [first], [second]):
                run_backward(loss_of(model, i), optimizers)
                for optimizer in optimizers:
                    optimizer.step()
                if i % 2:
                    model.zero_grad()
        ends.append((model, first))
    assert_same(*ends)


def test_parameters_of_a_class_of_their_own_keep_it() -> None:
    class Special(nn.Parameter):
        pass

    model = nn.Linear(4, 2)
    model.weight = Special(model.weight.data)
    model, optimizer = initialize(
        model, FusedAdam(model.parameters()), "O1", loss_scale=SCALES["dynamic"]
    )
    block(model, optimizer)
    assert type(model.weight) is Special
    assert model.weight.grad is not None
    assert model.weight.grad.abs().max() < 10
    optimizer.step()


def test_an_optimizer_of_a_users_own_may_take_them_too() -> None:
    """All that counts is what it says of itself, and what it reads."""

    class Sgd(torch.optim.SGD):
        _step_takes_scaled_grads = True
        scaled_grads: Any = None

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            inputs = self.scaled_grads
            assert inputs.found_inf == 0
            for master, grad in zip(inputs.stepped, inputs.grads, strict=True):
                master.sub_(grad.float() * inputs.inv_scale, alpha=0.1)
            for model, master in zip(inputs.models, inputs.stepped, strict=False):
                model.copy_(master)

    ends = []
    for optimizer_class in (Sgd, torch.optim.SGD):
        model = nn.Linear(4, 2)
        nn.init.constant_(model.weight, 0.3)
        nn.init.constant_(model.bias, 0.3)
        model, optimizer = initialize(
            model, optimizer_class(model.parameters(), lr=0.1), "O2", loss_scale=SCALES["dynamic"]
        )
        block(model, optimizer)
        optimizer.step()
        ends.append((model, optimizer))
    assert_same(*ends)


@pytest.mark.parametrize("optimizer_class", [Plain, FusedAdam])
def test_an_overflow_is_not_forgotten_by_a_step_that_is_refused(optimizer_class: Any) -> None:
    model, optimizer = make("O1", optimizer_class)
    block(model, optimizer)
    optimizer.step()
    overflow(model, optimizer)
    failing_step(model, optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate:UserWarning")
@pytest.mark.parametrize("level", DYNAMIC)
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, FusedSGD])
def test_a_parameter_that_is_in_a_group_twice_has_one_gradient(
    optimizer_class: Any, level: str
) -> None:
    """As with tied weights, whose two modules are asked for their parameters; torch only warns."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optimizer = optimizer_class([*model[0].parameters(), *model[1].parameters()], lr=0.01)
    model, optimizer = initialize(model, optimizer, level, loss_scale=128.0)
    for _ in range(3):
        block(model, optimizer)
        expected = torch.autograd.grad(loss_of(model), model[0].weight)[0].float()
        seen = next(amp.master_params(optimizer)).grad
        torch.testing.assert_close(seen.float(), expected, rtol=0.01, atol=1e-4)
        optimizer.step()
        optimizer.zero_grad()
