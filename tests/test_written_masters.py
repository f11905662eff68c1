"""What is written to masters holds, though torch does not count it: also where weights are the truth.

Masters are in `optimizer.param_groups`, in what `amp.master_params` yields, and in state dicts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import amp
from tests import training
from tests.covering import covering
from tests.models import started, step_on
from tests.training import LEAN, OPTIMIZERS, PLAIN_TIMES, WHOLE, Training, evaluated_after, writing

# Scripts that write to what the optimizer steps. In FP32 these are the model's parameters.


def without_a_gradient(t: Training) -> None:
    t.iterate(2)
    for _ in range(2):
        for master in t.written(t.stepped[-2:]):
            master.mul_(0.5).add_(0.1)
        t.iterate()
    t.iterate(2, other=True)


def by_a_lookahead_that_nobody_knows(t: Training) -> None:
    """It is made after `initialize` and has no state, so it is no optimizer's wrapper."""
    slow = [0.5 * p.detach() for p in t.stepped]
    for i in range(6):
        t.iterate()
        if i % 2:
            for values, p, written in zip(slow, t.stepped, t.written(t.stepped), strict=True):
                values.lerp_(p.detach(), 0.2)
                written.copy_(values)


def copied_into_entries(t: Training) -> None:
    """As `load_state_dict` by hand does, in the middle of a training."""
    for factor in (0.75, 0.5):
        t.iterate(2)
        values, own = t.state, t.model.state_dict()
        for entry, value in zip(t.written(own.values()), values, strict=True):
            entry.copy_(factor * value)
        t.results += t.state


def steps_of_sam(t: Training) -> None:
    """By hand: up and back again, at what the optimizer steps."""
    for _ in range(3):
        t.backward()
        stepped = t.stepped[:4]  # which have gradients
        before = [p.detach().clone() for p in stepped]
        for p, written in zip(stepped, t.written(stepped), strict=True):
            written.add_(p.grad)
        t.backward()
        for written, values in zip(t.written(stepped), before, strict=True):
            written.copy_(values)
        t.optimizer.step()


FEW = ["SGD", "AdamW, fused", "FusedAdam", "FusedSGD"]
OF_MASTERS = (without_a_gradient, by_a_lookahead_that_nobody_knows, copied_into_entries)
TARGETS = [target for target in training.TARGETS if target != "weights"]


@pytest.mark.parametrize(
    ("target", "when", "level", "optimizer"),
    covering(
        TARGETS,
        [when for when in PLAIN_TIMES if when is not evaluated_after],
        ["O2", "O5"],
        FEW,
    ),
)
def test_what_is_written_to_masters_holds(target: str, when: Any, level: str, optimizer: str) -> None:
    """Steps are small here: a forward that does not see the write yet makes little difference."""
    training.check_with_fp32(writing(target, when), level, optimizer, slow=True)


@pytest.mark.parametrize(
    ("target", "when", "level", "optimizer"),
    [
        *covering(TARGETS, PLAIN_TIMES, WHOLE, FEW),
        *covering(TARGETS, PLAIN_TIMES, WHOLE, OPTIMIZERS, strength=1, slow_strength=1),
    ],
)
def test_what_is_written_to_masters_is_in_the_next_forward(
    target: str, when: Any, level: str, optimizer: str
) -> None:
    """A training goes on in the bits that it has after a write with a trace."""
    training.check(writing(target, when), level, optimizer)


@pytest.mark.parametrize(
    ("script", "level", "optimizer"),
    [
        *covering(OF_MASTERS, WHOLE, FEW),
        *covering(OF_MASTERS, WHOLE, OPTIMIZERS, strength=1, slow_strength=1),
        *covering([steps_of_sam], ["O2", "O5"], FEW),
    ],
)
def test_a_script_that_writes_to_masters_trains_as_in_fp32(
    script: training.Script, level: str, optimizer: str
) -> None:
    training.check(script, level, optimizer)


# Scripts that look at masters, or write them, and write to the model's parameters.


def after_clipping(t: Training) -> None:
    for _ in range(4):
        t.backward()
        torch.nn.utils.clip_grad_norm_(t.masters, 2.0)
        for weight in t.weights:
            weight.mul_(0.75)
        t.optimizer.step()


def before_clipping(t: Training) -> None:
    for _ in range(4):
        t.backward()
        for weight in t.weights:
            weight.mul_(0.75)
        torch.nn.utils.clip_grad_norm_(t.masters, 2.0)
        t.optimizer.step()


def after_a_step_that_was_clipped(t: Training) -> None:
    for _ in range(4):
        t.backward()
        torch.nn.utils.clip_grad_norm_(t.masters, 2.0)
        t.optimizer.step()
        for weight in t.weights:
            weight.clamp_(-0.05, 0.05)


