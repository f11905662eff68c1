"""Masters and optimizers: any torch optimizer, any group, any order of calls."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amp
from amp.errors import AmpRuntimeError
from amp.masters.agreement import Pairs
from amp.masters.pair import Pair
from amp.optimizers import FusedAdam
from tests.covering import covering
from tests.levels import DYNAMIC
from tests.models import (
    LEVELS,
    MASTER_LEVELS,
    TOLERANCE,
    adamw,
    batch,
    conv_net,
    initialize,
    linear,
    run_backward,
    sgd,
    started,
    step_on,
    train_on,
)
from tests.states import assert_same

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ASGD": {"lr": 0.01},
    "Adadelta": {"lr": 1.0},
    "Adafactor": {"lr": 0.05},
    "Adagrad": {"lr": 0.05},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.01},
    "Rprop": {"lr": 0.01},
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
}


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    images, labels = batch(step)
    return F.cross_entropy(model(images), labels)


def backward(model: nn.Module, optimizer: Any, step: int = 0, **kwargs: Any) -> None:
    run_backward(loss_of(model, step), optimizer, **kwargs)


def assert_trains(model: Any, optimizer: Any, level: str, part: float, **options: Any) -> None:
    """Ten steps at a level make a loss fall below a part of what it was."""
    if level == "O3" and isinstance(optimizer.defaults.get("eps"), float):
        optimizer.param_groups[0]["eps"] = 1e-3  # the default is 0 in float16
    model, optimizer = initialize(model, optimizer, level, **options)
    first = loss_of(model).item()
    for _ in range(10):
        train_on(loss_of(model), optimizer)
    assert loss_of(model).item() < first * part


@pytest.mark.parametrize(("name", "level"), covering(OPTIMIZERS, LEVELS, strength=1))
def test_every_torch_optimizer_trains(name: str, level: str) -> None:
    model = conv_net()
    optimizer = getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name])
    assert_trains(model, optimizer, level, 0.98)


@pytest.mark.parametrize(("level", "name"), covering(LEVELS, ["AdamW", "RAdam", "Lion"], strength=1))
def test_optimizers_of_others_train(name: str, level: str) -> None:
    """optimi's, which step parameter by parameter in code of their own."""
    optimi = pytest.importorskip("optimi")
    ends = []
    for masters in (None, "split16") if level == "O5" else (None,):
        model = conv_net()
        optimizer = getattr(optimi, name)(model.parameters(), lr=0.003, weight_decay=0.01)
        assert_trains(model, optimizer, level, 1.0, master_weights=masters)
        ends.append(model.state_dict())
    assert_same(ends[0], ends[-1])


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_masters_step_as_fp32_training_on_the_same_gradients_does(level: str) -> None:
    """A step far below half precision's resolution must not be lost."""
    model = linear()
    reference = [p.detach().clone().requires_grad_() for p in model.parameters()]
    reference_optimizer = torch.optim.SGD(reference, lr=1e-6)
    model, optimizer = initialize(model, sgd(model, lr=1e-6, momentum=0), level)
    for _ in range(20):
        optimizer.zero_grad()
        run_backward(model(torch.ones(1, 4)).sum(), optimizer)
        for p, master in zip(reference, amp.master_params(optimizer), strict=True):
            p.grad = master.grad.clone()
        optimizer.step()
        reference_optimizer.step()
    for p, master in zip(reference, amp.master_params(optimizer), strict=True):
        assert torch.equal(p, master)
        assert not torch.equal(p, p.to(model.weight.dtype).float())
    assert torch.equal(model.weight, reference[0].to(model.weight.dtype))


def test_existing_state_is_kept_and_recast() -> None:
    for level in LEVELS:
        model = conv_net()
        optimizer = adamw(model)
        loss_of(model).backward()
        optimizer.step()
        before = [copy.deepcopy(optimizer.state[p]) for p in model.parameters()]
        model, optimizer = initialize(model, optimizer, level)
        for p, state in zip(amp.master_params(optimizer), before, strict=True):
            assert optimizer.state[p]["step"] == state["step"]
            for key in ("exp_avg", "exp_avg_sq"):
                assert optimizer.state[p][key].dtype is p.dtype
                assert torch.equal(optimizer.state[p][key], state[key].to(p.dtype))
        assert len(optimizer.state) == len(before)


