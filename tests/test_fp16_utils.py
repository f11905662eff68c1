"""What scripts of 2018 do with fp16_utils, and what comes out."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp.errors import AmpError, AmpRuntimeError, AmpTypeError, AmpValueError
from amp.fp16_utils import (
    SAFE_GLOBALS,
    BN_convert_float,
    DynamicLossScaler,
    FP16_Optimizer,
    FP16Model,
    LossScaler,
    clip_grad_norm,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)
from amp.optimizers import FusedAdam
from tests.states import through_a_file


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def half_net() -> nn.Module:
    return network_to_half(net())


def batch(i: int = 0) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(i))


def loss_of(model: nn.Module, i: int = 0, factor: float = 1.0) -> Tensor:
    return (model(batch(i)).float() * factor).square().mean()


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def by_hand(steps: int = 5, scale: float = 128.0) -> tuple[nn.Module, list[nn.Parameter]]:
    """The loop that FP16_Optimizer stands for, written out in torch."""
    model = half_net()
    params = list(model.parameters())
    masters = [nn.Parameter(p.detach().float()) for p in params]
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    for i in range(steps):
        model.zero_grad()
        (loss_of(model, i) * scale).backward()
        for parameter, master in zip(params, masters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float() / scale
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(params, masters, strict=True):
                parameter.copy_(master)
    return model, masters


def iterate(optimizer: FP16_Optimizer, loss: Tensor) -> None:
    """Step by the gradients of a loss alone."""
    optimizer.zero_grad()
    optimizer.backward(loss)
    optimizer.step()


def assert_equal(some: Any, others: Any) -> None:
    for a, b in zip(some, others, strict=True):
        assert torch.equal(a.detach().float(), b.detach().float())


# FP16_Optimizer


@pytest.mark.parametrize("make", [sgd, lambda m: torch.optim.SGD(m.parameters(), 0.1, 0.9, fused=True)])
@pytest.mark.parametrize("options", [{"static_loss_scale": 128.0}, {"dynamic_loss_scale": True}])
def test_it_is_the_loop_by_hand(options: dict[str, Any], make: Callable[[Any], Any]) -> None:
    expected, masters = by_hand()
    model = half_net()
    optimizer = FP16_Optimizer(make(model), **options)
    for i in range(5):
        iterate(optimizer, loss_of(model, i))
    assert_equal(model.parameters(), expected.parameters())
    halves = [p.dtype is torch.float16 for p in expected.parameters()]
    assert_equal(optimizer.all_fp32_from_fp16_params, itertools.compress(masters, halves))


def test_groups_of_masters_and_of_others() -> None:
    model = half_net()
    params = list(model.parameters())
    groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.01}]
    optimizer = FP16_Optimizer(torch.optim.SGD(groups, lr=0.1))
    assert [len(group) for group in optimizer.fp16_groups] == [2, 2]
    assert [len(group) for group in optimizer.fp32_from_fp16_groups] == [2, 2]
    assert [len(group) for group in optimizer.fp32_from_fp32_groups] == [1, 1]
    assert all(p.dtype is torch.float16 for p in optimizer.all_fp16_params)
    assert all(p.dtype is torch.float32 for p in optimizer.all_fp32_from_fp16_params)
    assert optimizer.param_groups[1]["lr"] == 0.01
    more = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer.add_param_group({"params": [more]})
    assert [len(group) for group in optimizer.fp16_groups] == [2, 2, 1]


@pytest.mark.parametrize("update", [True, False])
def test_gradients_of_several_backwards_add_up(update: bool) -> None:
    ends = []
    for together in (True, False):
        model = half_net()
        optimizer = FP16_Optimizer(sgd(model), static_loss_scale=64.0)
        optimizer.zero_grad()
        if together:
            optimizer.backward(loss_of(model, 0) + loss_of(model, 1))
        else:
            for i in range(2):
                optimizer.backward(loss_of(model, i), update_master_grads=update)
            optimizer.update_master_grads()
        ends.append([p.grad for group in optimizer.param_groups for p in group["params"]])
        optimizer.step()
    torch.testing.assert_close(*ends, rtol=2e-3, atol=1e-5)


def test_gradients_of_a_loss_that_was_scaled_by_hand() -> None:
    model, twin = half_net(), half_net()
    by_backward = FP16_Optimizer(sgd(twin), static_loss_scale=64.0)
    by_backward.backward(loss_of(twin))
    optimizer = FP16_Optimizer(sgd(model), static_loss_scale=64.0)
    (loss_of(model) * optimizer.loss_scale).backward()
    optimizer.update_master_grads()
    for group, other in zip(optimizer.param_groups, by_backward.param_groups, strict=True):
        assert_equal([p.grad for p in group["params"]], [p.grad for p in other["params"]])


def test_overflow_skips_the_step_and_lowers_the_scale() -> None:
    model = half_net()
    optimizer = FP16_Optimizer(
        sgd(model), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 1024}
    )
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.backward(loss_of(model, factor=math.inf))
    assert optimizer.overflow
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None
    assert optimizer.step() is None
    assert_equal(model.parameters(), before)
    assert optimizer.loss_scale == 512.0
    optimizer.zero_grad()
    optimizer.backward(loss_of(model))
    assert not optimizer.overflow
    optimizer.step()
    assert not torch.equal(next(model.parameters()), before[0])


def test_arguments_of_a_dynamic_scale() -> None:
    model = half_net()
    arguments = {
        "init_scale": 2.0**10,
        "scale_factor": 4.0,
        "scale_window": 2,
        "min_loss_scale": 2.0**6,
        "max_loss_scale": 2.0**12,
    }
    optimizer = FP16_Optimizer(
        sgd(model, lr=0.0), dynamic_loss_scale=True, dynamic_loss_args=arguments, verbose=False
    )
    scales = []
    for factor in (1.0, 1.0, 1.0, 1.0, math.inf, math.inf, math.inf, math.inf):
        iterate(optimizer, loss_of(model, factor=factor))
        scales.append(int(math.log2(optimizer.loss_scale)))
    assert scales == [10, 12, 12, 12, 10, 8, 6, 6]
    with pytest.raises(AmpTypeError, match="dynamic_loss_args has 'window'; allowed: init_scale"):
        FP16_Optimizer(sgd(half_net()), dynamic_loss_scale=True, dynamic_loss_args={"window": 3})


@pytest.mark.parametrize("options", [{}, {"static_loss_scale": 8.0}, {"dynamic_loss_scale": True}])
def test_the_scale_may_be_set(options: dict[str, Any]) -> None:
    model = half_net()
    optimizer = FP16_Optimizer(sgd(model), **options)
    optimizer.loss_scale = 256.0
    assert optimizer.loss_scale == 256.0
    seen = []
    next(model.parameters()).register_hook(lambda grad: seen.append(grad.clone()))
    optimizer.backward(loss_of(model))
    master_grad = optimizer.all_fp32_from_fp16_params[0].grad
    assert master_grad is not None
    assert torch.equal(seen[0].float() / 256, master_grad)


def test_clipping_is_of_unscaled_gradients() -> None:
    model = half_net()
    optimizer = FP16_Optimizer(sgd(model), static_loss_scale=1024.0)
    optimizer.backward(loss_of(model, factor=10.0))
    norm = optimizer.clip_master_grads(0.5)
    grads = optimizer.inspect_master_grad_data()
    assert grads is not None
    flat = torch.cat([g.flatten() for group in grads for g in group if g is not None])
    assert norm > 0.5
    torch.testing.assert_close(flat.norm(), torch.tensor(0.5), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_lbfgs_steps_with_a_closure(dynamic: bool) -> None:
    model = half_net()
    optimizer = FP16_Optimizer(
        torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4), dynamic_loss_scale=dynamic
    )
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, factor=math.inf if dynamic and len(calls) == 1 else 1.0)
        optimizer.backward(loss)
        calls.append(loss.item())
        return loss

    first = optimizer.step(closure)
    for _ in range(3):
        optimizer.step(closure)
    assert first is not None
    assert calls[-1] < calls[0]
    assert optimizer.loss_scale == (2.0**15 if dynamic else 1.0)


def test_schedulers_move_the_rate_of_the_wrapper() -> None:
    model = half_net()
    optimizer = FP16_Optimizer(sgd(model))
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for i in range(2):
        iterate(optimizer, loss_of(model, i))
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == optimizer.optimizer.param_groups[0]["lr"] == 0.025


def test_zero_grad_by_either_name() -> None:
    for clear, empties in (
        (lambda o: o.zero_grad(), False),
        (lambda o: o.zero_grad(set_grads_to_None=True), True),
        (lambda o: o.zero_grad(set_to_none=True), True),
    ):
        model = half_net()
        optimizer = FP16_Optimizer(sgd(model), static_loss_scale=4.0)
        optimizer.backward(loss_of(model))
        clear(optimizer)
        for p in optimizer.all_fp32_from_fp16_params:
            assert p.grad is None if empties else p.grad is None or not p.grad.any()


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("make", [sgd, lambda m: FusedAdam(m.parameters(), lr=0.01)])
def test_it_resumes_bit_for_bit(make: Callable[[Any], Any], model_first: bool) -> None:
    def run(model: nn.Module, optimizer: FP16_Optimizer, steps: range) -> list[Tensor]:
        for i in steps:
            iterate(optimizer, loss_of(model, i, math.inf if i == 1 else 1.0))
        masters = [p.detach().clone() for p in optimizer.all_fp32_from_fp16_params]
        return [*masters, torch.tensor(optimizer.loss_scale)]

    model = half_net()
    options: dict[str, Any] = {"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_window": 3}}
    optimizer = FP16_Optimizer(make(model), **options)
    run(model, optimizer, range(4))
    saved = through_a_file([model.state_dict(), optimizer.state_dict()])
    expected = run(model, optimizer, range(4, 9))

    resumed_model = half_net()
    resumed = FP16_Optimizer(make(resumed_model), **options)
    if model_first:
        resumed_model.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    if not model_first:
        resumed_model.load_state_dict(saved[0])
    assert_equal(run(resumed_model, resumed, range(4, 9)), expected)


def test_masters_of_another_model_are_refused_and_nothing_changed() -> None:
    optimizer = FP16_Optimizer(sgd(half_net()))
    before = [p.detach().clone() for p in optimizer.all_fp32_from_fp16_params]
    other = FP16_Optimizer(sgd(network_to_half(nn.Linear(3, 3))))
    with pytest.raises(AmpValueError, match="expected a list of 4 tensors: the masters of"):
        optimizer.load_state_dict(other.state_dict())
    assert_equal(optimizer.all_fp32_from_fp16_params, before)


@pytest.fixture
def apex_modules() -> Any:
    """Modules by the names that apex's pickles refer to, as long as the test lasts."""
    names = ("apex", "apex.amp", "apex.amp.scaler", "apex.fp16_utils", "apex.fp16_utils.loss_scaler")
    modules = {name: types.ModuleType(name) for name in names}
    sys.modules.update(modules)

    def forget() -> None:
        for name in names:
            sys.modules.pop(name, None)

    yield types.SimpleNamespace(scaler=modules["apex.amp.scaler"], forget=forget)
    forget()


