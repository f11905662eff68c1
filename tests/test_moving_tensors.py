"""16-bit buffers and frozen weights that training moves: who is warned of, and what cures it."""

from __future__ import annotations

import ast
import gc
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import spectral_norm

import amp
from amp.errors import AmpWarning
from tests.covering import covering
from tests.models import LEVELS, MASTER_LEVELS, initialize, run_backward, started, step_on

STEPS = 10


class Statistics(nn.Module):
    """Subtracts the mean of what it has seen."""

    count: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count.add_(1)
            self.mean.add_((x.detach().mean(0) - self.mean) / self.count)
        return x - self.mean


class Net(nn.Module):
    """Has a buffer and a frozen teacher beside trained layers, and nothing that moves."""

    book: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)
        self.teacher = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.teacher.requires_grad_(False)
        self.register_buffer("book", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.body:
            x = layer(x)
        return self.head(x) - self.teacher(x).detach().to(x.dtype) * self.book.to(x.dtype)


def said(
    level: str,
    model: nn.Module,
    after_step: Callable[[int], object] = lambda i: None,
    steps: int = STEPS,
    kind: Any = torch.optim.SGD,
    **overrides: Any,
) -> list[str]:
    """Train, call a function after each step, and return the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = kind(model.parameters(), lr=1e-2)
        model, optimizer = initialize(model, optimizer, level, verbosity=0, **overrides)
        for i in range(steps):
            optimizer.zero_grad()
            step_on(model(batch(i)).float().pow(2).mean(), optimizer)
            after_step(i)
    texts = [str(each.message) for each in caught if each.category is AmpWarning]
    return [text for text in texts if not text.startswith("fp8=")]


def batch(i: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(i)) + 1


def rules_in(text: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = ast.literal_eval(re.findall(r"rules=(\[.*?\])", text)[0])
    return found


# What is warned of.


def in_place(x: Tensor, new: Tensor) -> None:
    with torch.no_grad():
        x.mul_(0.9).add_(new, alpha=0.1)


def foreach(x: Tensor, new: Tensor) -> None:
    with torch.no_grad():
        torch._foreach_mul_([x], 0.9)
        torch._foreach_add_([x], [new], alpha=0.1)


def by_copy(x: Tensor, new: Tensor) -> None:
    with torch.no_grad():
        x.copy_(0.9 * x + 0.1 * new)


def through_data(x: Tensor, new: Tensor) -> None:
    x.data.mul_(0.9).add_(new, alpha=0.1)


def to_data(x: Tensor, new: Tensor) -> None:
    x.data = 0.9 * x.data + 0.1 * new


WRITES: list[Any] = [in_place, foreach, by_copy, through_data, to_data]


@pytest.mark.parametrize(
    ("level", "write", "kind"),
    covering(MASTER_LEVELS, WRITES, [torch.optim.SGD, amp.optimizers.FusedAdam]),
)
@pytest.mark.parametrize("what", ["teacher", "book"])
def test_what_a_script_moves_is_named_once(level: str, write: Any, kind: Any, what: str) -> None:
    model: Any = Net()
    moved = list(model.teacher[0].parameters()) if what == "teacher" else [model.book]

    def after_step(i: int) -> None:
        for x in moved:
            write(x, torch.full_like(x, i))

    (text,) = said(level, model, after_step, kind=kind)
    if what == "teacher":
        assert "the parameters teacher.0.weight, teacher.0.bias, which no optimizer steps" in text
        assert rules_in(text) == [{"module": "teacher.0", "cast": "float32"}]
        assert "buffer_dtype" not in text
    else:
        assert "the buffers book, in each step" in text
        assert rules_in(text) == [{"tensor": "book", "cast": "float32"}]
        assert "or all buffers by buffer_dtype='float32'" in text


@pytest.mark.parametrize("is_in_optimizer", [False, True])
def test_an_average_that_amp_moves_in_fp32_is_not_named(is_in_optimizer: bool) -> None:
    """It does so by `lerp_` towards a weight with a master, for what has no master itself."""
    model: Any = Net()
    pairs = list(zip(model.teacher[0].parameters(), model.head.parameters(), strict=True))
    teacher = set(model.teacher.parameters())

    def after_step(i: int) -> None:
        with torch.no_grad():
            for average, x in pairs:
                average.lerp_(x, 0.01)

    def kind(params: Any, lr: float) -> torch.optim.SGD:
        return torch.optim.SGD([x for x in params if is_in_optimizer or x not in teacher], lr=lr)

    assert len(said("O5", model, after_step, kind=kind)) == is_in_optimizer


@pytest.mark.parametrize("masters", [True, "split16", "split24", "kahan"])
def test_whatever_the_masters_are(masters: Any) -> None:
    model: Any = Net()
    kind = amp.optimizers.FusedAdam
    move = lambda i: in_place(model.book, model.book + i)  # noqa: E731
    assert len(said("O5", model, move, kind=kind, master_weights=masters)) == 1


def test_a_buffer_that_is_registered_anew_in_each_step() -> None:
    model: Any = Net()

    def after_step(i: int) -> None:
        model.book = 0.9 * model.book + 0.1 * i

    assert "the buffers book" in said("O5", model, after_step)[0]


def test_a_weight_that_a_script_steps_by_hand() -> None:
    model: Any = Net()
    model.register_parameter("bias", nn.Parameter(torch.ones(4)))
    model.head.register_forward_hook(lambda module, args, out: out + model.bias)
    rest = [x for name, x in model.named_parameters() if name != "bias"]

    def after_step(i: int) -> None:
        with torch.no_grad():
            model.bias -= 1e-3 * model.bias.grad

    texts = said("O5", model, after_step, kind=lambda params, lr: torch.optim.SGD(rest, lr=lr))
    assert ["the parameters bias, which no optimizer steps" in text for text in texts] == [True]


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_the_rules_that_are_named_cure_it(level: str) -> None:
    limit = {torch.float16: 2048, torch.bfloat16: 256}

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), Statistics(), nn.Linear(4, 4), Statistics())

    model: Any = made()
    (text,) = said(level, model, steps=4)
    dtype = model[1].count.dtype
    assert f"a count stands still at {limit[dtype]}" in text
    assert rules_in(text) == [{"module": "1", "cast": "float32"}, {"module": "3", "cast": "float32"}]
    cures: list[dict[str, Any]] = [
        {"rules": rules_in(text)},
        {"buffer_dtype": "float32"},
        {"rules": [{"tensor": "*.count", "cast": "float32"}, {"tensor": "*.mean", "cast": "float32"}]},
    ]
    amp.get_session().close()
    for cure in cures:
        model = made()
        assert not said(level, model, steps=260, **cure)
        assert float(model[1].count) == float(model[3].count) == 260
        amp.get_session().close()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_teacher_arrives_by_the_rules_that_are_named(level: str) -> None:
    def distance(**overrides: Any) -> tuple[float, list[str]]:
        model: Any = Net()
        before: Any = Net()

        def after_step(i: int) -> None:
            with torch.no_grad():
                for x in model.teacher[0].parameters():
                    x.mul_(0.999).add_(torch.full_like(x, 2), alpha=0.001)

        texts = said(level, model, after_step, steps=200, **overrides)
        expected = 2 + 0.999**200 * (before.teacher[0].weight.detach() - 2)
        found = (model.teacher[0].weight.detach().float() - expected).abs().max()
        amp.get_session().close()
        return float(found), texts

    far, (text,) = distance()
    near, none = distance(rules=rules_in(text))
    assert near < 1e-4 < 5e-3 < far
    assert not none


def test_blocks_get_one_rule() -> None:
    class Block(nn.Module):
        centre: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("centre", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.centre.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return self.fc(x)

    model = nn.Sequential(*(Block() for _ in range(12)))
    (text,) = said("O5", model)
    assert rules_in(text) == [{"tensor": "*.centre", "cast": "float32"}]
    assert "and 4 more" in text


def test_tensors_of_several_models_are_told_apart() -> None:
    models = [Net(), nn.Sequential(Statistics())]
    optimizer = torch.optim.SGD(models[0].parameters(), lr=1e-2)
    models, optimizer = amp.initialize(models, optimizer, opt_level="O5", verbosity=0)

    def train() -> None:
        for i in range(4):
            step_on(models[0](models[1](batch(i))).sum(), optimizer)

    with pytest.warns(AmpWarning, match=re.escape("the buffers models[1].0.count, models[1].0.mean")):
        train()


def test_skipped_steps_and_closures_count() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Statistics())
    assert len(said("O2", model, loss_scale={"init": 2.0**40, "max": 2.0**40})) == 1
    model = nn.Sequential(nn.Linear(4, 4), Statistics())
    model, optimizer = started(model, lambda p: torch.optim.LBFGS(p, max_iter=2), "O5")

    def closure() -> Tensor:
        optimizer.zero_grad()
        return run_backward(model(batch(0)).float().pow(2).mean(), optimizer)

    for _ in range(2):
        optimizer.step(closure)
    with pytest.warns(AmpWarning, match="the buffers 1.count, 1.mean"):
        optimizer.step(closure)


@pytest.mark.slow
def test_a_compiled_forward_is_seen() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), Statistics())
    model.compile(backend="aot_eager")
    assert "the buffers 1.count, 1.mean" in said("O5", model)[0]


def test_training_goes_on_where_the_warning_is_an_error() -> None:
    def trained(is_error: bool) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(4, 4), Statistics())
        model, optimizer = started(made, lambda p: torch.optim.SGD(p, lr=1e-2), "O5")
        errors = 0
        with warnings.catch_warnings():
            warnings.simplefilter("error" if is_error else "ignore")
            for i in range(STEPS):
                optimizer.zero_grad()
                run_backward(model(batch(i)).float().pow(2).mean(), optimizer)
                try:
                    optimizer.step()
                except AmpWarning:
                    errors += 1
        return [
            x.detach().clone() for x in (*model.parameters(), *amp.master_params(optimizer))
        ], errors

    (left, errors), (right, _) = trained(True), trained(False)
    assert errors == 1
    assert all(map(torch.equal, left, right))


# What is not.


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_in_which_nothing_moves(level: str) -> None:
    assert said(level, Net()) == []
    assert amp.get_session().observers == [], "the watch is over"


@pytest.mark.parametrize("level", sorted(set(LEVELS) - set(MASTER_LEVELS)))
def test_levels_that_keep_it_in_fp32_or_have_no_masters(level: str) -> None:
    assert said(level, nn.Sequential(nn.Linear(4, 4), Statistics())) == []


class Caches(nn.Module):
    """Makes one cache in its first forward, and lets another grow with its input."""

    mask: Tensor | None
    positions: Tensor
    filled: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("mask", None)
        self.register_buffer("positions", torch.zeros(0))
        self.register_buffer("filled", torch.zeros(4))
        self.is_filled = False

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(4, dtype=x.dtype)
        if not self.is_filled:
            self.filled.add_(1).mul_(2)
            self.is_filled = True
        length = len(self.positions) + 1
        self.positions = torch.arange(length).to(x.dtype)
        return self.fc(x * self.mask + self.filled)


def spectral(made: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(made(nn.Linear(4, 4)), nn.Linear(4, 4))


@pytest.mark.parametrize("level", MASTER_LEVELS)
@pytest.mark.parametrize(
    "make",
    [
        Caches,
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        lambda: spectral(parametrizations.spectral_norm),
        lambda: spectral(spectral_norm),
    ],
)
def test_buffers_of_layers_and_caches(level: str, make: Callable[[], nn.Module]) -> None:
    assert said(level, make()) == []


def test_a_checkpoint_that_is_loaded() -> None:
    model: Any = Net()
    state = {name: x.clone() for name, x in model.state_dict().items()}
    state["book"] += 3
    assert said("O5", model, lambda i: model.load_state_dict(state) if i == 3 else None) == []


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), {"keep_batchnorm_fp32": False}),
        (
            nn.Sequential(nn.Linear(4, 4), Statistics()),
            {"rules": [{"tensor": "1.*", "cast": "bfloat16"}]},
        ),
    ],
)
def test_what_the_user_has_said_to_be_16_bits(model: nn.Module, overrides: dict[str, Any]) -> None:
    assert said("O5", model, **overrides) == []


@pytest.mark.parametrize("freezes", [False, True])
def test_weights_that_another_optimizer_steps(freezes: bool) -> None:
    """Whose gradients are gone when this one steps, and which do not require any then."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizers: Any = [torch.optim.SGD(each.parameters(), lr=1e-2) for each in (first, second)]
    (first, second), optimizers = amp.initialize(  # type: ignore[assignment]
        [first, second], optimizers, opt_level="O5", verbosity=0
    )
    for i in range(STEPS):
        for model, optimizer in zip((first, second), optimizers, strict=True):
            for each in (first, second):
                each.requires_grad_(not freezes or each is model)
            run_backward(second(first(batch(i))).sum(), optimizers)
            optimizer.step()
            for each in optimizers:
                each.zero_grad()


def test_gradients_that_a_hook_of_the_step_removes() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer: Any = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1e-2)
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    (first, second), optimizer = amp.initialize(  # type: ignore[assignment]
        [first, second], optimizer, opt_level="O5", verbosity=0
    )
    for i in range(STEPS):
        step_on(second(first(batch(i))).sum(), optimizer)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    amp.get_session().close()


def test_frozen_weights_that_are_moved_or_rewritten_alike_are_not_named() -> None:
    """As by an offload and back; and nothing keeps the memory that they had."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model.register_buffer("mask", torch.ones(4, 4))
    model[0].requires_grad_(False)
    made = torch.optim.SGD(model[1].parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, made, opt_level="O5", verbosity=0)
    gone = []
    for _ in range(7):
        gone.append(StorageWeakRef(model[0].weight.untyped_storage()))
        model[0].weight.data = model[0].weight.data.clone()
        model.mask = torch.ones_like(model.mask)
        optimizer.zero_grad()
        step_on(model(torch.ones(2, 4)).float().mean(), optimizer)
    gc.collect()
    assert all(reference.expired() for reference in gone)
