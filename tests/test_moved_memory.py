"""What a step reads and writes may have moved since the last one: kernels get the addresses of now.

Each test trains twice. In one run tensors move between two steps, keeping their values; both must end
in the same bits, and what lies where the tensors were must be what was put there.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp
from amp.distributed import set_values
from amp.kernels import cpu_loop
from amp.kernels.language import INTERPRETED
from amp.kernels.tensor_lists import TensorList
from amp.optimizers import FusedAdam
from tests.covering import covering

SIZE = 24
STEPS = 3 if INTERPRETED else 5
"""Of a training; tensors move in the middle."""
ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def the_loop_does_every_step(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the loop in C++ do the steps of small tensors too."""
    monkeypatch.setattr(cpu_loop, "WORTH_COMPILING", 0)
    loops: list[Any] = []
    loop_for = cpu_loop.loop_for

    def loop_noting(*args: Any) -> Any:
        loops.append(loop_for(*args))
        return loops[-1]

    monkeypatch.setattr(cpu_loop, "loop_for", loop_noting)
    yield
    assert bool(loops) is not INTERPRETED
    assert None not in loops, "the loop was not compiled"


class Left:
    """The memory that a tensor has left, with what was put there."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._written = torch.full_like(tensor, 7)
        tensor.copy_(self._written)

    def is_as_it_was_left(self) -> bool:
        return torch.equal(self._tensor, self._written)


def by_data(tensor: Tensor) -> Left:
    old = tensor.data
    set_values(tensor, old.clone())  # which masters cannot refuse
    return Left(old)


def by_set(tensor: Tensor) -> Left:
    old = tensor.data
    tensor.set_(old.clone())  # pyright: ignore
    return Left(old)


def by_resize(tensor: Tensor) -> Left:
    """The storage is released and comes back, as for offloading; something else takes its place."""
    storage, values = tensor.untyped_storage(), tensor.detach().clone()
    address, others = tensor.data_ptr(), []
    storage.resize_(0)
    while not storage.nbytes():
        others.append(torch.empty_like(values))
        if others[-1].data_ptr() == address or len(others) == 100:
            storage.resize_(values.nbytes)
    tensor.data.copy_(values)
    return Left(torch.cat(others) if values.dim() else torch.stack(others))


def by_growth(tensor: Tensor) -> Left:
    """An alias is made larger, for which the memory of both moves."""
    tensor.data.resize_(1000 + tensor.numel())
    return Left(torch.zeros(1))


def by_sharing(tensor: Tensor) -> Left:
    tensor.share_memory_()
    return Left(torch.zeros(1))


WAYS = {f.__name__: f for f in (by_data, by_set, by_resize, by_growth, by_sharing)}


class Training:
    """Four layers under a fused optimizer, in a session or in none."""

    def __init__(self, level: str | None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(*[nn.Linear(SIZE, SIZE) for _ in range(4)])
        self.optimizer: Any = FusedAdam(self.model.parameters(), lr=1e-2, weight_decay=0.1)
        self.level = level
        if level is not None:
            amp.initialize(self.model, self.optimizer, opt_level=level, verbosity=0, **options)
        self.grads: list[Tensor] = []
        self.x = torch.randn(8, SIZE)

    def backward(self) -> None:
        loss = self.model(self.x).float().square().mean()
        if self.level is None:
            loss.backward()
            self.grads = [p.grad for p in self.model.parameters()]
            return
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
            self.grads = [p.grad for p in self.model.parameters()]

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def stepped(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def tensors(self, what: str) -> list[Tensor]:
        if what == "stepped":
            return self.stepped
        if what == "models":
            return list(self.model.parameters())
        if what == "grads":
            return self.grads
        if what == "lows":
            masters = amp.get_session(self.optimizer).masters
            lows = masters.low_halves(self.stepped)
            assert lows is not None
            return lows
        return [self.optimizer.state[p][what] for p in self.stepped]

    def bits(self) -> list[Tensor]:
        values = [t.detach().clone() for t in self.model.state_dict().values()]
        values += [t.detach().clone() for t in self.model.parameters()]
        return values + [t.clone() for p in self.stepped for t in self.optimizer.state[p].values()]


def trained(case: str, move: Callable[[Training], list[Left]] | None) -> list[Tensor]:
    level, options = CASES[case]
    training, left = Training(level, **options), []
    for i in range(STEPS):
        training.backward()
        if move is not None and i == STEPS // 2:
            with torch.no_grad():
                left += move(training)
        training.step()
    assert all(each.is_as_it_was_left() for each in left), "something was written where a tensor was"
    bits = training.bits()
    if level is not None:
        amp.get_session(training.optimizer).close()
    return bits


@functools.cache
def trained_in_place(case: str) -> list[Tensor]:
    return trained(case, None)


CASES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "no session": (None, {}),
    "O1": ("O1", {}),
    "O5": ("O5", {}),
    "O5 split16": ("O5", {"master_weights": "split16"}),
}
STATE = ("exp_avg", "exp_avg_sq", "step")
WHAT = {
    "no session": ("stepped", "grads", *STATE),
    "O1": ("stepped", "grads", "exp_avg"),
    "O5": ("stepped", "models", "grads", *STATE),
    "O5 split16": ("models", "lows", "grads", "exp_avg_sq"),
}
ROWS = [(case, what) for case, names in WHAT.items() for what in names]


@pytest.mark.parametrize(("row", "way"), covering(ROWS, WAYS, strength=1))
def test_what_has_moved_is_stepped_where_it_is(row: tuple[str, str], way: str) -> None:
    case, what = row
    expected = trained_in_place(case)
    for chosen in (slice(5, 6), slice(None)):

        def move(training: Training, chosen: slice = chosen) -> list[Left]:
            tensors = training.tensors(what)[chosen]
            before = [tensor.data_ptr() for tensor in tensors]
            left = [WAYS[way](tensor) for tensor in tensors]
            assert before != [tensor.data_ptr() for tensor in tensors], "nothing has moved"
            return left

        found = trained(case, move)
        assert all(map(torch.equal, found, expected)), f"{chosen}"


@pytest.mark.parametrize("case", CASES)
def test_entries_of_the_state_that_were_replaced_are_used(case: str) -> None:
    def replace(training: Training) -> list[Left]:
        left = []
        for parameter in training.stepped[3:5]:
            entries = training.optimizer.state[parameter]
            for name, old in list(entries.items()):
                entries[name] = old.clone()
                left.append(Left(old))
        return left

    assert all(map(torch.equal, trained(case, replace), trained_in_place(case)))


def test_state_that_was_set_to_zero_in_new_memory_counts() -> None:
    """What the memory held before has no part in it."""

    def run(in_place: bool) -> list[Tensor]:
        def reset(training: Training) -> list[Left]:
            moment = training.tensors("exp_avg")[5]
            if in_place:
                moment.zero_()
            else:
                moment.data = torch.zeros_like(moment)
            return []

        return trained("O5", reset)

    assert all(map(torch.equal, run(True), run(False)))


@pytest.mark.parametrize("case", ["no session", "O1"])
def test_weights_that_a_load_has_assigned_are_stepped(case: str) -> None:
    """`assign=True` keeps the parameters and exchanges what they hold, where torch swaps tensors."""

    def load(training: Training) -> list[Left]:
        old = list(training.model.parameters())
        state = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
        training.model.load_state_dict(state, assign=True)
        new = list(training.model.parameters())
        for group in training.optimizer.param_groups:
            group["params"][:] = new
        for before, after, grad in zip(old, new, training.grads, strict=True):
            training.optimizer.state[after] = training.optimizer.state.pop(before)
            after.grad = grad
        return [Left(tensor.data) for tensor in old]

    assert all(map(torch.equal, trained(case, load), trained_in_place(case)))


@pytest.mark.parametrize(("case", "what"), ROWS)
def test_memory_that_was_released_is_named(case: str, what: str) -> None:
    level, options = CASES[case]
    training = Training(level, **options)
    for _ in range(2):
        training.backward()
        training.step()
    training.backward()
    tensor = training.tensors(what)[5]
    values = tensor.detach().clone()
    before = training.bits() if what not in ("stepped", "models", "lows", *STATE) else None
    tensor.untyped_storage().resize_(0)
    with pytest.raises(amp.AmpError, match=r"param_groups\[0\]\['params'\]\[5\].* has no memory"):
        training.optimizer.step()
    tensor.untyped_storage().resize_(values.nbytes)
    tensor.data.copy_(values)
    assert before is None or all(map(torch.equal, training.bits(), before))
    training.step()


@pytest.mark.parametrize("what", STATE)
def test_state_of_another_size_is_refused_before_anything_is_stepped(what: str) -> None:
    training = Training("O5")
    for _ in range(2):
        training.backward()
        training.step()
    training.backward()
    before = training.bits()
    kept = training.tensors(what)[5].clone()
    training.tensors(what)[5].data = torch.zeros(2)
    with pytest.raises((ValueError, RuntimeError), match=r"shape|size"):
        training.optimizer.step()
    training.tensors(what)[5].data = kept
    assert all(map(torch.equal, training.bits(), before))


def test_moments_that_are_no_longer_channels_last_are_looked_at_again() -> None:
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    optimizer = FusedAdam([weight])
    weight.grad = torch.ones_like(weight)
    for _ in range(2):
        optimizer.step()
    before = TensorList([moment := optimizer.state[weight]["exp_avg"]]).layout
    moment.as_strided_(weight.shape, (12, 4, 2, 1))
    assert TensorList([moment], before=before).kind.orders is None
    moment.resize_(48)
    with pytest.raises(ValueError, match="no usable 'exp_avg'"):
        optimizer.step()


PROGRAM = """
import sys, torch, amp
from amp.distributed import set_values
from amp.kernels import cpu_loop
from tests import test_moved_memory as moved

cpu_loop.WORTH_COMPILING = 0
for case, what in (("O5", "exp_avg"), ("O5", "stepped"), ("O5", "models")):
    def move(training):
        return [moved.by_data(tensor) and None for tensor in training.tensors(what)[5:6]] and []
    moved.trained(case, move)
print("no stray access")
"""


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="there is no loop in C++")
def test_an_address_sanitizer_finds_no_stray_access_of_the_loop(tmp_path: Path) -> None:
    """The old memory is freed at once here, so that an access of it is one after free."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    runtime = (
        compiler
        and subprocess.run(
            [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    if not runtime or not Path(runtime).is_absolute():
        pytest.skip("the compiler has no address sanitizer")
    trained("O5", None)  # the loop of this process, which the fixture asks for
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONMALLOC": "malloc",
            "LD_PRELOAD": runtime,
            "ASAN_OPTIONS": "detect_leaks=0",
            "CXX": f"{compiler} -fsanitize=address",
            "XDG_CACHE_HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert "AddressSanitizer" not in run.stderr, run.stderr[-3000:]
    assert "no stray access" in run.stdout, run.stderr[-3000:]