def test_an_old_checkpoint_with_a_pickled_scaler_loads(apex_modules: Any) -> None:
    old_class = type("LossScaler", (), {"__module__": "apex.amp.scaler"})
    apex_modules.scaler.LossScaler = old_class
    scaler: Any = old_class()
    vars(scaler).update(_loss_scale=4096.0, _unskipped=17, _overflow_buf=torch.zeros(1).int())
    model = half_net()
    optimizer = FP16_Optimizer(sgd(model), dynamic_loss_scale=True)
    old = {**optimizer.state_dict(), "loss_scaler": scaler}
    file = io.BytesIO()
    torch.save(old, file)
    apex_modules.forget()
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file, weights_only=True)
    file.seek(0)
    with torch.serialization.safe_globals(SAFE_GLOBALS):
        saved = torch.load(file, weights_only=True)
    optimizer.load_state_dict(saved)
    assert optimizer.loss_scale == 4096.0
    assert optimizer.state_dict()["loss_scaler"]["unskipped"] == 17


def state_of_2018(
    optimizer: FP16_Optimizer, flat: bool, dynamic: bool = True, **entries: Any
) -> dict[str, Any]:
    """Return the state of an optimizer as the `FP16_Optimizer` of `apex.optimizers` would save it."""
    inner = copy.deepcopy(optimizer.optimizer.state_dict())
    groups = [[p.detach().clone() for p in group["params"]] for group in optimizer.param_groups]
    state = {"dynamic_loss_scale": dynamic, "cur_scale": 4096.0, "cur_iter": 8}
    if dynamic:
        state |= {"last_overflow_iter": 3, "scale_factor": 4.0, "scale_window": 8}
    if not flat:
        return {**state, "optimizer_state_dict": inner, "fp32_groups": groups, **entries}
    moments: dict[int, Any] = {}
    for i, group in enumerate(inner["param_groups"]):
        each = [inner["state"][key] for key in group["params"]]
        moments[70 + i] = {  # of the flat parameter
            name: torch.cat([entry[name].reshape(-1) for entry in each])
            if each[0][name].dim()
            else each[0][name]
            for name in each[0]
        }
        if isinstance(optimizer.optimizer, FusedAdam):  # of which apex's kept a number
            moments[70 + i]["step"] = int(moments[70 + i]["step"])
        group["params"] = [70 + i]
    masters = [nn.Parameter(torch.cat([p.reshape(-1) for p in group])) for group in groups]
    inner = {"state": moments, "param_groups": inner["param_groups"]}
    return {**state, "optimizer_state_dict": inner, "fp32_groups_flat": masters, **entries}


