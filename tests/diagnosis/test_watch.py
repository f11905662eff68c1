"""`amp.watch` on scripts that never call `initialize`: what it finds, and that it changes nothing."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset

import amp
from amp.diagnosis import advice, watching
from amp.diagnosis.places import Place, open_modes
from tests.diagnosis import users_scripts
from tests.diagnosis.users_scripts import FAULTS, MODELS, X, Y, healthy, net, steps

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")


def line_at_fault(script: Callable[[], None]) -> int | None:
    lines, first = inspect.getsourcelines(script)
    return next((first + i for i, line in enumerate(lines) if line.endswith("# here\n")), None)


@pytest.mark.parametrize("script", FAULTS, ids=lambda script: script.__name__)
def test_a_users_script(script: Callable[[], None]) -> None:
    cause, part = FAULTS[script]
    with amp.watch() as watch:
        script()
    named = [x for x in watch.report.findings if x.cause == cause and part in x.what]
    assert named, str(watch.report)
    line = line_at_fault(script)
    if line is not None:
        assert (named[0].file, named[0].line) == (users_scripts.__file__, line)
    assert "rules:" not in str(watch.report)
    if cause not in ("mathematics", "still", "range"):
        assert "mathematics" not in str(watch.report)


def adversaries() -> None:
    """Two nets and a scaler: each leaves scaled gradients in the other; and one net in FP32."""
    nets = net(), net()
    optimizers = [torch.optim.SGD(each.parameters(), 1e-3) for each in nets]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plain = net()
    without_it = torch.optim.SGD(plain.parameters(), 1e-3)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
            losses = [users_scripts.scaled(each, scaler, 0.5) for each in nets]
            sum(losses).backward()  # type: ignore[union-attr]
            scaler.step(optimizer)
            F.cross_entropy(plain(X), Y).backward()
            without_it.step()
        scaler.update()


@pytest.mark.parametrize(
    "script",
    [
        adversaries,
        lambda: users_scripts.penalty_of_a_gradient(1024.0),
        lambda: users_scripts.masters_by_hand(1e-9, come_back=True),
    ],
    ids=["adversaries", "penalty", "masters"],
)
def test_what_is_done_by_hand_and_rightly_is_nothing_to_say(script: Callable[[], None]) -> None:
    with amp.watch() as watch:
        script()
    assert watch.report.is_healthy, str(watch.report)


def has_recurrent_bfloat16() -> bool:
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(2, 2)(torch.ones(1, 1, 2))
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        (model, precision)
        for model in MODELS
        for precision in ("float32", "bfloat16", "float16")
        if (model, precision) != ("recurrent", "float16")  # which torch does not have on a CPU
    ],
)
def test_a_healthy_script_hears_nothing_and_keeps_its_bits(model: str, precision: str) -> None:
    if (model, precision) == ("recurrent", "bfloat16") and not has_recurrent_bfloat16():
        pytest.skip("oneDNN has no LSTM in bfloat16 for this CPU")
    torch.manual_seed(0)
    expected = healthy(MODELS[model](), precision)
    torch.manual_seed(0)
    with amp.watch() as watch:
        found = healthy(MODELS[model](), precision)
    assert watch.report.is_healthy, str(watch.report)
    assert watch.report.ops > 100
    assert all(map(torch.equal, found, expected))


def test_what_it_attached_to_is_one_line() -> None:
    with amp.watch() as watch:
        healthy(net(), "float16")
    about = "Sequential, 740 parameters in float32, AdamW, a GradScaler, 6 steps"
    assert watch.about == f"{about}; training ended before step 20"
    with amp.watch() as watch:
        net()(X)
    assert watch.about == "no optimizer was made"


def test_torch_is_as_before() -> None:
    functions = (torch.optim.Optimizer, "__init__"), (torch.autograd, "backward"), (nn.Module, "_apply")
    before = [getattr(*each) for each in functions]
    with pytest.raises(ZeroDivisionError), amp.watch():
        healthy(net(), "float32", 1)
        raise ZeroDivisionError
    assert [getattr(*each) for each in functions] == before
    assert not torch.nn.modules.module._global_forward_pre_hooks


def gan(loud: float) -> None:
    """The second optimizer's loss overflows."""
    torch.manual_seed(0)
    models: Any = [net().half(), net().half()]
    optimizers = [torch.optim.SGD(model.parameters(), 1e-3) for model in models]
    for _ in range(3):
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            out = model(X.half()) * (loud if i else 1.0)
            F.cross_entropy(out.float(), Y).backward()
            optimizer.step()


