"""Users do things in other orders and places: each of these once went wrong without a word."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import amp
from amp.fp16_utils import FP16_Optimizer
from amp.kernels import backend, update_scale
from amp.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from tests.distributed.models import (
    WIDTH,
    assert_equal_on_ranks,
    backward,
    batches,
    data_rank,
    end_of,
    fsdp1,
    initialize,
    loss_of,
    make,
    make_optimizer,
    mesh,
    parallelize_sequence,
    prepared,
    sgd,
    shard,
    weights_of,
    whole,
)
from tests.distributed.test_synchronization import not_synced
from tests.distributed.world import ranks
from tests.levels import DYNAMIC, LEVELS

QUICK = ["O1", "O2", "O5"]


def with_sgd(model: Any, level: str, **options: Any) -> Any:
    return initialize(model, sgd(model), level, **options)


# Where accumulation without communication hides from a look at the model.


class Container(nn.Module):
    """Holds a network that is wrapped on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.network = make()


class Checkpointed(nn.Module):
    """Runs a network's forward again in the backward."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.network, x, use_reentrant=False)


Hidden = tuple[Any, Any, Callable[[Tensor], Tensor], Callable[[], AbstractContextManager[Any]]]
"""A model, its optimizer, a forward, and what keeps backwards from reducing."""


def ddp_of_a_part(level: str) -> Hidden:
    container, optimizer = with_sgd(Container(), level)
    ddp = DistributedDataParallel(container.network)
    return container, optimizer, ddp, ddp.no_sync


def ddp_and_bare(level: str) -> Hidden:
    model, optimizer = with_sgd(make(), level)
    ddp = DistributedDataParallel(model)
    return model, optimizer, lambda x: ddp(x) + 0.1 * ddp.module(x + 0.1), ddp.no_sync


def ddp_of_checkpoints(level: str) -> Hidden:
    model, optimizer = with_sgd(make(), level)
    ddp = DistributedDataParallel(Checkpointed(model))
    return model, optimizer, ddp, ddp.no_sync


def replicated(level: str, first: bool) -> Hidden:
    model: Any = make()
    if first:
        replicate(model)
    model, optimizer = with_sgd(model, level)
    if not first:
        replicate(model)
    return model, optimizer, model, functools.partial(not_synced, model)


def compiled(level: str, wrap: str) -> Hidden:
    model, wrapped, optimizer = prepared(wrap, level, sgd)
    without_sync = wrapped.no_sync if wrap == "ddp" else functools.partial(not_synced, model)
    return model, optimizer, torch.compile(wrapped, backend="eager"), without_sync


HIDDEN: dict[str, Callable[[str], Hidden]] = {
    "DDP around a part": ddp_of_a_part,
    "DDP and a bare forward": ddp_and_bare,
    "DDP around checkpoints": ddp_of_checkpoints,
    "replicate, initialize": functools.partial(replicated, first=True),
    "initialize, replicate": functools.partial(replicated, first=False),
    "compiled DDP": functools.partial(compiled, wrap="ddp"),
    "compiled FSDP2": functools.partial(compiled, wrap="fsdp2"),
}


@ranks(2)
@pytest.mark.parametrize(
    ("kind", "level"),
    [
        *((kind, level) for kind in HIDDEN if "compiled" not in kind for level in QUICK),
        *(("compiled DDP", "O5"), ("compiled FSDP2", "O1")),
    ],
)
def test_accumulation_without_communication_is_seen_wherever_it_hides(
    rank: int, kind: str, level: str
) -> None:
    model, optimizer, forward, without_sync = HIDDEN[kind](level)
    for i, (x, y) in enumerate(batches(*data_rank("ddp"))):
        with nullcontext() if i % 2 else without_sync():
            backward((forward(x).float() - y).square().mean(), optimizer)
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_on_ranks(weights_of(model).values())


@ranks(2)
@pytest.mark.parametrize(
    ("wrap", "level"), [*(("fsdp2", level) for level in LEVELS), ("fsdp1", "O1"), ("fsdp1", "O4")]
)
def test_the_flag_may_be_set_back_before_the_block_ends(rank: int, wrap: str, level: str) -> None:
    """The flag is set back before the block ends, by which time the backward has gone by it."""
    ends = []
    for inside in (False, True):
        model = fsdp1(make()) if wrap == "fsdp1" else shard(make())
        scaling: Any = {"loss_scale": {"init": 64.0, "growth_interval": 1}} if level in DYNAMIC else {}
        model, optimizer = with_sgd(model, level, **scaling)
        off = model.no_sync if wrap == "fsdp1" else functools.partial(not_synced, model)
        for i, (x, y) in enumerate(batches(*data_rank(wrap))):
            without_sync = nullcontext if i % 2 else off
            loss = loss_of(model, x, y)
            around, within = (nullcontext, without_sync) if inside else (without_sync, nullcontext)
            with around(), amp.scale_loss(loss, optimizer) as scaled_loss, within():
                scaled_loss.backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
        ends.append(torch.cat([whole(p).detach().float().flatten() for p in model.parameters()]))
        amp.get_session().close()
    assert torch.equal(*ends)


@ranks(2)
@pytest.mark.parametrize(
    ("how", "level"),
    # At a scale of 1 a block that raises leaves what it has added, as a loop without amp does.
    [*(("raise", level) for level in DYNAMIC), *(("zero_grad", level) for level in QUICK)],
)
def test_gradients_that_are_dropped_are_dropped_where_fsdp_keeps_them(
    rank: int, how: str, level: str
) -> None:
    """What FSDP2 keeps to be reduced later goes with a block that raised, and with zero_grad."""
    ends = []
    for happens in (False, True):
        model, optimizer = with_sgd(shard(make()), level)
        for i, (x, y) in enumerate(batches(*data_rank("fsdp2"))):
            if i == 1 and happens:
                model.set_requires_gradient_sync(False)
                loss = loss_of(model, x, y)
                with (
                    pytest.raises(OSError) if how == "raise" else nullcontext(),
                    amp.scale_loss(loss, optimizer) as scaled_loss,
                ):
                    scaled_loss.backward()
                    if how == "raise":
                        raise OSError
                if how == "zero_grad":
                    optimizer.zero_grad()
                model.set_requires_gradient_sync(True)
            elif i != 1:
                backward(loss_of(model, x, y), optimizer)
                optimizer.step()
                optimizer.zero_grad()
        ends.append(end_of(model))
    assert torch.equal(*ends)


@ranks(2)
@pytest.mark.parametrize("level", QUICK)
def test_zero_grad_of_one_optimizer_keeps_what_fsdp_keeps_for_another(rank: int, level: str) -> None:
    """`zero_grad` of one optimizer drops nothing of another's in the same FSDP module."""
    ends = []
    for happens in (False, True):
        model = shard(make())
        optimizers = [sgd(part) for part in (model.layers[0].up, model.layers[0].down)]
        amp.initialize(model, optimizers, opt_level=level, verbosity=0)
        first, second, *_ = batches(*data_rank("fsdp2"))
        with not_synced(model):
            backward(loss_of(model, *first), optimizers)
        if happens:
            optimizers[0].zero_grad()
        backward(loss_of(model, *second), optimizers)
        optimizers[1].step()
        ends.append(weights_of(model))
        amp.get_session().close()
    name = "layers.0.down.weight"
    assert torch.equal(ends[0][name], ends[1][name])
    assert not torch.equal(ends[0][name], make().get_parameter(name))