def two_groups(model: nn.Module, make: Callable[..., Any]) -> FP16_Optimizer:
    """Return an optimizer with decay for matrices alone, as BERT's scripts made it."""
    params = list(model.parameters())
    decay, others = [p for p in params if p.dim() > 1], [p for p in params if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return FP16_Optimizer(make(groups), dynamic_loss_scale=True)


def all_half() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).half()


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda groups: FusedAdam(groups, lr=0.01),
        lambda groups: torch.optim.AdamW(groups, lr=0.01),
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    ],
)
def test_checkpoints_of_apex_optimizers(make: Callable[..., Any], flat: bool) -> None:
    def run(model: nn.Module, optimizer: FP16_Optimizer, steps: range) -> list[Tensor]:
        for i in steps:
            iterate(optimizer, (model(batch(i).half()).float() - i).square().mean() / 2**7)
        return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]

    model = all_half()
    optimizer = two_groups(model, make)
    run(model, optimizer, range(4))
    saved = through_a_file(state_of_2018(optimizer, flat))
    optimizer.loss_scale = 4096.0
    expected = run(model, optimizer, range(4, 8))

    resumed_model = all_half()
    resumed = two_groups(resumed_model, make)
    resumed.load_state_dict(saved)
    assert resumed.loss_scale == 4096.0
    assert resumed.state_dict()["loss_scaler"]["unskipped"] == 4  # good steps since the overflow
    for half, master in zip(resumed.all_fp16_params, resumed.all_fp32_from_fp16_params, strict=True):
        assert torch.equal(half, master.half())
    assert_equal(run(resumed_model, resumed, range(4, 8)), expected)
    assert resumed.loss_scale == 4.0 * 4096.0  # by the factor and the window of the checkpoint
    again = two_groups(all_half(), make)
    again.load_state_dict(resumed.state_dict())


