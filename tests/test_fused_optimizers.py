"""The fused optimizers as a user of torch.optim sees them, with a session and without."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp
from amp.errors import AmpRuntimeError, AmpValueError
from amp.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedLion, FusedNovoGrad, FusedSGD
from tests.covering import covering
from tests.levels import DYNAMIC, LEVELS
from tests.models import initialize, run_backward, train_on
from tests.states import assert_same

LR = 1e-2
STEPS = 40


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).to(dtype)


def batches(dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(4, 8).to(dtype), torch.randn(4, 2).to(dtype)) for _ in range(STEPS)]


def train(
    net: nn.Module, optimizer: Any, dtype: torch.dtype = torch.float32, steps: int = STEPS
) -> Any:
    for x, y in batches(dtype)[:steps]:
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def two_groups(net: nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in net.parameters() if p.dim() > 1]
    return [
        {"params": weights, "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.dim() == 1], "lr": LR / 2, "betas": (0.8, 0.99)},
    ]


def assert_near(net: nn.Module, exact: nn.Module, tolerance: float = 1e-4) -> None:
    for p, e in zip(net.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(p.double(), e.double(), rtol=0, atol=tolerance * LR * STEPS)


@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"eps": 1e-4}])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_is_torchs_over_groups(decoupled: bool, options: dict[str, Any]) -> None:
    net, exact = model(), model(torch.float64)
    train(net, FusedAdam(two_groups(net), lr=LR, adam_w_mode=decoupled, **options))
    reference = torch.optim.AdamW if decoupled else torch.optim.Adam
    train(exact, reference(two_groups(exact), lr=LR, weight_decay=0.0, **options), torch.float64)
    assert_near(net, exact)


PAIRS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sgd": (FusedSGD, torch.optim.SGD, {}),
    "sgd, momentum": (FusedSGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "sgd, nesterov": (FusedSGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adagrad": (
        FusedAdagrad,
        torch.optim.Adagrad,
        {"lr_decay": 0.01, "initial_accumulator_value": 0.1},
    ),
    "adamw": (FusedAdam, torch.optim.AdamW, {"betas": (0.8, 0.99)}),
    "adam": (functools.partial(FusedAdam, adam_w_mode=False), torch.optim.Adam, {}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_each_is_torchs_and_state_goes_there_and_back(name: str) -> None:
    ours, theirs, options = PAIRS[name]
    options = {"lr": LR, "weight_decay": 0.1, **options}
    net, exact = model(), model(torch.float64)
    optimizer = ours(net.parameters(), **options)
    train(net, optimizer)
    train(exact, theirs(exact.parameters(), **options), torch.float64)
    assert_near(net, exact)
    there, back = copy.deepcopy(net), copy.deepcopy(net)
    at_torch = theirs(there.parameters(), lr=1.0)
    at_torch.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    returned = ours(back.parameters(), lr=1.0)
    returned.load_state_dict(copy.deepcopy(at_torch.state_dict()))
    assert returned.param_groups[0]["weight_decay"] == 0.1
    continued(net, optimizer)
    assert_near(continued(there, at_torch), net)
    assert_same(net.parameters(), continued(back, returned).parameters())


def test_what_torchs_sgd_saved_loads_with_momentum_and_without() -> None:
    for momentum in (0.0, 0.9):
        net = model()
        theirs = torch.optim.SGD(net.parameters(), lr=LR, momentum=momentum, dampening=0.5)
        train(net, theirs, steps=3)
        mine = copy.deepcopy(net)
        optimizer = FusedSGD(mine.parameters(), lr=1.0)
        optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
        assert_near(continued(mine, optimizer), continued(net, theirs))


def test_lion_moves_every_weight_by_the_rate() -> None:
    net, start = model(), model()
    optimizer = FusedLion(net.parameters(), lr=LR)
    train(net, optimizer, steps=1)
    for p, s in zip(net.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close((p - s).abs(), torch.full_like(p, LR), rtol=1e-4, atol=0)
    other = FusedLion(model().parameters())
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == LR


def test_options_of_apex_that_torch_does_not_have() -> None:
    """With a zero gradient the decay alone moves a weight, and no moment hears of it."""
    for make, moved in (
        (lambda ps: FusedSGD(ps, lr=0.5, momentum=0.9, weight_decay=0.1, wd_after_momentum=True), 0.95),
        (lambda ps: FusedAdagrad(ps, lr=0.5, weight_decay=0.1, adagrad_w_mode=True), 0.95),
    ):
        weight = nn.Parameter(torch.ones(4))
        optimizer = make([weight])
        for i in range(1, 3):
            weight.grad = torch.zeros(4)
            optimizer.step()
            torch.testing.assert_close(weight.detach(), torch.full((4,), moved**i))
        (moment,) = [v for k, v in optimizer.state[weight].items() if k != "step"]
        assert not moment.any()


def test_without_bias_correction_the_first_steps_are_larger() -> None:
    """By (1 - beta1) / sqrt(1 - beta2), as the moments start at 0."""
    net, start = model(), model()
    train(net, FusedAdam(net.parameters(), lr=LR, bias_correction=False, eps=0.0), steps=1)
    expected = LR * (1 - 0.9) / math.sqrt(1 - 0.999)
    for p, s in zip(net.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close((p - s).abs(), torch.full_like(p, expected), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_trains_with_it(level: str) -> None:
    """Beside the same level with torch's own: the same decisions, the same weights."""
    weights, scales = [], []
    for make in (FusedAdam, torch.optim.AdamW):
        net = model()
        optimizer: Any = make(net.parameters(), lr=LR, eps=1e-3, weight_decay=0.0)
        session = amp.Session(level, loss_scale="dynamic", verbosity=0)
        net, optimizer = session.initialize(net, optimizer)
        for i, (x, y) in enumerate(batches()):
            loss = (net(x).float() - y).square().mean() * (1e38 if i == 5 else 1.0)
            train_on(loss, optimizer)
        scales.append(session.loss_scale())
        session.close()
        weights.append(net.float())
    assert scales[0] == scales[1] < 65536
    tolerance = 0.3 if level == "O3" else 1e-2
    assert_near(weights[0], weights[1], tolerance)


