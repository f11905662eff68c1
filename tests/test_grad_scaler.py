"""GradScaler does what torch's does, bit for bit, and what torch's does not."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import random
import warnings
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp
from amp.errors import AmpAssertionError, AmpRuntimeError, AmpTypeError, AmpValueError, AmpWarning
from amp.optimizers import FusedAdam, FusedSGD
from tests.models import run_backward
from tests.states import assert_same

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "AdamW(fused)": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "SGD(fused)": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
}


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def begun(scaler: amp.GradScaler) -> amp.GradScaler:
    """Scale something, as a script does before it unscales gradients."""
    scaler.scale(torch.ones(()))
    return scaler


def loss_of(model: nn.Module, i: int, overflows: bool = False) -> Tensor:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(i))
    return model(x).square().mean() * (math.inf if overflows else 1.0)


def iterate(scaler: Any, model: nn.Module, optimizer: Any, overflows: bool = False) -> None:
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 0, overflows)).backward()
    scaler.step(optimizer)
    scaler.update()


def train(scaler: Any, make: Callable[[Any], Any], steps: int = 30, clip: bool = False) -> list[Any]:
    """Return what there is after each step: scale, tracker and weights."""
    model = net()
    optimizer = make(model.parameters())
    overflows = random.Random(7)
    trace: list[Any] = []
    for i in range(steps):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, i, overflows.random() < 0.2)).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        trace.append((scaler.get_scale(), scaler._get_growth_tracker()))
        trace.append([p.detach().clone() for p in model.parameters()])
    return trace


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_bitwise_torchs(name: str, clip: bool) -> None:
    options: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 3}
    mine = train(amp.GradScaler("cpu", **options), OPTIMIZERS[name], clip=clip)
    torchs = train(torch.amp.GradScaler("cpu", **options), OPTIMIZERS[name], clip=clip)
    assert_same(mine, torchs)


@pytest.mark.filterwarnings("ignore:[0-9]+ overflows in a row")
@pytest.mark.parametrize("seed", range(5))
def test_the_schedule_is_torchs_to_the_last_bit(seed: int) -> None:
    numbers = random.Random(seed)
    options = {
        "init_scale": numbers.uniform(1, 1e5),
        "growth_factor": numbers.uniform(1.01, 3),
        "backoff_factor": numbers.uniform(0.1, 0.99),
        "growth_interval": numbers.randint(1, 5),
    }
    scalers: list[Any] = [cls("cpu", **options) for cls in (amp.GradScaler, torch.amp.GradScaler)]
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for _ in range(200):
        bad = numbers.random() < 0.25
        for scaler in scalers:
            optimizer.zero_grad()
            scaler.scale(parameter.sum() * (math.nan if bad else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        if scalers[0].get_scale() < 1e-30:
            break


def test_it_is_torchs_class_and_takes_either_order_of_arguments() -> None:
    for scaler in (
        amp.GradScaler("cpu", 1024.0, 3.0, 0.25, 7, True),
        amp.GradScaler(1024.0, 3.0, 0.25, 7, True, device="cpu"),  # pyright: ignore[reportCallIssue]
        amp.GradScaler(
            torch.device("cpu"),
            init_scale=1024,
            growth_factor=3,
            backoff_factor=0.25,
            growth_interval=7,
        ),
    ):
        assert isinstance(scaler, torch.amp.GradScaler)
        assert scaler.is_enabled()
        assert scaler.get_scale() == 1024.0
        assert scaler.get_growth_factor() == 3.0
        assert scaler.get_backoff_factor() == 0.25
        assert scaler.get_growth_interval() == 7


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a GPU")
def test_without_a_gpu_it_is_disabled_and_says_so() -> None:
    with pytest.warns(AmpWarning, match=r"there is no GPU: it is disabled.*use GradScaler\('cpu'\)"):
        scaler = amp.GradScaler()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = loss_of(model, 0)
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    before = model[0].weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before, model[0].weight)
    assert not scaler.is_enabled()
    assert not scaler.step_was_skipped(optimizer)
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})
    assert scaler.get_growth_interval() == 2000
    assert not pickle.loads(pickle.dumps(scaler)).is_enabled()


Pair = namedtuple("Pair", "a b")


def test_what_it_scales() -> None:
    scaler = amp.GradScaler("cpu", init_scale=4.0)
    one = torch.ones(2)
    nested = scaler.scale([one, (one, Pair(one, [one])), {"x": one}])
    assert isinstance(nested, list)
    assert isinstance(nested[1], tuple)
    assert isinstance(nested[1][1], Pair)
    assert torch.equal(nested[1][1].b[0], 4 * one)
    assert torch.equal(nested[2]["x"], 4 * one)
    assert [x.sum().item() for x in scaler.scale(one for _ in range(2))] == [8.0, 8.0]
    big = torch.full((2,), 60000.0, dtype=torch.float16)
    assert torch.equal(scaler.scale(big), torch.full((2,), 240000.0))
    for wrong in (3.0, "loss", None, [1.0]):
        with pytest.raises(AmpValueError, match="give it a tensor or an iterable of tensors"):
            scaler.scale(wrong)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["SGD", "FusedSGD"])
def test_gradients_of_every_precision(name: str, dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=dtype))
    scaler = amp.GradScaler("cpu", init_scale=128.0)
    optimizer = OPTIMIZERS[name]([parameter])
    scaler.scale((parameter * torch.tensor([1.0, 2.0, 3.0], dtype=dtype)).sum()).backward()
    assert parameter.grad is not None
    assert parameter.grad[0] == 128
    scaler.step(optimizer)
    scaler.update()
    expected = 1 - 0.1 * torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(parameter.detach().float(), expected, rtol=1e-2, atol=0)
    assert not scaler.step_was_skipped(optimizer)


def test_a_gradient_that_cannot_be_unscaled_is_named_and_nothing_changed() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = torch.optim.SGD([first, second], lr=0.1)
    scaler = amp.GradScaler("cpu")
    scaler.scale(first.sum() + second.abs().sum()).backward()
    with pytest.raises(AmpTypeError, match=r"shape \(3,\) \(number 1 of .* SGD\) is torch.complex64"):
        scaler.step(optimizer)
    assert first.grad is not None
    assert torch.equal(first.grad, torch.full((2,), 65536.0))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_becomes_inf_by_unscaling_is_noticed(name: str) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = OPTIMIZERS[name]([parameter])
    scaler = begun(amp.GradScaler("cpu", init_scale=2.0**-20))
    parameter.grad = torch.full((3,), 1e35)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.step_was_skipped(optimizer)
    assert torch.equal(parameter, torch.ones(3))
    assert scaler.get_scale() == 2.0**-21


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sparse_gradients(dtype: torch.dtype) -> None:
    """Two entries of one row, whose sum is what overflows."""
    table = nn.Embedding(4, 2, sparse=True)
    table.weight.data = torch.ones(4, 2, dtype=dtype)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.5)
    for value, skips in ((1.0, False), (40000.0, dtype is torch.float16)):
        table.weight.data.fill_(1.0)
        scaler = begun(amp.GradScaler("cpu", init_scale=1.0))
        indices = torch.tensor([[1, 1]])
        values = torch.full((2, 2), value, dtype=dtype)
        table.weight.grad = torch.sparse_coo_tensor(indices, values, (4, 2), check_invariants=True)
        scaler.step(optimizer)
        assert scaler.step_was_skipped(optimizer) is skips
        assert table.weight[1, 0] == (1.0 if skips else 1 - value)
        assert table.weight[0, 0] == 1


def test_several_optimizers_back_off_once_and_skip_each_for_itself() -> None:
    models = [net(), net()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    scaler = amp.GradScaler("cpu", init_scale=64.0)
    for overflows in ([True, False], [True, True], [False, False]):
        before = scaler.get_scale()
        for model, optimizer, bad in zip(models, optimizers, overflows, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, 1, bad)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert [scaler.step_was_skipped(optimizer) for optimizer in optimizers] == overflows
        assert scaler.get_scale() == before * (0.5 if any(overflows) else 1.0)


def test_calls_out_of_order() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = amp.GradScaler("cpu")
    with pytest.raises(AmpRuntimeError, match="was not stepped by this GradScaler yet"):
        scaler.step_was_skipped(optimizer)
    for call in (scaler.unscale_, scaler.step, lambda _: scaler.update()):
        with pytest.raises(AmpAssertionError, match="before GradScaler.scale: no loss was scaled yet"):
            call(optimizer)
    loss = scaler.scale(loss_of(model, 0))
    with pytest.raises(AmpAssertionError, match="none of its parameters has a gradient"):
        scaler.step(optimizer)
    with pytest.raises(AmpAssertionError, match="no optimizer was stepped or unscaled"):
        scaler.update()
    loss.backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(optimizer)
    with pytest.raises(AmpAssertionError, match=r"Call scaler.update\(\) first"):
        pickle.dumps(scaler)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called since the last update"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="unscale_.. is being called after step"):
        scaler.unscale_(optimizer)
    scaler.update()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_closure_is_refused_however_it_is_passed(name: str) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    before = [p.detach().clone() for p in model.parameters()]
    for args, kwargs in (((lambda: 0,), {}), ((), {"closure": lambda: 0})):
        with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
            scaler.step(optimizer, *args, **kwargs)
    assert all(map(torch.equal, before, model.parameters()))
    scaler.step(optimizer)
    scaler.update()


def test_what_the_step_returns_and_is_given() -> None:
    class Curious(torch.optim.SGD):
        def step(self, closure: Any = None, *, more: int = 0) -> Any:  # type: ignore[override]
            super().step()
            return more

    model = net()
    optimizer = Curious(model.parameters(), lr=0.1)
    scaler = amp.GradScaler("cpu")
    for bad, expected in ((False, 7), (True, None)):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, 0, bad)).backward()
        assert scaler.step(optimizer, more=7) == expected
        scaler.update()


@pytest.mark.parametrize(
    "new",
    [8.0, 8, torch.tensor(8.0), torch.tensor([8.0]), torch.tensor([[8]]), torch.ones(1).half() * 8],
)
def test_a_scale_of_the_users_own(new: Any) -> None:
    scaler = amp.GradScaler("cpu", growth_interval=2)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    iterate(scaler, model, optimizer)
    scaler.update(new)
    assert scaler.get_scale() == 8.0
    assert scaler._get_growth_tracker() == 1
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 0)).backward()
    scaler.unscale_(optimizer)
    unscaled = model[0].weight.grad.clone()
    model.zero_grad()
    loss_of(model, 0).backward()
    torch.testing.assert_close(unscaled, model[0].weight.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "new",
    [
        *(0.0, -1.0, math.inf, math.nan),
        *(torch.ones(2), torch.tensor(0.0), torch.ones(1, requires_grad=True)),
    ],
)
def test_a_scale_that_cannot_be_is_refused(new: Any) -> None:
    scaler = amp.GradScaler("cpu")
    with pytest.raises(AmpValueError, match=r"scale"):
        scaler.update(new)
    assert scaler.get_scale() == 65536.0


WRONG: list[tuple[str, Any]] = [
    *[("init_scale", x) for x in (0.0, -1.0, math.inf, math.nan)],
    *[("growth_factor", x) for x in (1.0, 0.5, math.nan, math.inf, "fast")],
    *[("backoff_factor", x) for x in (1.0, 0.0, -1.0, math.nan)],
    *[("growth_interval", x) for x in (0, -1, 1.5, math.nan)],
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_numbers_that_make_no_sense_are_refused(name: str, value: Any) -> None:
    with pytest.raises(AmpValueError, match=name.removesuffix("_scale")):
        amp.GradScaler("cpu", **{name: value})
    if name == "init_scale":
        return
    scaler = amp.GradScaler("cpu")
    before = scaler.state_dict()
    with pytest.raises(AmpValueError, match=name):
        getattr(scaler, f"set_{name}")(value)
    with pytest.raises(AmpValueError, match=name):
        scaler.load_state_dict({**before, name: value})
    assert scaler.state_dict() == before


def test_setters_change_what_comes() -> None:
    scaler = amp.GradScaler("cpu", init_scale=16.0)
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(1)
    assert scales(scaler, ".x") == [64.0, 16.0]


def scales(scaler: amp.GradScaler, overflows: str) -> list[float]:
    begun(scaler)
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    trace = []
    for symbol in overflows:
        parameter.grad = torch.tensor([math.inf if symbol == "x" else 0.0])
        scaler.step(optimizer)
        scaler.update()
        trace.append(scaler.get_scale())
    return trace


def test_bounds_and_hysteresis() -> None:
    bounded = amp.GradScaler("cpu", init_scale=4.0, growth_interval=1, min_scale=2.0, max_scale=8.0)
    assert scales(bounded, "...xxxx.") == [8.0, 8.0, 8.0, 4.0, 2.0, 2.0, 2.0, 4.0]
    patient = amp.GradScaler("cpu", init_scale=8.0, hysteresis=2, growth_interval=3)
    assert scales(patient, "x.x...x") == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0]
    with pytest.raises(AmpValueError, match="min=4.0 is above max=2.0"):
        amp.GradScaler("cpu", min_scale=4.0, max_scale=2.0)


def test_the_scale_never_reaches_zero_and_endless_overflows_are_explained() -> None:
    scaler = amp.GradScaler("cpu")
    with pytest.warns(AmpWarning, match="scaling is not the cause"):
        trace = scales(scaler, "x" * 200)
    assert trace[-1] == 2.0**-126


def test_states_go_to_torchs_and_come_back() -> None:
    mine = amp.GradScaler("cpu", init_scale=32.0, growth_interval=5)
    scales(mine, "..x..")
    torchs = torch.amp.GradScaler("cpu")
    torchs.load_state_dict(mine.state_dict())
    assert (torchs.get_scale(), torchs._get_growth_tracker()) == (16.0, 2)
    back = amp.GradScaler("cpu")
    back.load_state_dict(torchs.state_dict())
    assert scales(back, "...") == scales(mine, "...") == [16.0, 16.0, 32.0]
    assert back.get_growth_interval() == 5


def test_a_state_that_cannot_be_loaded_changes_nothing() -> None:
    scaler = amp.GradScaler("cpu", hysteresis=2)
    before = scaler.state_dict()
    with pytest.raises(AmpRuntimeError, match="saved from a GradScaler that was disabled"):
        scaler.load_state_dict({})
    with pytest.raises(AmpValueError, match="has no growth_factor, .*, only scale: it is not a GradSc"):
        scaler.load_state_dict({"scale": 2.0})
    wrong = {"scale": math.nan, "_hysteresis_left": math.nan, "_growth_tracker": 1e39}
    for name, value in {**wrong, "growth_interval": 10**400}.items():
        with pytest.raises(AmpValueError, match=name.removeprefix("_hy")):
            scaler.load_state_dict({**before, "scale": 2.0, name: value})
    assert scaler.state_dict() == before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_go_on_as_the_original(copied: Callable[[Any], Any]) -> None:
    scaler = amp.GradScaler("cpu", init_scale=64.0, hysteresis=2, growth_interval=4, max_scale=128.0)
    scales(scaler, "x..")
    twin = copied(scaler)
    assert scales(twin, "x......") == scales(scaler, "x......")


@pytest.mark.parametrize("cls", [amp.GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), None])
def test_what_is_known_before_the_first_loss_is_as_in_torch(copied: Any, cls: Any) -> None:
    """Subclasses and pickles read `_scale`, `_init_scale` and `_init_growth_tracker`."""
    saved = cls("cpu", init_scale=64.0, growth_interval=9)
    saved._init_growth_tracker = 5
    assert saved._scale is None
    assert saved.state_dict()["_growth_tracker"] == 5
    scaler = cls("cpu")
    scaler.load_state_dict(saved.state_dict())
    scaler = scaler if copied is None else copied(scaler)
    assert (scaler._scale, scaler._growth_tracker) == (None, None)
    assert (scaler._init_scale, scaler._init_growth_tracker) == (64.0, 5)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (64.0, 5)
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.scale(parameter.sum()).backward()
    assert (scaler._scale, scaler._growth_tracker) == (64.0, 5)
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (64.0, 6)
    assert parameter == 0.0


def test_a_first_scale_near_the_end_of_float32_stays_finite() -> None:
    scaler = amp.GradScaler("cpu", init_scale=1e38, growth_factor=16.0, growth_interval=1)
    assert scales(scaler, "..") == [torch.tensor(1e38).item()] * 2
    assert scales(scaler, "x")[0] == pytest.approx(5e37)
    assert scales(scaler, ".") == [torch.tensor(1e38).item()]


def test_a_disabled_scaler_takes_any_numbers() -> None:
    nonsense: dict[str, Any] = {
        "init_scale": 0.0,
        "growth_factor": 0.5,
        "backoff_factor": 3.0,
        "growth_interval": -1,
        "min_scale": -1.0,
        "max_scale": math.nan,
        "hysteresis": 0,
    }
    scaler = amp.GradScaler("cpu", enabled=False, **nonsense)
    scaler.set_growth_factor(0.0)
    scaler.set_backoff_factor(2.0)
    scaler.set_growth_interval(-3)
    assert scaler.get_scale() == 1.0
    assert scaler.scale(torch.ones(())) == 1.0


def test_what_subclasses_of_torchs_override_is_called() -> None:
    calls: list[str] = []

    class Own(amp.GradScaler):
        def _unscale_grads_(
            self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
        ) -> dict[torch.device, Tensor]:
            calls.append("unscale")
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

        def _maybe_opt_step(self, *args: Any, **kwargs: Any) -> float | None:
            calls.append("step")
            return super()._maybe_opt_step(*args, **kwargs)

    train(Own("cpu"), OPTIMIZERS["SGD"], steps=2)
    assert calls == ["unscale", "step"] * 2


def test_optimizers_that_skip_on_the_device_tell_without_waiting() -> None:
    model = net()
    optimizer = FusedAdam(model.parameters())
    scaler = amp.GradScaler("cpu")
    for bad in (False, True, False):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, 0, bad)).backward()
        scaler.step(optimizer)
        assert scaler.step_was_skipped(optimizer, wait=False) is bad
        assert scaler.step_was_skipped(optimizer) is bad
        scaler.update()


def test_gradient_penalty_and_accumulation_as_in_torchs_examples() -> None:
    ends = []
    for cls, accumulate in itertools.product((amp.GradScaler, torch.amp.GradScaler), (1, 3)):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = cls("cpu", init_scale=256.0)
        for i in range(6):
            loss = loss_of(model, i)
            params = list(model.parameters())
            grads = torch.autograd.grad(scaler.scale(loss), params, create_graph=True)
            inverse = 1.0 / scaler.get_scale()
            penalty = torch.stack([(g * inverse).square().sum() for g in grads]).sum().sqrt()
            scaler.scale((loss + penalty) / accumulate).backward()
            if (i + 1) % accumulate == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        ends.append([p.detach() for p in model.parameters()])
    for mine, torchs in zip(ends[:2], ends[2:], strict=True):
        assert all(map(torch.equal, mine, torchs))


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
@pytest.mark.parametrize("optimizer_class", [FusedAdam, torch.optim.AdamW])
def test_torchs_grad_scaler_steps_a_fused_optimizer_of_a_session(
    level: str, optimizer_class: Any
) -> None:
    """Where amp scales nothing, a script may keep its own GradScaler."""

    def train(level: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        model: Any = nn.Linear(4, 4)
        more: dict[str, Any] = {} if optimizer_class is FusedAdam else {"fused": True}
        optimizer: Any = optimizer_class(model.parameters(), lr=0.1, eps=0.1, **more)
        if level is not None:
            amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
        for i in range(6):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).float().pow(2).sum() * (math.inf if i == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return [p.detach().clone() for p in model.parameters()]

    torch.testing.assert_close(train(level), train(None), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("optimizer_class", [FusedAdam, FusedSGD, torch.optim.Adam])
def test_torchs_grad_scaler_around_the_loss_of_a_block(level: str, optimizer_class: Any) -> None:
    """Two scales multiply; where amp has none, that is no mistake."""
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 4)
    more: dict[str, Any] = {} if optimizer_class is not torch.optim.Adam else {"fused": True}
    made: Any = optimizer_class(model.parameters(), lr=0.01, **more)
    model, optimizer = amp.initialize(model, made, opt_level=level, verbosity=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    weights = []
    with warnings.catch_warnings():
        if level in ("O1", "O2"):
            warnings.filterwarnings("ignore", "GradScaler.step calls")
        for i in range(4):
            optimizer.zero_grad()
            x = torch.ones(2, 4) * (math.inf if i == 2 else 1.0)
            run_backward(scaler.scale(model(x).float().pow(2).mean()), optimizer)
            scaler.step(optimizer)
            scaler.update()
            weights.append(model.weight.detach().clone())
    assert weights[-1].isfinite().all()
    assert torch.equal(weights[1], weights[2])  # the batch with inf
    if level not in ("O1", "O2"):
        assert not torch.equal(weights[2], weights[3])