def test_checkpoints_of_apex_optimizers_with_other_scales() -> None:
    model = all_half()
    optimizer = FP16_Optimizer(sgd(model), static_loss_scale=128.0)
    iterate(optimizer, model(batch().half()).float().square().mean())
    static = state_of_2018(optimizer, flat=True, dynamic=False, cur_scale=64.0)
    optimizer.load_state_dict(static)
    assert optimizer.loss_scale == 64.0
    optimizer.load_state_dict(state_of_2018(optimizer, flat=True))  # a dynamic one
    assert optimizer.loss_scale == 64.0
    # The class of contrib has FP32 masters of FP32 parameters too.
    model = half_net()
    optimizer = FP16_Optimizer(sgd(model))
    iterate(optimizer, loss_of(model))
    state = state_of_2018(optimizer, flat=False)
    state["fp32_groups"] = [[p + 1 for p in group] for group in state["fp32_groups"]]
    optimizer.load_state_dict(state)
    assert_equal(optimizer.param_groups[0]["params"], state["fp32_groups"][0])
    assert model[1][1].weight.dtype is torch.float32  # type: ignore[index]


@pytest.mark.parametrize("flat", [True, False])
def test_damaged_checkpoints_of_apex_optimizers(flat: bool) -> None:
    model = all_half()
    optimizer = two_groups(model, lambda groups: FusedAdam(groups, lr=0.01))
    iterate(optimizer, model(batch().half()).float().square().mean())
    good = state_of_2018(optimizer, flat)
    masters = "fp32_groups_flat" if flat else "fp32_groups"
    inner = good["optimizer_state_dict"]
    damaged: list[dict[str, Any]] = [
        {"cur_scale": math.nan},
        {"cur_scale": 0.0},
        {"scale_window": 0},
        {"scale_factor": 0.5},
        {"cur_iter": -1},
        {"last_overflow_iter": 9},
        {"dynamic_loss_scale": "yes"},
        {masters: None},
        {masters: good[masters][:1]},
        {masters: good[masters][::-1]},
        {masters: [good[masters][0], None]},
        {"optimizer_state_dict": None},
        {"optimizer_state_dict": {**inner, "param_groups": inner["param_groups"][:1]}},
        {"optimizer_state_dict": {**inner, "state": {**inner["state"], 99: {}}}},
        {"optimizer_state_dict": {**inner, "state": dict.fromkeys(inner["state"], 1)}},
        {
            "optimizer_state_dict": {
                **inner,
                "state": {k: {**v, "step": -1} for k, v in inner["state"].items()},
            }
        },
    ]
    if flat:
        whole = good[masters]
        damaged += [
            {masters: [whole[0] * math.nan, whole[1]]},
            {masters: [whole[0][:-1], whole[1]]},
            {
                "optimizer_state_dict": {
                    "state": {k: {**v, "exp_avg": v["exp_avg"][1:]} for k, v in inner["state"].items()},
                    "param_groups": inner["param_groups"],
                }
            },
            {
                "optimizer_state_dict": {
                    **inner,
                    "param_groups": [{**g, "params": [[1]]} for g in inner["param_groups"]],
                }
            },
        ]
    before = copy.deepcopy(optimizer.state_dict())
    config = optimizer.loss_scaler.config
    for entries in damaged:
        with pytest.raises(AmpError, match="state_dict|fp32_groups|cur_|scale_|last_|99"):
            optimizer.load_state_dict({**good, **entries})
        for name in ("cur_scale", "dynamic_loss_scale", "scale_window", "optimizer_state_dict"):
            if entries.keys() == {name}:
                with pytest.raises(AmpError):
                    optimizer.load_state_dict({k: v for k, v in good.items() if k != name})
    after = optimizer.state_dict()
    assert str(after) == str(before)
    assert optimizer.loss_scaler.config is config
    optimizer.load_state_dict(good)


