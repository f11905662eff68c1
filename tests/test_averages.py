"""Averages and copies of a model that has masters are in FP32, whoever makes them, before or after."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn

import amp
from amp.masters import averages
from tests.covering import covering
from tests.models import started, step_on

DECAY = 0.97
LEVELS = ["O0", "O2", "O5", "split16"]
X = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
Y = torch.sin(X.sum(1, keepdim=True) / 2)


def by_hand(ema: nn.Module, net: nn.Module) -> None:
    for average, value in zip(ema.parameters(), net.parameters(), strict=True):
        average.lerp_(value, 1 - DECAY)


def by_hand_of_data(ema: nn.Module, net: nn.Module) -> None:
    for average, value in zip(ema.parameters(), net.parameters(), strict=True):
        average.data.mul_(DECAY).add_(value.data, alpha=1 - DECAY)


def by_hand_for_all(ema: nn.Module, net: nn.Module) -> None:
    torch._foreach_lerp_(list(ema.parameters()), list(net.parameters()), 1 - DECAY)


def of_state_dicts(ema: nn.Module, net: nn.Module) -> None:
    """As timm's ModelEmaV3 does it."""
    for average, value in zip(ema.state_dict().values(), net.state_dict().values(), strict=True):
        average.lerp_(value, 1 - DECAY)


def by_torch(ema: Any, net: nn.Module) -> None:
    ema.update_parameters(net)


WAYS: dict[str, tuple[Callable[[Any], nn.Module], Callable[[Any, Any], None]]] = {
    "multi_avg_fn": (
        lambda net: AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(DECAY)),
        by_torch,
    ),
    "avg_fn": (lambda net: AveragedModel(net, avg_fn=get_ema_avg_fn(DECAY)), by_torch),
    "lerp_": (copy.deepcopy, by_hand),
    "mul_ and add_": (copy.deepcopy, by_hand_of_data),
    "_foreach_lerp_": (copy.deepcopy, by_hand_for_all),
    "state dicts": (copy.deepcopy, of_state_dicts),
}


def net_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 1))


def at(level: str) -> dict[str, Any]:
    """Return the options of a level, or of lean masters."""
    lean = {"opt_level": "O5", "master_weights": "split16"}
    return {"verbosity": 0, **(lean if level == "split16" else {"opt_level": level})}


def begun(
    level: str, make: Callable[[Any], Any] = lambda p: torch.optim.SGD(p, 0.1), net: Any = None
) -> Any:
    """Return a net and its optimizer, initialized."""
    net = net_of() if net is None else net
    return amp.initialize(net, make(net.parameters()), **at(level))


def loss_of(model: nn.Module) -> Tensor:
    return (model(X).float() - Y).square().mean()