@ranks(2)
def test_what_one_model_has_not_reduced_does_not_keep_another_from_its_step(rank: int) -> None:
    """What one model has not reduced is nothing to the optimizer of another."""
    generator, critic = make(), make()
    optimizers = [sgd(generator), sgd(critic)]
    amp.initialize([generator, critic], optimizers, opt_level="O5", verbosity=0, num_losses=2)
    of_generator, of_critic = DistributedDataParallel(generator), DistributedDataParallel(critic)
    (x, y), *_ = batches(*data_rank("ddp"))
    with of_critic.no_sync():
        backward(loss_of(of_critic, x, y), optimizers[1], loss_id=1)
    backward(loss_of(of_generator, x, y), optimizers[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizers[0].step()
    backward(loss_of(of_critic, x, y), optimizers[1], loss_id=0)  # the scale is 1 as well
    optimizers[1].step()
    assert_equal_on_ranks([*weights_of(generator).values(), *weights_of(critic).values()])


# Gradients in memory that others write.


@ranks(2)
@pytest.mark.parametrize("level", QUICK)
def test_held_gradients_survive_a_backward_into_the_same_buckets(rank: int, level: str) -> None:
    """DDP's buckets hold the gradients of two optimizers, and any backward overwrites them."""
    ends = []
    for views in (False, True):
        model = make()
        optimizers = [
            FusedSGD(part.parameters(), lr=0.2, momentum=0.5) for part in (model.layers, model.head)
        ]
        amp.initialize(model, optimizers, opt_level=level, verbosity=0)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=views, find_unused_parameters=True)
        for x, y in batches(*data_rank("ddp")):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for optimizer in optimizers:
                backward(loss_of(ddp, x, y), optimizer)
            loss_of(ddp, x, y).backward()  # outside of any block
            for optimizer in optimizers:
                optimizer.step()
        ends.append(end_of(model))
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=1e-5)


