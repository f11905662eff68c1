"""A 16-bit parameter and its master have one gradient: scripts that use `p.grad` train as in FP32."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import amp
from amp.errors import AmpRuntimeError
from amp.optimizers import FusedAdam, FusedSGD
from amp.torch_versions import HAS_GRAD_DTYPE
from amp.training.deferred_gradients import DeferredGradient
from tests import training
from tests.covering import covering
from tests.models import initialize, run_backward
from tests.states import through_a_file
from tests.training import WIDTH, Training

pytestmark = pytest.mark.skipif(not HAS_GRAD_DTYPE, reason="needs a gradient of another dtype")

LEVELS = ("O1", "O2", "O5", "O5 split16")
OPTIMIZERS = ("SGD", "AdamW", "AdamW, fused", "FusedSGD", "FusedAdam")


def multi_task(t: Training) -> None:
    """Combine the gradients of two losses, as PCGrad does."""
    grads = []
    for task in t.tasks():
        t.optimizer.zero_grad()
        t.backward_of(task)
        grads.append([p.grad.clone() for p in t.trained])
    for p, a, b in zip(t.trained, *grads, strict=True):
        p.grad = 0.7 * a + 0.1 * b


def gradients_that_are_kept(t: Training) -> None:
    """The same with the tensors themselves: they stay what they were."""
    grads = []
    for task in t.tasks():
        t.optimizer.zero_grad()
        t.backward_of(task)
        grads.append([p.grad for p in t.trained])
    for p, a, b in zip(t.trained, *grads, strict=True):
        p.grad = 0.7 * a + 0.1 * b


def zeros_by_the_model(t: Training) -> None:
    t.model.zero_grad(set_to_none=False)
    t.backward_of(t.tasks()[0])


def clipped_by_hand(t: Training) -> None:
    t.backward_of(t.tasks()[0])
    norm = sum(float(p.grad.data.norm(2)) ** 2 for p in t.trained) ** 0.5
    for p in t.trained:
        p.grad.data.mul_(0.5 / (norm + 1e-6))


def views_in_place(t: Training) -> None:
    t.backward_of(t.tasks()[0])
    for p in t.trained:
        p.grad.view(-1)[::2].zero_()
        p.grad.detach()[-1] = 0.01


def by_numpy(t: Training) -> None:
    t.backward_of(t.tasks()[0])
    for p in t.trained:
        p.grad = torch.from_numpy(np.sign(p.grad.numpy()) * 0.01)


def centralized_between_blocks(t: Training) -> None:
    for _ in range(2):
        t.backward_of(t.tasks()[0] / 2)
        for p in t.trained:
            if p.dim() > 1:
                p.grad.sub_(p.grad.mean(dim=1, keepdim=True))


def hooked(t: Training) -> None:
    """A hook of the optimizer's step changes gradients."""
    t.backward_of(t.tasks()[0])

    def halve(optimizer: Any, *_: Any) -> None:
        for p in t.trained:
            p.grad = p.grad * 0.5

    handle = t.optimizer.register_step_pre_hook(halve)
    t.optimizer.step()
    handle.remove()
    t.optimizer.zero_grad()
    t.backward_of(t.tasks()[0])


def by_data(t: Training) -> None:
    t.backward_of(t.tasks()[0])
    for p in t.trained:
        p.grad.data = p.grad.data * 0.5


def both_alike(t: Training) -> None:
    t.backward_of(t.tasks()[0])
    saved = [p.grad.clone() for p in t.trained]
    t.optimizer.zero_grad()
    for p, stepped, grad in zip(t.trained, t.stepped[:4], saved, strict=True):
        p.grad = stepped.grad = grad
    t.backward_of(t.tasks()[1])


def masters_assigned_before_a_group(t: Training) -> None:
    t.backward_of(t.tasks()[0])
    for stepped in t.stepped[:4]:
        stepped.grad = stepped.grad * 0.5 if stepped.grad is not None else None
    t.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


SCRIPTS = (
    *(multi_task, gradients_that_are_kept, zeros_by_the_model, clipped_by_hand, views_in_place),
    *(by_numpy, centralized_between_blocks, hooked, by_data, both_alike),
    masters_assigned_before_a_group,
)
"""Others are in the machine of tests/gradient_machine.py, whose gradients are small integers."""


@functools.cache
def trained(script: training.Script, level: str | None, optimizer: str) -> Tensor:
    t = Training(level, optimizer)
    for _ in range(6):
        t.optimizer.zero_grad()
        script(t)
        t.optimizer.step()
    return training.vector(t.model.state_dict().values())