def test_parameter_groups_keep_their_hyper_parameters() -> None:
    model = conv_net()
    groups = [
        {"params": list(model.conv.parameters()), "lr": 0.0},
        {"params": list(model.norm.parameters()) + list(model.head.parameters()), "lr": 0.1},
    ]
    model, optimizer = initialize(model, torch.optim.SGD(groups), "O2")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    backward(model, optimizer)
    optimizer.step()
    after = model.state_dict()
    assert torch.equal(after["conv.weight"], before["conv.weight"])
    assert not torch.equal(after["head.weight"], before["head.weight"])


@pytest.mark.parametrize("level", LEVELS)
def test_add_param_group(level: str) -> None:
    model = conv_net()
    optimizer = torch.optim.SGD(model.conv.parameters(), lr=0.1)
    model, optimizer = initialize(model, optimizer, level)
    backward(model, optimizer)
    optimizer.add_param_group({"params": (p for p in model.head.parameters()), "lr": 0.2})
    optimizer.add_param_group({"params": model.norm.weight})
    model.zero_grad()
    backward(model, optimizer)
    before = model.state_dict()["head.weight"].clone()
    grad = list(amp.master_params(optimizer))[2].grad.clone()
    optimizer.step()
    after = model.state_dict()["head.weight"]
    torch.testing.assert_close(after.float(), (before - 0.2 * grad).float(), rtol=2e-3, atol=1e-4)
    with pytest.raises(ValueError, match=r"parameter"):
        optimizer.add_param_group({"params": model.head.parameters()})
    with pytest.raises(TypeError):
        optimizer.add_param_group([model.norm.bias])
    with pytest.raises(TypeError):
        optimizer.add_param_group({"params": {model.norm.bias}})
    assert len(optimizer.param_groups) == 3


@pytest.mark.parametrize(
    ("level", "optimizer_class", "blocks"),
    covering(
        ["O0", "O1", "O2", "O4", "O5"], [torch.optim.SparseAdam, torch.optim.SGD], [1, 2], strength=1
    ),
)
def test_sparse_gradients(level: str, optimizer_class: Any, blocks: int) -> None:
    def make() -> nn.Embedding:
        torch.manual_seed(0)
        return nn.Embedding(6, 3, sparse=True)

    tokens = torch.tensor([[1, 1, 4]])
    reference, model = make(), make()
    reference_optimizer = optimizer_class(reference.parameters(), lr=0.1)
    model, optimizer = initialize(model, optimizer_class(model.parameters(), lr=0.1), level)
    for _ in range(2):
        reference_optimizer.zero_grad()
        optimizer.zero_grad()
        for _ in range(blocks):
            (reference(tokens) ** 2).sum().backward()
            run_backward((model(tokens).float() ** 2).sum(), optimizer)
        assert next(amp.master_params(optimizer)).grad.is_sparse
        reference_optimizer.step()
        optimizer.step()
    tolerance = TOLERANCE[level]
    torch.testing.assert_close(
        model.state_dict()["weight"], reference.weight.detach(), rtol=tolerance, atol=tolerance
    )
    assert torch.equal(model.state_dict()["weight"][0], reference.weight[0])


def test_a_sparse_gradient_that_overflows_skips_the_step() -> None:
    model, optimizer = started(nn.Embedding(6, 3, sparse=True), lambda p: sgd(p, momentum=0), "O2")
    step_on(model(torch.tensor([1])).sum() * math.inf, optimizer)
    assert amp.step_was_skipped(optimizer)


# Closures.


@pytest.mark.parametrize(
    ("level", "loss_scale"),
    covering(["O0", "O1", "O2", "O4", "O5"], [128.0, "dynamic"], strength=1),  # float16 L-BFGS diverges
)
def test_lbfgs(level: str, loss_scale: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 4)
    target = x @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]]) + 0.3
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6)
    model, optimizer = initialize(model, optimizer, level, loss_scale=loss_scale)
    evaluations = 0

    def closure() -> Tensor:
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        output = model(x)
        assert output.dtype is (
            {"O1": torch.float16, "O4": torch.bfloat16}.get(level, torch.float32)
        ), "casts are on inside a closure"
        return run_backward(F.mse_loss(output.float(), target), optimizer)

    first = closure().item()
    for _ in range(4):
        returned = optimizer.step(closure)
    assert returned is not None
    assert evaluations > 8
    assert F.mse_loss(model(x).float(), target).item() < first / 50


