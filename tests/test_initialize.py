"""What `initialize` accepts, gives back, refuses, and leaves alone when it fails."""

from __future__ import annotations

import copy
import gc
import logging
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amp
from amp.arguments import advise_on_devices
from amp.kernels import scaled_mm
from amp.training.attached_optimizer import AttachedOptimizer
from tests.covering import covering
from tests.models import (
    CAST_LEVELS,
    LEVELS,
    MODEL_DTYPE,
    TOLERANCE,
    ConvNet,
    adamw,
    batch,
    conv_net,
    linear,
    run_backward,
    sgd,
    started,
    step_on,
    train_on,
)
from tests.states import assert_same


def train_step(model: nn.Module, optimizer: Any, step: int = 0, *, plain: bool = False) -> torch.Tensor:
    """Take a step, in a block or in plain PyTorch, and return the loss before it."""
    images, labels = batch(step)
    optimizer.zero_grad()
    loss = run_backward(F.cross_entropy(model(images), labels), None if plain else optimizer)
    optimizer.step()
    return loss.detach()


# Shapes.


def test_what_comes_back_mirrors_what_went_in() -> None:
    a, b = linear(1), linear(2)
    oa, ob = sgd(a), sgd(b)
    assert amp.initialize(a) is a
    models, optimizers = amp.initialize([a, b], [oa, ob])
    assert models == [a, b]
    assert optimizers == [oa, ob]
    c = linear(3)
    oc = sgd(c)
    model, optimizer = amp.initialize(c, oc)
    assert model is c
    assert optimizer is oc
    assert amp.initialize(linear(), [])[1] == []
    assert isinstance(amp.initialize([linear()]), list)
    d = linear(4)
    models, optimizer = amp.initialize([d], sgd(d))
    assert models == [d]
    assert isinstance(optimizer, torch.optim.SGD)
    e = sgd(linear(5))
    assert amp.initialize(None, e) == (None, e)
    assert amp.initialize([], []) == ([], [])


def test_o0_is_plain_pytorch_bit_for_bit() -> None:
    plain, ours = conv_net(), conv_net()
    plain_optimizer, optimizer = adamw(plain), adamw(ours)
    ours, optimizer = amp.initialize(ours, optimizer, opt_level="O0")
    for step in range(5):
        loss = train_step(plain, plain_optimizer, step, plain=True)
        assert torch.equal(train_step(ours, optimizer, step), loss)
    assert_same(plain.state_dict(), ours.state_dict())


@pytest.mark.parametrize("level", LEVELS)
def test_half_precision_follows_fp32(level: str) -> None:
    reference, model = conv_net(), conv_net()
    reference_optimizer, optimizer = sgd(reference), sgd(model)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level)
    for step in range(5):
        train_step(reference, reference_optimizer, step, plain=True)
        train_step(model, optimizer, step)
    kept = amp.get_session().properties.keep_batchnorm_fp32
    assert model.conv.weight.dtype is MODEL_DTYPE[level]
    of_norm = torch.float32 if kept else MODEL_DTYPE[level]
    assert model.norm.weight.dtype is model.norm.running_mean.dtype is of_norm
    tolerance = TOLERANCE[level]
    for name, value in reference.named_parameters():
        torch.testing.assert_close(
            model.get_parameter(name).float(), value, rtol=tolerance, atol=tolerance
        )


# enabled=False.


def test_disabled_does_nothing() -> None:
    model = linear().half()  # not even refused
    optimizer = sgd(model)
    step = optimizer.step
    assert amp.initialize(model, optimizer, enabled=False, opt_level="nonsense") == (model, optimizer)
    assert optimizer.step == step
    loss = torch.ones((), requires_grad=True)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    assert amp.state_dict() == {}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 1}})
    assert list(amp.master_params(optimizer)) == list(model.parameters())
    assert amp.step_was_skipped(optimizer) is False
    with amp.disable_casts():
        pass


# Refusals.


class Wrapped(nn.parallel.DistributedDataParallel):
    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