def test_a_window_has_the_steps_of_all_optimizers() -> None:
    with amp.watch(at=[1]) as watch:
        gan(1e6)
    (found,) = [x for x in watch.report.findings if x.cause == "range"]
    assert found.op == "Tensor.mul"
    assert watch.about.startswith("Sequential, 740 parameters in float16, SGD")


def test_several_micro_batches_and_closures() -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        return loss

    with amp.watch() as watch:
        for _ in range(3):
            optimizer.step(closure)
    assert watch.report.is_healthy, str(watch.report)


def test_a_model_is_copied_and_pickled_inside_a_window() -> None:
    with amp.watch() as watch:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        average = torch.optim.swa_utils.AveragedModel(model)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(X), Y).backward()
            optimizer.step()
            average.update_parameters(model)
            copied = copy.deepcopy(model)
            pickle.loads(pickle.dumps(model))
            assert torch.equal(copied(X), model(X))
    assert watch.report.is_healthy, str(watch.report)
    assert not any(module._forward_pre_hooks for module in model.modules())


class Squares(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Tensor:
        return (torch.ones(16) * index).square() / 1000


def test_workers_of_a_loader_have_no_shadow() -> None:
    loader = DataLoader(Squares(), 16, num_workers=2)
    with amp.watch() as watch:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for x in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert watch.report.is_healthy, str(watch.report)


def loaded(x: Tensor) -> Tensor:
    torch.save(x, file := io.BytesIO())
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


@pytest.mark.parametrize(
    "made",
    [
        lambda x: next(iter(DataLoader(TensorDataset(x), batch_size=8, num_workers=1)))[0],
        lambda x: next(iter(DataLoader(TensorDataset(x), batch_size=8)))[0],
        loaded,
        lambda x: torch.tensor(x.tolist()),
    ],
    ids=["worker", "no worker", "torch.load", "torch.tensor"],
)
def test_a_batch_that_is_not_finite_is_data_however_it_comes(made: Any) -> None:
    model = nn.Linear(6, 1)
    given = torch.randn(8, 6)
    given[2, 1] = math.nan
    with amp.watch() as watch:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(made(given)).mean().backward()
        optimizer.step()
    (found, *_) = watch.report.findings
    assert (found.cause, found.what) == ("data", "argument 'input' is not finite at [2, 1]")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("number", [-1e9, 1e9, -math.inf])
@pytest.mark.parametrize(
    "made",
    [
        torch.tensor,
        lambda number, dtype: torch.tensor(data=[number], dtype=dtype),
        lambda number, dtype: torch.as_tensor([number, 1.0], dtype=dtype)[0],
        lambda number, dtype: torch.zeros(2, dtype=dtype).new_tensor(number),
    ],
)
def test_a_number_that_is_inf_from_birth_is_a_cast(made: Any, number: float, dtype: Any) -> None:
    mask = torch.ones(4, 4, dtype=torch.bool).tril() & (torch.arange(4) != 2)[:, None]
    model = nn.Linear(4, 4).to(dtype)
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-9)
        y = torch.where(mask, model(torch.ones(4, 4, dtype=dtype)), made(number, dtype=dtype))
        y.softmax(-1).float().square().mean().backward()
        optimizer.step()
    found = [(x.cause, x.value) for x in watch.report.findings if x.cause in ("cast", "mathematics")]
    if math.isinf(number):
        assert [cause for cause, _ in found] == ["mathematics"]
    else:
        assert found == ([("cast", 1e9)] if dtype is torch.float16 else [])


