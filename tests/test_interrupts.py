"""Ctrl-C at any line of the library leaves all as it was before a block, or after it."""

import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amp
from amp.casting.regions import forwards, give_torchs_cache, take_torchs_cache
from tests.interrupting import GRAD_MODES, Interrupter, every_nth_line, interrupt
from tests.models import run_backward, started, train_on

# Since Python 3.14 the end of a generator is traced too, where Python ignores an exception.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(16, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Any:
        h = checkpoint(self.hidden, x, use_reentrant=False)
        with torch.autocast("cpu", enabled=False):
            h = h.float().tanh()
        return self.out(h)


def state_of_torch() -> tuple[Any, ...]:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("ipu"),
        torch.is_autocast_cache_enabled(),
        depth,
    )


def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss = nn.functional.mse_loss(model(x), y) + (model.out.weight @ model.out.weight.t()).sum()
    train_on(loss, optimizer)


def make(level: str, optimizer: Callable[..., Any]) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model, made = started(Net(), lambda p: optimizer(p, lr=1e-2), level)
    return model, made, torch.randn(8, 16), torch.randn(8, 1)


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, amp.optimizers.FusedAdam], ids=lambda c: c.__name__
)
@pytest.mark.parametrize("level", ["O1", "O4", "O2", "O6"])
@every_nth_line(499, 61)
def test_an_interrupt_at_any_line_leaves_autocast_as_it_was(
    level: str, optimizer: Any, every: int
) -> None:
    parts = make(level, optimizer)
    for _ in range(2):
        step(*parts)
    counted = interrupt(-1, lambda: step(*parts))
    assert counted.lines > 300
    before = state_of_torch()
    for line in range(0, counted.lines, every):
        interrupter = interrupt(line, lambda: step(*parts))
        assert state_of_torch() == before, interrupter.place
        parts[1].zero_grad()
        parts[0](parts[2])  # outside of regions a thread may leave the place to its next forward
        assert not forwards.have_torchs_cache, interrupter.place


def look_at_gradients(model: Any, optimizer: Any, x: Tensor) -> None:
    run_backward(model(x).sum(), optimizer)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.isfinite()


@pytest.mark.parametrize(
    ("level", "unit"),
    [
        ("O2", lambda model, optimizer, x: model(x)),
        ("O2", lambda model, optimizer, x: model.state_dict()),
        ("O2", look_at_gradients),
        ("O6", lambda model, optimizer, x: model(x)),
    ],
    ids=["O2 forward", "O2 state_dict", "O2 look", "O6 forward"],
)
@every_nth_line(83, 23)
def test_an_interrupt_leaves_autograd_as_it_was(
    level: str, unit: Callable[..., Any], every: int
) -> None:
    """Also one while torch switches it, which a signal may meet and no line of the library does."""

    def run(at: int) -> Interrupter:
        model, optimizer, x, _ = make(level, amp.optimizers.FusedAdam)
        with torch.no_grad():
            model.out.weight.add_(1.0)  # which its master is to follow
            optimizer.param_groups[0]["params"][0].add_(1.0)  # which its weight is to follow
        interrupter = interrupt(at, lambda: unit(model, optimizer, x), (GRAD_MODES,))
        amp.get_session(optimizer).close()
        return interrupter

    for line in run(-1).first[::every]:
        interrupter = run(line)
        was_enabled = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        assert was_enabled, interrupter.place