class InParts(nn.Module):
    """A model of two parts, of which one may be in a wrapper."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = (
            wrap(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))),
            nn.Linear(8, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(x).relu())
        return out


@pytest.mark.parametrize("opt_level", [f"O{i}" for i in range(6)])
def test_a_part_may_be_in_data_parallel(opt_level: str) -> None:
    weights = []
    for wrap in (nn.Sequential, nn.DataParallel):
        model, optimizer = started(InParts(wrap), lambda p: torch.optim.SGD(p, lr=0.01), opt_level)
        for step in range(3):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
            train_on(model(x).square().mean(), optimizer)
        weights.append(model.state_dict())
        amp.get_session(optimizer).close()
    bare, wrapped = weights
    torch.testing.assert_close(
        {name.replace("encoder.module", "encoder.0"): value for name, value in wrapped.items()},
        dict(bare),
        rtol=0,
        atol=0,
    )


@pytest.mark.parametrize("opt_level", [f"O{i}" for i in range(6)])
def test_a_part_in_ddp_is_refused_where_it_would_reduce_wrongly(opt_level: str) -> None:
    model = InParts(Wrapped)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if opt_level in ("O0", "O4"):
        amp.initialize(model, sgd(model), opt_level=opt_level, verbosity=0)
    else:
        with pytest.raises(RuntimeError, match="the part 'encoder' of the model is in Wrapped already"):
            amp.initialize(model, sgd(model), opt_level=opt_level, verbosity=0)
    assert all(value.dtype is before[name].dtype for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("models", "optimizers", "error", "text"),
    [
        (
            lambda m: nn.DataParallel(m),
            sgd,
            RuntimeError,
            "wrapped in DataParallel already.*bare model",
        ),
        (lambda m: Wrapped(m), sgd, RuntimeError, "is wrapped in Wrapped already"),
        (lambda m: m.half(), sgd, RuntimeError, "parameter 'weight' is torch.float16 already.*FP32"),
        (lambda m: m.bfloat16(), sgd, RuntimeError, "parameter 'weight' is torch.bfloat16 already"),
        (lambda m: (m,), sgd, TypeError, "models must be a torch.nn.Module.*got tuple; make it a list"),
        (lambda m: m.parameters(), sgd, TypeError, "models must be .* got generator"),
        (lambda m: [m, None], sgd, TypeError, "models must be .* got NoneType"),
        (
            lambda m: m,
            lambda m: (sgd(m),),
            TypeError,
            "optimizers must be .* got tuple; make it a list",
        ),
        (lambda m: m, lambda m: "sgd", TypeError, "optimizers must be a torch.optim.Opt.*got str"),
        (lambda m: m, lambda m: [sgd(m)] * 2, RuntimeError, r"optimizers\[1\] is in the list twice"),
    ],
)
def test_what_initialize_refuses(models: Any, optimizers: Any, error: type, text: str) -> None:
    model = linear()
    optimizer = optimizers(model)
    with pytest.raises(error, match=text) as caught:
        amp.initialize(models(model), optimizer, opt_level="O2")
    assert isinstance(caught.value, amp.AmpError)
    assert AttachedOptimizer.of(optimizer) is None


def test_a_half_buffer_is_named() -> None:
    model = conv_net()
    model.offset = model.offset.half()
    with pytest.raises(RuntimeError, match="buffer 'offset' is torch.float16 already"):
        amp.initialize(model, opt_level="O1")


@pytest.mark.parametrize("cast", [None, False])
@pytest.mark.parametrize("masters", [True, "split16"])
def test_a_model_that_is_half_already_where_that_is_allowed(cast: Any, masters: Any) -> None:
    model = linear().half()
    before = [p.detach().clone() for p in model.parameters()]
    options = {"cast_model_type": cast, "master_weights": masters, "loss_scale": 128.0}
    _, optimizer = started(model, sgd, "O2", allow_incoming_model_not_fp32=True, **options)
    assert_same(model.parameters(), before)
    for value, master in zip(before, model.state_dict().values(), strict=True):
        assert torch.equal(master, value.float())
    step_on(torch.stack([p.float().sum() for p in model.parameters()]).sum(), optimizer)
    for value, master in zip(before, model.state_dict().values(), strict=True):
        assert torch.equal(master, value.float() - optimizer.param_groups[0]["lr"])


def test_a_lazy_model_is_refused_until_it_has_weights() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: lazy modules are new
        model = nn.LazyLinear(3)
    with pytest.raises(RuntimeError, match="has no values yet"):
        amp.initialize(model, opt_level="O2")


def test_an_optimizer_of_a_live_session_is_refused_and_one_of_a_closed_is_not() -> None:
    model, optimizer = started(linear(), sgd, "O1")
    with pytest.raises(RuntimeError, match=r"get_session\(optimizer\).close\(\)"):
        amp.initialize(linear(), optimizer, opt_level="O1")
    amp.get_session(optimizer).close()
    amp.initialize(model, optimizer, opt_level="O1")
    train_linear(model, optimizer)


def train_linear(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    step_on(model(torch.ones(2, 4)).float().pow(2).sum(), optimizer)


def test_numbers_of_every_kind_are_numbers() -> None:
    import numpy as np

    two: Any = np.int64(2)
    one: Any = np.int64(1)
    scales: list[Any] = [np.float32(128), torch.tensor(64.0)]
    model, optimizer = started(linear(), sgd, "O2", num_losses=two, loss_scale=scales[0])
    run_backward(model(torch.ones(1, 4)).sum(), optimizer, loss_id=one)
    amp.initialize(linear(), opt_level="O2", loss_scale=scales[1], min_loss_scale=0)
    assert amp.loss_scale() == 64.0


@pytest.mark.parametrize("num_losses", [0, -1, 1.5, True])
def test_num_losses_must_be_a_count(num_losses: Any) -> None:
    with pytest.raises(ValueError, match="num_losses=.* must be an integer of at least 1"):
        amp.initialize(linear(), num_losses=num_losses)


# A failure changes nothing.


class Brittle(torch.optim.SGD):
    """Lets nobody replace its step: initialize fails late, its masters being in place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "step":
            raise OSError("hands off")
        super().__setattr__(name, value)