class Loud(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 6e4 * 6e4).softmax(-1)


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def compiled_inside(model: Any) -> nn.Module:
    model[1][0] = compiled(model[1][0])
    return model


@pytest.mark.parametrize(
    ("loss_of", "said"),
    [
        (lambda y: y.sqrt().sum(), "torch.sqrt(x + 1e-6)"),
        (lambda y: torch.where(y > 0, y.log(), 0 * y).sum(), "torch.log(x + 1e-6)"),
        (lambda y: y.pow(2).sum(-1).pow(0.5).sum(), "(x + 1e-6).pow(exponent)"),
        (lambda y: (y / y.norm(dim=-1, keepdim=True)).sum(), "x / (y + 1e-6)"),
        (lambda y: (1 / y).sum(), "1 / (x + 1e-6)"),
        (lambda y: (y - 1).sqrt().sum(), "Look at the numbers"),
    ],
)
def test_what_is_infinite_at_0_is_kept_from_it_by_an_eps_inside(loss_of: Any, said: str) -> None:
    model = nn.Linear(4, 4)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        loss_of(model(torch.ones(3, 4))).backward()
        optimizer.step()
    assert watch.report.cause == "mathematics"
    assert said in watch.report.findings[0].advice


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel, compiled_inside])
def test_names_in_wrapped_models_are_those_that_rules_have(wrap: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Sequential(Loud())), nn.Linear(4, 1))
    model[2].register_buffer("positions", torch.arange(600.0))
    wrapped = wrap(model)
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD(wrapped.parameters(), 1e-3)
        with torch.autocast("cpu", torch.float16):
            y = wrapped(torch.randn(8, 4).clamp(min=0.5))
        y.float().mean().backward()
        optimizer.step()
    assert watch.about.startswith("Sequential, 25 parameters")
    assert "module': '1.0.0', 'cast'" in watch.report.findings[0].advice, str(watch.report)
    assert watch.report.findings[0].module == "1.0.0"
    assert all("orig_mod" not in x and x[0].isdigit() for x in watch.report.findings[0].reached)


def test_tensors_of_vmap_have_no_memory() -> None:
    with amp.watch() as watch:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)

        def loss_of(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)

        weights = {name: each.detach() for name, each in model.named_parameters()}
        torch.vmap(torch.func.grad(loss_of), (None, 0, 0))(weights, X[:, None], Y[:, None])
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
    assert watch.report.is_healthy, str(watch.report)