def test_grad_scaler_of_torch_lets_it_unscale_and_skip() -> None:
    net, exact = model(), model(torch.float64)
    optimizer = FusedAdam(net.parameters(), lr=LR)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for i, (x, y) in enumerate(batches()):
        loss = (net(x) - y).square().mean() * (math.inf if i == 3 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    reference = torch.optim.AdamW(exact.parameters(), lr=LR, weight_decay=0.0)
    for i, (x, y) in enumerate(batches(torch.float64)):
        (exact(x) - y).square().mean().backward()
        if i != 3:
            reference.step()
        reference.zero_grad()
    assert scaler.get_scale() == 512.0
    assert_near(net, exact)
    assert {float(state["step"]) for state in optimizer.state.values()} == {STEPS - 1}


# State dicts.


def continued(net: nn.Module, optimizer: Any) -> nn.Module:
    torch.manual_seed(2)
    for _ in range(10):
        for p in net.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    return net


def test_what_torch_saved_before_it_fused_loads() -> None:
    """Steps on the host, and none of our hyper-parameters."""
    net = model()
    theirs = torch.optim.AdamW(net.parameters(), lr=LR, foreach=False)
    train(net, theirs)
    saved = copy.deepcopy(theirs.state_dict())
    for group in saved["param_groups"]:
        for name in ("fused", "decoupled_weight_decay", "maximize"):
            group.pop(name, None)
    mine = copy.deepcopy(net)
    optimizer = FusedAdam(mine.parameters())
    optimizer.load_state_dict(saved)
    assert_near(continued(mine, optimizer), continued(net, theirs))


@pytest.mark.parametrize("steps", [STEPS, torch.tensor(float(STEPS)), torch.tensor(STEPS)])
def test_a_checkpoint_of_apex_loads(steps: Any) -> None:
    """It counts the steps of a group, not of a parameter."""
    net = model()
    optimizer = FusedAdam(net.parameters(), lr=LR)
    train(net, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in saved["state"].values():
        del entry["step"]
    keep = ("lr", "bias_correction", "betas", "eps", "weight_decay", "params")
    saved["param_groups"] = [
        {"step": steps, **{k: group[k] for k in keep}} for group in saved["param_groups"]
    ]
    mine = copy.deepcopy(net)
    loaded = FusedAdam(mine.parameters())
    loaded.load_state_dict(saved)
    assert "step" not in loaded.param_groups[0]
    continued(mine, loaded)
    assert_same(mine.parameters(), continued(net, optimizer).parameters())


def test_it_pickles_and_schedulers_move_its_rate() -> None:
    net = model()
    weight = next(net.parameters())
    optimizer = FusedAdam(net.parameters(), lr=LR, set_grad_none=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    train(net, optimizer, steps=1)
    weight.grad = torch.ones_like(weight)
    copied = pickle.loads(pickle.dumps(optimizer))
    for each in (optimizer, copied):
        first = each.param_groups[0]["params"][0]
        first.grad = torch.ones_like(first)
        each.zero_grad()
        assert first.grad is not None, "set_grad_none=False writes zeros"
        assert not first.grad.any()
    before = weight.clone()
    scheduler.step()
    weight.grad.fill_(1.0)
    optimizer.step()
    assert torch.equal(weight, before)


def test_a_closure_is_evaluated_with_gradients() -> None:
    net = model()
    optimizer = FusedAdam(net.parameters(), lr=LR)
    x, y = batches()[0]

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first


# Bad input.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"lr=-1 must be at least 0 and finite"),
        ({"lr": math.nan}, r"lr=nan must be"),
        ({"lr": torch.tensor(-0.5)}, r"lr=-0.5 must be"),
        ({"lr": torch.ones(2)}, r"lr has shape \(2,\); give it one element"),
        ({"eps": "1e-8"}, r"eps='1e-8' is no number"),
        ({"weight_decay": math.inf}, r"weight_decay=inf must be"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]=1 must be at least 0 and below 1"),
        ({"betas": 0.9}, r"betas=0.9 must be two numbers"),
        ({"amsgrad": True}, r"use torch.optim.Adam\(..., amsgrad=True\)"),
        ({"master_weights": True}, r"amp.initialize\(model, optimizer, opt_level='O2'\)"),
    ],
)
def test_hyper_parameters_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FusedAdam(model().parameters(), **options)


def test_sgd_says_what_it_needs() -> None:
    with pytest.raises(TypeError, match=r"needs a learning rate: FusedSGD\(params, lr=0.1\)"):
        FusedSGD(model().parameters())
    group = {"params": model().parameters(), "lr": LR}
    assert FusedSGD([group]).param_groups[0]["lr"] == LR
    with pytest.raises(ValueError, match="nesterov=True with momentum=0.0 and dampening=0.0: it needs"):
        FusedSGD(model().parameters(), lr=LR, nesterov=True)
    with pytest.raises(ValueError, match="dampening=2 must be"):
        FusedSGD(model().parameters(), lr=LR, dampening=2.0)


def assert_step_is_refused(optimizer: Any, net: nn.Module, error: type, message: str) -> None:
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(error, match=message):
        optimizer.step()
    assert all(map(torch.equal, net.parameters(), before)), "nothing was written"


def test_a_rate_that_became_nan_is_refused_before_any_group_steps() -> None:
    net = model()
    optimizer = FusedAdam(two_groups(net), lr=LR)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.param_groups[1]["lr"] = math.nan
    assert_step_is_refused(optimizer, net, ValueError, "lr=nan")


@pytest.mark.parametrize("name", ["lr", "betas", "eps"])
def test_hyper_parameters_that_change_in_place_are_checked_in_each_step(name: str) -> None:
    """Those that are the same objects are not, if they cannot change."""
    parameter = nn.Parameter(torch.ones(2))
    value = torch.tensor(0.5)
    options: dict[str, Any] = {name: (value, 0.9) if name == "betas" else value}
    optimizer = FusedAdam([parameter], **options)
    for _ in range(3):
        parameter.grad = torch.ones(2)
        optimizer.step()
        assert optimizer.zero_grad() is None
    value.fill_(-1.0)
    before = parameter.detach().clone()
    parameter.grad = torch.ones(2)
    with pytest.raises(ValueError, match="-1 must be at least 0"):
        optimizer.step()
    assert torch.equal(parameter, before)


@pytest.mark.parametrize("level", [None, "O0", "O2"])
def test_a_group_may_hold_its_parameters_in_a_tuple(level: str | None) -> None:
    model: Any = nn.Linear(2, 2)
    optimizer: Any = FusedAdam(model.parameters())
    if level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    optimizer.param_groups[0]["params"] = tuple(optimizer.param_groups[0]["params"])
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.zero_grad()
    assert [p.grad for p in (*optimizer.param_groups[0]["params"], *model.parameters())] == [None] * 4


def test_gradients_that_no_kernel_takes_are_named() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Embedding(4, 4, sparse=True))
    optimizer = FusedAdam(net.named_parameters(), lr=LR)
    net[1](net[0](torch.ones(2, 4)).argmax(-1)).sum().backward()
    next(net.parameters()).grad = torch.ones(4, 4)
    message = (
        r"gradient of '1.weight', param_groups\[0\]\['params'\]\[2\], of shape \(4, 4\), is sparse"
    )
    assert_step_is_refused(optimizer, net, TypeError, message)