def train(net: Any, optimizer: Any, steps: int, then: Callable[[], object] = int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        step_on(loss_of(net), optimizer)
        with torch.no_grad():
            then()


@pytest.mark.parametrize(
    ("level", "way", "before"),
    [("O0", "lerp_", False), *covering(LEVELS[1:], WAYS, [False, True], strength=1, slow_strength=1)],
)
def test_an_average_learns_as_in_fp32(level: str, way: str, before: bool) -> None:
    make, update = WAYS[way]
    net: Any = net_of()
    ema = make(net) if before else None
    net, optimizer = begun(level, lambda p: torch.optim.Adam(p, 2e-2), net)
    ema = ema or make(net)
    assert {parameter.dtype for parameter in ema.parameters()} == {torch.float32}
    train(net, optimizer, 120, lambda: update(ema, net))
    assert loss_of(net) < 0.001
    assert loss_of(ema) < 0.005  # 0.6 untrained
    narrow = {"O2": torch.float16, "O5": torch.bfloat16, "split16": torch.bfloat16}.get(level)
    assert next(net.parameters()).dtype is (narrow or torch.float32)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_an_average_of_weights_that_have_no_masters_moves(way: str, before: bool) -> None:
    make, update = WAYS[way]
    net: Any = net_of()
    ema = make(net) if before else None
    net, optimizer = begun("O3", net=net)
    ema = ema or make(net)
    with torch.no_grad():
        update(ema, net)  # torch's first one copies
    expected = [parameter.detach().double() for parameter in ema.parameters()]
    first = list(expected)

    def both() -> None:
        update(ema, net)
        for i, weight in enumerate(net.parameters()):
            expected[i] = expected[i].lerp(weight.detach().double(), 1 - DECAY)

    train(net, optimizer, 10, both)
    for found, average, start in zip(ema.parameters(), expected, first, strict=True):
        assert found.dtype is torch.float32
        torch.testing.assert_close(found.detach().double(), average, rtol=1e-5, atol=1e-6)
        assert not torch.equal(average, start)


@pytest.mark.parametrize("level", ["O2", "O5", "split16"])
def test_a_deep_copy_has_the_values_of_the_masters_and_runs_on_its_own(level: str) -> None:
    net, optimizer = begun(level, lambda p: torch.optim.Adam(p, 3e-3))
    train(net, optimizer, 5)
    copied = copy.deepcopy(net)
    state, own = net.state_dict(), copied.state_dict()
    assert all(torch.equal(state[name], own[name]) for name in state)
    before = copied(X)
    assert before.dtype is torch.float32
    plain = net_of()
    plain.load_state_dict(own)
    assert torch.equal(before, plain(X))  # computed in FP32
    train(net, optimizer, 5)
    assert torch.equal(copied(X), before)
    amp.get_session().close()
    assert torch.equal(copied(X), before)  # the session is closed
    assert "__deepcopy__" not in vars(nn.Module)


@pytest.mark.parametrize(
    ("optimizer_first", "make", "level"),
    covering(
        [False, True], [torch.optim.AdamW, amp.optimizers.FusedAdam], [*LEVELS, "O1", "O3"], strength=1
    ),
)
def test_copies_of_a_model_and_its_optimizer_train_on_together(
    level: str, make: Any, optimizer_first: bool
) -> None:
    """As in training that is based on populations."""
    net, optimizer = begun(level, lambda p: make(p, lr=3e-3))
    train(net, optimizer, 20)
    if optimizer_first:
        stepper, twin = copy.deepcopy((optimizer, net))
    else:
        twin, stepper = copy.deepcopy((net, optimizer))
    state = net.state_dict()
    assert all(torch.equal(state[name], value) for name, value in twin.state_dict().items())
    before = float(loss_of(twin).detach())
    for _ in range(20):
        stepper.zero_grad()
        loss_of(twin).backward()
        stepper.step()
    assert float(loss_of(twin).detach()) < 0.95 * before
    assert {parameter.dtype for parameter in twin.parameters()} == {torch.float32}
    assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())


def test_a_copy_of_a_part_and_of_what_is_around() -> None:
    net, _ = begun("O5", net=nn.ModuleDict({"a": net_of(), "b": nn.BatchNorm1d(4)}))
    assert copy.deepcopy(net["a"])(X).dtype is torch.float32
    around = copy.deepcopy({"models": [net], "also": net["a"]})
    assert around["models"][0]["a"] is around["also"]
    assert {x.dtype for x in around["also"].parameters()} == {torch.float32}
    assert net["a"][0].weight.dtype is torch.bfloat16


def test_copies_of_several_models_at_once() -> None:
    nets: Any = [net_of(), net_of()]
    optimizers: Any = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
    with amp.Session("O2", verbosity=0) as session:
        nets, optimizers = session.initialize(nets, optimizers)
        for copied in copy.deepcopy(nets):
            assert {x.dtype for x in copied.parameters()} == {torch.float32}


def test_tied_and_frozen_weights_and_buffers_are_copied_as_they_are() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight
            self.a.bias.requires_grad_(False)
            self.register_buffer("shift", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) + self.shift

    net: Any = Tied()
    optimizer: Any = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    net, optimizer = amp.initialize(net, optimizer, **at("O5"))
    copied = copy.deepcopy(net)
    assert copied.b.weight is copied.a.weight
    assert [p.requires_grad for p in copied.parameters()] == [True, False, True]
    assert {x.dtype for x in copied.state_dict().values()} == {torch.float32}
    assert copied.shift.dtype is torch.float32
    assert copied(torch.ones(1, 4)).dtype is torch.float32


@pytest.mark.parametrize("masters", ["FP32", "split16", "kahan"])
@pytest.mark.parametrize(
    "detached", [Tensor.detach, lambda weight: weight.data], ids=["detach", "data"]
)
def test_a_detached_weight_is_averaged_by_its_master(
    detached: Callable[[Tensor], Tensor], masters: str
) -> None:
    net, optimizer = started(net_of(), lambda p: torch.optim.SGD(p, 0.1), "O5", master_weights=masters)
    train(net, optimizer, 1)
    for name, weight in net.named_parameters():
        exact = net.state_dict()[name]
        assert torch.equal(torch.zeros_like(exact).lerp_(detached(weight), 1.0), exact)
        part = torch.zeros_like(exact[1:]).lerp_(detached(weight)[1:], 1.0)  # has no master
        assert torch.equal(part, weight[1:].float())


