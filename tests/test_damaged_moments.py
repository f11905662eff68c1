"""Moments that no step could have made: one AmpError by name, before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp
from amp.errors import AmpError, AmpValueError
from amp.optimizers import FusedAdam, FusedSGD
from tests.models import started, train_on

pytestmark = pytest.mark.filterwarnings("ignore:.*quantiz", "ignore:.*deprecated")
DAMAGES: dict[str, Callable[[Tensor], Any]] = {
    "another shape": lambda x: torch.zeros(3, 3),
    "flat": lambda x: x.reshape(-1).clone(),
    "None": lambda x: None,
    "a list": lambda x: x.tolist(),
    "an array": lambda x: x.float().numpy(),
    "a text": lambda x: "moment",
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8),
    "complex": lambda x: x + 1j,
    "on meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O1": {"opt_level": "O1", "loss_scale": 1.0},
    "O5": {"opt_level": "O5"},
    "O5, packed": {"opt_level": "O5", "master_weights": "split24", "state_dtype": "packed16"},
}


def step(model: Any, optimizer: Any) -> None:
    train_on(model(torch.ones(2, 4)).float().sum(), optimizer)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_initialize_refuses_and_leaves_all_as_it_was(damage: str, options: str) -> None:
    model: Any = nn.Linear(4, 8)
    optimizer: Any = FusedAdam(model.parameters(), lr=0.01)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = optimizer.state[model.weight]
    right, state["exp_avg"] = state["exp_avg"], DAMAGES[damage](state["exp_avg"])
    damaged = state["exp_avg"]
    with pytest.raises(AmpValueError, match=r"\['params'\]\[0\].* has no usable 'exp_avg'"):
        amp.initialize(model, optimizer, verbosity=0, **OPTIONS[options])
    assert state["exp_avg"] is damaged
    assert model.weight.dtype is torch.float32
    assert "step" not in vars(optimizer)
    state["exp_avg"] = right
    model, optimizer = amp.initialize(model, optimizer, verbosity=0, **OPTIONS[options])
    step(model, optimizer)


@pytest.mark.parametrize("options", ["O0", "O1", "O5"])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("optimizer_class", [FusedAdam, FusedSGD])
def test_a_step_refuses_and_changes_nothing_and_the_session_closes(
    damage: str, options: str, optimizer_class: Any
) -> None:
    model: Any = nn.Linear(4, 8)
    more: dict[str, Any] = {} if optimizer_class is FusedAdam else {"momentum": 0.9}
    name = "exp_avg" if optimizer_class is FusedAdam else "momentum_buffer"
    made = optimizer_class(model.parameters(), lr=0.01, **more)
    model, optimizer = amp.initialize(model, made, verbosity=0, **OPTIONS[options])
    step(model, optimizer)
    weights = [p.detach().clone() for p in amp.master_params(optimizer)]
    state = optimizer.state[model.weight]
    state[name] = DAMAGES[damage](state[name])
    with pytest.raises(AmpError, match=f"{name}"):
        step(model, optimizer)
    assert all(map(torch.equal, weights, amp.master_params(optimizer)))
    amp.get_session(optimizer).close()
    assert model.weight.dtype is torch.float32


@pytest.mark.parametrize("damage", ["None", "a list", "a text", "missing"])
@pytest.mark.parametrize("level", ["O0", "O5"])
def test_an_optimizer_of_torch_loads_no_damaged_moment(level: str, damage: str) -> None:
    model, optimizer = started(nn.Linear(4, 8), lambda p: torch.optim.AdamW(p, lr=0.01), level)
    step(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    if damage == "missing":
        del saved["state"][0]["exp_avg"]
    else:
        saved["state"][0]["exp_avg"] = DAMAGES[damage](saved["state"][0]["exp_avg"])
    with pytest.raises(AmpValueError, match="'exp_avg'"):
        optimizer.load_state_dict(saved)
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
    step(model, optimizer)


def test_an_sgd_of_torch_loads_that_it_has_no_momentum() -> None:
    model, optimizer = started(nn.Linear(4, 8), lambda p: torch.optim.SGD(p, lr=0.01), "O5")
    step(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    step(model, optimizer)