def test_a_closure_that_always_overflows_is_an_error() -> None:
    model, optimizer = started(linear(), sgd, "O2")

    def closure() -> Tensor:
        return run_backward(model(torch.ones(1, 4)).sum() * math.inf, optimizer)

    with (
        pytest.warns(amp.AmpWarning, match="overflows in a row: gradients were inf or NaN"),
        pytest.raises(RuntimeError, match="inf or nan without scaling too"),
    ):
        optimizer.step(closure)
    assert torch.isfinite(model.weight).all()


# Schedulers.


@pytest.mark.parametrize(
    ("level", "when", "first_step_overflows"),
    covering(LEVELS, ["before", "after", "both"], [False, True], strength=1),
)
def test_learning_rate_schedulers(level: str, when: str, first_step_overflows: bool) -> None:
    model = conv_net()
    optimizer = sgd(model)
    schedulers = []
    if when != "after":
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    model, optimizer = initialize(model, optimizer, level)
    if when != "before":
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    for step in range(2):
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
            overflow = first_step_overflows and step == 0 and level in DYNAMIC
            (scaled_loss * (math.inf if overflow else 1.0)).backward()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.25 ** len(schedulers)


def test_a_scheduler_between_two_sessions() -> None:
    model = linear()
    optimizer = sgd(model)
    with amp.Session("O0") as session:
        session.initialize(model, optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    initialize(model, optimizer, "O1")
    run_backward(model(torch.ones(1, 4)).sum() * math.inf, optimizer)
    before = model.weight.detach().clone()
    optimizer.step()
    scheduler.step()
    assert amp.step_was_skipped(optimizer)
    assert torch.equal(before, model.weight)


# Several of them.


@pytest.mark.parametrize("level", LEVELS)
def test_one_optimizer_over_several_models(level: str) -> None:
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(4, 3), nn.Linear(3, 4)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=0.01)
    (encoder, decoder), optimizer = initialize([encoder, decoder], optimizer, level)
    x = torch.randn(16, 4)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        losses.append(step_on(F.mse_loss(decoder(torch.tanh(encoder(x))).float(), x), optimizer).item())
    assert losses[-1] < losses[0] * 0.9


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_that_only_looks_like_one(level: str) -> None:
    class Larc:
        """As apex's: wraps an optimizer and is none itself."""

        def __init__(self, optim: torch.optim.Optimizer) -> None:
            self.optim = optim
            self.param_groups = optim.param_groups
            self.state = optim.state

        def step(self, closure: Any = None) -> Any:
            for group in self.optim.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(0.5)
            return self.optim.step(closure)

        def zero_grad(self) -> None:
            self.optim.zero_grad()

    model = linear()
    start = model.weight.detach().clone()
    model, optimizer = initialize(model, Larc(sgd(model, lr=1.0, momentum=0)), level)
    optimizer.zero_grad()
    step_on(model(torch.ones(1, 4)).sum(), optimizer)
    torch.testing.assert_close(model.state_dict()["weight"], start - 0.5, rtol=0, atol=4e-3)


def test_an_eps_that_is_zero_in_float16_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    initialize(model := linear(), adamw(model), "O2")
    initialize(model := linear(), adamw(model, eps=1e-3), "O3")
    assert not caplog.records
    initialize(model := linear(), adamw(model), "O3")
    assert "AdamW has eps=1e-08, which is 0 in torch.float16" in caplog.text


def test_an_optimizer_can_be_copied_and_saved() -> None:
    import pickle

    _model, optimizer = started(linear(), sgd, "O2")
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert twin.param_groups[0]["params"][0].dtype is torch.float32
        twin.step()