def test_names_of_2018() -> None:
    optimizer = FP16_Optimizer(sgd(half_net()), static_loss_scale=8.0, verbose=False)
    assert optimizer.cur_scale == optimizer.loss_scaler.loss_scale() == 8.0


def test_it_is_neither_pickled_nor_unpickled() -> None:
    with pytest.raises(AmpRuntimeError, match=r"saved by state_dict\(\)"):
        pickle.dumps(FP16_Optimizer(sgd(half_net())))


# Scalers


def test_a_static_scaler() -> None:
    scaler = LossScaler(8)
    x = nn.Parameter(torch.ones(2))
    scaler.backward((3 * x).sum())
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2,), 24.0))
    x.grad[0] = math.inf
    assert not scaler.has_overflow([x])
    scaler.update_scale(True)
    assert scaler.loss_scale == scaler.cur_scale == 8.0
    assert torch.equal(scaler.scale_gradient(None, (x.detach(), None), ())[0], torch.full((2,), 8.0))  # type: ignore[arg-type]
    scaler.cur_scale = 16.0
    assert scaler.loss_scale == 16.0
    with pytest.raises(AmpValueError, match="init=0"):
        LossScaler(0)


def reference(overflows: str, factor: float, window: int, scale: float) -> list[float]:
    """The rule of apex.fp16_utils, as its documentation has it."""
    trace, last = [], -1
    for i, symbol in enumerate(overflows):
        if symbol == "x":
            scale, last = max(scale / factor, 1.0), i
        elif (i - last) % window == 0:
            scale *= factor
        trace.append(scale)
    return trace


