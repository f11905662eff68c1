"""O1 and O4: which dtype each op gives, what stays right in training, and what is given back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import amp
from amp.torch_versions import CASTS_LOSE_GRADIENTS
from tests.models import BY_OP_DTYPE as HALF
from tests.models import (
    TOLERANCE,
    adamw,
    batch,
    casting,
    conv_net,
    initialize,
    linear,
    run_backward,
    sgd,
    started,
)


@pytest.fixture(params=HALF)
def half(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Turn op casting on, and say to what."""
    with casting(request.param):
        yield HALF[request.param]


X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3])


def test_comparisons_of_mixed_types(half: torch.dtype) -> None:
    a, b = torch.ones(2, dtype=half), torch.ones(2)
    assert (a == b).all()
    assert not (a < b).any()
    assert torch.equal(a, b)


def test_doubles_and_integers_are_left_alone(half: torch.dtype) -> None:
    assert (X.double() @ X.double()).dtype is torch.float64
    assert F.softmax(X.double(), -1).dtype is torch.float64
    assert torch.dot(X[0].double(), X[0]).dtype is torch.float64
    assert LABELS.sum().dtype is torch.int64
    z = X.to(torch.complex64)
    assert (z @ z).dtype is torch.complex64


# In place and out=.


def test_in_place_ops_keep_their_dtype(half: torch.dtype) -> None:
    for name in ("add_", "mul_", "sub_", "div_", "atan2_"):
        assert getattr(X.to(half), name)(X).dtype is half
        assert getattr(X.clone(), name)(X.to(half)).dtype is torch.float32
    y = x = X.to(half)
    y += X
    assert y is x
    assert x.dtype is half
    assert X.to(half).addmm_(X, X).dtype is half
    assert X.clone().addmm_(X.to(half), X).dtype is torch.float32


@pytest.mark.parametrize("name", ["exp_", "log_", "reciprocal_", "rsqrt_", "cumsum_", "pow_"])
def test_fp32_ops_refuse_to_write_to_half_in_place(half: torch.dtype, name: str) -> None:
    args = {"cumsum_": (0,), "pow_": (2,)}.get(name, ())
    with pytest.raises(NotImplementedError, match=f"{name} runs in FP32 and cannot write to"):
        getattr(X.to(half), name)(*args)
    assert getattr(X.clone(), name)(*args).dtype is torch.float32
    with amp.disable_casts():
        assert getattr(X.to(half), name)(*args).dtype is half


def test_binary_cross_entropy_is_banned_on_half(half: torch.dtype) -> None:
    p = X.sigmoid()
    with pytest.raises(NotImplementedError, match="BCEWithLogitsLoss.*input.float()") as caught:
        F.binary_cross_entropy(p.to(half), p)
    assert isinstance(caught.value, amp.AmpError)
    with pytest.raises(NotImplementedError):
        nn.BCELoss()(p, p.to(half))
    assert F.binary_cross_entropy(p, p).dtype is torch.float32
    with amp.disable_casts():
        F.binary_cross_entropy(p.to(half), p.to(half))


# Switching off.


def test_disable_casts_nests_and_survives_exceptions(half: torch.dtype) -> None:
    with pytest.raises(KeyError), amp.disable_casts():
        with amp.disable_casts():
            assert (X @ X).dtype is torch.float32
        assert (X @ X).dtype is torch.float32
        raise KeyError
    assert (X @ X).dtype is half


@pytest.mark.parametrize("compiled", [False, True])
def test_disable_casts_decorates_with_and_without_parentheses(
    half: torch.dtype, compiled: bool
) -> None:
    for decorate in (amp.disable_casts, amp.disable_casts()):
        square = decorate(lambda x: x @ x)
        called = torch.compile(square, backend="eager", fullgraph=True) if compiled else square
        assert called(X).dtype is torch.float32
        assert (X @ X).dtype is half


def test_disable_casts_is_for_this_thread(half: torch.dtype) -> None:
    seen = []
    with amp.disable_casts():
        thread = threading.Thread(target=lambda: seen.append((X @ X).dtype))
        thread.start()
        thread.join()
        assert (X @ X).dtype is torch.float32
    assert seen == [half]


def test_disable_casts_without_casts_does_nothing() -> None:
    with amp.disable_casts():
        assert (X @ X).dtype is torch.float32
    amp.initialize(linear(), opt_level="O2")
    with amp.disable_casts():
        pass


def test_casts_are_off_inside_the_optimizer() -> None:
    seen = []

    class Nosy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append((X @ X).dtype)
            if len(seen) == 2:
                raise KeyError
            return super().step(closure)

    _model, optimizer = started(linear(), lambda p: Nosy(p, lr=0.1), "O1")
    optimizer.step()
    with pytest.raises(KeyError):
        optimizer.step()
    assert seen == [torch.float32] * 2
    assert (X @ X).dtype is torch.float16


# Training.


@pytest.mark.parametrize("level", HALF)
def test_gradients_come_in_fp32_and_are_right(level: str) -> None:
    reference, model = conv_net().double(), conv_net()
    model, optimizer = initialize(model, adamw(model), level)
    x, y = batch()
    F.cross_entropy(reference(x.double()), y).backward()
    run_backward(F.cross_entropy(model(x), y), optimizer)
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())
    ours = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    exact = torch.cat([p.grad.flatten() for p in reference.parameters()])
    assert torch.dist(ours, exact) <= TOLERANCE[level] / 2 * torch.linalg.vector_norm(exact)