def test_a_weight_that_has_moved_is_averaged_by_its_master() -> None:
    net, _ = begun("O2")
    exact, kept = net.state_dict()["0.weight"], []
    for _ in range(2):
        assert torch.equal(torch.zeros_like(exact).lerp_(net[0].weight.data, 1.0), exact)
        kept.append(net[0].weight.data)  # nothing else gets its address
        net[0].weight.data = net[0].weight.data.clone()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("made_before", [False, True])
def test_parameters_of_an_average_are_moved_towards_masters(made_before: bool, compiled: bool) -> None:
    """They require gradients, as those of a deep copy do, and are exactly what the masters hold."""
    net: Any = net_of()
    optimizer: Any = torch.optim.SGD(net.parameters(), 0.1)
    average: Any = copy.deepcopy(net)
    net, optimizer = amp.initialize(net, optimizer, opt_level="O5", verbosity=0)
    average = average if made_before else copy.deepcopy(net)
    train(net, optimizer, 1)

    def move(value: Tensor, towards: Tensor) -> None:
        value.lerp_(towards, 1.0)

    if compiled:
        move = torch.compile(move, backend="eager")
    exact = net.state_dict()
    for (name, value), weight in zip(average.named_parameters(), net.parameters(), strict=True):
        assert value.requires_grad
        with torch.no_grad():
            move(value, weight)
        assert torch.equal(value, exact[name])


def test_lerp_in_a_forward_is_torchs() -> None:
    net, _ = begun("O5")
    weight: Tensor = net[0].weight
    torch.zeros(weight.shape).lerp(weight, 0.25).sum().backward()
    assert (weight.grad == 0.25).all()
    halves = torch.ones(3, 4, dtype=torch.bfloat16)
    batched = torch.func.vmap(lambda a, b: torch.lerp(a, b, 0.5))(torch.zeros(3, 4), halves)
    assert torch.equal(batched, torch.full((3, 4), 0.5))


def by_lerp_(shadows: list[Tensor], weights: list[Tensor]) -> None:
    for shadow, weight in zip(shadows, weights, strict=True):
        shadow.lerp_(weight, 1 - DECAY)


def by_foreach_lerp_(shadows: list[Tensor], weights: list[Tensor]) -> None:
    torch._foreach_lerp_(shadows, [weight.detach() for weight in weights], 1 - DECAY)


def by_stylegans_lerp(shadows: list[Tensor], weights: list[Tensor]) -> None:
    for shadow, weight in zip(shadows, weights, strict=True):
        shadow.copy_(weight.lerp(shadow, DECAY))


SHADOW_WAYS: dict[str, Callable[[list[Tensor], list[Tensor]], None]] = {
    "lerp_": by_lerp_,
    "_foreach_lerp_": by_foreach_lerp_,
}


@pytest.mark.parametrize(("level", "way"), covering(LEVELS, SHADOW_WAYS, strength=1))
def test_clones_of_weights_in_16_bits_learn_as_in_fp32(level: str, way: str) -> None:
    """They are FP32 averages, rounded, and may stand in for weights, as around an evaluation."""
    net, optimizer = begun(level, lambda p: torch.optim.Adam(p, 2e-2))
    shadows = [p.detach().clone() for p in net.parameters()]
    exact = [shadow.float() for shadow in shadows]

    def average() -> None:
        SHADOW_WAYS[way](shadows, [p.data for p in net.parameters()])
        SHADOW_WAYS[way](exact, list(net.parameters()))

    train(net, optimizer, 120, average)
    assert [s.dtype for s in shadows] == [p.dtype for p in net.parameters()]
    for shadow, value in zip(shadows, exact, strict=True):
        assert torch.equal(shadow, value.to(shadow.dtype))
    kept = [p.data for p in net.parameters()]
    for p, shadow in zip(net.parameters(), shadows, strict=True):
        p.data = shadow
    with torch.no_grad():
        assert loss_of(net) < 0.005  # 0.6 untrained
    for p, data in zip(net.parameters(), kept, strict=True):
        p.data = data


def test_the_lerp_of_stylegan_reads_masters() -> None:
    net, optimizer = begun("O5", lambda p: torch.optim.Adam(p, 2e-2))
    ema = copy.deepcopy(net)

    def average() -> None:
        by_stylegans_lerp(list(ema.parameters()), list(net.parameters()))

    train(net, optimizer, 120, average)
    assert loss_of(ema) < 0.005


def pair_at_o2() -> tuple[Tensor, Tensor]:
    """Return a weight in 16 bits that has a master, detached, and zeros of its shape in FP16."""
    averages._warn_of_narrow_average.cache_clear()
    net, _ = begun("O2")
    weight: Tensor = net[0].weight.detach()
    return weight, torch.zeros_like(weight)