@pytest.mark.parametrize("level", LEVELS)
def test_a_failed_initialize_changes_nothing(level: str) -> None:
    model = conv_net()
    first = adamw(model)
    F.cross_entropy(model(batch()[0]), batch()[1]).backward()
    first.step()
    params = [p for group in first.param_groups for p in group["params"]]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    grads = [p.grad.clone() for p in params]
    state = copy.deepcopy(first.state_dict())
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    with pytest.raises(OSError, match="hands off"):
        amp.initialize(model, [first, Brittle(model.parameters(), lr=1)], opt_level=level)

    assert "step" not in vars(first)
    assert AttachedOptimizer.of(first) is None
    after = [p for group in first.param_groups for p in group["params"]]
    assert all(p is q for p, q in zip(params, after, strict=True))
    for name, value in model.state_dict().items():
        assert value.dtype is before[name].dtype
        assert torch.equal(value, before[name]), name
    assert all(torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True))
    for index, entries in first.state_dict()["state"].items():
        assert_same(entries, state["state"][index])
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert torch.mm(torch.eye(2), torch.eye(2)).dtype is torch.float32
    with pytest.raises(RuntimeError, match="before amp.initialize"):
        amp.state_dict()
    first.step()


def test_a_failed_initialize_leaves_the_session_before_it() -> None:
    model, optimizer = started(linear(), sgd, "O1")
    with pytest.raises(RuntimeError):
        amp.initialize(linear().half(), opt_level="O2")
    assert model(torch.ones(1, 4)).dtype is torch.float16
    train_linear(model, optimizer)


@pytest.mark.parametrize("level", LEVELS)
def test_a_session_whose_first_initialize_failed_may_be_initialized(level: str) -> None:
    expected = linear()
    with amp.Session(level, verbosity=0) as session:
        session.initialize(expected)
        dtypes = expected(torch.ones(1, 4)).dtype, torch.mm(torch.eye(2), torch.eye(2)).dtype
    model: Any = linear()
    with amp.Session(level, verbosity=0) as session:
        with pytest.raises(OSError, match="hands off"):
            session.initialize(model, Brittle(model.parameters(), lr=1))
        model = session.initialize(model)
        assert dtypes == (model(torch.ones(1, 4)).dtype, torch.mm(torch.eye(2), torch.eye(2)).dtype)
    assert torch.mm(torch.eye(2), torch.eye(2)).dtype is torch.float32