def test_a_model_moved_after_initialize_gets_an_error() -> None:
    with pytest.raises(
        RuntimeError, match=r"\(2,\) is on meta and its FP32 master on cpu.*Move it first"
    ):
        Pairs([Pair(torch.ones(2, device="meta"), torch.ones(2))]).check_devices()


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("when", ["before the block", "after the block"])
def test_a_model_cast_after_initialize_gets_an_error(level: str, when: str) -> None:
    model, optimizer = started(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)), FusedAdam, level)
    other = torch.bfloat16 if level == "O2" else torch.float16
    if when == "before the block":
        model[1].to(other)
        with (
            pytest.raises(AmpRuntimeError, match=r"^'1.weight' is torch.b?float16"),
            amp.scale_loss(torch.ones(()), optimizer),
        ):
            pass
        return
    run_backward(model(torch.ones(3, 4)).float().sum(), optimizer)
    model[1].to(other)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(AmpRuntimeError, match=r"^'1.weight' is torch.b?float16 .* at amp.initialize"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_model_cast_to_fp32_after_initialize_is_cast_back_and_named(level: str) -> None:
    model, _optimizer = started(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)), FusedAdam, level)
    dtype = model[1].weight.dtype
    model[1].float()
    with pytest.warns(amp.AmpWarning, match=r"^'1.weight' is torch.float32 and was .* same values"):
        model(torch.ones(3, 4))
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


@pytest.mark.parametrize("level", LEVELS)
def test_one_loss_for_optimizers_of_two_initialize_calls(level: str) -> None:
    models = [linear(seed) for seed in range(2)]
    optimizers = [initialize(model, sgd(model, momentum=0), level, verbosity=0)[1] for model in models]
    loss = torch.stack([model(torch.ones(1, 4)).float().sum() for model in models]).sum()
    run_backward(loss, optimizers)
    for optimizer in optimizers:
        assert (next(amp.master_params(optimizer)).grad == 1).all()
        optimizer.step()
    if level in DYNAMIC:
        run_backward(loss.detach() * models[1].bias.sum() * math.inf, optimizers)
        for optimizer in optimizers:
            optimizer.step()
            assert amp.step_was_skipped(optimizer)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("level", LEVELS)
def test_muon(level: str) -> None:
    """It takes matrices only, so it has a model of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))
    optimizer = torch.optim.Muon(model.parameters(), lr=0.05)
    model, optimizer = initialize(model, optimizer, level)
    x, y = torch.randn(16, 6), torch.randint(0, 3, (16,))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        losses.append(step_on(F.cross_entropy(model(x), y), optimizer).item())
    assert losses[-1] < losses[0] * 0.8


# What loss scaling cannot take.


@pytest.mark.parametrize("level", DYNAMIC)
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_complex_gradient_is_refused_by_name_and_nothing_else_changes(
    level: str, accumulate: bool
) -> None:
    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = linear()
            self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))

        def forward(self, x: torch.Tensor, rotate: bool = True) -> torch.Tensor:
            y = self.head(x).float()
            return (y * self.phase).abs() if rotate else y

    model, optimizer = started(Rotated(), sgd, level)
    x = torch.ones(2, 4)
    if accumulate:
        run_backward(model(x, rotate=False).sum(), optimizer)
    kept = [p.grad.clone() if p.grad is not None else None for p in amp.master_params(optimizer)]
    with pytest.raises(
        TypeError, match=r"the gradient of 'phase' is torch.complex64 and cannot be unsc"
    ):
        run_backward(model(x).sum(), optimizer)
    for parameter, grad in zip(amp.master_params(optimizer), kept, strict=True):
        if grad is None or parameter.grad is None:
            assert grad is parameter.grad
        else:
            assert torch.equal(parameter.grad, grad)
    assert amp.loss_scale() == 1024
    step_on(model(x, rotate=False).sum(), optimizer)
    assert not amp.step_was_skipped(optimizer)


# Optimizers that skip on the device.


@pytest.fixture
def uninitialized_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # which fills it, see torch.utils.deterministic
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("level", "make"),
    covering(DYNAMIC, ["Adam", "AdamW", "SGD", "SGD without momentum", "Adagrad"], strength=1),
)
def test_fused_optimizers_skip_by_themselves_and_end_where_others_do(
    level: str, make: str, uninitialized_memory_is_nan: None
) -> None:
    """Bit for bit what the host's decision gives, with overflows in the first and in later steps."""
    results = []
    for on_device in (True, False):
        model = linear()
        kind = getattr(torch.optim, make.split()[0])
        options = {"momentum": 0.9} if make == "SGD" else {}
        optimizer = kind(model.parameters(), lr=0.05, fused=True, **options)
        optimizer._step_supports_amp_scaling = on_device
        model, optimizer = initialize(model, optimizer, level)
        skipped = []
        for step in range(8):
            optimizer.zero_grad()
            torch.manual_seed(step)
            factor = math.inf if step in (0, 3, 4) else 1.0
            step_on(model(torch.randn(2, 4)).float().square().sum() * factor, optimizer)
            skipped.append(amp.step_was_skipped(optimizer))
            assert not hasattr(optimizer, "found_inf")
        assert [i for i, was in enumerate(skipped) if was] == [0, 3, 4]
        assert amp.loss_scale() == 1024 / 8
        results.append([p.detach().clone() for p in model.parameters()])
        amp.get_session().close()
    for on_device, on_host in zip(*results, strict=True):
        assert torch.equal(on_device, on_host)
        assert on_device.isfinite().all()