ALIASES: dict[str, Callable[[Tensor], tuple[Callable[[], Tensor], Any]]] = {
    "detached": lambda average: (average.detach, average),
    "data": lambda average: (lambda: average.data, average),
    "a view": lambda average: (lambda: average.view(-1).view(average.shape), average),
    "shared with processes": lambda average: (average.share_memory_, average),
    "an array's": lambda average: (lambda: average, average.numpy()),
    "of an array": lambda average: (lambda: a, a := torch.from_numpy(average.numpy().copy())),
    "a parameter": lambda average: (lambda: a, a := nn.Parameter(average.clone(), requires_grad=False)),
    "transposed": lambda average: (lambda: a, a := average.t().contiguous().t()),
}


@pytest.mark.parametrize("way", SHADOW_WAYS)
@pytest.mark.parametrize("alias", ALIASES)
def test_an_average_is_one_by_whatever_name_it_is_updated(alias: str, way: str) -> None:
    weight, zeros = pair_at_o2()
    wide = torch.zeros(weight.shape)
    average, seen = ALIASES[alias](zeros)
    for _ in range(50):
        SHADOW_WAYS[way]([average()], [weight])
        SHADOW_WAYS[way]([wide], [weight])
    found = seen if isinstance(seen, Tensor) else torch.from_numpy(seen)
    assert found.dtype is torch.float16
    assert torch.equal(found, wide.half())


def test_an_average_that_is_written_to_goes_on_from_there() -> None:
    weight, average = pair_at_o2()
    wide = torch.zeros(weight.shape)
    for _ in range(3):
        average.lerp_(weight, 0.01)
        wide.lerp_(weight, 0.01)
    average.data[0] = wide[0] = 0.5
    for _ in range(3):
        average.lerp_(weight, 0.01)
        wide.lerp_(weight, 0.01)
    assert torch.equal(average, wide.half())


def test_what_averages_stand_for_goes_with_them() -> None:
    weight, average = pair_at_o2()
    with torch.no_grad():
        for _ in range(100):
            average.clone().lerp_(weight, 0.01)  # in a forward, perhaps
        assert len(averages._exact) < 50
        average.lerp_(weight, 0.01)
    amp.get_session().close()
    assert not averages._exact


@pytest.mark.parametrize("event", ["another session closes", "initialize fails", "it fails elsewhere"])
def test_averages_go_on_in_fp32_while_their_session_is_open(
    event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("late")

    net: Any = net_of()
    session = amp.Session("O5", verbosity=0)
    net, _ = session.initialize(net, torch.optim.SGD(net.parameters(), 0.1))
    weight = net[0].weight.detach()
    average, wide = torch.zeros_like(weight), torch.zeros(weight.shape)
    for i in range(100):
        average.lerp_(weight, 0.01)
        wide.lerp_(weight, 0.01)
        if i == 50:
            other = amp.Session("O2", verbosity=0)
            other.initialize(net_of())
            if event == "another session closes":
                other.close()
            else:
                failing = session if event == "initialize fails" else other
                monkeypatch.setattr("amp.session.Session.watch_forwards", fail)
                with pytest.raises(RuntimeError, match="late"):
                    failing.initialize(net_of())
    assert torch.equal(average, wide.bfloat16())
    assert copy.deepcopy(net)[0].weight.dtype is torch.float32


def test_a_forward_computes_what_it_would_without_amp() -> None:
    """An update of a teacher inside of the model, and one of what no model holds."""

    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))
            self.register_buffer("average", torch.zeros(4, 4))
            self.average: Tensor

        def forward(self, x: Tensor) -> Tensor:
            mixed = self.average.clone().lerp_(self.weight, 0.01)
            out = x @ self.weight + x @ self.average + x @ mixed
            self.average = self.average.clone()
            self.average.lerp_(self.weight.detach(), 0.01)
            return out

    model, _ = started(Teacher(), lambda p: torch.optim.SGD(p, 0.1), "O5")
    for training in (True, False):
        model.train(training)
        with torch.set_grad_enabled(training):
            assert model(torch.ones(2, 4)).dtype is torch.float32
    assert model.average.dtype is torch.bfloat16
    torch.testing.assert_close(model.average.float(), torch.eye(4) * (1 - 0.99**2), rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    "change",
    [
        lambda average, weight: torch.stack([average] * 2).lerp_(weight, 0.01),
        lambda average, weight: torch.lerp(average, weight, 0.01, out=torch.empty_like(average)),
        lambda average, weight: average.lerp_(weight, 0.5),
        lambda average, weight: average.lerp_(weight, weight=torch.tensor(0.01).half()),
        lambda average, weight: torch.vmap(lambda x: x.lerp_(weight, 0.01))(torch.stack([average] * 2)),
    ],
)
@pytest.mark.filterwarnings("ignore:an average in", "ignore:There is a performance drop")
def test_what_is_no_average_is_left_to_torch(change: Callable[[Tensor, Tensor], Tensor]) -> None:
    weight, average = pair_at_o2()
    result = change(average, weight)
    assert average.dtype is result.dtype is torch.float16
    assert not averages._exact