def after_logging(t: Training) -> None:
    """What is logged after the step is written after that, before the next forward."""
    for _ in range(4):
        t.iterate()
        t.results += [p.detach().norm().view(1) for p in t.masters]
        for weight in t.weights:
            weight.mul_(0.75)
        t.evaluate()


def before_logging(t: Training) -> None:
    for _ in range(4):
        t.backward()
        for weight in t.weights:
            weight.mul_(0.75)
        t.results += [p.detach().norm().view(1) for p in t.masters]
        t.optimizer.step()


AFTER_A_LOOK = (
    *(after_clipping, before_clipping, after_a_step_that_was_clipped),
    *(after_logging, before_logging),
)


@pytest.mark.parametrize(
    ("script", "level", "optimizer"),
    [
        *covering(AFTER_A_LOOK, WHOLE, FEW),
        *covering(AFTER_A_LOOK, WHOLE, OPTIMIZERS, strength=1, slow_strength=1),
        *covering(
            AFTER_A_LOOK[:3],  # lean masters have no values to log
            LEAN,
            ["FusedAdam", "FusedSGD"],
            strength=1,
        ),
    ],
)
def test_a_look_at_masters_takes_no_write_to_weights_back(
    script: training.Script, level: str, optimizer: str
) -> None:
    training.check(script, level, optimizer)


def weights_and_then_masters(t: Training) -> None:
    """The masters that are written have what was written to the weights."""
    for _ in range(4):
        t.backward()
        for weight in t.weights:
            weight.mul_(0.75)
        for master in t.masters:
            master.detach().add_(0.02)
        t.optimizer.step()


def masters_and_then_weights(t: Training) -> None:
    """The weights that are written have what was written to the masters, from the forward on."""
    for _ in range(4):
        t.iterate()
        for master in t.written(t.stepped):
            master.mul_(0.75)
        t.evaluate()
        for weight in t.weights:
            weight.add_(0.02)


def masters_saved_and_then_weights(t: Training) -> None:
    for _ in range(4):
        t.iterate()
        for master in t.written(t.stepped):
            master.mul_(0.75)
        t.evaluate()
        t.results += t.state
        for weight in t.weights:
            weight.add_(0.02)
        t.results += t.state


BOTH = (weights_and_then_masters, masters_and_then_weights, masters_saved_and_then_weights)


@pytest.mark.parametrize(
    ("script", "level", "optimizer"),
    [
        *covering(BOTH, WHOLE, FEW),
        *covering(BOTH, WHOLE, OPTIMIZERS, strength=1, slow_strength=1),
    ],
)
def test_writes_to_weights_and_to_masters_come_one_after_the_other(
    script: training.Script, level: str, optimizer: str
) -> None:
    training.check(script, level, optimizer)


# Wrappers of optimizers.


class Clamping(torch.optim.Optimizer):
    """Keeps the list of the model's parameters, and writes to them in its step."""

    def __init__(self, t: Training) -> None:
        self.base, self.t, self.weights = t.optimizer, t, t.parameters
        self.param_groups, self.state = self.base.param_groups, self.base.state
        self.defaults = self.base.defaults

    def step(self, closure: Any = None) -> Any:
        result = self.base.step(closure)
        for weight in self.t.written(self.weights):
            weight.clamp_(-0.05, 0.05)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)


class ClampingBefore(Clamping):
    """Writes to them before the step of what it wraps."""

    def step(self, closure: Any = None) -> Any:
        for weight in self.t.written(self.weights):
            weight.clamp_(-0.05, 0.05)
        return self.base.step(closure)


def wrapped(t: Training) -> None:
    t.iterate(4)


def wrapped_and_saved(t: Training) -> None:
    for _ in range(3):
        t.iterate()
        t.evaluate()
        t.results += t.state


WRAPPED = (wrapped, wrapped_and_saved)


@pytest.mark.parametrize(
    ("wrap", "script", "level", "optimizer"),
    [
        *covering([Clamping, ClampingBefore], WRAPPED, WHOLE, FEW),
        *covering(
            [Clamping, ClampingBefore], [wrapped], WHOLE, OPTIMIZERS, strength=1, slow_strength=1
        ),
        *covering([Clamping, ClampingBefore], [wrapped], LEAN, ["FusedAdam", "FusedSGD"], strength=1),
    ],
)
def test_a_wrapper_that_writes_the_models_parameters_in_its_step_is_heard(
    wrap: Any, script: training.Script, level: str, optimizer: str
) -> None:
    training.check(script, level, optimizer, wrap)