def test_the_state_of_another_optimizer_is_refused_and_changes_nothing() -> None:
    net = model()
    optimizer = FusedAdam(net.parameters(), lr=LR)
    train(net, optimizer, steps=3)
    before = copy.deepcopy(optimizer.state_dict())
    sgd = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
    with pytest.raises(ValueError, match=r"group 0 in the state dict has no betas, eps"):
        optimizer.load_state_dict(sgd.state_dict())
    other = copy.deepcopy(before)
    del other["state"][1]["exp_avg_sq"]
    with pytest.raises(ValueError, match="state of parameter 1 .* no exp_avg_sq, only step, exp_avg"):
        optimizer.load_state_dict(other)
    amsgrad = torch.optim.AdamW(net.parameters(), amsgrad=True)
    with pytest.raises(ValueError, match=r"use torch.optim.Adam\(..., amsgrad=True\)"):
        optimizer.load_state_dict(amsgrad.state_dict())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, entry in before["state"].items():
        assert all(torch.equal(entry[name], after["state"][key][name]) for name in entry)


class NovoGrad(torch.optim.Optimizer):
    """The formula of the paper, with apex's bias correction, tensor by tensor."""

    def __init__(self, params: Any, inside: bool, init_zero: bool, largest: bool) -> None:
        super().__init__(params, {})
        self.inside, self.init_zero, self.largest = inside, init_zero, largest

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                norm = p.grad.abs().max() if self.largest else p.grad.norm()
                first = torch.zeros_like(norm) if self.init_zero else norm
                state = self.state[p] or {"t": 0, "m": torch.zeros_like(p), "v": first}
                self.state[p] = state
                state["t"] += 1
                if self.largest:
                    state["v"] = 0.98 * state["v"] + (1 - 0.98) * norm
                else:
                    state["v"] = (0.98 * state["v"] ** 2 + (1 - 0.98) * norm**2).sqrt()
                d = state["v"] / (1 - 0.98 ** state["t"]) ** 0.5 + 1e-8
                scaled = p.grad / d + 0.1 * p if self.inside else p.grad
                state["m"] = 0.95 * state["m"] + (1 - 0.95) * scaled
                mean = state["m"] / (1 - 0.95 ** state["t"])
                p -= LR * (mean if self.inside else mean / d + 0.1 * p)