def test_an_average_in_inference_mode() -> None:
    weight, average = pair_at_o2()
    with torch.inference_mode():
        average.lerp_(weight, 0.01)
        made = torch.zeros_like(average)
        made.lerp_(weight, 0.01)
    average.lerp_(weight, 0.01)
    assert not average.is_inference()
    with torch.inference_mode():
        made.lerp_(weight, 0.01)
    assert torch.equal(average, made)


def test_an_average_that_stays_in_16_bits_warns_once() -> None:
    def update(average: Tensor, weight: Tensor) -> None:
        average.copy_(average.lerp(weight, 1 - DECAY))

    weight, average = pair_at_o2()
    with pytest.warns(amp.AmpWarning, match="an average in float16 .* rounded away") as told:
        update(average, weight)
    assert told[0].filename == __file__
    update(average, weight)  # once
    wide = torch.zeros(weight.shape)
    update(wide, weight)
    torch.testing.assert_close(wide, weight.float() * (1 - DECAY), rtol=1e-3, atol=1e-5)


def test_lerp_takes_its_arguments_by_name() -> None:
    weight, average = pair_at_o2()
    wide = torch.zeros(weight.shape)
    exact = torch.lerp(input=wide, end=weight, weight=0.5)
    assert torch.equal(exact, wide.lerp(end=weight, weight=0.5))
    assert exact.dtype is torch.float32
    torch._foreach_lerp_([wide], [weight], weight=0.5)
    assert torch.equal(wide, exact)
    torch._foreach_lerp_(self=[average], tensors1=[torch.ones_like(average)], weight=0.5)
    assert (average == 0.5).all()


def test_models_without_masters_are_copied_as_ever() -> None:
    class Own(nn.Module):
        def __deepcopy__(self, memo: Any) -> str:
            return "its own way"

    begun("O2")
    half = net_of().half()
    assert next(copy.deepcopy(half).parameters()).dtype is torch.float16
    assert copy.deepcopy(Own()) == "its own way"
    assert pickle.loads(pickle.dumps(half))[0].weight.dtype is torch.float16
    assert torch.lerp(torch.zeros(2).half(), torch.ones(2).half(), 0.5).tolist() == [0.5, 0.5]
    with pytest.raises(RuntimeError, match="dtype"):
        torch.zeros(2).double().lerp_(torch.ones(2), 0.5)


def test_swa_with_batch_norm_in_a_whole_run() -> None:
    net, optimizer = begun(
        "O5",
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
        nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1)),
    )
    swa = AveragedModel(net, use_buffers=True)
    train(net, optimizer, 200, lambda: swa.update_parameters(net))
    update_bn([X], swa)
    trained = loss_of(swa.eval())
    net.load_state_dict(swa.module.state_dict())  # and back into the run
    assert loss_of(net.eval()).item() == pytest.approx(trained.item(), abs=0.01)
    amp.get_session().close()
    assert trained < 0.2


def test_what_hooks_the_gradient_of_a_weight_stays() -> None:
    """DistributedDataParallel reduces gradients by such a hook."""
    net, optimizer = begun("O5")
    weight, calls = net[0].weight, []
    accumulation = weight.expand_as(weight).grad_fn.next_functions[0][0]
    accumulation.register_hook(lambda *_: calls.append(1))
    ema: Any = AveragedModel(net)
    train(net, optimizer, 3, lambda: ema.update_parameters(net))
    assert len(calls) == 3


def test_an_update_that_fails_leaves_the_model_in_16_bits() -> None:
    net: Any = net_of()
    optimizer: Any = torch.optim.SGD(net.parameters(), 0.1)

    def failing(*args: Any) -> Tensor:
        raise ZeroDivisionError

    net, optimizer = amp.initialize(net, optimizer, **at("O5"))
    ema = AveragedModel(net, avg_fn=failing)
    ema.update_parameters(net)  # the first one copies
    with pytest.raises(ZeroDivisionError):
        ema.update_parameters(net)
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