@ranks(2)
@pytest.mark.parametrize("level", QUICK)
def test_sums_to_be_made_are_made_outside_of_blocks_too(rank: int, level: str) -> None:
    """Gradients of norms that are sums to be made, of a backward without `scale_loss`."""
    ends = []
    for cut in (False, True):
        model: Any = parallelize_sequence(make()) if cut else make()
        model, optimizer = initialize(model, FusedSGD(model.parameters(), lr=0.2), level)
        for x, y in batches():
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        ends.append(weights_of(model))
        amp.get_session().close()
    for name, value in ends[0].items():
        if "norm" in name:
            torch.testing.assert_close(ends[1][name], value, rtol=0, atol=1e-3)


# Ranks that would not have agreed.


@ranks(4)
@pytest.mark.parametrize("kind", ["lamb", "novograd", "bfloat16"])
@pytest.mark.slow
def test_parameters_that_some_ranks_see_alike_are_stepped_apart_on_all(rank: int, kind: str) -> None:
    """Parameters that are cut along one dimension of a mesh each, so that some ranks see them alike."""
    on = mesh("x", "y")
    placements: Any = [[Shard(0), Replicate()], [Replicate(), Shard(0)]]
    torch.manual_seed(0)
    weights = [nn.Parameter(distribute_tensor(torch.randn(4, 4), on, where)) for where in placements]
    kinds: dict[str, Any] = {
        "lamb": FusedLAMB,
        "novograd": FusedNovoGrad,
        "bfloat16": functools.partial(FusedAdam, state_dtype=torch.bfloat16),
    }
    optimizer = kinds[kind](weights, lr=0.1)
    for step in range(3):
        grad = torch.randn(4, 4, generator=torch.Generator().manual_seed(step), device="cpu")
        for weight, where in zip(weights, placements, strict=True):
            weight.grad = distribute_tensor(grad.to(weight.device), on, where)
        optimizer.step()
    moments = [optimizer.state[weight]["exp_avg"] for weight in weights]
    assert_equal_on_ranks(whole(each) for each in (*weights, *moments))


@ranks(2)
def test_a_sum_that_cannot_be_made_names_the_collective(rank: int) -> None:
    """As they do in time where another rank has no gradient to sum."""
    model = parallelize_sequence(make())
    model, optimizer = with_sgd(model, "O1")
    (x, y), *_ = batches()
    loss = loss_of(model, x, y)

    def time_out(*_: Any, **__: Any) -> None:
        raise RuntimeError("Timed out waiting")

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(amp.AmpError, match=r"agree with ranks \[0, 1\] on the sums of gradients"),
        amp.scale_loss(loss, optimizer) as scaled_loss,
    ):
        scaled_loss.backward()
        patch.setattr(DTensor, "redistribute", time_out)


@ranks(2)
def test_an_overflow_where_ranks_have_different_numbers_of_optimizers(rank: int) -> None:
    """Stages of a pipeline have one optimizer or several: after an overflow no rank waits for ever."""
    models: list[Any] = [nn.Linear(4, 4) for _ in range(1 + rank)]
    models, optimizers = amp.initialize(
        models,
        [sgd(model) for model in models],
        opt_level="O2",
        verbosity=0,
        loss_scale={"init": 4.0},
        process_group=distributed.group.WORLD,
    )
    for bad in (True, False):
        loss = torch.stack([model(torch.ones(1, 4)).float().sum() for model in models]).sum()
        with amp.scale_loss(loss * torch.inf if bad and rank else loss, optimizers) as scaled_loss:
            scaled_loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            assert amp.step_was_skipped(optimizer) is bad
            optimizer.zero_grad()


