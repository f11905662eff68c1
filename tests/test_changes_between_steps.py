"""A step keeps what it knows of its tensors, and notices whatever somebody does to them."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp
from amp.kernels.language import INTERPRETED
from amp.optimizers import FusedAdam
from amp.optimizers.batches import Batches
from tests.covering import covering
from tests.devices import DEVICES
from tests.models import run_backward, started, train_on

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # NumPy interprets
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # triton 3.6
]


def states(optimizer: Any) -> list[dict[str, Any]]:
    return list(optimizer.state.values())


def replace_moments(net: Any, optimizer: Any) -> None:
    for state in states(optimizer):
        state["exp_avg"] = state["exp_avg"] * 0.5


def move_moments(net: Any, optimizer: Any) -> None:
    for state in states(optimizer):
        state["exp_avg_sq"].data = state["exp_avg_sq"].data.clone()


def offload_moments_and_bring_them_back(net: Any, optimizer: Any) -> None:
    kept = [{name: value.clone() for name, value in state.items()} for state in states(optimizer)]
    for state in states(optimizer):
        state.clear()
    for state, values in zip(states(optimizer), kept, strict=True):
        state.update(values)


def empty_the_states(net: Any, optimizer: Any) -> None:
    for state in states(optimizer):
        state.clear()


def turn_a_weight(net: Any, optimizer: Any) -> None:
    """The same memory, read in another order."""
    net[0].weight.data = net[0].weight.data.t()


def replace_a_counter(net: Any, optimizer: Any) -> None:
    states(optimizer)[0]["step"] = states(optimizer)[0]["step"] + 3


def start_anew(net: Any, optimizer: Any) -> None:
    optimizer.state.clear()


def load(net: Any, optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def move_weights(net: Any, optimizer: Any) -> None:
    for parameter in net.parameters():
        parameter.data = parameter.data.clone()


def transpose_a_weight(net: Any, optimizer: Any) -> None:
    net[0].weight.data = net[0].weight.data.t().contiguous().t()


def freeze(net: Any, optimizer: Any) -> None:
    net[2].weight.requires_grad_(False)


def unfreeze(net: Any, optimizer: Any) -> None:
    net[2].weight.requires_grad_(True)


def change_the_rate(net: Any, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def split_the_group(net: Any, optimizer: Any) -> None:
    group = optimizer.param_groups[0]
    if len(group["params"]) > 1:
        rest = {**group, "params": group["params"][1:], "lr": 0.02}
        group["params"] = group["params"][:1]
        optimizer.param_groups.append(rest)


def transposed_gradient(net: Any, optimizer: Any) -> None:
    """Gradients in another order, until somebody clears them."""
    net[0].weight.register_post_accumulate_grad_hook(transpose)


def transpose(parameter: Any) -> None:
    parameter.grad = parameter.grad.t().contiguous().t()


def moving_gradients(net: Any, optimizer: Any) -> None:
    """At another address with each step."""
    kept: list[Any] = []
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(functools.partial(move_gradient, kept))


def move_gradient(kept: list[Any], parameter: Any) -> None:
    kept.append(parameter.grad)
    parameter.grad = parameter.grad.clone()


def nothing(net: Any, optimizer: Any) -> None:
    pass


CHANGES: list[Callable[[Any, Any], None]] = [
    *(nothing, replace_moments, move_moments, offload_moments_and_bring_them_back),
    *(empty_the_states, replace_a_counter, start_anew, load),
    *(move_weights, transpose_a_weight, turn_a_weight),
    *(freeze, unfreeze, change_the_rate, split_the_group, transposed_gradient),
    moving_gradients,
]


def train(
    change: Callable[[Any, Any], None], level: str | None, device: str, forgets: bool
) -> list[Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)).to(device)
    if change is unfreeze:
        freeze(net, None)
    optimizer: Any = FusedAdam(net.parameters(), lr=0.01)
    if level is not None:
        amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    for i in range(4 if INTERPRETED else 6):
        if i in (1, 2, 4):
            change(net, optimizer)
        if forgets:
            optimizer._batches = Batches()
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(i)).to(device)
        run_backward(net(x).float().square().mean(), None if level is None else optimizer)
        optimizer.step()
        optimizer.zero_grad()
    results = [p.detach().clone() for p in net.parameters()]
    results += [value.clone() for state in states(optimizer) for value in state.values()]
    if level is not None:
        amp.get_session(optimizer).close()
    return results


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("level", "change"), covering([None, "O2"], CHANGES, strength=1))
def test_whatever_is_changed(
    change: Callable[[Any, Any], None], level: str | None, device: str
) -> None:
    knows, forgets = [train(change, level, device, forgets) for forgets in (False, True)]
    assert len(knows) == len(forgets)
    assert all(map(torch.equal, knows, forgets))


@pytest.mark.parametrize("steps", [1, 3])
def test_what_was_given_up_is_freed(steps: int) -> None:
    """Nothing that a step knows of tensors keeps them in memory."""
    net, optimizer = started(nn.Linear(4, 4), FusedAdam, "O2")
    for _ in range(steps):
        train_on(net(torch.ones(2, 4)).sum(), optimizer)
    moments = [weakref.ref(state["exp_avg"]) for state in optimizer.state.values()]
    masters = [weakref.ref(p) for p in amp.master_params(optimizer)]
    optimizer.state.clear()
    assert [moment() for moment in moments] == [None, None]
    amp.get_session(optimizer).close()
    assert [master() for master in masters] == [None, None]


def test_a_group_that_leaves_between_block_and_step_takes_no_other_along() -> None:
    ends = []
    for optimizer_class in (FusedAdam, torch.optim.AdamW):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4))
        groups = [{"params": [net[0].weight]}, {"params": [net[1].weight, net[2].weight]}]
        optimizer: Any = optimizer_class(groups, lr=0.1, weight_decay=0.0)
        net, optimizer = amp.initialize(net, optimizer, opt_level="O5", verbosity=0)
        run_backward(net(torch.randn(5, 4)).square().sum(), optimizer)
        del optimizer.param_groups[0]
        optimizer.step()
        ends.append([p.detach().float() for p in net.parameters()])
        amp.get_session(optimizer).close()
    torch.testing.assert_close(*ends)
