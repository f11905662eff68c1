"""What `initialize` has done is taken back: whole, after a failure anywhere, or in a second try."""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import amp
from amp import active
from amp.training.attached_optimizer import AttachedOptimizer
from tests.interrupting import Interrupter, every_nth_line, interrupt
from tests.models import run_backward
from tests.states import assert_same

LEVELS: dict[str, dict[str, Any]] = {
    "O1": {},
    "O2": {},
    "O3": {},
    "O4": {},
    "O5": {},
    "O6": {},
    "O5 split16": {"master_weights": "split16"},
    "O2 kahan": {"master_weights": "kahan"},
}


def make(optimizer: Callable[..., Any] = torch.optim.Adam, **options: Any) -> tuple[nn.Module, Any]:
    """Return a model with a norm, and an optimizer that has stepped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 16))
    made = optimizer(model.parameters(), lr=1e-2, **options)
    model(torch.randn(4, 16)).square().sum().backward()
    made.step()
    made.zero_grad()
    return model, made


def outlook(model: nn.Module, optimizer: Any) -> list[Any]:
    """Return everything of a model, an optimizer and torch that `initialize` may change."""
    modules = list(model.modules())
    hooks = [
        (len(m._forward_pre_hooks), len(m._forward_hooks), len(m._state_dict_hooks), type(m))
        for m in modules
    ]
    functions = [torch.matmul, Tensor.matmul, Tensor.lerp_, torch.nn.utils.clip_grad_norm_]
    functions += [nn.functional.linear, torch.autocast.__enter__, vars(nn.Module).get("__deepcopy__")]
    return [
        hooks,
        functions,
        [name for name in vars(optimizer) if "amp" in name or name in ("step", "zero_grad")],
        [id(p) for group in optimizer.param_groups for p in group["params"]],
        [id(p) for p in model.parameters()],
        [id(p) for p in optimizer.state],
        torch.is_autocast_enabled("ipu"),
    ]


def values(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return copies of the weights and of the optimizer's state."""
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for i, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        entry = optimizer.state[parameter]
        found |= {f"{i} {key}": value.clone() for key, value in entry.items()}
    return found


class RefusedError(Exception):
    """What a handler of the user's raises."""


class Refusing(logging.Handler):
    """A log handler that raises at a record."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def emit(self, record: logging.LogRecord) -> None:
        if self.text in record.getMessage():
            raise RefusedError


@pytest.mark.parametrize("level", LEVELS)
def test_a_log_handler_that_raises_leaves_nothing_changed(level: str) -> None:
    model, optimizer = make(eps=1e-10)
    handler, logger = Refusing("eps"), logging.getLogger("amp")
    before, was = outlook(model, optimizer), values(model, optimizer)
    logger.addHandler(handler)
    level_before = logger.level
    logger.setLevel(logging.INFO)
    try:
        if level == "O3":
            with pytest.raises(RefusedError):
                amp.initialize(model, optimizer, opt_level=level[:2], **LEVELS[level])
        handler.text = "resolves to"
        with pytest.raises(RefusedError):
            amp.initialize(model, optimizer, opt_level=level[:2], **LEVELS[level])
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level_before)
    assert outlook(model, optimizer) == before
    assert_same(values(model, optimizer), was, equal_nan=True)
    assert AttachedOptimizer.of(optimizer) is None
    assert active.session_of(model) is None


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(torch.optim.Adam, {}), (amp.optimizers.FusedAdam, {"state_dtype": "bfloat16"})],
)
def test_no_memory_for_the_last_cast_leaves_nothing_changed(
    monkeypatch: pytest.MonkeyPatch, optimizer: Any, options: Any
) -> None:
    model, made = make(optimizer)
    before, was = outlook(model, made), values(model, made)
    recast = AttachedOptimizer.recast_state

    def fail(self: Any, dtype: Any = None) -> None:
        recast(self, dtype)
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(AttachedOptimizer, "recast_state", fail)
    with pytest.raises(torch.OutOfMemoryError):
        amp.initialize(model, made, opt_level="O3", verbosity=0, **options)
    monkeypatch.undo()
    assert outlook(model, made) == before
    assert_same(values(model, made), was, equal_nan=True)
    model, made = amp.initialize(model, made, opt_level="O2", verbosity=0)


class NoMemory(TorchDispatchMode):
    """Lets the n-th operation that needs memory find none; with `for_long` all later ones, too."""

    _ALIASES = "detach", "view", "alias", "as_strided", "expand"

    def __init__(self, n: int, for_long: bool) -> None:
        super().__init__()
        self.n, self.for_long, self.was_met = n, for_long, False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n -= not any(name in str(function) for name in self._ALIASES)
        if self.n == 0 or (self.for_long and self.n < 0):
            self.was_met = True
            raise torch.OutOfMemoryError("no more")
        return function(*args, **(kwargs or {}))


SMALL: dict[str, tuple[Any, dict[str, Any]]] = {
    "O1": (amp.optimizers.FusedAdam, {"state_dtype": "bfloat16"}),
    "O2": (torch.optim.Adam, {}),
    "O2 deferred": (amp.optimizers.FusedAdam, {"loss_scale": 128.0}),
    "O3": (amp.optimizers.FusedAdam, {"state_dtype": "bfloat16"}),
    "O5": (torch.optim.Adam, {}),
    "O5 split16": (torch.optim.Adam, {"master_weights": "split16"}),
    "O5 packed": (amp.optimizers.FusedAdam, {"master_weights": "split24", "state_dtype": "packed16"}),
    "O7 delayed": (torch.optim.Adam, {"fp8": {"recipe": "delayed"}}),
}

FIRST = [(1 + i // 2 % 3, level) for i, level in enumerate(SMALL)]
"""Where each begins to try every third operation: in pairs, since every other level is left out."""


def all_of(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return copies of weights, state and gradients."""
    grads = {f"grad {i}": p.grad for i, p in enumerate(model.parameters()) if p.grad is not None}
    return values(model, optimizer) | {name: grad.clone() for name, grad in grads.items()}