@ranks(2)
def test_a_rank_may_ask_alone_whether_a_step_was_skipped(rank: int) -> None:
    """What one rank alone has asked changes nothing of what it does with the others."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (backend, update_scale):
            patch.setattr(module, "is_on_host", lambda tensor: False)
        model = shard(make())
        fused = FusedSGD(model.parameters(), lr=0.1)
        model, optimizer = initialize(model, fused, "O5", loss_scale={"init": 4.0})
        for x, y in batches(*data_rank("fsdp2")):
            backward(loss_of(model, x, y), optimizer)
            optimizer.step()
            assert rank or not amp.step_was_skipped(optimizer)
            model.zero_grad(set_to_none=False)  # amp does not see it


# What is refused.


@ranks(2)
@pytest.mark.parametrize("kind", ["pipeline", "zero"])
def test_a_norm_of_one_ranks_parameters_alone_is_refused(rank: int, kind: str) -> None:
    model = make()
    part = (model.layers, model.head)[rank]
    group: Any = distributed.group.WORLD
    options = {}
    optimizer: Any
    if kind == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer  # which uses torch.jit, and warns

        optimizer = ZeroRedundancyOptimizer(model.parameters(), FusedSGD, lr=0.1, max_grad_norm=1.0)
    else:
        optimizer, options = FusedAdam(part.parameters(), max_grad_norm=1.0), {"process_group": group}
    with pytest.raises(amp.AmpError, match="max_grad_norm=1.0, and each rank has different parameters"):
        initialize(model, optimizer, "O1", **options)
    cut = shard(make())  # knows its ranks, however the group is called
    initialize(cut, FusedAdam(cut.parameters(), max_grad_norm=1.0), "O1", process_group=group)


@ranks(2)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_process_group_that_comes_after_the_masters_is_refused(rank: int, level: str) -> None:
    model = make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(amp.distributed, "world_size", lambda: 1)
        with_sgd(model, level)
    with pytest.raises(amp.AmpError, match="Call init_process_group before amp.initialize"):
        DistributedDataParallel(model)


@ranks(2)
def test_a_closed_session_refuses_nothing(rank: int) -> None:
    """A session that is closed, and still held by somebody, has no say in what comes after it."""
    model = make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(amp.distributed, "world_size", lambda: 1)
        closed = amp.Session("O2", verbosity=0)
        closed.initialize(model, sgd(model))
    closed.close()
    model, optimizer = with_sgd(model.float(), "O4")
    ddp = DistributedDataParallel(model)
    (x, y), *_ = batches(*data_rank("ddp"))
    with ddp.join(throw_on_early_termination=False):
        backward(loss_of(ddp, x, y), optimizer)
    optimizer.step()
    assert closed.closed


# What a wrapper does besides.


class Timed(nn.Module):
    """Takes an FP32 argument that has no weight, as a rotary embedding does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        return self.linear(x) + torch.sin(times).to(x.dtype)


class WithTimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Timed()])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x, torch.linspace(0, 1000, WIDTH))


@ranks(2)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_modules_under_fsdp2_get_the_inputs_that_they_get_without(rank: int, level: str) -> None:
    torch.manual_seed(0)
    plain, cut = WithTimes(), WithTimes()
    cut.load_state_dict(plain.state_dict())
    (x, _), *_ = batches()
    results = []
    for model in (plain, shard(cut)):
        with_sgd(model, level)
        results.append(model(x))
        amp.get_session().close()
    assert torch.equal(*results)


@ranks(2)
@pytest.mark.parametrize("level", QUICK)
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_looking_at_a_checkpoint_between_micro_batches_changes_nothing(
    rank: int, wrap: str, level: str
) -> None:
    """`get_state_dict` before the first step makes the optimizer's state, and takes no gradients."""
    ends = []
    for looks in (False, True):
        adamw = functools.partial(make_optimizer, "adamw")
        scaling: Any = {"loss_scale": {"init": 64.0, "growth_interval": 1}} if level in DYNAMIC else {}
        model, wrapped, optimizer = prepared(wrap, level, adamw, **scaling)
        (first, second, *_) = batches(*data_rank(wrap))
        with wrapped.no_sync() if wrap == "ddp" else not_synced(wrapped):
            backward(loss_of(wrapped, *first), optimizer)
        if looks:
            amp.get_state_dict(wrapped, optimizer)
        backward(loss_of(wrapped, *second), optimizer)
        optimizer.step()
        ends.append(end_of(model))
    assert torch.equal(*ends)


@ranks(2)
def test_a_rank_may_ask_alone_whether_gradients_overflowed(rank: int) -> None:
    model: Any = shard(nn.Linear(WIDTH, 2).half())
    args = {"init_scale": 4.0}
    optimizer = FP16_Optimizer(sgd(model), dynamic_loss_scale=True, dynamic_loss_args=args)
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        optimizer.backward(model(torch.ones(1, WIDTH).half()).float().sum() * factor)
        overflows = factor > 1
        if rank == 0:
            assert optimizer.overflow == optimizer.state_dict()["overflow"] == overflows
        assert (optimizer.clip_master_grads(1.0) == -1) == overflows
        optimizer.step()
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
    assert rank or optimizer.overflow
