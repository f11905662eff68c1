"""A 16-bit parameter and its master have one gradient: scripts that use `p.grad` train as in FP32."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import amp
from amp.errors import AmpRuntimeError
from amp.optimizers import FusedAdam, FusedSGD
from amp.torch_versions import HAS_GRAD_DTYPE
from amp.training.deferred_gradients import DeferredGradient
from tests.covering import covering
from tests.models import initialize

pytestmark = pytest.mark.skipif(not HAS_GRAD_DTYPE, reason="needs a gradient of another dtype")

LEVELS: dict[str, dict[str, Any]] = {
    "O1": {"loss_scale": 128.0},
    "O2": {"loss_scale": 128.0},
    "O2 dynamic": {"loss_scale": {"init": 128.0}},
    "O5": {},
    "O5 split16": {"master_weights": "split16"},
}
OPTIMIZERS: dict[str, Any] = {
    "SGD": (lambda p: torch.optim.SGD(p, 0.05, 0.9),) * 2,
    "AdamW": (lambda p: torch.optim.AdamW(p, 0.01),) * 2,
    "AdamW fused": (lambda p: torch.optim.AdamW(p, 0.01, fused=True),) * 2,
    "FusedSGD": (
        lambda p: torch.optim.SGD(p, 0.05, 0.9),
        lambda p: FusedSGD(p, 0.05, 0.9, set_grad_none=True),
    ),
    "FusedAdam": (
        lambda p: torch.optim.AdamW(p, 0.01),
        lambda p: FusedAdam(p, 0.01, weight_decay=0.01),
    ),
}


class Training:
    """A small net under an optimizer, at a level or in FP32 without amp."""

    def __init__(self, level: str | None, optimizer: str) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        make = OPTIMIZERS[optimizer][level is not None]
        self.optimizer: Any = make(self.model.parameters())
        self.level = level
        self.x = torch.randn(16, 8)
        self.y = self.x.sum(1, keepdim=True)
        if level is not None:
            name, options = level.split()[0], LEVELS[level]
            amp.initialize(self.model, self.optimizer, opt_level=name, verbosity=0, **options)

    @property
    def out(self) -> Tensor:
        return self.model(self.x).float()

    def tasks(self) -> list[Tensor]:
        return [(self.out - self.y).square().mean(), (self.out + 1).abs().mean()]

    @property
    def loss(self) -> Tensor:
        return self.tasks()[0]

    def backward(self, loss: Tensor, **options: Any) -> None:
        if self.level is None:
            loss.backward(**options)
            return
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward(**options)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @property
    def stepped(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def multi_task(t: Training) -> None:
    """Combine the gradients of two losses, as PCGrad does."""
    grads = []
    for task in t.tasks():
        t.optimizer.zero_grad()
        t.backward(task)
        grads.append([p.grad.clone() for p in t.parameters])
    for p, a, b in zip(t.parameters, *grads, strict=True):
        p.grad = 0.7 * a + 0.1 * b


def gradients_that_are_kept(t: Training) -> None:
    """The same with the tensors themselves: they stay what they were."""
    grads = []
    for task in t.tasks():
        t.optimizer.zero_grad()
        t.backward(task)
        grads.append([p.grad for p in t.parameters])
    for p, a, b in zip(t.parameters, *grads, strict=True):
        p.grad = 0.7 * a + 0.1 * b


def removed(t: Training) -> None:
    t.backward(t.loss)
    t.model[0].weight.grad = None


def all_removed_and_made_again(t: Training) -> None:
    t.backward(t.loss * 3)
    for p in t.parameters:
        p.grad = None
    t.backward(t.loss)


def removed_by_the_model(t: Training) -> None:
    t.model.zero_grad()
    t.backward(t.loss)


def zeros_by_the_model(t: Training) -> None:
    t.model.zero_grad(set_to_none=False)
    t.backward(t.loss)


def clipped(t: Training) -> None:
    t.backward(t.loss)
    torch.nn.utils.clip_grad_norm_((p for p in t.parameters if p.grad is not None), 0.5)


def clipped_by_hand(t: Training) -> None:
    t.backward(t.loss)
    norm = sum(float(p.grad.data.norm(2)) ** 2 for p in t.parameters) ** 0.5
    for p in t.parameters:
        p.grad.data.mul_(0.5 / (norm + 1e-6))


def clipped_by_value(t: Training) -> None:
    t.backward(t.loss)
    torch.nn.utils.clip_grad_value_(t.model.parameters(), 0.02)


def views_in_place(t: Training) -> None:
    t.backward(t.loss)
    for p in t.parameters:
        p.grad.view(-1)[::2].zero_()
        p.grad.detach()[-1] = 0.01


def preconditioned(t: Training) -> None:
    """As K-FAC: read, and copy something else there."""
    t.backward(t.loss)
    for p in t.parameters:
        if p.grad is None:
            continue
        p.grad.copy_(p.grad / (p.grad.abs().mean() + 0.1))


def by_numpy(t: Training) -> None:
    t.backward(t.loss)
    for p in t.parameters:
        p.grad = torch.from_numpy(np.sign(p.grad.numpy()) * 0.01)


def centralized_between_blocks(t: Training) -> None:
    for _ in range(2):
        t.backward(t.loss / 2)
        for p in t.parameters:
            if p.dim() > 1:
                p.grad.sub_(p.grad.mean(dim=1, keepdim=True))


def replaced_between_blocks(t: Training) -> None:
    t.backward(t.loss)
    for p in t.parameters:
        p.grad = p.grad.sign() * 0.01
    t.backward(t.loss)


def masters_changed(t: Training) -> None:
    t.backward(t.loss)
    for p in t.stepped:
        p.grad = p.grad * 0.3


def masters_changed_in_place(t: Training) -> None:
    t.backward(t.loss)
    for p in t.stepped:
        p.grad.mul_(0.3)


def backward_outside(t: Training) -> None:
    t.backward(t.loss)
    (0.01 * t.out.square().mean()).backward()


def stepped_twice(t: Training) -> None:
    t.backward(t.loss)
    t.optimizer.step()


def noise(t: Training) -> None:
    t.backward(t.loss)
    generator = torch.Generator().manual_seed(1)
    for p in t.parameters:
        p.grad.add_(0.01 * torch.randn(p.shape, generator=generator))


def hooked(t: Training) -> None:
    """A hook of the optimizer's step changes gradients."""
    t.backward(t.loss)

    def halve(optimizer: Any, *_: Any) -> None:
        for p in t.parameters:
            p.grad = p.grad * 0.5

    handle = t.optimizer.register_step_pre_hook(halve)
    t.optimizer.step()
    handle.remove()
    t.optimizer.zero_grad()
    t.backward(t.loss)