@pytest.mark.parametrize(
    "overflows", ["." * 12, "x" * 40, "..x....x.x......x...", "x..x...x.........."]
)
@pytest.mark.filterwarnings("ignore:[0-9]+ overflows in a row")
@pytest.mark.parametrize("window", [1, 3])
def test_a_dynamic_scaler(overflows: str, window: int) -> None:
    scaler = DynamicLossScaler(init_scale=2.0**12, scale_factor=2.0, scale_window=window)
    trace = []
    for symbol in overflows:
        x = nn.Parameter(torch.ones(2))
        x.grad = torch.tensor([1.0, math.nan if symbol == "x" else 1.0])
        overflow = scaler.has_overflow([x])
        assert overflow is (symbol == "x")
        scaler.update_scale(overflow)
        trace.append(scaler.loss_scale)
    assert trace == reference(overflows, 2.0, window, 2.0**12)
    assert scaler.cur_iter == len(overflows)
    assert DynamicLossScaler._has_inf_or_nan(torch.tensor([math.inf]))
    assert DynamicLossScaler().loss_scale == 2.0**32


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_scalers_are_copied_with_where_they_are(copied: Callable[[Any], Any]) -> None:
    scaler = DynamicLossScaler(init_scale=16.0, scale_window=4)
    for overflow in (True, False, False):
        scaler.update_scale(overflow)
    twin = copied(scaler)
    for _ in range(6):
        for one in (scaler, twin):
            one.update_scale(False)
        assert twin.loss_scale == scaler.loss_scale
    assert scaler.loss_scale == 32.0
    assert copied(LossScaler(4)).loss_scale == 4.0


# Models and lists


def test_half_models_keep_batch_norms_wide() -> None:
    model = half_net()
    assert [p.dtype for p in model.parameters()].count(torch.float32) == 2
    assert model(batch()).dtype is torch.float16
    assert isinstance(model[0], tofp16)  # type: ignore[index]
    wide = BN_convert_float(net().half())
    assert {p.dtype for p in wide[1].parameters()} == {torch.float32}
    assert {b.dtype for b in wide[1].buffers()} == {torch.float32, torch.int64}
    wrapped = FP16Model(net())
    assert wrapped(batch()).dtype is torch.float16
    assert {p.dtype for p in convert_network(net(), torch.bfloat16)[0].parameters()} == {torch.bfloat16}
    recurrent = convert_network(nn.LSTM(3, 4), torch.float16)
    assert {p.dtype for p in recurrent.parameters()} == {torch.float16}


@pytest.mark.parametrize("flat", [False, True])
def test_lists_of_masters(flat: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).half()
    model[1].bias.requires_grad_(False)
    params, masters = prep_param_lists(model, flat_master=flat)
    assert len(params) == 3
    assert len(masters) == (1 if flat else 3)
    (model(batch().half()).float() * 8).sum().backward()
    model_grads_to_master_grads(params, masters, flat_master=flat)
    grads = torch.cat([p.grad.flatten().float() for p in params if p.grad is not None])
    assert torch.equal(torch.cat([m.grad.flatten() for m in masters if m.grad is not None]), grads)
    torch.optim.SGD(masters, lr=0.01).step()
    master_params_to_model_params(params, masters, flat_master=flat)
    stepped = torch.cat([m.detach().flatten() for m in masters])
    assert torch.equal(torch.cat([p.detach().flatten() for p in params]), stepped.half())
    assert to_python_float(clip_grad_norm(masters, 1.0)) > 0


def test_lists_that_do_not_fit() -> None:
    model = net().half()
    params, masters = prep_param_lists(model)
    with pytest.raises(AmpValueError, match="do not match, with flat_master=False"):
        model_grads_to_master_grads(params, masters[1:])
    with pytest.raises(AmpTypeError, match="flat_master=True takes parameters of one dtype"):
        prep_param_lists(BN_convert_float(model), flat_master=True)
    flat_params, flat = prep_param_lists(net().half(), flat_master=True)
    with pytest.raises(AmpValueError, match="6 of 6 parameters have no gradient, and a flat master"):
        model_grads_to_master_grads(flat_params, flat, flat_master=True)
    with pytest.raises(AmpValueError, match="no parameter of this Linear requires a gradient"):
        prep_param_lists(nn.Linear(2, 2).requires_grad_(False))
    model_grads_to_master_grads(params, masters)
    assert all(m.grad is None for m in masters)


def test_numbers_of_tensors_and_lists() -> None:
    assert to_python_float(torch.tensor(2.5)) == 2.5
    assert to_python_float([3.0]) == 3.0