@pytest.mark.parametrize(("script", "level", "optimizer"), covering(SCRIPTS, LEVELS, OPTIMIZERS))
def test_a_script_trains_as_in_fp32(script: training.Script, level: str, optimizer: str) -> None:
    expected, found = trained(script, None, optimizer), trained(script, level, optimizer)
    start = training.vector(Training(None, optimizer).parameters)
    assert (found - expected).norm() < 0.05 * (expected - start).norm()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_both_have_one_tensor(level: str, optimizer: str) -> None:
    t = Training(level, optimizer)
    t.backward_of(t.tasks()[0])
    for parameter, master in zip(t.trained, t.stepped[:4], strict=True):
        assert parameter.grad is master.grad
        assert parameter.grad is not None
        assert parameter.grad.dtype is torch.float32
        assert (parameter.grad.shape, parameter.grad.device) == (parameter.shape, parameter.device)
    t.optimizer.step()
    assert t.trained[0].grad is t.stepped[:4][0].grad is not None
    t.optimizer.zero_grad()
    assert all(p.grad is None for p in (*t.trained, *t.stepped[:4]))


@pytest.mark.parametrize("optimizer", ["SGD", "FusedSGD"])
def test_two_gradients_for_one_are_refused(optimizer: str) -> None:
    t = Training("O2", optimizer)
    t.backward_of(t.tasks()[0])
    before = [p.detach().clone() for p in t.stepped[:4]]
    t.trained[3].grad = torch.zeros(WIDTH)
    t.stepped[3].grad = torch.ones(WIDTH)
    with pytest.raises(AmpRuntimeError, match=r"shape .*was given a gradient, and its"):
        t.optimizer.step()
    assert all(map(torch.equal, before, t.stepped[:4]))
    t.stepped[3].grad = t.trained[3].grad
    t.optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW, fused", "FusedAdam"])
def test_gradients_of_a_block_that_overflowed_are_not_stepped_when_they_are_assigned(
    level: str, optimizer: str
) -> None:
    t = Training(level, optimizer, loss_scale="dynamic")
    before = [p.detach().clone() for p in t.trained]
    grads = []
    for factor in (1e30, 1e-3):
        t.optimizer.zero_grad()
        t.backward_of(t.tasks()[0] * factor)
        grads.append([p.grad.clone() for p in t.trained])
    for p, a, b in zip(t.trained, *grads, strict=True):
        p.grad = a + b
    t.optimizer.step()
    assert amp.step_was_skipped(t.optimizer)
    assert all(map(torch.equal, before, t.trained))
    t.optimizer.zero_grad()
    t.backward_of(t.tasks()[0] * 1e-3)
    t.optimizer.step()
    assert not amp.step_was_skipped(t.optimizer)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("optimizer", ["SGD", "FusedAdam"])
def test_a_block_that_overflowed_is_over_when_its_gradients_are_cleared(
    level: str, optimizer: str
) -> None:
    t = Training(level, optimizer, loss_scale="dynamic")
    for factor in (1e30, 1e-3):
        t.optimizer.zero_grad()
        t.backward_of(t.tasks()[0] * factor)
    t.optimizer.step()
    assert not amp.step_was_skipped(t.optimizer)


def deferred() -> Tensor:
    t = Training("O2", "FusedAdam")
    t.backward_of(t.tasks()[0])
    grad = t.model.first.weight.grad
    assert type(grad) is DeferredGradient
    vars(grad)["t"] = t  # which is kept as long as this
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
        lambda grad: torch.zeros(WIDTH, WIDTH) + grad,
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
    expected.backward_of(expected.tasks()[0])
    found = torch.as_tensor(use(deferred()))
    assert torch.equal(found.float(), expected.model.first.weight.grad)


def test_a_deferred_gradient_is_saved_as_an_ordinary_tensor() -> None:
    grad = deferred()
    saved = through_a_file(grad)
    assert type(saved) is Tensor
    assert torch.equal(saved, grad)


def test_its_memory_is_never_a_null_pointer() -> None:
    grad = deferred()
    assert grad.data_ptr()
    assert grad.untyped_storage().data_ptr() == grad.data_ptr()


def test_nothing_of_a_step_is_kept_when_the_gradients_go() -> None:
    t = Training("O2", "FusedAdam")
    for clear in (t.optimizer.zero_grad, t.model.zero_grad):
        t.backward_of(t.tasks()[0])
        t.optimizer.step()
        clear()
        t.model(t.x)  # a forward looks at what `model.zero_grad` has done
        gc.collect()
        alive = [x for x in gc.get_objects() if type(x) is Tensor and x.shape == (WIDTH, WIDTH)]
        assert not [x for x in alive if x.dtype is torch.float16], "16-bit gradients are kept"
        assert not [
            x for x in alive if x.grad_fn is None and x.dtype is torch.float32 and x.requires_grad
        ]