def test_a_look_at_gradients_does_not_switch_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interrupt torch switches it back late, and autograd with it."""
    model, optimizer, x, _ = make("O2", amp.optimizers.FusedAdam)

    def refuse(mode: bool = True) -> None:
        raise AssertionError("inference mode is switched")

    monkeypatch.setattr(torch, "inference_mode", refuse)
    look_at_gradients(model, optimizer, x)


class Units:
    """A run whose state can be compared: one optimizer, two parameters, a block and a step."""

    def __init__(self, level: str, optimizer: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        self.model, self.optimizer = started(model, lambda p: optimizer(p, lr=1e-2), level)
        self.is_dynamic = level in ("O1", "O2")
        self.x = torch.randn(8, 4)
        self.block()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def block(self) -> None:
        run_backward(self.model(self.x).square().mean() * 1e-3, self.optimizer)

    def gradients(self) -> list[Any]:
        groups = self.optimizer.param_groups
        grads = [parameter.grad for group in groups for parameter in group["params"]]
        return [None if grad is None else grad.clone() for grad in grads]

    def state(self) -> list[Any]:
        scale = amp.state_dict() if self.is_dynamic else None
        return [scale, *(v.clone() for v in self.model.state_dict().values())]


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(is_same, a, b))
    return bool(a == b)


@pytest.mark.parametrize(
    ("level", "optimizer"),
    [
        ("O1", torch.optim.SGD),
        ("O2", torch.optim.SGD),
        ("O2", amp.optimizers.FusedAdam),
        ("O5", amp.optimizers.FusedAdam),
    ],
)
@every_nth_line(997, 197)
def test_an_interrupted_block_was_left_or_not_entered(level: str, optimizer: Any, every: int) -> None:
    """The scale has moved where the gradients are there; the next block is right in any case."""
    run = Units(level, optimizer)
    before = run.state()
    counted = interrupt(-1, run.block)
    after, gradients = run.state(), run.gradients()
    for line in range(0, counted.lines, every):
        run = Units(level, optimizer)
        interrupter = interrupt(line, run.block)
        found, state = run.gradients(), run.state()
        if found.count(None) == len(found):  # the scale has moved, or not
            assert is_same(state, before) or is_same(state, after), interrupter.place
        else:
            assert is_same(found, gradients), interrupter.place
            assert is_same(state, after), interrupter.place
        run.optimizer.zero_grad()
        run.block()
        assert is_same(run.gradients(), gradients), interrupter.place
        run.optimizer.step()
        assert not amp.step_was_skipped(run.optimizer), interrupter.place


@pytest.mark.parametrize("level", ["O2", "O5"])
@every_nth_line(61, 13)
def test_an_interrupted_look_at_gradients_may_be_repeated(level: str, every: int) -> None:
    def run(at: int) -> tuple[Interrupter, list[Any]]:
        made = Units(level, amp.optimizers.FusedAdam)
        made.block()
        interrupter = interrupt(at, made.gradients)
        found = made.gradients()
        made.optimizer.zero_grad()
        amp.get_session(made.optimizer).close()
        return interrupter, found

    counted, expected = run(-1)
    assert counted.lines > 40
    for line in range(0, counted.lines, every):
        interrupter, found = run(line)
        assert is_same(found, expected), interrupter.place


@every_nth_line(41, 7)
def test_an_interrupted_delay_has_left_the_gradients_of_all_optimizers_or_of_none(every: int) -> None:
    def run(at: int) -> tuple[Interrupter, list[Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        made = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
        model, optimizers = amp.initialize(model, made, opt_level="O2", verbosity=0)
        x, interrupter = torch.ones(2, 4), Interrupter(at)
        block = amp.scale_loss(model(x).sum() * 1e-2, optimizers, delay_unscale=True)
        with ExitStack() as stack, suppress(KeyboardInterrupt), block as scaled_loss:
            scaled_loss.backward()
            stack.enter_context(interrupter.active())
        run_backward(model(x).sum() * 1e-2, optimizers)
        found = [p.grad.clone() for optimizer in optimizers for p in amp.master_params(optimizer)]
        amp.get_session(optimizers[0]).close()
        return interrupter, found

    counted, both = run(-1)
    one = [grad / 2 for grad in both]
    assert counted.lines > 50
    assert all(grad.isfinite().all() for grad in both)
    for line in counted.first[::every]:
        interrupter, found = run(line)
        assert is_same(found, one) or is_same(found, both), interrupter.place


@pytest.mark.parametrize(
    ("level", "optimizer"), [("O1", torch.optim.SGD), ("O2", amp.optimizers.FusedAdam)]
)
@every_nth_line(41, 7)
def test_a_block_that_raised_is_left_though_its_end_is_interrupted(
    level: str, optimizer: Any, every: int
) -> None:
    def run(at: int) -> tuple[Interrupter, list[Any]]:
        made, interrupter = Units(level, optimizer), Interrupter(at)
        made.block()
        block = amp.scale_loss(made.model(made.x).float().sum() * 1e-2, made.optimizer)
        with ExitStack() as stack, suppress(ValueError, KeyboardInterrupt), block as scaled_loss:
            scaled_loss.backward()
            stack.enter_context(interrupter.active())
            raise ValueError
        state, found = state_of_torch(), made.gradients()
        left = [p.grad for p in made.model.parameters() if level == "O2"]
        torch.set_grad_enabled(True)
        made.block()
        return interrupter, [state, left, found, made.gradients()]

    counted, expected = run(-1)
    assert counted.lines > 30
    for line in counted.first[::every]:
        interrupter, found = run(line)
        assert is_same(found, expected), interrupter.place


@pytest.mark.parametrize("options", [{}, {"master_weights": "split16"}], ids=["whole", "split16"])
@every_nth_line(11, 3)
def test_masters_agree_with_weights_after_an_interrupted_load(
    options: dict[str, Any], every: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model, _ = started(model, lambda p: torch.optim.SGD(p, lr=0.1), "O5", **options)
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    new = {name: tensor + 1 for name, tensor in old.items()}
    counted = interrupt(-1, lambda: model.load_state_dict(new))
    for line in counted.first[::every]:
        model.load_state_dict(old)
        interrupter = interrupt(line, lambda: model.load_state_dict(new))
        torch.set_grad_enabled(True)  # which torch's own loading has disabled
        for name, values in model.state_dict().items():
            weight = model.get_parameter(name)
            assert torch.equal(values.to(weight.dtype), weight), (interrupter.place, name)
            assert torch.equal(values, old[name]) or torch.equal(values, new[name])


def test_a_thread_that_ended_in_an_interrupt_does_not_keep_torchs_cache() -> None:
    thread = threading.Thread(target=take_torchs_cache)  # what comes after it never ran
    thread.start()
    thread.join()
    assert take_torchs_cache()
    give_torchs_cache()


def test_an_interrupted_region_without_casts_is_over() -> None:
    make("O1", torch.optim.SGD)

    def region() -> None:
        with amp.disable_casts():
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))

    counted = interrupt(-1, region)
    before = state_of_torch()
    for line in range(counted.lines):
        interrupter = interrupt(line, region)
        assert state_of_torch() == before, interrupter.place