# Again and again.


@pytest.mark.parametrize(("first", "second"), covering(LEVELS, LEVELS[::-1], strength=1))
def test_a_sweep_in_one_process_equals_runs_of_their_own(first: str, second: str) -> None:
    def run(level: str) -> list[torch.Tensor]:
        model, optimizer = started(conv_net(), sgd, level)
        for step in range(3):
            train_step(model, optimizer, step)
        return [p.detach().clone() for p in model.parameters()]

    alone = run(second)
    amp.get_session().close()
    run(first)
    again = run(second)
    assert all(torch.equal(a, b) for a, b in zip(alone, again, strict=True))


def test_two_models_initialized_one_after_the_other_both_train() -> None:
    pairs = []
    for seed, level in enumerate(("O2", "O1", "O0")):
        model = conv_net(seed)
        pairs.append(amp.initialize(model, sgd(model), opt_level=level))
    for model, optimizer in pairs:
        losses = [train_step(model, optimizer).item() for _ in range(10)]
        assert losses[-1] < losses[0] / 2


# Closing.


@pytest.mark.parametrize("level", LEVELS)
def test_close_gives_everything_back(level: str) -> None:
    model = conv_net()
    optimizer = adamw(model)
    params = list(model.parameters())
    names = model.state_dict()
    with amp.Session(level) as session:
        model, optimizer = session.initialize(model, optimizer)
        train_step(model, optimizer)
        values = {name: value.clone() for name, value in model.state_dict().items()}
        moments = [optimizer.state[p]["exp_avg"].clone() for p in amp.master_params(optimizer)]
    session.close()  # again: nothing happens
    assert not any(name in vars(optimizer) for name in ("step", "zero_grad", "add_param_group"))
    assert all(p is q for p, q in zip(params, optimizer.param_groups[0]["params"], strict=True))
    for name, value in model.state_dict().items():
        assert value.dtype is names[name].dtype
        torch.testing.assert_close(value, values[name], rtol=0, atol=0, equal_nan=True)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    for p, moment in zip(params, moments, strict=True):
        kept = optimizer.state[p]["exp_avg"]
        torch.testing.assert_close(kept, moment.float(), rtol=0, atol=0, equal_nan=True)
    with pytest.raises(RuntimeError, match="session was closed"):
        session.initialize(linear())
    with pytest.raises(RuntimeError, match="session was closed"):
        amp.get_session(optimizer)
    train_step(model, optimizer, plain=True)