def test_a_group_that_is_not_fused_any_more_is_decided_by_the_host() -> None:
    """A loaded state dict, or a group added later, may not be fused."""
    plain = linear()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    plain(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    model, extra = linear(), nn.Parameter(torch.ones(4))
    for case in ("loaded", "added"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        model, optimizer = initialize(model, optimizer, "O1")
        if case == "loaded":
            optimizer.load_state_dict(state)
        else:
            optimizer.add_param_group({"params": [extra], "fused": False, "foreach": False})
        for factor in (1.0, math.inf, 1.0):
            before = model.weight.detach().clone()
            optimizer.zero_grad()
            step_on((model(torch.ones(1, 4)) * extra).sum() * factor, optimizer)
            assert amp.step_was_skipped(optimizer) == (factor == math.inf)
            assert torch.equal(before, model.weight) == (factor == math.inf)
        amp.get_session().close()


def test_a_wrapper_around_a_fused_optimizer_is_decided_by_the_host() -> None:
    """What it passes on by `__getattr__` reaches the inner optimizer one way only."""

    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def __getattr__(self, name: str) -> Any:
            return getattr(self.optimizer, name)

        def step(self, closure: Any = None) -> Any:
            return self.optimizer.step(closure)

    model = linear()
    optimizer: Any = Wrapper(torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))
    model, optimizer = initialize(model, optimizer, "O1")
    for factor in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        step_on(model(torch.ones(1, 4)).sum() * factor, optimizer)
        assert amp.step_was_skipped(optimizer) == (factor == math.inf)
    assert model.weight.isfinite().all()


@pytest.mark.parametrize("level", DYNAMIC)
@pytest.mark.parametrize("delay", [False, True])
def test_a_gradient_that_is_refused_leaves_no_optimizer_of_the_block_half_done(
    level: str, delay: bool
) -> None:
    good, odd = linear(), nn.ParameterList([nn.Parameter(torch.ones(4, dtype=torch.complex64))])
    optimizers = [sgd(good), sgd(odd)]
    initialize([good, odd], optimizers, level)
    for factor in (1.0, math.inf):
        loss = (good(torch.ones(1, 4)).float() * odd[0]).abs().sum() * factor
        with pytest.raises(TypeError, match="the gradient of '0' is torch.complex64"):
            run_backward(loss, optimizers, delay_unscale=delay)
        for optimizer in optimizers:
            assert all(p.grad is None for p in amp.master_params(optimizer))
        assert good.weight.grad is None
    step_on(good(torch.ones(1, 4)).sum(), optimizers[0])
    assert not amp.step_was_skipped(optimizers[0])
    assert amp.loss_scale() == 1024
    amp.get_session().close()


def test_close_succeeds_whatever_gradients_wait_for_unscaling() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(3))
    model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    model, optimizer = initialize(model, sgd(model), "O1")
    run_backward(model.weight.sum(), optimizer, delay_unscale=True)
    model.phase.abs().sum().backward()
    with pytest.raises(TypeError, match="the gradient of 'phase'"):
        optimizer.step()
    amp.get_session().close()
    assert "step" not in vars(optimizer)
    assert model.weight.grad is None  # it was scaled, and could not be unscaled any more


def test_each_evaluation_of_a_closure_sees_the_weights_of_its_time() -> None:
    """Also in a region of torch.autocast, which caches casts of weights."""

    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            first = closure()
            super().step()
            return first, closure()

    model, optimizer = started(nn.Linear(4, 2), lambda p: Twice(p, lr=0.5), "O0")
    x = torch.ones(3, 4)

    def closure() -> float:
        optimizer.zero_grad()
        return float(run_backward(model(x).float().square().mean(), optimizer).detach())

    with torch.autocast("cpu", torch.bfloat16):
        first, second = optimizer.step(closure)
    assert first != second
