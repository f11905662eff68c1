"""A 16-bit parameter is the truth, whoever wrote to it: training goes on from what it holds.

torch counts no write to `p.data`, to memory that a parameter shares, or by a collective. Old scripts
write in these ways in each iteration.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel

import amp
from tests import training
from tests.covering import covering
from tests.models import run_backward
from tests.test_fork import in_fork
from tests.training import (
    FUSED,
    LEAN,
    LEVELS,
    OPTIMIZERS,
    PLAIN_TIMES,
    TIMES_OF_A_SKIPPED_STEP,
    TIMES_WITH_A_CLOSURE,
    TORCHS,
    WHOLE,
    Training,
    fitting,
    writing,
)

# Scripts that write to the model's parameters. Each is run in FP32 too, without amp.


def best_restored(t: Training) -> None:
    """Early stopping: back to the weights of the best epoch."""
    t.iterate()
    best = copy.deepcopy(t.model.state_dict())
    t.iterate(4)
    for name, weight in zip(best, t.weights, strict=True):
        weight.copy_(best[name])
    t.iterate()


def average_for_evaluation(t: Training) -> None:
    """An average of the weights takes their place for an evaluation, and they come back."""
    average = [p.detach().clone() for p in t.parameters]
    for _ in range(3):
        t.iterate(2)
        backup = [p.detach().clone() for p in t.parameters]
        for weight, mean in zip(t.weights, average, strict=True):
            weight.copy_(mean)
        t.evaluate()
        t.results += t.state
        for weight, values in zip(t.weights, backup, strict=True):
            weight.copy_(values)
        for mean, p in zip(average, t.parameters, strict=True):
            mean.mul_(0.9).add_(p.detach(), alpha=0.1)


def average_kept(t: Training) -> None:
    """Training goes on from the average, which began with other weights."""
    average = [0.3 - p.detach().float() for p in t.parameters]
    for _ in range(3):
        t.iterate(2)
        for mean, weight in zip(average, t.weights, strict=True):
            mean.mul_(0.5).add_(weight, alpha=0.5)
            weight.copy_(mean)


def masked(t: Training) -> None:
    """Pruned weights are zero, and grow again from there."""
    masks = [torch.arange(p.numel()).view_as(p) % 3 == 0 for p in t.parameters]
    for _ in range(3):
        t.iterate()
        for weight, mask in zip(t.weights, masks, strict=True):
            weight[mask] = 0
    t.iterate()


def renormed(t: Training) -> None:
    for _ in range(4):
        t.iterate()
        for weight in t.weights:
            if weight.dim() > 1:
                weight.copy_(weight.renorm(2, 0, 0.3))


def pulled_towards_a_teacher(t: Training) -> None:
    teacher = [0.3 - p.detach() for p in t.parameters]
    for _ in range(4):
        t.iterate()
        for weight, values in zip(t.weights, teacher, strict=True):
            weight.mul_(0.75).add_(values, alpha=0.25)


def averaged_in_one_call(t: Training) -> None:
    teacher = [0.3 - p.detach() for p in t.parameters]
    for _ in range(4):
        t.iterate()
        weights = t.weights
        torch._foreach_mul_(weights, 0.75)
        torch._foreach_add_(weights, teacher, alpha=0.25)


def parts_of_a_flat_vector(t: Training) -> None:
    """All weights are views of one vector, which somebody training."""
    flat = parameters_to_vector([p.detach() for p in t.parameters])
    vector_to_parameters(flat, t.parameters)
    for _ in range(4):
        t.iterate()
        for whole in [flat] if t.way == "unseen" else t.weights:
            whole.mul_(0.75)


def in_numpy(t: Training) -> None:
    """An array that was made once, with the bits that a parameter has, is written in each iteration."""
    dtype = {2: torch.int16, 4: torch.int32}[t.parameters[0].itemsize]
    arrays = [p.detach().view(dtype).numpy() for p in t.parameters]
    for _ in range(4):
        t.iterate()
        for array, weight in zip(arrays, t.weights, strict=True):
            if t.way == "unseen":
                array[...] = (0.75 * weight).view(dtype).numpy()
            else:
                weight.mul_(0.75)


def without_a_gradient(t: Training) -> None:
    """The steps pass over a layer that is written, until a loss reaches it."""
    t.iterate(2)
    for _ in range(2):
        for weight in t.weights[-2:]:
            weight.mul_(0.5).add_(0.1)
        t.iterate()
    t.evaluate()
    t.iterate(2, other=True)


def frozen(t: Training) -> None:
    """A frozen layer is written, and then trained on."""
    t.iterate()
    for p in t.parameters[:2]:
        p.requires_grad_(False)
        p.grad = None
    t.iterate()
    for weight in t.weights[:2]:
        weight.mul_(-0.5)
    t.iterate()
    for p in t.parameters[:2]:
        p.requires_grad_(True)
    t.iterate(2)


def frozen_and_thawed_at_once(t: Training) -> None:
    """Nothing is called between the freezing, the write and the end of it."""
    t.iterate()
    first = t.parameters[:2]
    for p in first:
        p.requires_grad_(False)
    for weight in t.weights[:2]:
        weight.mul_(-0.5)
    for p in first:
        p.requires_grad_(True)
    t.iterate(2)


SCRIPTS = (
    *(best_restored, average_for_evaluation, average_kept, masked, renormed),
    *(pulled_towards_a_teacher, averaged_in_one_call, parts_of_a_flat_vector, in_numpy),
    *(without_a_gradient, frozen, frozen_and_thawed_at_once),
    *(writing("weights", when) for when in (*PLAIN_TIMES, *TIMES_WITH_A_CLOSURE)),
)


@pytest.mark.parametrize(
    ("script", "level", "optimizer"),
    [
        *covering(SCRIPTS, WHOLE, TORCHS, strength=1),
        *covering(SCRIPTS, WHOLE, FUSED, strength=1, slow_strength=1),
        *covering(
            SCRIPTS, ["O2 split16", "O5 split24", "O5 kahan"], FUSED, strength=1, slow_strength=1
        ),
        *covering(SCRIPTS, ["O5 split16", "O2 kahan"], TORCHS, strength=1),
    ],
)
def test_a_script_that_writes_without_a_trace_trains_as_in_fp32(
    script: training.Script, level: str, optimizer: str
) -> None:
    training.check(script, level, optimizer)


def test_a_search_along_a_line_goes_on_from_what_its_closure_writes() -> None:
    """LBFGS evaluates the closure several times in a step."""

    def searched(level: str | None) -> Tensor:
        torch.manual_seed(0)
        model: Any = nn.Linear(4, 4)
        x, y = torch.randn(16, 4), torch.randn(16, 4)
        optimizer: Any = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        if level is not None:
            amp.initialize(model, optimizer, opt_level=level, verbosity=0, **WHOLE[level])

        def closure() -> Tensor:
            for p in model.parameters():
                p.data.clamp_(-0.2, 0.2)
            optimizer.zero_grad()
            loss = (model(x).float() - y).square().mean()
            run_backward(loss, None if level is None else optimizer)
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return training.vector(model.state_dict().values())

    for level in ("O2", "O5"):
        assert training.distance(searched(level), searched(None)) < 0.02
        amp.get_session().close()


@pytest.mark.parametrize(
    ("when", "level", "optimizer"),
    covering(
        TIMES_OF_A_SKIPPED_STEP, ["O2", "O5", "O5 kahan"], ["AdamW", "AdamW, fused", "SGD", "FusedAdam"]
    ),
)
def test_a_step_that_is_skipped_takes_no_write_back(when: Any, level: str, optimizer: str) -> None:
    """The host skips before it calls the optimizer, or the device inside of it."""
    checked = {"mode": "static", "init": 128.0, "check": True}
    training.check(writing("weights", when), level, optimizer, loss_scale=checked)


# Whoever writes: each way is made ready before training, and then writes all weights.

Writer = Callable[[list[Tensor]], None]
"""Writes values, in the dtype of the parameters, to the parameters that it was made for."""


def by_data(parameters: list[nn.Parameter], folder: Path) -> Writer:
    def write(values: list[Tensor]) -> None:
        for p, value in zip(parameters, values, strict=True):
            p.data.copy_(value)

    return write


def by_a_view(parameters: list[nn.Parameter], folder: Path) -> Writer:
    """A view of each parameter that was made long ago."""
    views = [p.data.view(-1) for p in parameters]

    def write(values: list[Tensor]) -> None:
        for view, value in zip(views, values, strict=True):
            view[:] = value.flatten()

    return write


def by_numpy(parameters: list[nn.Parameter], folder: Path) -> Writer:
    arrays = [p.detach().view(torch.int16).numpy() for p in parameters]

    def write(values: list[Tensor]) -> None:
        for array, value in zip(arrays, values, strict=True):
            np.copyto(array, value.view(torch.int16).numpy())

    return write


def by_a_flat_vector(parameters: list[nn.Parameter], folder: Path) -> Writer:
    """Parameters are parts of one vector: those of DeepSpeed's and Megatron's flat buffers."""
    flat = parameters_to_vector([p.detach() for p in parameters])
    vector_to_parameters(flat, parameters)

    def write(values: list[Tensor]) -> None:
        flat.copy_(parameters_to_vector(values))

    return write


def by_another_process(parameters: list[nn.Parameter], folder: Path) -> Writer:
    """Parameters in shared memory, as Hogwild has them."""
    for p in parameters:
        p.share_memory_()

    def write(values: list[Tensor]) -> None:
        def write_there() -> bool:
            for p, value in zip(parameters, values, strict=True):
                p.data.copy_(value)
            return True

        assert in_fork(write_there)

    return write


def by_a_mapped_file(parameters: list[nn.Parameter], folder: Path) -> Writer:
    files = []
    for i, p in enumerate(parameters):
        mapped: dict[str, Any] = {"shared": True, "size": p.numel(), "dtype": p.dtype}
        first, second = [torch.from_file(str(folder / str(i)), **mapped) for _ in range(2)]
        first.copy_(p.detach().flatten())
        p.data = first.view_as(p)
        files.append(second)

    def write(values: list[Tensor]) -> None:
        for file, value in zip(files, values, strict=True):
            file.copy_(value.flatten())

    return write


def by_address(parameters: list[nn.Parameter], folder: Path) -> Writer:
    """As an extension in C++ does, or a kernel."""

    def write(values: list[Tensor]) -> None:
        for p, value in zip(parameters, values, strict=True):
            ctypes.memmove(p.data_ptr(), value.data_ptr(), value.nbytes)

    return write


WRITERS = (
    *(by_data, by_a_view, by_numpy, by_a_flat_vector, by_another_process, by_a_mapped_file),
    by_address,
)


def in_the_next_step(t: Training) -> list[Tensor]:
    """The step moves them little from what was written."""
    t.set_rate(1e-12)
    t.iterate()
    return t.state


def in_a_step_whose_block_was_before(t: Training) -> list[Tensor]:
    t.set_rate(1e-12)
    t.optimizer.step()
    return t.state


def in_a_state_dict(t: Training) -> list[Tensor]:
    return t.state


def after_a_load(t: Training) -> list[Tensor]:
    t.optimizer.load_state_dict(t.optimizer.state_dict())
    return t.state


def in_a_deep_copy(t: Training) -> list[Tensor]:
    return list(copy.deepcopy(t.model).parameters())


def in_an_average(t: Training) -> list[Tensor]:
    return list(AveragedModel(t.model).module.parameters())


def in_an_average_that_moves(t: Training) -> list[Tensor]:
    """It takes over all of the values at a factor of 1."""
    average = [torch.full_like(p, 7.0, dtype=torch.float32) for p in t.parameters]
    for mean, p in zip(average, t.parameters, strict=True):
        mean.lerp_(p.detach(), 1.0)
    return average


def after_close(t: Training) -> list[Tensor]:
    amp.get_session(t.optimizer).close()
    assert {p.dtype for p in t.parameters} == {torch.float32}
    return t.parameters  # type: ignore[return-value]


def in_masters_beside_gradients(t: Training) -> list[Tensor]:
    assert all(p.grad is not None for p in t.parameters[:4])
    return [master.detach().clone() for master in t.masters]


PLACES = (
    *(
        in_the_next_step,
        in_a_step_whose_block_was_before,
        in_a_state_dict,
        after_a_load,
        in_a_deep_copy,
    ),
    *(in_an_average, in_an_average_that_moves, after_close, in_masters_beside_gradients),
)


@pytest.mark.parametrize(
    ("writer", "place", "level", "optimizer"),
    covering(
        WRITERS,
        PLACES,
        [*WHOLE, "O2 split16", "O5 split24", "O5 kahan"],
        ["FusedAdam", "FusedSGD", "AdamW", "AdamW, fused"],
    ),
)
def test_what_anybody_wrote_is_everywhere(
    writer: Any, place: Any, level: str, optimizer: str, tmp_path: Path
) -> None:
    """Whole masters have just what was written; lean ones may keep low bits."""
    if level in LEAN and place is in_masters_beside_gradients:
        pytest.skip("lean masters have no values")
    t = Training(level, fitting(optimizer, level))
    write = writer(t.parameters, tmp_path)
    t.iterate(3)
    generator = torch.Generator().manual_seed(3)
    sizes = torch.tensor([1.0, 1e-3, 0.0, -1e-2]).repeat(training.WIDTH // 4)
    values = [
        (sizes * (torch.rand(p.shape, generator=generator) + 0.5)).to(p.dtype) for p in t.parameters
    ]
    t.backward()
    write(values)
    for found, value in zip(place(t), values, strict=True):
        assert found.dtype is torch.float32
        if level in WHOLE:
            torch.testing.assert_close(found, value.float(), rtol=0, atol=1e-6)
        else:
            half_a_unit = torch.finfo(value.dtype).eps * value.float().abs() / 2 + 2**-25
            assert ((found - value.float()).abs() <= 1.01 * half_a_unit).all()


@pytest.mark.parametrize("level", WHOLE)
@pytest.mark.parametrize("optimizer", ["AdamW, fused", "FusedAdam", "FusedSGD"])
def test_what_was_not_written_keeps_its_low_bits(level: str, optimizer: str) -> None:
    """Of one parameter, of which one half was written, and of all that were written as they are."""
    t = Training(level, optimizer)
    t.iterate(3)
    before = t.state
    for p in t.parameters[1:]:
        p.data.copy_(p.data.clone())
    t.model.first.weight.data[::2] = 0.25
    weight, *others = t.state
    assert (weight[::2] == 0.25).all()
    assert torch.equal(weight[1::2], before[0][1::2])
    assert all(map(torch.equal, others, before[1:]))
    copied = [p.detach() for p in copy.deepcopy(t.model).parameters()]
    assert all(map(torch.equal, copied, [weight, *others]))
    t.set_rate(0.0)
    t.iterate()
    assert all(map(torch.equal, t.state, [weight, *others]))


@pytest.mark.parametrize("look", ["a state dict", "a copy", "an evaluation"])
@pytest.mark.parametrize("level", WHOLE)
@pytest.mark.parametrize("optimizer", ["AdamW", "FusedAdam"])
def test_weights_that_are_taken_back_have_their_low_bits(optimizer: str, level: str, look: str) -> None:
    """An average is in place for a while, and is looked at; training goes on as if it were not."""
    ends = []
    for happens in (False, True):
        t = Training(level, optimizer)
        for _ in range(3):
            t.iterate()
            if not happens:
                continue
            backup = [p.detach().clone() for p in t.parameters]
            for p in t.parameters:
                p.data.mul_(0.5)
            if look == "an evaluation":
                t.evaluate()
            else:
                found = in_a_state_dict(t) if look == "a state dict" else in_a_deep_copy(t)
                assert all(map(torch.equal, found, [p.detach().float() for p in t.parameters]))
            for p, value in zip(t.parameters, backup, strict=True):
                p.data.copy_(value)
        ends.append(training.vector(t.state))
        amp.get_session(t.optimizer).close()
    assert torch.equal(*ends)


@pytest.mark.parametrize("optimizer", ["AdamW", "FusedAdam"])
@pytest.mark.parametrize("level", WHOLE)
def test_a_nan_that_is_written_is_saved_and_goes_again(level: str, optimizer: str) -> None:
    t = Training(level, optimizer)
    t.iterate(2)
    t.model.first.weight.data[0, 0] = torch.nan
    weight = t.state[0]
    assert weight[0, 0].isnan()
    assert int(weight.isnan().sum()) == 1
    t.model.first.weight.data[0, 0] = 0.25
    t.iterate()
    assert t.state[0].isfinite().all()
    assert abs(t.state[0][0, 0] - 0.25) < 0.05


# Memory in FP32.


def assigned(t: Training, values: list[Tensor]) -> None:
    for p, value in zip(t.parameters, values, strict=True):
        p.data = value.clone()


def by_vector(t: Training, values: list[Tensor]) -> None:
    vector_to_parameters(parameters_to_vector(values), t.parameters)


def before_a_forward(t: Training) -> None:
    with torch.no_grad():
        assert t.model(t.x).isfinite().all()


def nothing(t: Training) -> None:
    """What comes next is the first to look."""


def before_a_step(t: Training) -> None:
    """Of a block that was before; the step itself does nothing."""
    t.set_rate(0.0)
    t.optimizer.step()
    t.set_rate(0.02)


def before_a_block(t: Training) -> None:
    t.backward()


def before_a_look_at_masters(t: Training) -> None:
    assert all(master.dtype is torch.float32 for master in t.masters)


@pytest.mark.parametrize(
    ("write", "then", "level", "optimizer"),
    covering(
        [assigned, by_vector],
        [nothing, before_a_forward, before_a_step, before_a_block, before_a_look_at_masters],
        [*WHOLE, "O2 split16", "O5 split24", "O5 kahan"],
        ["FusedAdam", "FusedSGD", "AdamW", "AdamW, fused"],
    ),
)
def test_fp32_values_that_are_assigned_to_16_bit_weights_are_taken_over_and_rounded(
    write: Any, then: Any, level: str, optimizer: str
) -> None:
    t = Training(level, fitting(optimizer, level))
    dtype = t.parameters[0].dtype
    t.iterate(2)
    t.backward()
    generator = torch.Generator().manual_seed(3)
    values = [torch.rand(p.shape, generator=generator) + 0.5 for p in t.parameters]
    write(t, values)
    then(t)
    found = t.state
    assert {p.dtype for p in t.parameters} == {dtype}
    lean = {"split16": 0.0, "split24": 2**-14, "kahan": 2**-14}
    for p, value, saved in zip(t.parameters, values, found, strict=True):
        torch.testing.assert_close(
            saved, value, rtol=0 if level in WHOLE else lean[level.split()[1]], atol=0
        )
        rounded = torch.finfo(dtype).eps / 2 * 1.01  # of a tie, a lean pair may round either way
        torch.testing.assert_close(p.detach().float(), value, rtol=rounded, atol=0)
    t.iterate()
    assert 0 < training.distance(training.vector(t.state), training.vector(values)) < 0.3


@pytest.mark.parametrize("level", WHOLE)
@pytest.mark.parametrize("optimizer", ["SGD", "FusedAdam"])
def test_a_training_goes_on_from_fp32_values_that_were_assigned(level: str, optimizer: str) -> None:
    """As it does from values that were written to masters."""

    def trained(assigns: bool) -> Tensor:
        t = Training(level, optimizer)
        for _ in range(3):
            t.iterate()
            values = [0.75 * value for value in t.state]
            if assigns:
                assigned(t, values)
            else:
                for master, value in zip(t.masters, values, strict=True):
                    master.detach().copy_(value)
        result = training.vector(t.state)
        amp.get_session(t.optimizer).close()
        return result

    assert torch.equal(trained(True), trained(False))


@pytest.mark.parametrize("place", [after_close, in_a_deep_copy, in_an_average])
@pytest.mark.parametrize("level", ["O2", "O5", "O5 split16"])
def test_fp32_values_that_were_assigned_are_in_copies_and_after_close(level: str, place: Any) -> None:
    t = Training(level, "FusedAdam")
    t.iterate(2)
    values = [0.75 * value for value in t.state]
    assigned(t, values)
    assert all(map(torch.equal, place(t), values))


# What writes to weights in a forward.


class Embedded(nn.Module):
    """Rows of a table that the forward makes no longer than 0.5, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8, max_norm=0.5)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "FusedAdam", "FusedSGD"])