def test_masters_of_the_script_s_own() -> None:
    with amp.watch() as watch:
        model = net().bfloat16()
        masters = [parameter.detach().float() for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(masters, 1e-3)
        for _ in range(3):
            F.cross_entropy(model(X.bfloat16()).float(), Y).backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None  # type: ignore[union-attr]
            optimizer.step()
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    parameter.copy_(master)
    assert watch.report.is_healthy, str(watch.report)
    assert watch.about.startswith("Sequential, 740 parameters in bfloat16, AdamW")


def test_steps_that_a_scaler_skips_at_first_are_no_fault() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    with amp.watch() as watch:
        for _ in range(20):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(X).float(), Y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() < 2.0**24
    assert watch.report.is_healthy, str(watch.report)


@pytest.mark.parametrize("make", [torch.optim.SGD, amp.optimizers.FusedAdam])
def test_a_step_that_amp_skips_is_counted_once(make: Any) -> None:
    with amp.watch() as watch, amp.Session("O2", verbosity=0, loss_scale={"init": 2.0**24}) as session:
        model: Any = net()
        model, optimizer = session.initialize(model, make(model.parameters(), 1e-3))
        for _ in range(24):
            optimizer.zero_grad()
            with session.scale_loss(F.cross_entropy(model(X).float(), Y), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        assert any(row.overflow for row in session.history())
    name = make.__name__
    assert watch.about.startswith("Sequential, ")
    assert "parameters in float16" in watch.about  # as it was in the session, which has ended
    assert watch.about.endswith(f"{name}, at O2, 24 steps")


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5", "O7"])
def test_a_healthy_script_with_amp(level: str) -> None:
    ends = []
    for watched in (False, True):
        torch.manual_seed(0)
        model: Any = net()
        optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-3)
        watch = amp.watch()
        with amp.Session(level, verbosity=0) as session:
            if watched:
                watch.__enter__()
            model, optimizer = session.initialize(model, optimizer)
            for _ in range(24):
                optimizer.zero_grad()
                with session.scale_loss(F.cross_entropy(model(X).float(), Y), optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
            if watched:
                watch.__exit__(None, None, None)
                assert watch.report.is_healthy, str(watch.report)
                assert watch.report.ops > 100
                assert watch._models == [model]  # once, though masters are what the optimizer has
            ends.append([parameter.detach().clone() for parameter in amp.master_params(optimizer)])
    assert all(map(torch.equal, *ends))


def test_an_op_of_the_users_own_library() -> None:
    @torch.library.custom_op("reamp_tests::divided", mutates_args=())
    def divided(x: Tensor) -> Tensor:
        return x / torch.zeros_like(x)

    divided.register_autograd(lambda ctx, grad: grad)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with amp.watch() as watch:
        divided(model(X)).sum().backward()
        optimizer.step()
    (found,) = watch.report.findings
    assert (found.cause, found.what) == (
        "range",
        "the result has an inf, and the op cannot run in FP64",
    )
    assert "reamp_tests.divided" in found.op


def test_accumulated_gradients_that_are_inf_do_not_stand_still() -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu")
    with amp.watch() as watch:
        for _ in range(5):
            optimizer.zero_grad()
            for _ in range(2):
                with torch.autocast("cpu", torch.float16):
                    out = model(X)
                scaler.scale((out.float() + 30).square().sum(1).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert watch.report.is_healthy, str(watch.report)


class Count(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.full((), 1024.0))
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.out(x)


@pytest.mark.parametrize(
    ("level", "rules", "said"),
    [
        ("", [], "Keep buffers in float32: leave out .bfloat16() and .half(), and use torch.autocast."),
        ("O5", [], "rules: [{module: inner, cast: float32}]"),
        ("O5", [{"module": "inner", "cast": "float32"}], "healthy"),
    ],
)
def test_a_buffer_that_stands_still_is_cured_by_no_master(level: str, rules: Any, said: str) -> None:
    model: Any = nn.Sequential()
    model.add_module("inner", Count())
    model = model if level else model.bfloat16()
    with amp.watch(at=[1]) as watch:
        optimizer: Any = torch.optim.SGD(model.parameters(), 10.0)
        if level:
            model, optimizer = amp.initialize(
                model, optimizer, opt_level=level, verbosity=0, rules=rules
            )
        for _ in steps(optimizer):
            F.cross_entropy(model(X if level else X.bfloat16()).float(), Y).backward()
    assert said in str(watch.report)
    assert "O5" not in str(watch.report)


class Guard(torch.autograd.Function):
    """Limits the norm of a gradient, which it computes in the gradient's own format."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,) = grads
        norm = grad.pow(2).sum(-1, keepdim=True).sqrt()
        return grad * (1e3 / norm.clamp(min=1e3))


def test_an_overflow_that_a_scaler_does_not_see_is_named() -> None:
    """A gradient divided by inf is 0, so no step is skipped, and the scale does not go down."""
    first, last = nn.Linear(16, 32), nn.Linear(32, 4)
    optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    with amp.watch() as watch:
        for _ in range(20):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(last(Guard.apply(first(X))).float(), Y) * 3
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 65536.0
    (found,) = watch.report.findings  # that weights stand still is a consequence
    assert (found.cause, found.phase, found.op) == ("absorbed range", "backward", "pow")
    assert "no gradient shows it" in found.what
    assert "loss scale of 65536" in found.what
    assert "x.float()" in found.advice


def test_the_cure_of_a_cancellation_is_where_the_digits_were_lost() -> None:
    model = net()
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for _ in steps(optimizer):
            likely = torch.sigmoid(model(X).bfloat16() + 9)
            lost_at = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
            torch.log(1 - likely).float().mean().backward()
    found = next(x for x in watch.report.findings if x.cause != "loss")  # of the last steps
    assert (found.cause, found.line) == ("cancellation", lost_at + 2)
    assert f"test_watch.py:{lost_at}," in found.advice


@pytest.mark.parametrize("is_cured", [False, True])
def test_of_values_that_the_format_does_not_hold_the_first_is_named(is_cured: bool) -> None:
    """In float32 a later line would be no cure."""
    model = net()
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for _ in steps(optimizer):
            numbers = torch.arange(64, dtype=torch.bfloat16)
            first = (numbers.float() if is_cured else numbers) + 1000
            lost_at = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
            angles = first * numbers / 64
            (model(X) * torch.sin(angles).float().mean()).mean().backward()
    assert watch.report.is_healthy is is_cured
    if not is_cured:
        (found,) = watch.report.findings
        assert (found.cause, found.line) == ("cast", lost_at)
        assert f"test_watch.py:{lost_at}," in found.advice
        assert "it shows at torch.sin" in found.what


def test_of_two_roundings_before_a_difference_of_0_the_larger_one_is_named() -> None:
    """As of the ratio of two policies, which are equal in the first step."""
    model = net()
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        old = F.log_softmax(model(X), 1).detach()
        for _ in steps(optimizer):
            new = F.log_softmax(model(X), 1).bfloat16()
            lost_at = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
            ratio = torch.exp(new.float() - old)
            (ratio - 1 - (new.float() - old)).mean().backward()
    found = [x for x in watch.report.findings if x.cause in ("rounding", "cancellation")]
    assert found
    assert all("bfloat16" in x.what for x in found)
    assert f"test_watch.py:{lost_at}," in found[0].advice


@pytest.mark.parametrize("then", ["nothing", "moved", "set again", "written"])
def test_a_buffer_that_a_cast_has_rounded_matters_as_long_as_it_is_as_it_was(then: str) -> None:
    with amp.watch(at=[1]) as watch:
        model = nn.Sequential(nn.Linear(16, 4))
        model.register_buffer("frequency", torch.linspace(0, 1, 7))
        frequency = model.frequency
        model.bfloat16()
        if then == "moved":
            model._apply(torch.clone)  # as .to of another device
        if then == "set again":
            model.frequency = frequency
        optimizer = torch.optim.SGD(model.parameters(), 10.0)
        for _ in steps(optimizer):
            F.cross_entropy(model(X.bfloat16()).float(), Y).backward()
            if then == "written":
                model.get_buffer("frequency").fill_(1.0)
    is_found = "buffer" in [x.cause for x in watch.report.findings]
    assert is_found == (then in ("nothing", "moved"))


@pytest.mark.parametrize("bad", [0, 1, 2, 3])
def test_a_loss_that_is_nan_between_the_steps_with_a_shadow_is_reported(bad: int) -> None:
    model = net()
    with amp.watch(at=[1, 5]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for step in range(1, 5):
            optimizer.zero_grad()
            target = torch.full((), torch.nan if step >= bad > 0 else 0.0)
            F.l1_loss(model(X), target.expand(len(X), 4)).backward()  # with gradients of 0 for NaN
            optimizer.step()
    found = [(x.cause, x.what) for x in watch.report.findings]
    said = f"the loss of step {bad} is not finite, and this step was not looked at"
    if bad == 1:  # this step was, and those after it have the same loss
        assert [cause for cause, _ in found] == ["mathematics"]
    else:
        assert found == ([("loss", said)] if bad else [])
        assert all(f"--at {bad - 1},{bad}, or amp.watch" in x.advice for x in watch.report.findings)


def test_what_is_computed_in_float32_is_cast_back() -> None:
    said = advice.keep_wide(Place("f", "", "train.py", 3), None)
    assert "x.float() at train.py:3, then .to(x.dtype) where the numbers fit" in said


def test_a_diagnosis_inside_of_a_watch() -> None:
    """A window does not end while another one is open inside of it."""
    model = net()
    with amp.watch(at=[1, 2]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        model, optimizer = amp.initialize(
            model, optimizer, opt_level="O2", loss_scale=128.0, verbosity=0
        )
        for _ in range(2):
            with amp.diagnose(model, optimizer) as report:
                for _ in range(2):
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(X).float(), Y)
                    with amp.scale_loss(loss, optimizer) as scaled_loss:
                        scaled_loss.backward()
                    optimizer.step()
            assert report.is_healthy
            assert report.ops > 0
    assert watch.report.is_healthy
    assert not open_modes()


class AMode(TorchFunctionMode):
    """A mode of a script's own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


def step_once() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).pow(2).mean().backward()
        optimizer.step()


@pytest.mark.parametrize("where", ["default device", "with a device", "a mode of before"])
def test_a_device_or_an_older_mode_does_not_keep_it_from_watching(where: str) -> None:
    with contextlib.ExitStack() as stack:
        if where == "a mode of before":
            stack.enter_context(AMode())
        watch = stack.enter_context(amp.watch())
        if where == "with a device":
            stack.enter_context(torch.device("cpu"))
        if where == "default device":
            torch.set_default_device("cpu")
            stack.callback(torch.set_default_device, None)
        step_once()
    assert watch.report.ops > 0
    assert watch.report.is_healthy, str(watch.report)


def evaluate() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    model(torch.ones(2, 4))
    assert optimizer.state == {}


def step_by_jvp() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    weights = {name: x.detach() for name, x in model.named_parameters()}

    def loss_of(weights: Any) -> Any:
        return torch.func.functional_call(model, weights, torch.ones(2, 4)).pow(2).mean()

    along = {name: torch.randn_like(x) for name, x in weights.items()}
    slope = torch.func.jvp(loss_of, (weights,), (along,))[1]
    for name, x in model.named_parameters():
        x.grad = slope * along[name]
    optimizer.step()


def step_without_a_module() -> None:
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 1e-3)
    weight.pow(2).mean().backward()
    optimizer.step()


def step_under_a_mode() -> None:
    with AMode():
        step_once()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # of torch.func.jvp
@pytest.mark.parametrize(
    ("train", "at", "why"),
    [
        (lambda: None, 1, "no optimizer of torch has stepped here: put steps by hand into"),
        (evaluate, 1, "no optimizer of torch has stepped here"),
        (step_under_a_mode, 1, "the mode AMode was open"),
        (step_once, 9, "training ended after 3 steps, before step 9: give smaller"),
        (step_without_a_module, 1, "what the optimizer steps is in no module"),
        (step_by_jvp, 1, "no backward has begun, as where torch.func computes the gradients"),
    ],
)
def test_nothing_is_not_healthy(train: Callable[[], None], at: int, why: str) -> None:
    with amp.watch(at=[at]) as watch:
        train()
    assert not watch.report.is_healthy
    assert f"nothing was watched: {why}" in str(watch.report)


@pytest.mark.parametrize("much", ["MUCH_TIME", "MUCH_MEMORY", "neither"])
def test_what_a_watch_costs_is_said_after_the_first_forward_of_a_large_model(
    much: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if much != "neither":
        monkeypatch.setattr(watching, much, 0.0)
    said = []
    with amp.watch(at=[1, 2]):
        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        with torch.no_grad():
            model(torch.ones(2, 64))
        for _ in range(3):
            y = model(torch.ones(2, 64))
            said.append(len(caplog.messages))
            y.sum().backward()
            optimizer.step()
    assert said == [much != "neither"] * 3
    assert all(re.match(r"2 watched steps, about \d+ s each, with 0\.0 GB", x) for x in caplog.messages)


def test_a_diagnosis_of_nothing_is_not_healthy() -> None:
    with amp.diagnose(nn.Linear(1, 1)) as report:
        pass
    assert not report.is_healthy
    assert str(report) == "nothing was watched: no op of torch ran"