@pytest.mark.parametrize(
    ("inside", "init_zero", "norm_type"), covering([False, True], [False, True], [0, 2])
)
def test_novograd(inside: bool, init_zero: bool, norm_type: int) -> None:
    net, exact = model(), model(torch.float64)
    optimizer = FusedNovoGrad(
        net.parameters(),
        lr=LR,
        betas=(0.95, 0.98),
        weight_decay=0.1,
        reg_inside_moment=inside,
        init_zero=init_zero,
        norm_type=norm_type,
    )
    train(net, optimizer)
    train(exact, NovoGrad(exact.parameters(), inside, init_zero, norm_type == 0), torch.float64)
    assert_near(net, exact)
    back = copy.deepcopy(net)
    returned = FusedNovoGrad(back.parameters())
    returned.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    continued(net, optimizer)
    assert_same(continued(back, returned).parameters(), net.parameters())


def test_norms_of_apexs_novograd_load() -> None:
    """It keeps them in the group, in one tensor for float16 parameters and one for the others."""
    net = model()
    optimizer = FusedNovoGrad(net.parameters(), lr=LR)
    train(net, optimizer, steps=3)
    saved = copy.deepcopy(optimizer.state_dict())
    norms = torch.stack([saved["state"][i].pop("exp_avg_sq") for i in range(4)])
    for entry in saved["state"].values():
        del entry["step"]
    saved["param_groups"][0] |= {"step": 3, "exp_avg_sq": [torch.empty(0), norms]}
    loaded = copy.deepcopy(net)
    other = FusedNovoGrad(loaded.parameters())
    other.load_state_dict(saved)
    continued(net, optimizer)
    assert_same(continued(loaded, other).parameters(), net.parameters())
    saved["param_groups"][0]["exp_avg_sq"] = [torch.empty(0), norms[:3]]
    with pytest.raises(AmpValueError, match="3 norms for 4 parameters"):
        other.load_state_dict(saved)