@pytest.mark.parametrize("level", ["O2", "O5", "O5 split16", "O5 kahan"])
def test_rows_of_an_embedding_that_its_forward_shortens_stay_short(level: str, optimizer: str) -> None:
    def trained(level: str | None) -> Tensor:
        torch.manual_seed(0)
        model: Any = Embedded()
        made = (OPTIMIZERS if level else training.IN_FP32)[optimizer](model.parameters())
        if level is not None:
            options = {"opt_level": level.split()[0], "verbosity": 0, **LEVELS[level]}
            amp.initialize(model, made, **options)
        x, y = torch.arange(8), torch.randn(8, 4)
        for _ in range(5):
            made.zero_grad()
            loss = (model(x).float() - y).square().sum(1).mean()
            run_backward(loss, None if level is None else made)
            made.step()
        model(x)
        return training.vector(model.state_dict().values())

    found, in_fp32 = trained(level), trained(None)
    assert (in_fp32[: 8 * 8].view(8, 8).norm(dim=1) < 0.51).all()
    assert training.distance(found, in_fp32) < 0.02


@pytest.mark.parametrize("level", WHOLE)
@pytest.mark.parametrize("optimizer", ["AdamW", "FusedAdam"])
def test_weights_that_a_forward_writes_through_data_are_stepped_from_there(
    level: str, optimizer: str
) -> None:
    """As spectral normalization by hand does."""

    def shrinking(t: Training) -> None:
        def shrink(*_: Any) -> None:
            weight, *_others = t.weights
            weight.mul_(0.75)

        t.model.register_forward_pre_hook(shrink)
        t.iterate(4)

    training.check(shrinking, level, optimizer)


