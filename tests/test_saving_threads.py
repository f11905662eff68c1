"""A thread may save the model while another one trains it."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp
from tests.covering import covering

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "fused": lambda parameters: amp.optimizers.FusedAdam(parameters, lr=1e-3),
}


def train(level: str, name: str, saves: bool, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer: Any = OPTIMIZERS[name](model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    is_over, saved = threading.Event(), []

    def save() -> None:
        while not is_over.is_set():
            saved.append(sum(map(torch.Tensor.numel, model.state_dict().values())))

    thread = threading.Thread(target=save)
    if saves:
        thread.start()
    try:
        for _ in range(40):
            with amp.scale_loss(model(torch.randn(16, 64)).square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
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
    for key, tensor in watched.items():
        assert torch.equal(tensor, alone[key]), key