def test_lamb_steps_as_far_as_a_weight_is_long() -> None:
    start = model()
    for options in ({"max_grad_norm": None}, {"weight_decay": 0.0, "use_nvlamb": True}):
        net = model()
        train(net, FusedLAMB(net.parameters(), lr=LR, **options), steps=1)  # type: ignore[arg-type]
        for p, s in zip(net.parameters(), start.parameters(), strict=True):
            torch.testing.assert_close((p - s).norm(), LR * s.norm(), rtol=1e-4, atol=0)
    net = model()
    train(net, FusedLAMB(net.parameters(), lr=LR, weight_decay=0.0), steps=1)
    for p, s in zip(net.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close((p - s).abs(), torch.full_like(p, LR), rtol=1e-2, atol=0)


MAKERS: dict[str, Any] = {
    "FusedAdagrad": FusedAdagrad,
    "FusedAdam": FusedAdam,
    "FusedLAMB": FusedLAMB,
    "FusedLion": FusedLion,
    "FusedNovoGrad": FusedNovoGrad,
    "FusedSGD": lambda params, **options: FusedSGD(params, **{"lr": LR, "momentum": 0.9, **options}),
}


@pytest.mark.parametrize(
    ("name", "level"), covering(MAKERS, [None, "O0", "O1", "O2", "O5"], strength=1)
)
def test_clipping_inside_is_clipping_before(name: str, level: str | None) -> None:
    """Over all groups together, with a session and without, whoever looks at the gradients."""
    ends = []
    for how in ("inside", "inside, looked at", "before"):
        net = model()
        options = {"max_grad_norm": 0.3 if how != "before" else None, "lr": LR}
        optimizer = MAKERS[name](two_groups_of(net), **options)
        if level is not None:
            loss_scale = {"init": 64} if level in DYNAMIC else 64.0
            net, optimizer = initialize(net, optimizer, level, loss_scale=loss_scale)
        for x, y in batches()[:8]:
            loss = (net(x) - y).square().mean() * 10
            run_backward(loss, None if level is None else optimizer)
            if how == "inside, looked at":
                assert all(p.grad is not None for p in amp.master_params(optimizer))
            if how == "before":
                total = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.3)
                assert total > 1
            optimizer.step()
            optimizer.zero_grad()
        ends.append(list(amp.master_params(optimizer)))
    for inside, looked_at, before in zip(*ends, strict=True):
        torch.testing.assert_close(inside, before, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(looked_at, before, rtol=1e-4, atol=1e-6)


def two_groups_of(net: nn.Module) -> list[dict[str, Any]]:
    params = list(net.parameters())
    return [{"params": params[:1]}, {"params": params[1:], "lr": LR / 2}]


@pytest.mark.parametrize(("name", "level"), covering(MAKERS, [None, "O1", "O2"], strength=1))
def test_moments_in_16_bits_stay_near(name: str, level: str | None) -> None:
    """tests/test_small_states.py resumes with them."""
    ends = []
    for state_dtype in (None, torch.bfloat16):
        net = model()
        optimizer = MAKERS[name](net.parameters(), lr=1e-3, state_dtype=state_dtype)
        if level is not None:
            net, optimizer = initialize(net, optimizer, level)
        for x, y in batches():
            optimizer.zero_grad()
            run_backward((net(x) - y).square().mean(), None if level is None else optimizer)
            optimizer.step()
        moments = [x for state in optimizer.state.values() for x in state.values() if x.dim()]
        assert {x.dtype for x in moments} == {state_dtype or torch.float32}
        ends.append(list(amp.master_params(optimizer)))
    torch.testing.assert_close(*ends, rtol=0, atol=0.1 * 1e-3 * STEPS)


def test_moments_change_their_dtype_with_the_optimizer_that_loads_them() -> None:
    net = model()
    wide = FusedAdam(net.parameters())
    train(net, wide, steps=2)
    narrow = FusedAdam(net.parameters(), state_dtype=torch.bfloat16)
    narrow.load_state_dict(copy.deepcopy(wide.state_dict()))
    for p in net.parameters():
        assert torch.equal(narrow.state[p]["exp_avg"], wide.state[p]["exp_avg"].bfloat16())
    wide.load_state_dict(copy.deepcopy(narrow.state_dict()))
    for p in net.parameters():
        assert torch.equal(narrow.state[p]["exp_avg_sq"].float(), wide.state[p]["exp_avg_sq"])
    with pytest.raises(AmpValueError, match="state_dtype=torch.float16 is not one of torch.bfloat16"):
        FusedAdam(net.parameters(), state_dtype=torch.float16)


def test_a_parameter_that_changes_between_steps_is_named() -> None:
    net = model()
    optimizer = FusedAdam(list(net.named_parameters()), lr=LR)
    train(net, optimizer, steps=1)
    net[2].half()
    before = copy.deepcopy(net)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(
        AmpRuntimeError, match=r"'2.weight', .* is torch.float16 and its exp_avg torch.fl"
    ):
        optimizer.step()
    assert all(map(torch.equal, net.parameters(), before.parameters()))


def test_momentum_may_come_later() -> None:
    ends = []
    for optimizer_class in (FusedSGD, torch.optim.SGD):
        net = model()
        optimizer = optimizer_class(net.parameters(), lr=0.1, momentum=0.0)
        train(net, optimizer, steps=2)
        optimizer.param_groups[0]["momentum"] = 0.9
        train(net, optimizer, steps=3)
        ends.append([p.detach() for p in net.parameters()])
    torch.testing.assert_close(*ends)


def test_moments_in_16_bits_are_not_for_float64() -> None:
    net = model(torch.float64)
    optimizer = FusedAdam(net.parameters(), state_dtype=torch.bfloat16)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(TypeError, match=r"params.* is torch.float64 .* Leave state_dtype out"):
        optimizer.step()
    assert not optimizer.state


def test_what_was_refused_is_refused_again() -> None:
    """As when the cell of a notebook is run once more."""
    parameter = nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([parameter])
    for dtype in (torch.float32, torch.float16):
        parameter.grad = None
        parameter.data = parameter.data.to(dtype)
        parameter.grad = torch.ones(4, dtype=dtype)
        if dtype is torch.float32:
            optimizer.step()
    for _ in range(2):
        with pytest.raises(AmpRuntimeError, match="was changed after its first step"):
            optimizer.step()
    assert (parameter == parameter[0]).all()
