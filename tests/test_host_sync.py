"""How often a training step makes the host wait for the device.

On any machine by counting the operations that hand a device's values to the host; on a GPU, where the
driver knows, by forbidding them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import amp
from amp.kernels.language import INTERPRETED
from amp.optimizers import FusedAdagrad, FusedAdam, FusedLion, FusedSGD
from tests.levels import DYNAMIC, LEVELS, STATIC
from tests.models import initialize, run_backward, started, step_on, waiting_is_an_error

pytestmark = pytest.mark.usefixtures("the_cpu_is_a_device")
WAITS = (
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::allclose",
)


class CountingWaits(TorchDispatchMode):
    """Counts the operations after which the host knows something that the device computed."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if name in WAITS:
            self.waits[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_waits() -> Iterator[Counter[str]]:
    with CountingWaits() as mode:
        yield mode.waits


def net(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 2)).to(device)


def step(model: nn.Module, optimizer: Any, blocks: int = 1, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    device = next(model.parameters()).device
    for _ in range(blocks):
        run_backward(model(torch.ones(4, 8, device=device)).float().square().mean() * factor, optimizer)
    optimizer.step()


FUSED: dict[str, Any] = {  # torch 2.11's fused Adagrad waits by itself
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, fused=True),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.01, momentum=0.9),
    "FusedAdagrad": lambda params: FusedAdagrad(params, lr=0.01),
    "FusedLion": lambda params: FusedLion(params, lr=0.01),
}

COUNTED = [kind for kind in FUSED if INTERPRETED or not kind.startswith("Fused")]
"""In plain torch our fused optimizers look at tensors that are the host's anyway."""


def test_the_count_sees_what_it_should() -> None:
    with counted_waits() as waits:
        x = torch.ones(3)
        assert x.sum().item() == 3
        assert bool(x.sum() > 0)
        assert torch.equal(x, x)
    assert waits == {"aten::_local_scalar_dense": 2, "aten::equal": 1}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", COUNTED)
def test_a_step_that_can_skip_on_the_device_never_waits(level: str, kind: str) -> None:
    model, optimizer = started(net(), FUSED[kind], level)
    step(model, optimizer)
    with counted_waits() as waits:
        for factor in (1.0, float("inf"), 1.0):
            step(model, optimizer, blocks=2, factor=factor)
    assert not waits
    if level in DYNAMIC:
        assert amp.loss_scale() == 256
        assert not amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("level", DYNAMIC)
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("factor", [1.0, float("inf")])
def test_a_step_decided_by_the_host_waits_once_for_each_block(
    level: str, blocks: int, factor: float
) -> None:
    model, optimizer = started(net(), lambda p: torch.optim.RMSprop(p, foreach=True), level)
    step(model, optimizer)
    with counted_waits() as waits:
        step(model, optimizer, blocks, factor)
        skipped = amp.step_was_skipped(optimizer)
    assert skipped == (factor != 1.0)
    # The first overflow settles it, if the gradients are bad still.
    assert sum(waits.values()) == (blocks if factor == 1.0 else 2)


@pytest.mark.parametrize("level", STATIC)
def test_a_static_scale_never_waits(level: str) -> None:
    model = net()
    optimizer = torch.optim.RMSprop(model.parameters(), foreach=True)
    model, optimizer = initialize(model, optimizer, level, loss_scale=1.0)
    with counted_waits() as waits:
        step(model, optimizer)
    assert not waits


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_checks_without_a_scale_wait_for_no_device(level: str) -> None:
    """On a device, only optimizers that skip there are checked."""
    for make, is_checked in ((torch.optim.RMSprop, False), (FUSED["AdamW"], True)):
        model, optimizer = started(net(), make, level)
        step(model, optimizer)
        with counted_waits() as waits:
            step(model, optimizer, factor=math.inf)
        assert not waits
        assert amp.step_was_skipped(optimizer) is is_checked


def test_two_optimizers_of_one_block_wait_once_together() -> None:
    first, second = net(), net()
    optimizers = [torch.optim.RMSprop(m.parameters()) for m in (first, second)]
    initialize([first, second], optimizers, "O2")
    x = torch.ones(4, 8)
    with counted_waits() as waits:
        run_backward((first(x).float() + second(x).float()).square().mean(), optimizers)
        for optimizer in optimizers:
            optimizer.step()
    assert sum(waits.values()) == 1


@pytest.mark.parametrize("written", [0, 1, 4])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_state_dict_waits_at_most_twice(level: str, written: int) -> None:
    """However many weights were written since their masters last agreed with them."""
    model, _ = started(net(), torch.optim.RMSprop, level)
    weights = [p for p in model.parameters() if p.dtype is not torch.float32]
    assert len(weights) >= 4
    for weight in weights[:written]:
        weight.data.fill_(0.5)
    with counted_waits() as waits:
        saved = model.state_dict()
    assert 1 <= sum(waits.values()) <= 2
    assert sum(bool((value == 0.5).all()) for value in saved.values()) == written


def test_the_repr_of_a_session_says_what_it_has_and_does_not_wait() -> None:
    model, optimizer = started(net(), FUSED["AdamW"], "O2")
    step(model, optimizer, factor=math.inf)
    session = amp.get_session()
    with counted_waits() as waits:
        text = repr(session)
    assert not waits
    assert text == "Session('O2', models=[Sequential], optimizers=[AdamW], loss_scale=[512])"
    session.close()
    closed = text.replace("AdamW", "").replace(")", ", closed)")
    assert repr(session) == closed
    assert repr(amp.Session("O1", enabled=False)) == "Session('O1', enabled=False)"


@pytest.mark.gpu
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", FUSED)
def test_the_driver_sees_no_wait_either(level: str, kind: str) -> None:
    model, optimizer = started(net("cuda"), FUSED[kind], level)
    infinity = torch.tensor(float("inf"), device="cuda")
    x = torch.ones(4, 8, device="cuda")
    for _ in range(2):
        step(model, optimizer)
    with waiting_is_an_error():
        for factor in (None, infinity, None):
            optimizer.zero_grad()
            loss = model(x).float().square().mean()
            step_on(loss if factor is None else loss * factor, optimizer)
    if level in DYNAMIC:
        assert amp.loss_scale() == 512


@pytest.mark.gpu
def test_messages_reach_the_host_late_and_in_order(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = started(
        net("cuda"), lambda p: torch.optim.AdamW(p, fused=True), "O2", verbosity=1
    )
    step(model, optimizer)
    for _ in range(3):
        step(model, optimizer, factor=float("inf"))
    torch.cuda.synchronize()
    step(model, optimizer)
    torch.cuda.synchronize()
    step(model, optimizer)
    assert [record.getMessage().rsplit(" ", 1)[1] for record in caplog.records] == [
        "512.0",
        "256.0",
        "128.0",
    ]