def begin(level: str) -> tuple[nn.Module, Any]:
    """Return a model and an optimizer that have trained in a session, with gradients for a step."""
    optimizer, options = SMALL[level]
    model, made = make(optimizer)
    amp.initialize(model, made, opt_level=level[:2], verbosity=0, **options)
    for seed in range(2):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
        run_backward(model(x).float().square().mean(), made)
        if not seed:
            made.step()
            made.zero_grad()
    return model, made


@every_nth_line(9, 3)
@pytest.mark.parametrize(("first", "level"), FIRST)
def test_a_close_that_runs_out_of_memory_can_be_repeated_and_loses_nothing(
    first: int, level: str, every: int
) -> None:
    model, optimizer = begin(level)
    amp.get_session(optimizer).close()
    expected, seen = all_of(model, optimizer), outlook(model, optimizer)
    for n in range(first, 400, every):
        model, optimizer = begin(level)
        memory = NoMemory(n, for_long=bool(n % 2))
        with memory, suppress(torch.OutOfMemoryError):
            amp.get_session(optimizer).close()
        assert outlook(model, optimizer)[1] == seen[1]  # functions of the whole process
        if memory.was_met:
            amp.get_session(optimizer).close()
        assert_same(all_of(model, optimizer), expected, equal_nan=True)
        assert outlook(model, optimizer)[:3] == seen[:3]
        if not memory.was_met:
            break
    assert n > 9


@every_nth_line(9, 3)
@pytest.mark.parametrize(("first", "level"), FIRST)
def test_an_initialize_that_runs_out_of_memory_leaves_nothing_changed(
    first: int, level: str, every: int
) -> None:
    optimizer, options = SMALL[level]
    for n in range(first, 400, every):
        model, made = make(optimizer)
        model(torch.randn(4, 16)).square().sum().backward()
        before, was = outlook(model, made), all_of(model, made)
        memory = NoMemory(n, for_long=bool(n % 2))
        try:
            with memory:
                amp.initialize(model, made, opt_level=level[:2], verbosity=0, **options)
        except torch.OutOfMemoryError:
            assert outlook(model, made) == before
            assert_same(all_of(model, made), was, equal_nan=True)
            amp.initialize(model, made, opt_level=level[:2], verbosity=0, **options)
        amp.get_session(made).close()
        if not memory.was_met:
            break
    assert n > 9