def by_data(t: Training) -> None:
    t.backward(t.loss)
    for p in t.parameters:
        p.grad.data = p.grad.data * 0.5


def both_alike(t: Training) -> None:
    t.backward(t.loss)
    saved = [p.grad.clone() for p in t.parameters]
    t.optimizer.zero_grad()
    for p, stepped, grad in zip(t.parameters, t.stepped, saved, strict=True):
        p.grad = stepped.grad = grad
    t.backward(t.tasks()[1])


def both_removed(t: Training) -> None:
    t.backward(t.loss)
    for p, stepped in zip(t.parameters, t.stepped, strict=True):
        p.grad = stepped.grad = None
    t.backward(t.tasks()[1])


def hook_of_all_optimizers(t: Training) -> None:
    t.backward(t.loss)
    handle = register_optimizer_step_pre_hook(halve_as_others)
    t.optimizer.step()
    handle.remove()
    t.optimizer.zero_grad()
    t.backward(t.loss)


def halve_as_others(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad = p.grad * 0.5


def masters_assigned_before_a_group(t: Training) -> None:
    t.backward(t.loss)
    for stepped in t.stepped:
        stepped.grad = stepped.grad * 0.5 if stepped.grad is not None else None
    t.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


SCRIPTS = [
    *(by_data, both_alike, both_removed, hook_of_all_optimizers, masters_assigned_before_a_group),
    *(multi_task, gradients_that_are_kept, removed, all_removed_and_made_again, removed_by_the_model),
    *(zeros_by_the_model, clipped, clipped_by_hand, clipped_by_value, views_in_place, preconditioned),
    *(by_numpy, centralized_between_blocks, replaced_between_blocks, masters_changed),
    *(masters_changed_in_place, backward_outside, stepped_twice, noise, hooked),
]


def trained(script: Callable[[Training], None], level: str | None, optimizer: str) -> Tensor:
    training = Training(level, optimizer)
    for _ in range(6):
        training.optimizer.zero_grad()
        script(training)
        training.optimizer.step()
    return torch.cat([value.flatten().float() for value in training.model.state_dict().values()])


@pytest.mark.parametrize(("script", "level", "optimizer"), covering(SCRIPTS, LEVELS, OPTIMIZERS))
def test_a_script_trains_as_in_fp32(
    script: Callable[[Training], None], level: str, optimizer: str
) -> None:
    expected, found = trained(script, None, optimizer), trained(script, level, optimizer)
    start = torch.cat([p.detach().flatten() for p in Training(None, optimizer).parameters])
    assert (found - expected).norm() < 0.05 * (expected - start).norm()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_both_have_one_tensor(level: str, optimizer: str) -> None:
    training = Training(level, optimizer)
    training.backward(training.loss)
    for parameter, master in zip(training.parameters, training.stepped, strict=True):
        assert parameter.grad is master.grad
        assert parameter.grad is not None
        assert parameter.grad.dtype is torch.float32
        assert (parameter.grad.shape, parameter.grad.device) == (parameter.shape, parameter.device)
    training.optimizer.step()
    assert training.parameters[0].grad is training.stepped[0].grad is not None
    training.optimizer.zero_grad()
    assert all(p.grad is None for p in (*training.parameters, *training.stepped))


@pytest.mark.parametrize("optimizer", ["SGD", "FusedSGD"])
def test_two_gradients_for_one_are_refused(optimizer: str) -> None:
    training = Training("O2", optimizer)
    training.backward(training.loss)
    before = [p.detach().clone() for p in training.stepped]
    training.parameters[2].grad = torch.zeros(1, 8)
    training.stepped[2].grad = torch.ones(1, 8)
    with pytest.raises(AmpRuntimeError, match=r"shape \(1, 8\).*was given a gradient, and its"):
        training.optimizer.step()
    assert all(map(torch.equal, before, training.stepped))
    training.stepped[2].grad = training.parameters[2].grad
    training.optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW fused", "FusedAdam"])
def test_gradients_of_a_block_that_overflowed_are_not_stepped_when_they_are_assigned(
    level: str, optimizer: str
) -> None:
    training = Training(level, optimizer)
    amp.get_session(training.optimizer).close()
    amp.initialize(training.model, training.optimizer, opt_level=level, verbosity=0)
    before = [p.detach().clone() for p in training.parameters]
    grads = []
    for factor in (1e30, 1e-3):
        training.optimizer.zero_grad()
        training.backward(training.loss * factor)
        grads.append([p.grad.clone() for p in training.parameters])
    for p, a, b in zip(training.parameters, *grads, strict=True):
        p.grad = a + b
    training.optimizer.step()
    assert amp.step_was_skipped(training.optimizer)
    assert all(map(torch.equal, before, training.parameters))
    training.optimizer.zero_grad()
    training.backward(training.loss * 1e-3)
    training.optimizer.step()
    assert not amp.step_was_skipped(training.optimizer)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("optimizer", ["SGD", "FusedAdam"])
def test_a_block_that_overflowed_is_over_when_its_gradients_are_cleared(
    level: str, optimizer: str
) -> None:
    training = Training(level, optimizer)
    amp.get_session(training.optimizer).close()
    amp.initialize(training.model, training.optimizer, opt_level=level, verbosity=0)
    for factor in (1e30, 1e-3):
        training.optimizer.zero_grad()
        training.backward(training.loss * factor)
    training.optimizer.step()
    assert not amp.step_was_skipped(training.optimizer)


def deferred() -> Tensor:
    training = Training("O2", "FusedAdam")
    training.backward(training.loss)
    grad = training.model[0].weight.grad
    assert type(grad) is DeferredGradient
    vars(grad)["training"] = training  # which is kept as long as this
    return grad


@pytest.mark.parametrize(
    "use",
    [
        lambda grad: grad.numpy().copy(),
        lambda grad: np.asarray(grad),
        lambda grad: grad.tolist(),
        lambda grad: copy.deepcopy(grad),
        lambda grad: grad.data,
        lambda grad: grad.cpu().clone(),
        lambda grad: torch.from_dlpack(grad),
        lambda grad: torch.zeros(8, 8) + grad,
        lambda grad: torch.cat([grad])[:],
        lambda grad: torch._foreach_mul([grad], 1.0)[0],
        lambda grad: grad.share_memory_(),
        lambda grad: torch.stack(torch.unbind(grad)),
        lambda grad: grad.to(torch.float64),
        lambda grad: grad[:],
        lambda grad: torch.vmap(lambda row: row * 1)(grad),
    ],
)
def test_a_deferred_gradient_is_what_it_stands_for(use: Callable[[Tensor], Any]) -> None:
    expected = Training("O2", "SGD")
    expected.backward(expected.loss)
    found = torch.as_tensor(use(deferred()))
    assert torch.equal(found.float(), expected.model[0].weight.grad)


def test_a_deferred_gradient_is_saved_as_an_ordinary_tensor() -> None:
    file = io.BytesIO()
    grad = deferred()
    torch.save(grad, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert type(saved) is Tensor
    assert torch.equal(saved, grad)


def test_its_memory_is_never_a_null_pointer() -> None:
    grad = deferred()
    assert grad.data_ptr()
    assert grad.untyped_storage().data_ptr() == grad.data_ptr()


def test_nothing_of_a_step_is_kept_when_the_gradients_go() -> None:
    training = Training("O2", "FusedAdam")
    for clear in (training.optimizer.zero_grad, training.model.zero_grad):
        training.backward(training.loss)
        training.optimizer.step()
        clear()
        _ = training.out  # a forward looks at what `model.zero_grad` has done
        gc.collect()
        alive = [x for x in gc.get_objects() if type(x) is Tensor and x.shape == (8, 8)]
        assert not [x for x in alive if x.dtype is torch.float16], "16-bit gradients are kept"
        assert not [
            x for x in alive if x.grad_fn is None and x.dtype is torch.float32 and x.requires_grad
        ]


def test_a_model_that_is_copied_between_block_and_step() -> None:
    training = Training("O5", "FusedAdam")
    training.backward(training.loss)
    copied = copy.deepcopy(training.model)
    copied(training.x).sum().backward()
    training.optimizer.step()


@pytest.mark.usefixtures("before_torch_2_10")
@pytest.mark.parametrize("optimizer", ["SGD", "FusedAdam"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_before_torch_2_10_a_gradient_that_is_assigned_is_refused_by_the_step(
    level: str, optimizer: str
) -> None:
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 4)
    made: Any = {"SGD": torch.optim.SGD, "FusedAdam": FusedAdam}[optimizer](model.parameters(), lr=0.1)
    model, made = initialize(model, made, level, loss_scale=128.0)

    def block() -> None:
        with amp.scale_loss(model(torch.ones(2, 4)).float().sum(), made) as scaled_loss:
            scaled_loss.backward()

    block()
    assert model.weight.grad is None
    model.weight.grad = torch.ones_like(model.weight)
    with pytest.raises(AmpRuntimeError, match=r"of shape \(4, 4\) was given a gradient"):
        made.step()
    made.zero_grad()
    block()
    made.zero_grad()
    model.weight.grad = torch.ones_like(model.weight)  # with none to replace
    made.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_after_an_overflow_assigned_gradients_train_again(optimizer: str) -> None:
    training = Training("O2 dynamic", optimizer)
    skipped = []
    for i in range(6):
        training.optimizer.zero_grad()
        training.backward(training.loss * (torch.inf if i == 1 else 1))
        for p in training.parameters:
            p.grad = p.grad * 0.5
        training.optimizer.step()
        skipped.append(amp.step_was_skipped(training.optimizer))
    assert skipped == [False, True, False, False, False, False]


@pytest.mark.parametrize("level", ["O0", "O5"])
@pytest.mark.parametrize("optimizer", ["SGD", "FusedSGD"])
def test_an_exception_after_backward_leaves_all_gradients_or_none(level: str, optimizer: str) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    make: Any = {"SGD": torch.optim.SGD, "FusedSGD": FusedSGD}[optimizer]
    model, made = initialize(model, make(model.parameters(), lr=0.1), level)
    before = [p.detach().clone() for p in model.parameters()]
    with (
        pytest.raises(ZeroDivisionError),
        amp.scale_loss(model(torch.randn(8, 4)).float().square().mean(), made) as scaled_loss,
    ):
        scaled_loss.backward()
        raise ZeroDivisionError
    made.step()
    stayed = list(map(torch.equal, before[2:], list(model.parameters())[2:]))
    assert stayed == [level == "O5"] * 4, "backward has added to gradients in place at O0 alone"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_dropped_with_gradients_is_freed(level: str, optimizer: str) -> None:
    training = Training(level, optimizer)
    training.backward(training.loss)
    training.optimizer.step()
    alive = [weakref.ref(p) for p in (*training.parameters, *training.stepped)]
    del training
    amp.initialize(nn.Linear(1, 1), opt_level="O0", verbosity=0)  # the next default session
    gc.collect()
    assert [each() for each in alive] == [None] * len(alive)


@pytest.mark.parametrize("optimizer", ["SGD", "FusedSGD"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_gradients_are_where_they_were_after_a_compilation(level: str, optimizer: str) -> None:
    training = Training(level, optimizer)
    torch._dynamo.reset()
    training.backward(training.loss)
    before = [p.grad.clone() for p in training.parameters]
    compiled = torch.compile(training.model, backend="eager", fullgraph=True)
    compiled(training.x)
    doubled = torch.compile(lambda grad: grad * 2, backend="eager")
    for p in training.parameters:
        p.grad = doubled(p.grad.detach().clone())
    training.model.zero_grad()
    assert all(p.grad is None for p in training.parameters)
    training.optimizer.step()
    training.backward(training.loss)
    for p, grad in zip(training.parameters, before, strict=True):
        assert torch.equal(p.grad, grad)  # pyright: ignore


@pytest.mark.parametrize("optimizer", ["SGD", "FusedSGD"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_compiled_functions_take_gradients(level: str, optimizer: str) -> None:
    torch._dynamo.reset()
    shorter = torch.compile(lambda grad: grad / (grad.norm() + 1), backend="eager", dynamic=False)
    halved = torch.compile(lambda grad: grad.mul_(0.5), backend="eager", dynamic=False)
    moved = []
    for each in (None, level):
        training = Training(each, optimizer)
        before = [p.detach().float().clone() for p in training.parameters]
        for _ in range(3):
            training.optimizer.zero_grad()
            training.backward(training.loss)
            for p in training.parameters:
                p.grad = shorter(p.grad)
                halved(p.grad)
            training.optimizer.step()
        after = training.parameters
        moved.append(torch.cat([(a.float() - b).flatten() for a, b in zip(after, before, strict=True)]))
    torch.testing.assert_close(moved[1], moved[0], rtol=0.05, atol=2e-3)


@pytest.mark.parametrize("optimizer", ["SGD", "FusedSGD"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_master_that_two_optimizers_come_to_share(level: str, optimizer: str) -> None:
    """One optimizer takes it over from the other as well, between a block and `model.zero_grad()`."""
    moved = []
    for each in (None, level):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        make = OPTIMIZERS[optimizer][each is not None]
        made = [make(model.parameters()), make([nn.Parameter(torch.zeros(2))])]
        before = [p.detach().clone() for p in model.parameters()]
        if each is not None:
            amp.initialize(model, made, opt_level=each.split()[0], verbosity=0, **LEVELS[each])
        for _ in range(2):
            loss = (model(torch.randn(16, 8)).float() + 1).square().mean()
            if each is None:
                loss.backward()
            else:
                with amp.scale_loss(loss, made) as scaled_loss:
                    scaled_loss.backward()
            if len(made[1].param_groups) == 1:
                made[1].add_param_group({"params": list(model[2].parameters())})
                model.zero_grad()
        made[0].step()
        made[1].step()
        pairs = zip(model.parameters(), before, strict=True)
        moved.append(torch.cat([(a.detach().float() - b).flatten() for a, b in pairs]))
    torch.testing.assert_close(moved[1], moved[0], rtol=0.05, atol=2e-3)