# Whoever averages reads what was written.


@pytest.mark.parametrize("average", ["lerp_", "_foreach_lerp_", "mul_ and add_", "update_parameters"])
@pytest.mark.parametrize("level", ["O2", "O5", "O5 split16"])
def test_a_teacher_averages_what_was_written(level: str, average: str) -> None:
    def averaged(level: str | None) -> Tensor:
        t = Training(level, "FusedAdam")
        teacher: Any = copy.deepcopy(t.model)
        torchs: Any = AveragedModel(t.model, avg_fn=lambda mean, value, _: mean.lerp(value, 0.5))
        for _ in range(4):
            t.iterate()
            for p in t.parameters:
                p.data.mul_(0.5)
            means: list[Any] = list(teacher.parameters())
            values: list[Any] = list(t.parameters)
            with torch.no_grad():
                if average == "_foreach_lerp_":
                    torch._foreach_lerp_(means, values, 0.5)
                elif average == "update_parameters":
                    torchs.update_parameters(t.model)
                else:
                    for mean, value in zip(means, values, strict=True):
                        if average == "lerp_":
                            mean.lerp_(value, 0.5)
                        else:
                            mean.data.mul_(0.5).add_(value.data, alpha=0.5)
        used = torchs.module if average == "update_parameters" else teacher
        return training.vector([*used.parameters(), *t.state])

    assert training.distance(averaged(level), averaged(None)) < 0.02