@pytest.mark.parametrize("masters", [True, "split16", "kahan"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_model_of_a_closed_session_is_trained_on_as_if_nothing_had_happened(
    level: str, masters: Any
) -> None:
    ends = []
    options = {"master_weights": masters, "loss_scale": 128.0, "verbosity": 0}
    for close_after in (None, 3):
        model = conv_net()
        optimizer = adamw(model)
        for step in range(6):
            if step in (0, close_after):
                model, optimizer = amp.initialize(model, optimizer, opt_level=level, **options)
            train_step(model, optimizer, step)
            optimizer.zero_grad()
            if step + 1 == close_after:
                amp.get_session(optimizer).close()
        ends.append(model.state_dict())
    assert_same(ends[0], ends[1])


def test_a_session_takes_more_models_later() -> None:
    with amp.Session("O2") as session:
        a, b = linear(1), linear(2)
        oa, ob = sgd(a), sgd(b)
        session.initialize(a, oa)
        session.initialize(b, ob)
        for model, optimizer in ((a, oa), (b, ob)):
            step_on(model(torch.ones(1, 4)).sum(), optimizer)
            assert next(amp.master_params(optimizer)).dtype is torch.float32


# What is said.


def test_verbosity(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="amp")
    amp.initialize(linear(), opt_level="O2")
    assert "cast_model_type            : float16" in caplog.text
    caplog.clear()
    amp.initialize(linear(), opt_level="O2", verbosity=0)
    assert not caplog.records


def test_before_initialize_and_with_foreign_optimizers() -> None:
    optimizer = sgd(linear())
    loss = torch.ones((), requires_grad=True)
    with pytest.raises(RuntimeError, match=r"amp.scale_loss was called before amp.initialize"):
        amp.scale_loss(loss, optimizer).__enter__()
    for function in (amp.loss_scale, amp.state_dict, amp.get_session):
        with pytest.raises(RuntimeError, match="before amp.initialize"):
            function()
    amp.initialize(linear(), opt_level="O1")
    with pytest.raises(RuntimeError, match="this SGD did not come out of amp.initialize"):
        amp.scale_loss(loss, optimizer).__enter__()
    with pytest.raises(RuntimeError, match="this SGD did not come out of amp.initialize"):
        amp.step_was_skipped(optimizer)


@pytest.mark.parametrize(
    ("loss", "optimizers", "error", "text"),
    [
        (1.0, None, TypeError, "needs a floating-point tensor as loss, and got float"),
        (torch.ones(1, dtype=torch.int64), None, TypeError, "and got torch.int64"),
        (None, [], TypeError, "got an empty list"),
        (None, ["x"], TypeError, "got str"),
    ],
)
def test_scale_loss_says_what_it_needs(
    loss: Any, optimizers: Any, error: type[Exception], text: str
) -> None:
    _, optimizer = started(linear(), sgd, "O1")
    loss = torch.ones((), requires_grad=True) if loss is None else loss
    optimizers = optimizer if optimizers is None else optimizers
    with pytest.raises(error, match=text):
        amp.scale_loss(loss, optimizers).__enter__()


def test_doubles_and_complex_parameters_keep_their_dtype() -> None:
    class Odd(ConvNet):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(3, 3).double()
            self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.wide(super().forward(x)) * self.phase.abs()

    for level in LEVELS:
        torch.manual_seed(0)
        model = Odd()
        if level not in CAST_LEVELS:  # in a model that is not cast, float64 is the script's affair
            model.wide.float()
        optimizer = sgd(model)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0)
        phase = model.phase.detach().clone()
        double = model.wide.weight.detach().clone()
        train_step(model, optimizer)
        assert model.phase.dtype is torch.complex64
        if level in CAST_LEVELS:
            assert model.wide.weight.dtype is torch.float64
        assert not torch.equal(model.phase, phase)
        assert not torch.equal(model.wide.weight, double)


def test_a_backend_that_does_not_exist_is_refused_before_anything_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AMP_KERNELS", "tritn")
    model = linear()
    with pytest.raises(
        ValueError, match="variable AMP_KERNELS='tritn' is not one of triton, refer"
    ) as e:
        amp.initialize(model, sgd(model), opt_level="O2")
    assert isinstance(e.value, amp.AmpError)
    assert model.weight.dtype is torch.float32


def test_what_weights_were_before_the_cast_is_freed() -> None:
    """Weights of 2 bytes must not cost 6."""
    model = nn.Linear(61, 67, bias=False)
    amp.initialize(model, opt_level="O3", verbosity=0)
    gc.collect()
    wide = [t for t in gc.get_objects() if issubclass(type(t), Tensor) and t.shape == (67, 61)]
    assert [tensor.dtype for tensor in wide] == [torch.float16]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5", "O6", "O7", "mxfp8"])
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0)])
def test_what_a_gpu_emulates_is_said(
    capability: tuple[int, int], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    is_mxfp8 = level == "mxfp8"
    properties = amp.Session(
        "O4" if is_mxfp8 else level, **{"fp8": level} if is_mxfp8 else {}
    ).properties
    scaled_mm._way_of.cache_clear()
    parameter = SimpleNamespace(device=torch.device("cuda", 0))
    model: Any = SimpleNamespace(parameters=lambda: [parameter])
    try:
        found = list(advise_on_devices(properties, [model]))
    finally:
        scaled_mm._way_of.cache_clear()
    expected = []
    if capability < (8, 0) and level not in ("O0", "O1", "O2"):
        expected.append("emulates bfloat16")
    if level in ("O6", "O7") and capability < (8, 9):
        expected.append("fp8=current is emulated")
    if is_mxfp8 and capability < (10, 0):
        expected.append("fp8=mxfp8 is emulated")
    assert len(found) == len(expected)
    for text, part in zip(found, expected, strict=True):
        assert part in text
        assert f"cuda:0 (sm_{capability[0]}{capability[1]})" in text