def test_a_close_without_memory_leaves_no_function_patched_by_any_initialize() -> None:
    (first, of_first), (second, of_second) = make(), make()
    session, before = amp.Session("O2", verbosity=0), outlook(first, of_first)
    weights = [p.detach().clone() for p in (*first.parameters(), *second.parameters())]
    session.initialize(first, of_first)
    session.initialize(second, of_second)
    with NoMemory(1, True), pytest.raises(torch.OutOfMemoryError):
        session.close()
    assert outlook(first, of_first)[1] == before[1]
    of_second.zero_grad()
    session.close()
    assert outlook(first, of_first)[:3] == before[:3]
    for now, was in zip((*first.parameters(), *second.parameters()), weights, strict=True):
        assert torch.equal(now, was)


def test_a_failed_initialize_leaves_the_names_of_layers_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no more")

    model, optimizer = make()
    session = amp.Session("O7", fp8={"recipe": "delayed"}, verbosity=0)
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(AttachedOptimizer, "attach", fail)
        session.initialize(model, optimizer)
    session.initialize(model, optimizer)
    assert session.fp8 is not None
    assert session.fp8.history is not None
    assert session.fp8.history.names == ["0"]


@pytest.mark.parametrize("level", ["O6", "O7"])
def test_layers_multiply_in_fp8_after_an_initialize_of_their_session_has_failed(
    monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    def net() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 16))

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no more")

    x = torch.linspace(-1, 1, 256).reshape(8, 32)
    first, later, again = net(), net(), net()
    session, other = amp.Session(level, verbosity=0), amp.Session(level, verbosity=0)
    session.initialize(first, torch.optim.Adam(first.parameters()))
    in_fp8 = first(x)
    for one, model in ((session, later), (other, again)):
        optimizer = torch.optim.Adam(model.parameters())
        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
            patch.setattr(AttachedOptimizer, "recast_state", fail)
            one.initialize(model, optimizer)
        assert torch.equal(first(x), in_fp8)
        one.initialize(model, optimizer)
        assert torch.equal(model(x), in_fp8)
    session.close()
    assert not torch.equal(first(x), in_fp8)


@pytest.mark.parametrize("level", ["O2", pytest.param("O5", marks=pytest.mark.slow)])
@every_nth_line(12, 5)
def test_an_initialize_that_was_interrupted_at_its_end_is_undone_or_can_be_closed(
    level: str, every: int
) -> None:
    def run(at: int) -> tuple[Interrupter, bool]:
        model, optimizer = make()
        before, was = outlook(model, optimizer), values(model, optimizer)
        interrupter = interrupt(
            at, lambda: amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        )
        is_whole = AttachedOptimizer.of(optimizer) is not None
        if is_whole:
            assert amp.get_session(optimizer) is amp.get_session(), interrupter.place
            amp.get_session(optimizer).close()
        assert outlook(model, optimizer)[:3] == before[:3], interrupter.place
        assert_same(values(model, optimizer), was, equal_nan=True)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        amp.get_session(optimizer).close()
        return interrupter, is_whole

    counted, _ = run(-1)
    ends = [run(line)[1] for line in counted.first[-60::every]]
    assert ends == sorted(ends)
    assert set(ends) == {False, True}


@every_nth_line(997, 251)
@pytest.mark.parametrize("level", LEVELS)
def test_an_interrupted_close_can_be_repeated(level: str, every: int) -> None:
    def run(at: int) -> tuple[Interrupter, list[Any], dict[str, Tensor], list[Any]]:
        model, optimizer = make()
        before = outlook(model, optimizer)
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level[:2], verbosity=0, **LEVELS[level]
        )
        session = amp.get_session(optimizer)
        run_backward(model(torch.randn(4, 16)).square().mean(), optimizer)
        interrupter = interrupt(at, session.close)
        session.close()
        grads = {f"grad {i}": p.grad for i, p in enumerate(model.parameters()) if p.grad is not None}
        return interrupter, before, values(model, optimizer) | grads, outlook(model, optimizer)

    counted, before, expected, after = run(-1)
    assert counted.lines > 30
    # Of what is created anew each time only the number can be compared.
    assert before[:3] == after[:3]
    for line in counted.first[::every]:
        interrupter, _, found, after = run(line)
        assert after[:3] == before[:3], interrupter.place
        assert after[-1] == before[-1], interrupter.place
        assert after[3] == after[4], interrupter.place
        assert_same(found, expected, equal_nan=True)
