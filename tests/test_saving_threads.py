"""A thread may save the model while another one trains it."""

import copy
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp
from tests import training
from tests.covering import covering
from tests.models import train_on
from tests.states import assert_same

OPTIMIZERS = {name: training.OPTIMIZERS[name] for name in ("SGD", "AdamW", "FusedAdam")}


def train(
    level: str, name: str, saves: bool, begins: Callable[[], object] = lambda: None, **options: Any
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer: Any = OPTIMIZERS[name](model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    is_over, saved = threading.Event(), []

    def save() -> None:
        while not is_over.is_set():
            saved.append(sum(map(torch.Tensor.numel, model.state_dict().values())))

    begins()
    thread = threading.Thread(target=save)
    if saves:
        thread.start()
    try:
        for _ in range(40):
            train_on(model(torch.randn(16, 64)).square().mean(), optimizer)
    finally:
        is_over.set()
        if saves:
            thread.join()
    assert bool(saved) is saves
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "options", "level"),
    covering(OPTIMIZERS, [{}, {"master_weights": "kahan"}], ["O2", "O5"], strength=1),
)
def test_saving_meanwhile_changes_nothing(level: str, name: str, options: Any) -> None:
    alone, watched = (train(level, name, saves, **options) for saves in (False, True))
    assert_same(watched, alone)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs signals")
@pytest.mark.parametrize(
    ("name", "options", "level"),
    covering(
        OPTIMIZERS,
        [{}, {"master_weights": "kahan"}, {"master_weights": "split16"}],
        ["O2", "O5"],
        strength=1,
    ),
)
def test_saving_in_a_signal_handler_changes_nothing(level: str, name: str, options: Any) -> None:
    """As of a batch system that is about to take the node: it may come at any line."""
    if level == "O2" and options.get("master_weights") == "split16":
        options = {"master_weights": "kahan"}
    chance, seen = random.Random(5), []

    def save(*_: object) -> None:
        session = amp.get_session()
        seen.append([model.state_dict() for model in session.live_models()])
        copy.deepcopy([attached.optimizer.state_dict() for attached in session.attached])
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(5e-4, 4e-3))

    alone = train(level, name, saves=False, **options)
    amp.get_session().close()
    before = signal.signal(signal.SIGALRM, save)
    try:
        watched = train(
            level,
            name,
            saves=False,
            begins=lambda: signal.setitimer(signal.ITIMER_REAL, 1e-3),
            **options,
        )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(seen) > 3
    assert_same(watched, alone)