def test_a_model_that_is_copied_between_block_and_step() -> None:
    t = Training("O5", "FusedAdam")
    t.backward_of(t.tasks()[0])
    copied = copy.deepcopy(t.model)
    copied(t.x).sum().backward()
    t.optimizer.step()


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
        run_backward(model(torch.ones(2, 4)).float().sum(), made)

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
    t = Training("O2", optimizer, loss_scale={"init": 128.0})
    skipped = []
    for i in range(6):
        t.optimizer.zero_grad()
        t.backward_of(t.tasks()[0] * (torch.inf if i == 1 else 1))
        for p in t.trained:
            p.grad = p.grad * 0.5
        t.optimizer.step()
        skipped.append(amp.step_was_skipped(t.optimizer))
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
    t = Training(level, optimizer)
    t.backward_of(t.tasks()[0])
    t.optimizer.step()
    alive = [weakref.ref(p) for p in (*t.trained, *t.stepped[:4])]
    del t
    amp.initialize(nn.Linear(1, 1), opt_level="O0", verbosity=0)  # the next default session
    gc.collect()
    assert [each() for each in alive] == [None] * len(alive)


@pytest.mark.parametrize(
    ("level", "optimizer"), covering(["O1", "O2", "O5"], ["SGD", "FusedSGD"], strength=1)
)
def test_gradients_are_where_they_were_after_a_compilation(level: str, optimizer: str) -> None:
    t = Training(level, optimizer)
    torch._dynamo.reset()
    t.backward_of(t.tasks()[0])
    before = [p.grad.clone() for p in t.trained]
    layers = nn.Sequential(t.model.first, t.model.second)
    compiled = torch.compile(layers, backend="eager", fullgraph=True)
    compiled(t.x)
    doubled = torch.compile(lambda grad: grad * 2, backend="eager")
    for p in t.trained:
        p.grad = doubled(p.grad.detach().clone())
    t.model.zero_grad()
    assert all(p.grad is None for p in t.trained)
    t.optimizer.step()
    t.backward_of(t.tasks()[0])
    for p, grad in zip(t.trained, before, strict=True):
        assert torch.equal(p.grad, grad)  # pyright: ignore


@pytest.mark.parametrize(
    ("level", "optimizer"), covering(["O1", "O2", "O5"], ["SGD", "FusedSGD"], strength=1)
)
def test_compiled_functions_take_gradients(level: str, optimizer: str) -> None:
    torch._dynamo.reset()
    shorter = torch.compile(lambda grad: grad / (grad.norm() + 1), backend="eager", dynamic=False)
    halved = torch.compile(lambda grad: grad.mul_(0.5), backend="eager", dynamic=False)
    moved = []
    for each in (None, level):
        t = Training(each, optimizer)
        before = [p.detach().float().clone() for p in t.trained]
        for _ in range(3):
            t.optimizer.zero_grad()
            t.backward_of(t.tasks()[0])
            for p in t.trained:
                p.grad = shorter(p.grad)
                halved(p.grad)
            t.optimizer.step()
        after = t.trained
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
        make = training.OPTIMIZERS[optimizer]
        made = [make(model.parameters()), make([nn.Parameter(torch.zeros(2))])]
        before = [p.detach().clone() for p in model.parameters()]
        if each is not None:
            amp.initialize(model, made, opt_level=each.split()[0], verbosity=0, **training.LEVELS[each])
        for _ in range(2):
            loss = (model(torch.randn(16, 8)).float() + 1).square().mean()
            run_backward(loss, None if each is None else made)
            if len(made[1].param_groups) == 1:
                made[1].add_param_group({"params": list(model[2].parameters())})
                model.zero_grad()
        made[0].step()
        made[1].step()
        pairs = zip(model.parameters(), before, strict=True)
        moved.append(torch.cat([(a.detach().float() - b).flatten() for a, b in pairs]))
    torch.testing.assert_close(moved[1], moved[0], rtol=0.05, atol=2e-3)


class _Marked(Tensor):
    """A gradient of a class of the user's."""


def test_gradients_of_other_classes_become_fp32_one_by_one() -> None:
    model = nn.Linear(3, 3)
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O5", verbosity=0
    )
    with amp.scale_loss(model(torch.ones(1, 3)).sum().float(), optimizer) as scaled_loss:
        scaled_loss.backward()
        one = torch.ones(3, 3, dtype=torch.bfloat16)
        model.weight.grad = TwoTensor(one, one.clone())
        model.bias.grad = one[0].as_subclass(_Marked)  # type: ignore[assignment]
    for master in amp.master_params(optimizer):
        assert master.grad is not None
        assert master.grad.dtype is torch.float32
        assert bool((master.grad == 1).all())
