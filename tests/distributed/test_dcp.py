"""Checkpoints of torch.distributed.checkpoint: saved at one layout and level, loaded at another."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import amp
from tests.distributed import models
from tests.distributed.models import (
    SIZES,
    assert_equal_on_ranks,
    batches,
    make,
    make_optimizer,
    train,
    weights_of,
)
from tests.distributed.world import ranks, world
from tests.levels import DYNAMIC, LEVELS

HALF = 2


def prepared(wrap: str, level: str, optimizer: str, seed: bool = False) -> Any:
    """Return the model, what computes its forward, and its optimizer."""
    model = make()
    if seed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3).add_(0.1)
    scaling: Any = {"loss_scale": {"init": 256.0, "growth_interval": 1}} if level in DYNAMIC else {}
    return models.prepared(wrap, level, partial(make_optimizer, optimizer), model, **scaling)


def steps(wrapped: Any, optimizer: Any, first: int, last: int) -> None:
    """Train on the whole batch on every rank, so that every layout has the same gradients."""
    train(wrapped, optimizer, itertools.islice(batches(), first, last))


def state_of(wrapped: Any, optimizer: Any) -> dict[str, Any]:
    model, state = amp.get_state_dict(wrapped, optimizer)
    return {"model": model, "optimizer": state, "amp": amp.Stateful()}


def load(path: str, wrapped: Any, optimizer: Any) -> None:
    state = state_of(wrapped, optimizer)
    dcp.load(state, checkpoint_id=path)
    amp.set_state_dict(
        wrapped, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def save_half(rank: int, path: str, wrap: str, level: str, optimizer: str, is_async: bool) -> None:
    """Save after half of a run, and beside it what the whole of it comes to."""
    model, wrapped, made = prepared(wrap, level, optimizer)
    steps(wrapped, made, 0, HALF)
    if is_async:
        # It writes while training talks on the other group.
        own: Any = distributed.new_group(backend="gloo")
        saved: Any = dcp.async_save(state_of(wrapped, made), checkpoint_id=path, process_group=own)
        steps(wrapped, made, HALF, 4)  # while it is being written
        saved.result()
    else:
        dcp.save(state_of(wrapped, made), checkpoint_id=path)
        steps(wrapped, made, HALF, 4)
    weights = weights_of(model)
    if rank == 0:
        torch.save({"weights": weights, "scale": amp.loss_scale()}, f"{path}.expected")


def resume(rank: int, path: str, wrap: str, level: str, optimizer: str, same: bool) -> None:
    model, wrapped, made = prepared(wrap, level, optimizer, seed=True)
    load(path, wrapped, made)
    steps(wrapped, made, HALF, 4)
    expected = torch.load(f"{path}.expected", weights_only=True)
    weights = weights_of(model)
    assert_equal_on_ranks(weights.values())
    for name, value in weights.items():
        if same:
            assert torch.equal(value, expected["weights"][name]), name
        else:
            far = (value - expected["weights"][name]).norm() / expected["weights"][name].norm()
            assert far < 0.02, (name, far)
    if same and level in DYNAMIC:
        assert amp.loss_scale() == expected["scale"] == 256.0 * 16


@ranks(2)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2", "sp"])
def test_torchs_full_state_dict_goes_to_one_file_and_back(
    rank: int, path: str, wrap: str, level: str
) -> None:
    """By torch's own functions: whole tensors on the CPU, as `torch.save` takes them, and back."""
    model, wrapped, made = prepared(wrap, level, "adamw")
    steps(wrapped, made, 0, HALF)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = get_state_dict(wrapped, made, options=options)
    if rank == 0:
        torch.save({"model": weights, "optimizer": state, "amp": amp.state_dict()}, path)
    steps(wrapped, made, HALF, 4)
    expected = weights_of(model)
    amp.get_session().close()
    distributed.barrier()
    loaded = torch.load(path, weights_only=True)
    model, wrapped, made = prepared(wrap, level, "adamw", seed=True)
    set_state_dict(
        wrapped,
        made,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
        options=StateDictOptions(full_state_dict=True),
    )
    amp.load_state_dict(loaded["amp"])
    steps(wrapped, made, HALF, 4)
    weights = weights_of(model)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoint")


@pytest.mark.parametrize("optimizer", ["adamw", "fused"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2", "tp", "sp", "hsdp", "fsdp2+tp"])
def test_a_run_resumes_bit_for_bit_on_the_same_layout(
    wrap: str, level: str, optimizer: str, path: str
) -> None:
    if (level, optimizer) == ("O3", "adamw"):
        optimizer = "sgd"
    world(SIZES[wrap]).run(save_half, path, wrap, level, optimizer, False)
    world(SIZES[wrap]).run(resume, path, wrap, level, optimizer, True)


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (("fsdp2", 2), ("none", 1)),
        (("fsdp2", 2), ("fsdp2", 4)),
        (("fsdp2", 2), ("ddp", 2)),
        (("ddp", 2), ("fsdp2", 2)),
        (("none", 1), ("fsdp2", 4)),
        (("tp", 2), ("fsdp2", 2)),
        (("fsdp2+tp", 4), ("none", 1)),
        (("fsdp2", 4), ("tp", 2)),
    ],
)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_run_resumes_on_other_numbers_of_ranks_and_wrappers(
    there: tuple[str, int], here: tuple[str, int], level: str, path: str
) -> None:
    world(there[1]).run(save_half, path, there[0], level, "fused", False)
    world(here[1]).run(resume, path, here[0], level, "fused", False)


@pytest.mark.parametrize(("there", "here"), [("O5", "O1"), ("O2", "O5"), ("O0", "O2"), ("O4", "O5")])
@pytest.mark.parametrize("wrap", ["fsdp2", "ddp"])
def test_a_run_resumes_at_another_level(wrap: str, there: str, here: str, path: str) -> None:
    world(2).run(save_half, path, wrap, there, "fused", False)
    world(2).run(resume, path, wrap, here, "fused", False)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_what_is_saved_meanwhile_is_what_it_was(wrap: str, level: str, path: str) -> None:
    world(2).run(save_half, path, wrap, level, "fused", True)
    world(2).run(resume, path, wrap, level, "fused", True)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_torchs_tools_make_one_file_of_a_checkpoint_and_a_checkpoint_of_it(
    level: str, path: str
) -> None:
    world(2).run(save_half, path, "fsdp2", level, "fused", False)
    dcp_to_torch_save(path, f"{path}.pt")
    plain = torch.load(f"{path}.pt", weights_only=True)
    model = make()
    model.load_state_dict(plain["model"])
    assert {value.dtype for value in plain["model"].values()} == {torch.float32}
    assert plain["amp"]["opt_level"] == level
    torch_save_to_dcp(f"{path}.pt", f"{path} again")
    Path(f"{path}.expected").rename(f"{path} again.expected")
    world(2).run(resume, f"{path} again", "fsdp2", level, "fused", True)