@pytest.mark.parametrize("level", HALF)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_forward_gives_the_same_gradients(level: str, use_reentrant: bool) -> None:
    def run(checkpointed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(6, 6)
        model = nn.ModuleList([layer, nn.LayerNorm(6), layer])  # one weight used twice

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.parts = model

            def forward(self, x: Tensor) -> Tensor:
                for part in self.parts:
                    x = checkpoint(part, x, use_reentrant=use_reentrant) if checkpointed else part(x)
                return x.float().pow(2).mean()

        net, optimizer = started(Net(), sgd, level)
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)
        run_backward(net(x), optimizer)
        return [p.grad for p in net.parameters()]

    torch.testing.assert_close(run(True), run(False), rtol=1e-2, atol=1e-3)


# The weight cache.


class Twice(nn.Module):
    """Uses one weight twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.weight), self.weight)


def count_casts(function: Any) -> int:
    """How many times a 4x4 FP32 parameter is cast to half while `function` runs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default and args[0].shape == (4, 4):
                self.count += args[0].dtype is torch.float32
            return func(*args, **(kwargs or {}))

    with Counter() as counter:
        function()
    return counter.count


@pytest.mark.parametrize("grad", [True, False])
def test_a_weight_used_twice_is_cast_once_and_gets_both_gradients(grad: bool) -> None:
    model, optimizer = started(Twice(), sgd, "O1")
    x = torch.ones(1, 4)
    with torch.set_grad_enabled(grad):
        assert count_casts(lambda: model(x)) == (2 if CASTS_LOSE_GRADIENTS else 1)
        assert count_casts(lambda: F.linear(F.linear(x, model.weight), model.weight)) == 2
    if grad:
        run_backward(model(x).float().sum(), optimizer)
        assert torch.equal(model.weight.grad, torch.ones(4, 4) * 0.5 + torch.ones(4, 4) * 0.5)


def change_in_place(model: Twice) -> None:
    with torch.no_grad():
        model.weight.mul_(2)


def change_data(model: Twice) -> None:
    model.weight.data.mul_(2)  # an EMA swap as scripts write it: no version counter sees it


def replace_data(model: Twice) -> None:
    model.weight.data = model.weight.data * 2


def load(model: Twice) -> None:
    model.load_state_dict({"weight": model.weight.detach() * 2})


@pytest.mark.parametrize("change", [change_in_place, change_data, replace_data, load])
@pytest.mark.parametrize("grad", [True, False])
def test_no_weight_is_ever_stale(change: Any, grad: bool) -> None:
    model = amp.initialize(Twice(), opt_level="O1")
    x = torch.ones(1, 4)
    with torch.set_grad_enabled(grad):
        assert (model(x) == 0.25).all()
        change(model)
        assert (model(x) == 1).all()


def test_evaluation_between_training_steps_keeps_the_gradients() -> None:
    model, optimizer = started(Twice(), sgd, "O1")
    x = torch.ones(1, 4)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            model(x)
        optimizer.zero_grad()
        run_backward(model(x).float().sum(), optimizer)
        assert model.weight.grad is not None
        model.weight.requires_grad_(False)
        model(x)
        model.weight.requires_grad_(True)


def test_a_no_grad_part_inside_a_forward_does_not_cut_the_graph() -> None:
    class Peek(Twice):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                F.linear(x, self.weight)
            return super().forward(x)

    model = amp.initialize(Peek(), opt_level="O1")
    model(torch.ones(1, 4)).float().sum().backward()
    assert model.weight.grad is not None


def test_nothing_is_held_after_a_forward_even_one_that_raises() -> None:
    class Breaks(Twice):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise KeyError

    model = amp.initialize(Breaks(), opt_level="O1")
    for _ in range(3):
        with pytest.raises(KeyError):
            model(torch.ones(1, 4))
        assert not torch.is_autocast_enabled("cpu")
        with torch.no_grad():
            model.weight.mul_(2)
        assert (F.linear(torch.ones(1, 4), model.weight) == model.weight[0, 0]).all()


def test_a_second_backward_through_a_cached_cast() -> None:
    model, optimizer = started(Twice(), sgd, "O1")
    out = model(torch.ones(1, 4)).float().sum()
    with amp.scale_loss(out, optimizer) as scaled_loss:
        scaled_loss.backward(retain_graph=True)
        scaled_loss.backward()
    assert torch.equal(model.weight.grad, torch.full((4, 4), 2.0))


@pytest.mark.parametrize("after", [False, True])
def test_transformer_encoders_evaluate(half: torch.dtype, after: bool) -> None:
    """Torch's fast path for inference takes half inputs and FP32 weights for granted to agree."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    x = torch.randn(2, 5, 8)
    with amp.disable_casts(), torch.no_grad():
        expected = encoder(x)
    with torch.no_grad():
        out = encoder(x.to(half) if after else x)
    torch.testing.assert_close(out.float(), expected, rtol=5e-2, atol=5e-2)


def test_a_step_in_one_thread_leaves_the_casts_of_others_alone() -> None:
    began, finish, seen = threading.Event(), threading.Event(), []

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append((X @ X).dtype)
            began.set()
            assert finish.wait(10)
            return super().step(closure)

    _model, optimizer = started(linear(), lambda p: Slow(p, lr=0.1), "O1")
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    assert began.wait(10)
    seen.append((X @ X).dtype)
    finish.set()
    thread.join()
    assert seen == [torch.float32, torch.float16]