# Entries of a state dict.


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("optimizer", ["AdamW", "FusedAdam"])
@pytest.mark.parametrize("level", WHOLE)
def test_what_is_written_to_an_entry_shows_in_the_next_state_dict(
    level: str, optimizer: str, traced: bool
) -> None:
    """In every bit; the forward has it rounded, and what was not written is as it was."""
    t = Training(level, optimizer)
    t.iterate(2)
    before = t.state
    values = torch.rand(training.WIDTH, training.WIDTH) + 0.5
    entry = t.model.state_dict()["first.weight"]
    (entry if traced else entry.data).copy_(values)
    weight, *others = t.state
    assert torch.equal(weight, values)
    assert all(map(torch.equal, others, before[1:]))
    t.evaluate()
    assert torch.equal(t.model.first.weight.float(), values.to(t.model.first.weight.dtype).float())
    assert torch.equal(t.state[0], values)
    t.set_rate(1e-12)
    t.iterate()
    torch.testing.assert_close(t.state[0], values, rtol=0, atol=1e-6)


@pytest.mark.parametrize("level", WHOLE)
def test_what_is_written_to_entries_that_were_kept_is_in_the_next_forward(level: str) -> None:
    t = Training(level, "AdamW")
    entries = t.model.state_dict()
    for factor in (0.5, 2.0):
        t.iterate(2)
        expected = [factor * value for value in t.state]
        torch._foreach_mul_(list(entries.values()), factor)
        t.evaluate()
        for weight, value in zip(t.parameters, expected, strict=True):
            assert torch.equal(weight, value.to(weight.dtype))


@pytest.mark.parametrize("level", WHOLE)
def test_entries_and_weights_that_are_both_written_without_a_trace_count_each(level: str) -> None:
    """An entry through NumPy, and a weight through `.data`, after one `state_dict()`."""
    t = Training(level, "AdamW")
    t.iterate(2)
    t.model.state_dict()["first.weight"].numpy()[0] = 0.25
    t.model.first.weight.data[1] = 0.5
    t.model.second.weight.data.fill_(0.125)
    first, _, second, *_ = t.state
    assert torch.equal(first[:2], torch.tensor([[0.25], [0.5]]).expand(2, training.WIDTH))
    assert torch.equal(second, torch.full_like(second, 0.125))
    t.evaluate()
    assert torch.equal(t.model.first.weight[:2].float(), first[:2])


@pytest.mark.parametrize("level", WHOLE)
def test_a_state_dict_is_one_with_the_masters_as_long_as_weights_agree(level: str) -> None:
    """Saving takes no memory, and an entry follows the steps."""
    t = Training(level, "FusedAdam")
    t.iterate(2)
    kept = t.model.state_dict()["first.weight"]
    t.iterate()
    assert torch.equal(kept, t.state[0])
    addresses = [master.data_ptr() for master in amp.master_params(t.optimizer)]
    assert [value.data_ptr() for value in t.model.state_dict().values()] == addresses


@pytest.mark.parametrize("level", WHOLE)
@pytest.mark.parametrize("optimizer", ["SGD", "FusedAdam"])
def test_a_look_at_masters_through_data_undoes_no_write_to_a_weight(level: str, optimizer: str) -> None:
    """As of a script that logs norms, and then clips weights, as a WGAN does."""
    t = Training(level, optimizer)
    for _ in range(3):
        t.iterate()
        norms = [master.data.norm() for master in amp.master_params(t.optimizer)]
        assert all(norm > 0 for norm in norms)
        for weight in t.parameters:
            weight.data.clamp_(-0.0625, 0.0625)
        t.evaluate()
        assert all(weight.abs().max() <= 0.0625 for weight in t.parameters)
        assert all(value.abs().max() <= 0.0625 * 1.004 for value in t.state)  # they round to it


@pytest.mark.parametrize("level", WHOLE)
def test_other_elements_of_a_weight_and_of_its_master_may_be_written(level: str) -> None:
    t = Training(level, "AdamW")
    t.iterate(2)
    master, weight = next(iter(amp.master_params(t.optimizer))), t.model.first.weight
    master.data[0], weight.data[1] = 0.3, 0.5
    t.evaluate()
    assert torch.equal(t.state[0][:2], torch.tensor([[0.3], [0.5]]).expand(2, training.WIDTH))


class Moving(torch.optim.SGD):
    """Gives each parameter new memory in each step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_that_move_in_the_step_are_rounded_from_where_they_are(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amp.kernels.cpu_loop.WORTH_COMPILING", 0)
    torch.manual_seed(0)
    made = torch.nn.Linear(33, 17)
    model, optimizer = started(made, lambda p: Moving(p, lr=0.1), level, loss_scale=64.0)
    for _ in range(5):
        before = [p.clone() for p in amp.master_params(optimizer)]
        step_on(model(torch.randn(8, 33)).square().mean(), optimizer)
        masters: list[Any] = list(amp.master_params(optimizer))
        for parameter, master, old in zip(model.parameters(), masters, before, strict=True):
            assert torch.equal(parameter, master.to(parameter.dtype))
            assert torch.equal(master, old - 0.1 * master.grad)
        optimizer.zero_grad()
